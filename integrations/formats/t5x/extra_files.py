"""The companions of a T5X checkpoint: the dataset iterator, and files that users added.

Facts: a legacy checkpoint stores the iterator of its dataset in `train_ds-<iii>-of-<nnn>*` next to the arrays, an Orbax
checkpoint in `dataset/`. Both are opaque and are copied unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wherry.core.account import OTHERS, IgnoredEntry, ignored_file
from wherry.integrations.containers.orbax import layout as orbax
from wherry.integrations.formats.t5x.layout import ARRAY_FOLDER_PREFIXES, MSGPACK, PINNED
from wherry.storage.sidecar import FOLDER_NAME, SIGNATURE_NAME

if TYPE_CHECKING:
    from collections.abc import Collection

    from wherry.storage.location import Location
    from wherry.store.store import Entry

_ARRAY_METADATA = (".zarray", "zarr.json", ".zgroup")
_OWN = frozenset(
    {
        MSGPACK,
        PINNED,
        FOLDER_NAME,
        SIGNATURE_NAME,
        orbax.COMMITTED,
        orbax.CHECKPOINT,
        orbax.V1_MARKER,
        orbax.MANIFEST,
    }
)
_NOT_NAMED = "the train state does not name it"
_OWN_FOLDERS = frozenset({"d", "descriptor"})


@dataclass(slots=True)
class ExtraFiles:
    """The files of a folder besides its arrays: the companions, and folders that are not converted."""

    companions: list[Entry] = field(default_factory=list["Entry"])
    ignored: list[IgnoredEntry] = field(default_factory=list[IgnoredEntry])


def extra_files(home: Location, arrays: Collection[str]) -> ExtraFiles:
    """The files in a folder that belong neither to the format nor to arrays, with paths relative to the folder.

    Args:
        home: the folder.
        arrays: names of its folders with arrays or items.
    """
    found = ExtraFiles()
    for entry in home.entries():
        if not entry.is_dir:
            found.companions += [entry] if entry.name not in _OWN and entry.size >= 0 else []
        elif not (
            entry.name in arrays
            or entry.name in _OWN_FOLDERS
            or entry.name.startswith((orbax.PROCESS_PREFIX, *ARRAY_FOLDER_PREFIXES))
            or orbax.is_uncommitted(entry.name)
        ):
            inside = list(home.join(entry.name).walk(f"{entry.name}/"))
            if any(one.name.rsplit("/", 1)[-1] in _ARRAY_METADATA for one in inside):
                what = "a folder with other arrays"
                found.ignored.append(ignored_file(entry.name, OTHERS, what, _NOT_NAMED, weights=True))
            else:
                found.companions += [one for one in inside if not one.name.endswith(f"/{orbax.COMMITTED}")]
    return found
