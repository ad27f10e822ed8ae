"""ggml_types: a checkpoint as if it had been saved in the types of a GGUF file: plain ones, or quantised blocks.

Tensors without dimensions to quantise stay plain, and some are stated by the model alone. How far the stored values are
from the source's is counted while they are made.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.account import Bound
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Companion
from wherry.core.tally import open_tally
from wherry.core.tensorspec import Region, TensorSpec, region_shape, row_bands
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.contents import Access, Computed, Contents
from wherry.layout.losses import losses_of, note
from wherry.layout.words import rounding, widens
from wherry.mover.output import as_array
from wherry.mover.read import memory_for
from wherry.quantized.ggml import values_of
from wherry.quantized.ggml_encode import BLOCK, BOUNDS, encode_blocks
from wherry.quantized.measured_view import MeasuredView, MeasuringReader

if TYPE_CHECKING:
    import numpy as np


RECORD = "values"  # in a manifest's origin
_READ = 4 << 20  # bytes of values, as float32, that are read at a time, or one row
_BAND = 1 << 16  # elements that are encoded at a time
_WORKING = 64  # bytes of memory for each of them


class TypedView(MeasuredView):
    """A checkpoint in other element types; its source must stay open while the view is used."""

    def __init__(
        self,
        source: Checkpoint,
        types: Mapping[KeyPath, str],
        constants: Sequence[tuple[TensorSpec, bytes]],
        files: Mapping[str, bytes],
        record: Mapping[str, str],
    ) -> None:
        """Create a view; nothing is read yet.

        Args:
            source: the checkpoint, whose tensors are plain.
            types: key path → element type of each tensor that gets another one.
            constants: further tensors, with their bytes, which follow from the model.
            files: new companion files, by name.
            record: the options that decide the types; recorded if a value can change.
        """
        self._constants, self._files_by_name = constants, files
        stored = source.manifest.tensors
        typed = {path: replace(stored[path], dtype=dtype) for path, dtype in types.items()}
        specs = {**stored, **typed, **{spec.path: spec for spec, _data in constants}}
        kept = [one for one in source.manifest.companions if one.name not in files]
        companions = (*kept, *(Companion(name, len(data)) for name, data in files.items()))
        every = {path: _bound(stored[path].dtype, dtype) for path, dtype in types.items()}
        losses = {path: bound for path, bound in every.items() if bound is not None}
        origin = source.manifest.origin
        if losses:
            origin = {**origin, RECORD: dict(record)}
        manifest = replace(source.manifest, tensors=specs, companions=companions, origin=origin)
        super().__init__(source, manifest)
        self.bounds = {
            path: reduce(Bound.joined, [one[path] for one in (source.bounds, losses) if path in one])
            for path in source.bounds.keys() | losses.keys()
        }

    def made_of(self, path: KeyPath) -> Collection[KeyPath]:
        """The stored tensors that a tensor is made of; none of one that follows from the model."""
        return self._source.made_of(path) if path in self._source.manifest.tensors else ()

    def _over(self, reader: Contents) -> _TypedReader:
        constants = {spec.path: data for spec, data in self._constants}
        return _TypedReader(reader, self._source.manifest.tensors, constants, self._files_by_name)


def _bound(source: str, target: str) -> Bound | None:
    """What a value can lose; None if none can."""
    if target in BOUNDS:
        return BOUNDS[target]
    return None if widens(source, target) else rounding(target)


class _TypedReader(MeasuringReader):
    """A reader of other element types over plain tensors; used from several threads."""

    def __init__(
        self,
        reader: Contents,
        stored: Mapping[KeyPath, TensorSpec],
        constants: Mapping[KeyPath, bytes],
        files: Mapping[str, bytes],
    ) -> None:
        """Read nothing yet.

        Args:
            reader: of the source; it is closed together with this reader.
            stored: its tensors.
            constants: bytes of further tensors, by key path.
            files: companion files that differ, by name.
        """
        super().__init__(reader, stored, files)
        self._constants = constants

    def is_computed(self, spec: TensorSpec) -> bool:
        """Whether the tensor has another type than the source's, or is none of it."""
        stored = self._stored.get(spec.path)
        return stored is None or stored.dtype != spec.dtype

    def access(self, spec: TensorSpec) -> Access:
        """See Contents; a tensor is cut as the source's is."""
        access = super().access(spec)
        if spec.path not in self._stored or not self.is_computed(spec):
            return access
        assert isinstance(access, Computed)
        source = self.base.access(self._stored[spec.path])
        return replace(access, gridded=isinstance(source, Computed) and source.gridded)

    def memory(self, spec: TensorSpec, region: Region) -> int:
        """Memory for one band, and for what the source needs to make it."""
        if spec.path in self._constants:
            return 0
        stored, (band, _first) = self._stored[spec.path], next(_bands(region))
        values = _READ + memory_for(self.base.access(stored), stored, band)
        return values + _WORKING * min(_BAND, math.prod(region_shape(band)))

    def compute(self, spec: TensorSpec, region: Region, out: np.ndarray) -> None:
        """Make the values of a region, band by band."""
        if spec.path in self._constants:
            out[...] = as_array(memoryview(self._constants[spec.path]), spec.dtype, spec.shape)[region]
            return
        flat = out.reshape(-1)
        try:
            for band, first in _bands(region):
                values = self._parts.read(spec.path, band).reshape(-1)
                for start in range(0, values.size, _BAND):
                    made = self._make(spec.dtype, values[start : start + _BAND])
                    begin = dtypes.canonical_size(spec.dtype, first + start) // flat.itemsize
                    flat[begin : begin + made.size] = made
        finally:
            self._parts.release()

    def _make(self, kind: str, values: np.ndarray) -> np.ndarray:
        """Values in a type, or the bytes of their blocks; what they lose is counted."""
        if kind not in BOUNDS:
            made = values.astype(dtypes.numpy_dtype(kind))
            note(values, made)
            self._measure(kind, values, made)
            return made
        values = values.astype("f4").reshape(-1, BLOCK)
        blocks = encode_blocks(values, kind)
        stored, tally = values_of(blocks, kind), open_tally()
        if tally is not None:  # most small values become zero, as they should
            tally.losses += replace(losses_of(values, stored), zero=0, subnormal=0)
        self._measure(kind, values, stored)
        return blocks.reshape(-1)

    def _measure(self, kind: str, values: np.ndarray, stored: np.ndarray) -> None:
        """Where nothing is counted, as in a verification: the largest error, and as a share of the bound."""
        import numpy as np

        bound = _bound(values.dtype.name, kind)
        if open_tally() is not None or bound is None:
            return
        with np.errstate(all="ignore"):
            wide = np.abs(values.astype("f8"))
            error = np.abs(values.astype("f8") - stored.astype("f8"))
            allowed = bound.relative * wide + bound.absolute
            if bound.block:
                allowed = allowed + bound.block * wide.max(axis=1, keepdims=True)
            shares = np.where(error > 0, error / allowed, 0)
        self.measured.add(float(np.nanmax(error, initial=0)), float(np.nanmax(shares, initial=0)))


def _bands(region: Region) -> Iterator[tuple[Region, int]]:
    """The parts of a region that are read at a time, and the number of elements of it before each."""
    for band, span in row_bands(TensorSpec((), region_shape(region), "float32"), _READ):
        at = tuple(slice(a.start + b.start, a.start + b.stop) for a, b in zip(region, band, strict=True))
        yield at, span.start // 4
