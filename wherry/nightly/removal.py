"""removal: remove a checkpoint in one step, so that no reader sees a part of it.

On a local file system it is renamed to a staging name, which is never detected as a checkpoint, and then deleted;
`wherry clean` deletes what a killed process leaves. A conversion that holds the lease of the target prevents the
removal. On an object store the commit member is deleted first. Sidecar and signature of a single file go with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from wherry.core.request import SourceRequest
from wherry.core.steps import step_number
from wherry.cures import Command, Cure
from wherry.errors import (
    NotFoundError,
    StorageError,
    TargetInUseError,
    UnsupportedError,
    storage_error,
    storage_errors,
)
from wherry.formats.checkpoint import open_source
from wherry.formats.registry import find_format
from wherry.store.folders import (
    is_staging,
    is_there,
    remove,
    rename_without_replacing,
    staging_stem,
    sync_folder,
)
from wherry.store.local_store import locate
from wherry.store.location import Location
from wherry.store.sidecar import OWN_NAMES, sidecar_name, signature_name
from wherry.target.janitor import is_in_use
from wherry.target.lease import lease_of


@contextmanager
def removing(uri: str, checkpoint: str, format: str) -> Generator[None]:
    """Hide a checkpoint; delete it when the context ends without an error, else restore it.

    Args:
        uri: what was committed in one step: the checkpoint, or the step folder that holds it.
        checkpoint: URI of the checkpoint itself, by which readers register.
        format: its format.

    Raises:
        NotFoundError: it does not exist.
        TargetInUseError: a running job reads or writes it.
        UnsupportedError: the store cannot delete.
        StorageError: the storage failed.
    """
    place = locate(uri)
    if place.entry is None:
        raise NotFoundError("checkpoint not found", uri=uri)
    _require_unread(checkpoint)
    local = place.store.capabilities.local
    with _hide(Path(place.path), checkpoint) if local else _objects(uri, format):
        yield


def strangers(uri: str, checkpoint: str, format: str) -> list[str]:
    """Names of foreign files that would be removed with a checkpoint.

    Args:
        uri, checkpoint, format: as `removing` takes them.

    Raises:
        WherryError: it cannot be opened.
    """
    place, inner = locate(uri), locate(checkpoint)
    if place.path == inner.path:
        return _foreign(inner, format)
    if inner.parent.path != place.path or step_number(place.name, any_prefix=True) is None:
        return [f"{uri}, which is not the step folder of {checkpoint},"]
    # Orbax itself writes `_CHECKPOINT_METADATA` and its commit member next to the items of a step.
    own = (inner.name, *find_format(format).commit_members)
    siblings = [one.name for one in place.entries() if one.name not in own and not one.name.startswith("_")]
    return [name for name in siblings if not is_staging(name)] + _foreign(inner, format)


def _foreign(place: Location, format: str) -> list[str]:
    if place.entry is None or not place.entry.is_dir:
        return []
    with open_source(SourceRequest(place.uri, format)) as opened:
        own = {member.name for member in opened.reader.members()} | OWN_NAMES
    return [
        one.name for one in place.walk() if one.name not in own and not is_staging(one.name.split("/")[-1])
    ]


@contextmanager
def _hide(path: Path, checkpoint: str) -> Generator[None]:
    """Rename a local checkpoint to a staging name; delete it after the block, or restore it where the block fails."""
    with storage_errors(str(path)), lease_of(locate(path)) as held:
        hidden = path.with_name(f"{staging_stem(path.name)}.{secrets.token_hex(4)}")
        moved = {path: hidden}
        if not path.is_dir():
            names = {
                path.with_name(sidecar_name(path.name)): Path(f"{hidden}.sidecar"),
                path.with_name(signature_name(path.name)): Path(f"{hidden}.sidecar.sig"),
            }
            moved |= {source: target for source, target in names.items() if source.exists()}
        try:
            with held.exclusive():
                for source, target in moved.items():
                    rename_without_replacing(source, target)
                sync_folder(path.parent)
            # The marks of readers are next to the checkpoint, so they moved with a step folder around it.
            inner = Path(locate(checkpoint).path)
            marked = checkpoint if inner == path else str(hidden / inner.relative_to(path))
            _require_unread(marked)  # by one that began before the rename
            yield
        except BaseException:
            _put_back(moved)
            raise
        for target in moved.values():
            remove(target)


def _put_back(moved: Mapping[Path, Path]) -> None:
    """Restore the names of renamed files, also where the lease was lost: nothing is overwritten.

    Raises:
        StorageError: a name could not be restored; the error states where the file is.
    """
    failed: StorageError | None = None
    for source, target in moved.items():
        try:
            if is_there(target):  # it was moved
                rename_without_replacing(target, source)
                sync_folder(source.parent)
        except OSError as error:
            failed = failed or storage_error(error, str(target))
    if failed is not None:
        raise failed


@contextmanager
def _objects(uri: str, format: str) -> Generator[None]:
    """A checkpoint on an object store: it cannot be hidden there, so it is deleted after the block."""
    place = locate(uri)
    store = place.store
    if store.capabilities.local or not store.capabilities.create_only_put:
        raise UnsupportedError(
            f"deleting is not supported on {store.protocol}://",
            uri=uri,
            cure="remove it with the store's tools",
        )
    yield
    try:
        for name in find_format(format).commit_members:
            marker = place.join(name)
            if marker.exists():
                store.remove(marker.path)
        sidecar_files = [place.parent.join(name(place.name)) for name in (sidecar_name, signature_name)]
        store.remove(place.path, recursive=True)
        for file in sidecar_files:
            if file.exists():
                store.remove(file.path)
    except OSError as error:
        raise storage_error(error, uri) from error


def _require_unread(uri: str) -> None:
    if is_in_use(uri):
        raise TargetInUseError(
            "a running job reads it",
            uri=uri,
            cure=Cure("run {} again after the job", Command("prune")),
            retryable=True,
        )
