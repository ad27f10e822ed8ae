"""The files of a T5X checkpoint that hold no tensors: the dataset iterator, and what users put beside it.

Facts: a legacy checkpoint keeps the iterator of its dataset in `train_ds-<iii>-of-<nnn>*` beside the arrays, an Orbax
one in `dataset/`. Both are opaque: they are carried as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.integrations.containers.orbax import layout as orbax
from wherry.integrations.formats.t5x.layout import ARRAY_FOLDER_PREFIXES, MSGPACK, PINNED
from wherry.storage.sidecar import FOLDER_NAME, SIGNATURE_NAME

if TYPE_CHECKING:
    from collections.abc import Collection

    from wherry.storage.location import Entry, Location

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
_OWN_FOLDERS = frozenset({"d", "descriptor"})


def companions_beside(home: Location, arrays: Collection[str]) -> tuple[Entry, ...]:
    """The files in a folder that are neither its own nor those of arrays, with paths relative to it.

    Args:
        home: the folder.
        arrays: names of the folders in it that hold arrays or items.
    """
    found: list[Entry] = []
    for entry in home.entries():
        if not entry.is_dir:
            found += [entry] if entry.name not in _OWN and entry.size >= 0 else []
        elif entry.name not in arrays and not _own_folder(entry.name):
            inside = list(home.join(entry.name).walk(f"{entry.name}/"))
            holds_array = any(one.name.rsplit("/", 1)[-1] in _ARRAY_METADATA for one in inside)
            found += (
                [] if holds_array else [one for one in inside if not one.name.endswith(f"/{orbax.COMMITTED}")]
            )
    return tuple(found)


def _own_folder(name: str) -> bool:
    prefixes = (orbax.PROCESS_PREFIX, *ARRAY_FOLDER_PREFIXES)
    return name in _OWN_FOLDERS or name.startswith(prefixes) or orbax.uncommitted(name)
