"""The files of a checkpoint, compared with those of its record: added, missing, or of another size.

A file that was added to a recorded checkpoint may change what a library loads, such as a second set of weights, or
what it runs, such as the code of a model. So the record names every file in the folder, and whoever compares a
checkpoint with its record names each further file. `KNOWN` has what readers and tools are known to leave in such a
folder: these files are named too, and allowed. Files of the checkpoint itself are recorded with their sizes.

If a checkpoint is one file, nothing next to it counts; the record has its size under the name `.`. The list of files is
in the sidecar, but not in the digest of the checkpoint, which covers the tensors and the companion files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.lazy_dataclass import dataclass
from wherry.core.steps import step_number
from wherry.formats.registry import find_format
from wherry.store.folders import is_staging
from wherry.store.sidecar import FOLDER_NAME, OWN_NAMES, Sidecar

if TYPE_CHECKING:
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.format import Contents
    from wherry.store.location import Location


class KnownFile(NamedTuple):
    """A file that a reader or a tool leaves in a folder that it reads.

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
    KnownFile(
        re.compile(r"\.DS_Store|\._.*|Thumbs\.db|desktop\.ini"), "what a file browser keeps of a folder"
    ),
    KnownFile(re.compile(r"\.nfs[0-9a-f]+"), "a removed file that NFS keeps while it is open"),
    KnownFile(re.compile(r"\.wherry\.json\.before"), "the sidecar before a rewrite in place"),
)
_ITSELF = "."  # the name of a checkpoint that is one file
_MOST = 100_000  # names in a record: arrays without OCDBT have a file for each chunk
_PAGE = "a file of the repository's page"
_STEP = "a step of a run is a checkpoint of its own"
_RECORDED = "a checkpoint of its own, with its own record"


@dataclass(frozen=True, slots=True)
class FileDifferences:
    """How the files of a checkpoint differ from its record.

    Attributes:
        added: name → what is known to write such a file; empty if nothing is known. All files in a known folder are
            named as the folder.
        missing: names of recorded files of the checkpoint that are not there.
        resized: name → recorded size and present size.
    """

    added: Mapping[str, str] = field(default_factory=dict[str, str])
    missing: tuple[str, ...] = ()
    resized: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    @property
    def strange(self) -> list[str]:
        """The names of added files that nothing is known to write."""
        return [name for name, what in self.added.items() if not what]


def recorded_files(reader: Contents, location: Location) -> dict[str, int | None] | None:
    """The files for the record of a checkpoint.

    Args:
        reader: of the opened checkpoint.
        location: where it is.

    Returns:
        Name → size, or None for a file in its folder that does not belong to it; None if there are too many files.

    Raises:
        HostileError: a file must not be opened, or a folder has too many.
        StorageError: the storage failed.
    """
    sizes = _present_files(location)
    members = {_ITSELF, *(entry.name for entry in reader.members())}
    found = {name: size if name in members else None for name, size in sorted(sizes.items())}
    return found if len(found) <= _MOST else None


def file_differences(checkpoint: Checkpoint, location: Location, sidecar: Sidecar) -> FileDifferences:
    """Compare the names and sizes of the files of a checkpoint with its record.

    Args:
        checkpoint: opened.
        location: its location.
        sidecar: its record. One without a list of files knows only the companions.

    Raises:
        HostileError, StorageError: see `recorded_files`.
    """
    recorded, sizes = sidecar.files or {}, _present_files(location)
    companions = {one.name for one in checkpoint.manifest.companions}
    # The digest of the checkpoint covers the names of companions, so the list of files does not excuse one.
    added = companions & sizes.keys() - {one.name for one in sidecar.manifest.companions}
    if sidecar.files is not None:
        marks = find_format(checkpoint.detection.format).commit_members  # the last of which follow the record
        added |= sizes.keys() - recorded.keys() - companions - {_ITSELF, *marks}
    page: frozenset[str] = frozenset()
    if location.store.capabilities.one_commit:
        from wherry.store.hub import BLANK

        page = BLANK
    # Folders that have a sidecar of their own, and no recorded file of the checkpoint around them.
    folders = [folder for folder, _, name in (one.rpartition("/") for one in sizes) if name == FOLDER_NAME]
    own = [folder for folder in folders if not any(one.startswith(f"{folder}/") for one in recorded)]
    named: dict[str, str] = {}
    for name in sorted(added):
        what = known_file(name, page)
        home = next((folder for folder in own if name.startswith(f"{folder}/")), None)
        if home is not None:
            named[home] = _RECORDED
        else:
            named[name.partition("/")[0] if what else name] = what
    stated = {name: size for name, size in recorded.items() if size is not None}
    return FileDifferences(
        named,
        tuple(name for name in stated if name not in sizes),
        {name: (size, sizes[name]) for name, size in stated.items() if sizes.get(name, size) != size},
    )


def known_file(name: str, page: frozenset[str] = frozenset()) -> str:
    """The tool that writes a file of this name into the folder of a checkpoint; empty if none is known.

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


def _present_files(location: Location) -> dict[str, int]:
    """Name → size of every file in the folder of a checkpoint but for those of wherry, or of the one file."""
    entry = location.stat()
    if entry is None:
        return {}
    if not entry.is_dir:
        return {_ITSELF: entry.size}
    return {
        one.name: one.size
        for one in location.walk()
        if one.name not in OWN_NAMES and not is_staging(one.name.partition("/")[0])
    }
