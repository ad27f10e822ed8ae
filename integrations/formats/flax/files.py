"""Opens flax msgpack files, alone or with the zarr arrays of a multi-process save.

The file names of flax checkpoints, and the boxes in their trees.

Facts (flax `training/checkpoints.py`, 0.3 to 0.12): a checkpoint is the file `<prefix><step>`, prefix `checkpoint_`
by default, step an int or a float, possibly negative; it is written as `<prefix>tmp` and renamed. Arrays that no single
process held are in the folder `<file>_gda`, one zarr array below `a/b/c/` for the leaf with the text
`//GDAPlaceholder:a/b/c`. The folder is renamed first, then the file; on Google's store the folder has its final name
from the start and is committed when it has `commit_success.txt`. Transformers writes `flax_model.msgpack`.

linen boxes (`Partitioned`, `LogicallyPartitioned`) are one more key `value` around a leaf, and so are NNX variables
(`raw_value` in flax 0.8); logical axis names are not stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, render
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import IncompleteError, NotFoundError
from wherry.formats.contents import Absent, Contents, ContentsOver
from wherry.formats.format import Opened
from wherry.integrations.containers.msgpack.contents import MsgpackContents, PlacedReader, gather
from wherry.integrations.containers.msgpack.index import index_file
from wherry.integrations.containers.orbax.layout import RENAMELESS
from wherry.mover.read import read_array
from wherry.storage.location import Location
from wherry.store.store import Entry
from wherry.tree.tree_reading import read_leaves

if TYPE_CHECKING:
    from wherry.integrations.containers.zarr.reader import ArrayReader


PREFIX = "checkpoint_"
ARRAYS_SUFFIX = "_gda"
PLACEHOLDER = "//GDAPlaceholder:"
COMMITTED = "commit_success.txt"
SUFFIX = ".msgpack"
# Placeholders of Orbax and T5X for arrays stored elsewhere: a file with one is not a plain flax file.
FOREIGN = ("PLACEHOLDER://", "AGGREGATED://")
_NUMBERED = re.compile(r"(?:.*_)?(-?\d{1,15}(?:\.\d+)?)(?:\.msgpack)?")
_TEMPORARY = re.compile(r"(?:.*_)?tmp")
_BOXES = ("value", "raw_value")


def step_of(name: str) -> int | None:
    """The step in a file name; None if there is none, or a fraction."""
    found = _NUMBERED.fullmatch(name)
    step = float(found.group(1)) if found else None
    return int(step) if step is not None and step.is_integer() else None


def is_numbered(name: str) -> bool:
    """Whether a file has flax's name for a step, fractions included."""
    return _NUMBERED.fullmatch(name) is not None and "_" in name


def plausible(name: str, state: str) -> bool:
    """Whether the name makes a msgpack map without a visible array a flax file.

    Args:
        name: name of the file.
        state: how far its first bytes could be parsed (`Glance`); the less, the stricter the check of the name.
    """
    if state == "wrong":
        return name.startswith(PREFIX) or name.endswith(SUFFIX)
    return is_numbered(name) or (name.endswith(SUFFIX) and state != "whole")


def temporary(name: str) -> bool:
    """Whether a file has flax's name for an unfinished save."""
    return _TEMPORARY.fullmatch(name) is not None


def boxes(paths: Iterable[KeyPath], file: str) -> tuple[Evidence, ...]:
    """Evidence of the wrappers around the leaves of a tree."""
    known = list(paths)
    children: dict[KeyPath, int] = {}
    for path in known:
        children[path[:-1]] = children.get(path[:-1], 0) + 1
    rows: list[Evidence] = []
    for box in _BOXES:
        boxed = sum(path[-1:] == (box,) and children[path[:-1]] == 1 for path in known)
        if boxed:
            words = "an NNX variable of flax 0.8" if box == "raw_value" else "a linen box or an NNX variable"
            rows.append(Evidence(file, f"`{box}` alone around {boxed} of {len(known)} leaves: {words}"))
    return tuple(rows)


_STEPS = (("step",), ("state", "step"))


def open_file(location: Location, detection: Detection) -> Opened:
    """Open one msgpack file.

    Raises:
        IncompleteError: the name is that of an unfinished save.
        CorruptError, UnsupportedError, HostileError: see `index_file`.
    """
    _require_finished(detection)
    contents = gather(index_file(location), location)
    reader = PlacedReader(location, contents.places, (_member(location),))
    return _open_contents(detection, contents, contents.specs, reader)


def open_with_arrays(location: Location, detection: Detection) -> Opened:
    """Open a msgpack file together with its folder of arrays.

    Raises:
        IncompleteError: the save is unfinished, or the folder of the arrays or the metadata of an array is missing.
        CorruptError, UnsupportedError, HostileError: as above, or a placeholder points outside the folder.
    """
    _require_finished(detection)
    contents = gather(index_file(location), location)
    names = {
        path: value.removeprefix(PLACEHOLDER)
        for path, value in contents.values.items()
        if isinstance(value, str) and value.startswith(PLACEHOLDER)
    }
    folder = location.parent.join(location.name + ARRAYS_SUFFIX)
    arrays = _arrays(folder, names)
    for path in names:
        del contents.values[path]
    specs = {
        **contents.specs,
        **{
            path: TensorSpec(path, array.zarr.shape, array.zarr.dtype, chunks=array.zarr.chunks)
            for path, array in arrays.arrays.items()
        },
    }
    inline = PlacedReader(location, contents.places, (_member(location),))
    seen = Evidence(location.name, f"{len(names)} placeholders of arrays in {folder.name}")
    return _open_contents(detection.seen(seen), contents, specs, MixedReader(inline, arrays, folder))


def _require_finished(detection: Detection) -> None:
    if detection.verdict == "incomplete":
        raise IncompleteError(
            detection.reason or "the save was never finished", uri=detection.uri, cure="use another step"
        )


def _open_contents(
    detection: Detection,
    contents: MsgpackContents,
    specs: dict[KeyPath, TensorSpec],
    reader: PlacedReader | MixedReader,
) -> Opened:
    stored = _stored_step(specs, contents, reader)
    step = stored if detection.step is None else detection.step
    kind = read_leaves(specs, contents.values, contents.empties, specs=specs).whole_of_arrays
    manifest = Manifest(
        tensors=specs,
        values=contents.values,
        empties=contents.empties,
        lists=frozenset(contents.lists),
        step=step,
        kind=kind,
    )
    name = reader.location.name
    evidence = [Evidence(name, f"{len(specs)} tensors, {len(contents.values)} other values")]
    if contents.marked:
        evidence.append(Evidence(name, "array headers in a form that only wherry writes"))
    if stored is not None and stored != step:
        evidence.append(
            Evidence(name, f"step {step} in the name, step {stored} in the tree; flax uses the name")
        )
    precise = replace(
        detection, step=step, kind=kind, writer="wherry (as flax)" if contents.marked else "flax"
    )
    return Opened(precise.seen(*evidence, *boxes(specs, name)), manifest, reader)


def _stored_step(
    specs: dict[KeyPath, TensorSpec], contents: MsgpackContents, reader: PlacedReader | MixedReader
) -> int | None:
    """The step stored in the tree."""
    for path in _STEPS:
        value = contents.values.get(path)
        if type(value) is int:
            return value
        spec = specs.get(path)
        if spec is not None and spec.shape == () and "int" in spec.dtype and dtypes.bits(spec.dtype) >= 8:  # noqa: PLR2004
            return int(read_array(reader, spec, ()))
    return None


def _arrays(folder: Location, names: dict[KeyPath, str]) -> ArrayReader:
    """The reader of the arrays that the placeholders name."""
    from wherry.integrations.containers.zarr import kvstore, metadata  # tensorstore
    from wherry.integrations.containers.zarr.listing import list_files
    from wherry.integrations.containers.zarr.reader import ArrayReader, StoredArray

    if folder.entry is None:
        raise _lost_error(f"folder not found: {folder.name} with {len(names)} arrays", folder)
    if folder.store.protocol in RENAMELESS and not folder.join(COMMITTED).exists():
        raise _lost_error(
            f"missing {COMMITTED} in {folder.name}, which flax requires on {folder.store.protocol}://", folder
        )
    kvstore.base_spec(folder)
    listing = list_files(folder)
    arrays: dict[KeyPath, StoredArray] = {}
    for path, name in names.items():
        place = folder.member(name) if name else folder
        data = listing.read(f"{name}/.zarray" if name else ".zarray")
        if data is None:
            raise _lost_error(f"missing .zarray in {folder.name}/{name}", folder, path)
        arrays[path] = StoredArray(name, metadata.parse(data, 2, place.uri))
    # jax's serializer stores every chunk, zeros included.
    return ArrayReader(folder, arrays, listing, kvstore.context(), ocdbt=False, zeros_stored=True)


def _lost_error(what: str, folder: Location, path: KeyPath | None = None) -> IncompleteError:
    shown = None if path is None else render(path)
    cure = "copy it from the original location, or use another step"
    return IncompleteError(what, uri=folder.uri, path=shown, cure=cure)


def _member(location: Location) -> Entry:
    entry = location.stat()
    if entry is None:
        raise NotFoundError("file not found", uri=location.uri)
    return Entry(location.name, entry.size, is_dir=False, mark=entry.mark)


class MixedReader(ContentsOver):
    """Reads the tensors of the msgpack file itself, and those of the folder of zarr arrays.

    Attributes:
        location: of the checkpoint: the file.
    """

    def __init__(self, file: PlacedReader, arrays: ArrayReader, folder: Location) -> None:
        """Nothing is read yet.

        Args:
            file: the reader of the file.
            arrays: the reader of the folder.
            folder: that folder.
        """
        self.base, self.location = file, file.location
        self._arrays, self._folder = arrays, folder

    def inner(self, spec: TensorSpec) -> tuple[Contents, TensorSpec]:
        """The reader of the folder, or of the file."""
        return (self._arrays if spec.path in self._arrays.arrays else self.base), spec

    def absent(self) -> Iterable[Absent]:
        """Missing chunks of the arrays."""
        return self._arrays.absent()

    def members(self) -> Iterable[Entry]:
        """The file and its companions; the folder's files by their paths from the file's own folder."""
        below = (replace(entry, name=f"{self._folder.name}/{entry.name}") for entry in self._folder.walk())
        return chain(self.base.members(), below)

    def close(self) -> None:
        """Release the arrays."""
        self._arrays.close()
