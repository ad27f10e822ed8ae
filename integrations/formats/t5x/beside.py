"""The companions of a T5X checkpoint: the dataset iterator, and files that users added.

Facts: a legacy checkpoint stores the iterator of its dataset in `train_ds-<iii>-of-<nnn>*` beside the arrays, an Orbax
checkpoint in `dataset/`. Both are opaque and are copied unchanged.
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
    """The files in a folder that belong neither to the format nor to arrays, with paths relative to the folder.

    Args:
        home: the folder.
        arrays: names of its folders with arrays or items.
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
