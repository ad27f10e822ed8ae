"""Files in the folder of a checkpoint that its record does not have.

A file that was added to a recorded checkpoint may change what a library loads, such as a second set of weights, or
what it runs, such as the code of a model. So the record names every file that it was made of, and whoever compares a
checkpoint with its record names each further file. `KNOWN` has what readers and tools are known to leave in such a
folder: these files are named too, and allowed.

A checkpoint that is a file has no folder of its own, so nothing beside it counts. The list of files is in the sidecar,
but not in the digest of the checkpoint, which covers the tensors and the companion files.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.steps import step_number
from wherry.formats.registry import find_format
from wherry.objects.hub_commit import BLANK
from wherry.storage.folders import is_staging
from wherry.storage.sidecar import OWN_NAMES, Sidecar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wherry.formats.checkpoint import Checkpoint
    from wherry.storage.location import Location


class KnownFile(NamedTuple):
    """What a reader or a tool leaves in a folder that it reads.

    Attributes:
        pattern: of the first part of the name, relative to the folder of the checkpoint.
        what: who writes it, and what for.
    """

    pattern: re.Pattern[str]
    what: str


KNOWN = (
    KnownFile(re.compile(r"registered_model_meta"), "MLflow's note of the registered model"),
    KnownFile(re.compile(r"\.cache|\.huggingface"), "what huggingface_hub keeps of a download"),
    KnownFile(re.compile(r"\.git|\.gitattributes|\.gitignore"), "a repository of git"),
    KnownFile(re.compile(r"\.ipynb_checkpoints"), "what Jupyter keeps of open files"),
    KnownFile(re.compile(r"\.DS_Store|\._.*|Thumbs\.db|desktop\.ini"), "what a file browser keeps of a folder"),
    KnownFile(re.compile(r"\.nfs[0-9a-f]+"), "a removed file that NFS keeps while it is open"),
)
_MOST = 100_000  # names in a record: one for each chunk of an array without OCDBT
_PAGE = "a file of the repository's page"
_STEP = "a step of a run is a checkpoint of its own"


def recorded_files(location: Location) -> tuple[str, ...] | None:
    """The names of files for the record of a checkpoint; None if they are too many to be listed.

    Args, Raises: see `folder_files`.
    """
    names = folder_files(location)
    return names if len(names) <= _MOST else None


def folder_files(location: Location) -> tuple[str, ...]:
    """The names of all files in the folder of a checkpoint, relative to it, but for those of wherry.

    Args:
        location: the checkpoint.

    Returns:
        The names in order; none if the checkpoint is a file.

    Raises:
        HostileError: a file below must not be opened, or there are too many.
        StorageError: the storage failed.
    """
    entry = location.stat()
    if entry is None or not entry.is_dir:
        return ()
    return tuple(sorted(entry.name for entry in location.walk() if not _is_own(entry.name)))


def added_files(checkpoint: Checkpoint, location: Location, sidecar: Sidecar) -> Mapping[str, str]:
    """The files that were added to a checkpoint after its record was written.

    Args:
        checkpoint: opened.
        location: its location.
        sidecar: its record. One without a list of files knows only the companions.

    Returns:
        Name → what is known to write it; empty if nothing is. Of a folder that is known, the folder is named once.

    Raises:
        HostileError, StorageError: see `folder_files`.
    """
    companions = {one.name for one in sidecar.manifest.companions}
    if sidecar.files is None:
        present: Iterable[str] = (one.name for one in checkpoint.manifest.companions if not _is_own(one.name))
        recorded = companions
    else:
        present, members = folder_files(location), find_format(checkpoint.detection.format).commit_members
        recorded = companions.union(sidecar.files, members)
    page = BLANK if location.store.capabilities.one_commit else frozenset[str]()
    found: dict[str, str] = {}
    for name in present:
        if name not in recorded:
            top, what = name.partition("/")[0], known_file(name, page)
            found[top if what else name] = what
    return dict(sorted(found.items()))


def strange_files(checkpoint: Checkpoint, location: Location, sidecar: Sidecar) -> list[str]:
    """The names among `added_files` that nothing is known to write."""
    return [name for name, what in added_files(checkpoint, location, sidecar).items() if not what]


def known_file(name: str, page: frozenset[str] = frozenset()) -> str:
    """Who writes a file of this name into the folder of a checkpoint; empty if nobody is known to.

    Args:
        name: relative to the folder.
        page: names that the store itself may add.
    """
    top, *below = name.split("/")
    if name in page:
        return _PAGE
    if below and step_number(top) is not None:
        return _STEP
    return next((row.what for row in KNOWN if row.pattern.fullmatch(top)), "")


def _is_own(name: str) -> bool:
    return name in OWN_NAMES or is_staging(name.partition("/")[0])
