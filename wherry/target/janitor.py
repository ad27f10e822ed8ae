"""janitor: what processes make outside of targets, with its owners: temporary files, and marks on what they read.

A mark next to a source, a temporary folder and the spool of an export are not found from any target. So before one of
them is made, an owner's file in `WHERRY_HOME/made` says where it will be, and which process makes it: its host, number
and start, and the boot of the machine. The file goes when the work ends. Files of a process of this machine that has
ended are removed by the next conversion or export, by `wherry clean` and each night, whatever their age; files of a
process of another machine are left to that machine. A registration has such a file too, for the run that it opens in
MLflow: the next registration, `wherry clean` and each night end the run.

If the home cannot be written, only this is lost: the work goes on.

`in_use` marks checkpoints that are being read, so that nothing removes the input of a running job. wherry removes only
checkpoints that it wrote itself, and these have a sidecar. So a conversion that reads such a checkpoint marks it while
it runs; other sources are read without any mark. The mark is a lease next to the checkpoint, `.wherry-<name>.<8
hex>.reading`, so every process that could remove the checkpoint sees it, on any machine and with any home. A mark is
void when its process has ended, or has not renewed it for half a minute of watching (see `wherry.target.lease`).
Several processes may read one source. If no file can be written next to the source, and on object stores, which have no
leases, the mark is in `WHERRY_HOME/in-use` and is seen by processes that share the home; if that cannot be written
either, the conversion continues without a mark.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

from wherry.core.digest import sha256_of
from wherry.core.json_document import json_value
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import logger
from wherry.core.services import service
from wherry.errors import WherryError
from wherry.store.folders import PREFIX, remove, staging_stem
from wherry.store.home import ensure_home, home
from wherry.store.local_store import locate
from wherry.store.location import Location
from wherry.store.sidecar import sidecar_location
from wherry.target.lease import (
    Lease,
    LeaseFile,
    Owner,
    Verdict,
    judge,
    owner_from,
    this_boot,
    this_machine,
    this_process,
    verdict_of_process,
)

_FOLDER = "made"
_PATH, _STORE = "path", "tracking_store"  # what an owner's file names
_MOST_BYTES = 16384  # of an owner's file
_NAMES = (PREFIX, "wherry-")  # with which the names begin of all that wherry makes outside of targets
_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """Files that a process has left behind: the owner's file, and what it names."""

    record: Path
    path: Path


@dataclass(frozen=True, slots=True)
class LeftRun:
    """A run in a tracking store that a process has left open: the owner's file, and the store without secrets."""

    record: Path
    store: str


@contextmanager
def owning(path: Path) -> Generator[None]:
    """Name this process as the owner of what the block makes at a path, and removes again."""
    note(path)
    try:
        yield
    finally:
        forget(path)


def note(path: Path) -> None:
    """Name this process as the owner of what will be at a path; `forget` takes that back."""
    _write(_record_of(path), {_PATH: str(path.absolute())})


def _write(record: Path, what: dict[str, str]) -> None:
    data = {**_owner_table(secrets.token_hex(8)), **what}
    try:
        ensure_home()
        record.parent.mkdir(mode=0o700, exist_ok=True)
        record.write_text(json.dumps(data))
    except (WherryError, OSError) as error:
        _log.debug("%s has no owner's file: %s", next(iter(what.values())), error)


def forget(path: Path) -> None:
    """Remove the owner's file of a path if nothing is there any more."""
    with suppress(OSError):
        if not os.path.lexists(path):
            _record_of(path).unlink(missing_ok=True)


def _record_of(path: Path) -> Path:
    return home() / _FOLDER / f"{sha256_of('made', str(path.absolute()))[:32]}.json"


@contextmanager
def temporary_folder(prefix: str, parent: str | os.PathLike[str] | None = None) -> Generator[str]:
    """A temporary folder that is removed at the end of the block, or by the janitor.

    Args:
        prefix: of its name.
        parent: the folder that it is made in; by default that for temporary files.

    Raises:
        OSError: it cannot be made.
    """
    path = Path(parent or tempfile.gettempdir()) / f"{prefix}{secrets.token_hex(4)}"
    with owning(path):
        path.mkdir(mode=0o700)
        try:
            yield str(path)
        finally:
            with suppress(FileNotFoundError):
                remove(path)


def left_behind() -> list[LeftBehind]:
    """The files that ended processes of this machine have left behind."""
    return [left for left in _records() if os.path.lexists(left.path)]


def tidy() -> list[LeftBehind]:
    """Remove the files that ended processes of this machine have left, except those that cannot be removed now.

    Returns:
        What was removed.
    """
    done: list[LeftBehind] = []
    for left in _records():
        try:
            if os.path.lexists(left.path):
                remove(left.path)
                done.append(left)
            left.record.unlink(missing_ok=True)
        except OSError as error:
            _log.debug("%s, left by a process that has ended, cannot be removed: %s", left.path, error)
    return done


@contextmanager
def noting_run(store: str) -> Generator[None]:
    """Name this process as the owner of a run that the block opens in a tracking store, and ends again.

    The owner's file stays if the block fails: then the run may still be open.

    Args:
        store: the URI of the store, without secrets.
    """
    record = home() / _FOLDER / f"{secrets.token_hex(16)}.json"
    _write(record, {_STORE: store})
    yield
    with suppress(OSError):
        record.unlink(missing_ok=True)


def left_runs() -> list[LeftRun]:
    """The runs that ended processes of this machine may have left open in tracking stores."""
    return [LeftRun(record, data[_STORE]) for record, data in _of_ended(_STORE)]


def end_runs() -> list[LeftRun]:
    """End the runs that ended processes of this machine left open; a store that cannot be reached is tried next time.

    Returns:
        What is open no more.
    """
    done: list[LeftRun] = []
    left = left_runs()
    for store in sorted({one.store for one in left}):
        try:
            service("mlflow").end_abandoned(store)
        except WherryError as error:
            _log.warning(
                "runs in %s, left open by processes that have ended, cannot be ended: %s", store, error
            )
        else:
            done += [one for one in left if one.store == store]
    forget_runs(done)
    return done


def forget_runs(ended: Iterable[LeftRun]) -> None:
    """Remove the owner's files of runs that are open no more."""
    for one in ended:
        with suppress(OSError):
            one.record.unlink(missing_ok=True)


def owner_text() -> str:
    """This process as the owner of something that is not a file; see `text_has_ended`."""
    return json.dumps(_owner_table(secrets.token_hex(8)))


def text_has_ended(text: str) -> bool:
    """Whether the owner that a text names was a process of this machine that has ended."""
    try:
        found = json_value(text[:_MOST_BYTES])
    except ValueError:
        return False
    owner = owner_from(found)
    return owner is not None and _has_ended(owner, found)


def _owner_table(token: str) -> dict[str, Any]:
    return {**this_process(token).to_json(), "machine": this_machine(), "boot": this_boot()}


def _records() -> Iterator[LeftBehind]:
    """The owner's files of ended processes of this machine, with what they name."""
    for record, data in _of_ended(_PATH):
        path = Path(data[_PATH])
        if path.is_absolute() and path.name.startswith(_NAMES):
            yield LeftBehind(record, path)


def _of_ended(key: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The owner's files with a key, of processes of this machine that have ended."""
    with suppress(OSError):
        for record in sorted((home() / _FOLDER).glob("*.json")):
            found = _read(record)
            if found is not None and isinstance(found[1].get(key), str) and _has_ended(*found):
                yield record, found[1]


def _read(record: Path) -> tuple[Owner, dict[str, Any]] | None:
    try:
        with record.open("rb") as file:
            data = json_value(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return None
    owner = owner_from(data)
    return None if owner is None else (owner, data)


def _has_ended(owner: Owner, data: dict[str, Any]) -> bool:
    """Whether the owner was a process of this machine, in its process table or before the machine was started again."""
    machine, boot = data.get("machine"), data.get("boot")
    if machine and boot and this_boot() and machine == this_machine() and boot != this_boot():
        return True
    return verdict_of_process(owner) is Verdict.DEAD


_MARKS = "in-use"
_SUFFIX = ".reading"
_HEX = "[0-9a-f]" * 8


@contextmanager
def in_use(uri: str) -> Generator[None]:
    """Mark a checkpoint as being read while the context is open.

    Args:
        uri: the checkpoint itself, as its detection names it.
    """
    location = locate(uri)
    with ExitStack() as stack:
        if sidecar_location(location).exists():
            _hold_mark(location, stack)
        yield


def is_in_use(uri: str) -> bool:
    """Whether a running job reads the checkpoint."""
    return bool(uris_in_use([uri]))


def uris_in_use(uris: Iterable[str]) -> set[str]:
    """The checkpoints that running jobs read; all marks are watched at the same time, and void marks are removed."""
    marks = {mark: uri for uri in uris for mark in _marks(locate(uri))}
    found = judge(marks)
    for mark, judgement in found.items():
        if judgement.verdict in (Verdict.DEAD, Verdict.EXPIRED):
            with suppress(WherryError, OSError), Lease(LeaseFile(mark), marks[mark], judgement):
                pass  # taking a void mark over and leaving the block removes it
    return {marks[mark] for mark, judgement in found.items() if judgement.verdict is Verdict.ALIVE}


def _hold_mark(location: Location, stack: ExitStack) -> None:
    """Hold a mark in a stack, if one can be created."""
    error: BaseException | None = None
    for made in (_at_source, _at_home):
        try:
            place = made(location)
            if place is not None:
                mark = place.with_name(f"{place.name}.{secrets.token_hex(4)}{_SUFFIX}")
                with ExitStack() as held:
                    held.enter_context(owning(mark))
                    held.enter_context(Lease(LeaseFile(mark), location.uri))
                    stack.enter_context(held.pop_all())
                return
        except (WherryError, OSError) as caught:
            error = caught
    _log.warning("%s could not be marked as in use: %s", location.uri, error)


def _at_source(location: Location) -> Path | None:
    local = location.store.capabilities.local
    return Path(location.path).parent / staging_stem(location.name) if local else None


def _at_home(location: Location) -> Path:
    folder = ensure_home() / _MARKS
    folder.mkdir(exist_ok=True)
    return folder / _key(location)


def _marks(location: Location) -> Iterator[Path]:
    for place in (_at_source(location), home() / _MARKS / _key(location)):
        if place is not None:
            yield from place.parent.glob(f"{escape(place.name)}.{_HEX}{_SUFFIX}")


def _key(location: Location) -> str:
    return sha256_of("in-use", location.uri)[:16]
