"""The reader of T5X checkpoints: arrays in zarr and in the msgpack tree, and companions.

The arrays themselves are read like Orbax's. T5X adds a folder around them (the step) and more files next to them (the
dataset iterator).

The step of a T5X checkpoint: its folder's name and `state/step` must match. T5X itself does not check this.

The companions of a T5X checkpoint: the dataset iterator, and files that users added.

Facts: a legacy checkpoint stores the iterator of its dataset in `train_ds-<iii>-of-<nnn>*` next to the arrays, an Orbax
checkpoint in `dataset/`. Both are opaque and are copied unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from wherry.core.account import OTHERS, IgnoredEntry, ignored_file
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Value
from wherry.core.tensorspec import Sharding, TensorSpec
from wherry.errors import CorruptError
from wherry.formats.contents import ContentsOver
from wherry.integrations.containers.flat.reader import companion_location
from wherry.integrations.containers.orbax import layout as orbax
from wherry.integrations.containers.zarr.reader import ArrayReader, shortfall
from wherry.integrations.formats.t5x.layout import (
    ARRAY_FOLDER_PREFIXES,
    MSGPACK,
    PINNED,
    STATE,
    TRAIN_STATE,
    stated_step,
)
from wherry.mover.read import read_array
from wherry.storage.location import Location
from wherry.storage.sidecar import FOLDER_NAME, SIGNATURE_NAME
from wherry.store.store import Entry


class T5xReader(ContentsOver):
    """Reads one checkpoint.

    Attributes:
        home: the checkpoint: its folder, or its one file.
        arrays: reads the tensors.
        companions: names of the files without tensors.
        shardings: the writer's sharding of the arrays over devices, if known.
    """

    def __init__(
        self,
        home: Location,
        arrays: ArrayReader,
        companions: frozenset[str],
        shardings: Mapping[KeyPath, Sharding] | None = None,
    ) -> None:
        self.home = home
        self.base = self.arrays = arrays
        self.companions = companions
        self.shardings = shardings or {}

    def shortfall(self) -> str | None:
        """A text about missing parts, with the hosts that held them."""
        return shortfall(self.arrays, self.shardings)

    def companion(self, name: str) -> Location:
        """The location of a companion: in the folder.

        Raises:
            NotFoundError: the checkpoint does not have the companion.
        """
        return companion_location(self.home, name, self.companions)

    def members(self) -> Iterator[Entry]:
        """The files of the folder, or the file and its arrays; sidecar and signature are not part of the checkpoint."""
        entry = self.home.entry
        if entry is not None and not entry.is_dir:
            yield entry
            for array in self.arrays.arrays.values():
                yield from self.home.parent.join(array.name).walk(f"{array.name}/")
            return
        yield from (found for found in self.home.walk() if found.name not in (FOLDER_NAME, SIGNATURE_NAME))


STEP = (STATE, "step")
_STEPS = (STEP, (TRAIN_STATE, *STEP))


def checked_step(
    location: Location,
    tensors: Mapping[KeyPath, TensorSpec],
    values: Mapping[KeyPath, Value],
    reader: ArrayReader,
) -> int | None:
    """The step inside, else the step in the name; None if neither is known.

    Raises:
        CorruptError: the step in the name differs from the step inside.
    """
    place = next((path for path in _STEPS if path in tensors or path in values), STEP)
    inside, spec = values.get(place), tensors.get(place)
    if spec is not None and "int" in spec.dtype and spec.size == 1:
        array, listing = reader.arrays.get(spec.path), reader.listing
        lacks = (
            array is not None and listing is not None and any(listing.lack(key) for key in array.chunk_keys())
        )
        if not lacks:
            inside = int(read_array(reader, spec, spec.whole).reshape(()).item())
    stated = stated_step(location.name)
    if type(inside) is not int:
        return stated
    if stated is not None and stated != inside:
        raise CorruptError(
            f"step mismatch: {stated} in the folder's name, {inside} in state/step",
            uri=location.uri,
            cure=f"rename the folder to checkpoint_{inside}, or use another step",
        )
    return inside


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
