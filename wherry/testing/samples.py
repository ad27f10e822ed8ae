"""Samples: small checkpoints that hold everything that a format declares to hold, and the pieces to write them in.

A sample follows from the format's `Holds` alone: each dtype in several ranks, tensors across leaves and chunks,
tensors without elements, nested key paths, other values, empty nodes, companion files. Bytes are drawn at random
from a seed among those that are valid for the dtype, so that no chunk equals a fill value and samples are reproducible.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import count, cycle, islice, pairwise
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Companion, Manifest, Value
from wherry.core.tensorspec import Region, Span, TensorSpec, region_shape
from wherry.formats.registry import checked_options
from wherry.mover.move import cells, region_span

if TYPE_CHECKING:
    from wherry.formats.format import Format, Holds

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (2, 3), (3, 1, 5), (2, 3, 4, 5), (1, 2, 1, 3, 2))
_EVEN_SHAPES: tuple[tuple[int, ...], ...] = ((8,), (2, 4), (3, 2, 8))
_EMPTY_SHAPES: tuple[tuple[int, ...], ...] = ((0,), (3, 0, 2))
_MATRIX = (2, 3)  # of names that a system requires, which are those of matrices
_MOVES_SHAPE = (9, 1_000_003)  # one byte an element: more than a move
_SOURCE_DTYPES = ("bfloat16", "float32", "uint8")
_LEAVES_SHAPE = (3, 7, 299_593)  # one byte an element: crosses a leaf, ends inside one
_CHUNKS_SHAPE = (1309, 4099)  # four bytes an element, 20 MiB: three chunks, odd in both axes
_PARTS = ("params", "größe 1", "w.b")
_EMPTIES = {("nothing",): "none", ("state", "empty"): "dict", ("state", "rows"): "list"}
_VALUES: dict[KeyPath, Value] = {
    ("step",): 7,
    ("state", "name"): "run é",
    ("state", "rate"): 0.25,
    ("flag",): True,
}
_COMPANIONS = {"tokenizer.json": b'{"version": "1.0"}', "notes.txt": "größe\n".encode()}
_SHAPES_A_DTYPE = 3
_BYTE = 8
_RANKS = 2


@dataclass(frozen=True, slots=True)
class Sample:
    """A checkpoint that a format must be able to hold.

    Attributes:
        row: the format.
        options: its options, checked and complete.
        manifest: the manifest to write, as returned by the format's `prepare`.
        contents: canonical bytes of each tensor.
        companions: bytes of each companion file.
    """

    row: Format
    options: Mapping[str, Any]
    manifest: Manifest
    contents: Mapping[KeyPath, bytes]
    companions: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Piece:
    """One call of `MapWriter.write`: a natural region of a gridded tensor, or a span of any other tensor."""

    path: KeyPath
    where: Region | Span
    data: bytes


def sample(
    row: Format, options: Mapping[str, Any] | None = None, *, large: bool = True, seed: int = 0
) -> Sample:
    """A sample of everything that a format holds.

    Args:
        row: the format; it must be writable.
        options: its options, as a user passes them.
        large: whether tensors of 6 MiB and 20 MiB are among the tensors.
        seed: of the contents.
    """
    shapes = [*_specs(row, row.holds.dtypes)]
    if large:
        wide = "float32" if "float32" in row.holds.dtypes else _narrowest(row)
        shapes += [TensorSpec((), _LEAVES_SHAPE, _narrowest(row)), TensorSpec((), _CHUNKS_SHAPE, wide)]
    return _make_sample(row, shapes, checked_options(row, options or {}), seed)


def source(
    row: Format,
    seed: int = 0,
    largest: tuple[int, ...] = _MOVES_SHAPE,
    options: Mapping[str, Any] | None = None,
) -> Sample:
    """A sample for conversions: all kinds of content, but few and small tensors, and one larger tensor.

    Args:
        row: the format; it must be writable.
        seed: of the contents.
        largest: shape of the larger tensor, of the narrowest dtype; by default larger than one move.
        options: its options, as a user passes them.
    """
    few = _specs(row, row.holds.dtypes.intersection(_SOURCE_DTYPES) or {_narrowest(row)})
    return _make_sample(
        row, [*few, TensorSpec((), largest, _narrowest(row))], checked_options(row, options or {}), seed
    )


def _make_sample(row: Format, shapes: list[TensorSpec], options: Mapping[str, Any], seed: int) -> Sample:
    generator = random.Random(seed)  # noqa: S311  contents, not secrets
    if row.holds.ranks:
        shapes = [spec for spec in shapes for _rank in range(_RANKS)]
    specs = [
        replace(spec, path=path, shape=_MATRIX if path in row.holds.names else spec.shape)
        for spec, path in zip(shapes, _paths(row.holds), strict=False)
    ]
    # The nodes of the paths of `_paths` that are sequences.
    prefixes = {spec.path[:depth] for spec in specs for depth in range(1, len(spec.path))}
    lists = frozenset(path for path in prefixes if path[0] == "blocks" and path[-1] in ("blocks", "rows"))
    companions = {**(_COMPANIONS if row.holds.companions else {}), **row.holds.needs}
    manifest = Manifest(
        tensors={spec.path: spec for spec in specs},
        values=_VALUES if row.holds.values else {},
        empties=_EMPTIES if row.holds.empties else {},
        lists=lists,
        companions=tuple(Companion(name, len(data)) for name, data in companions.items()),
    )
    prepared = row.prepare(manifest, options)
    contents = {spec.path: random_bytes(spec, generator) for spec in specs}
    return Sample(row, options, prepared, contents, companions)


def variants(row: Format) -> Iterator[dict[str, Any]]:
    """The options of a format: all by default, then each other choice of each option alone."""
    yield {}
    for name, option in row.options.items():
        if isinstance(option.default, bool):
            yield {name: not option.default}
        yield from ({name: choice} for choice in option.choices if choice != option.default)


def pieces(sample: Sample, seed: int = 0) -> list[Piece]:
    """Cut all tensors of a sample into pieces for a writer, in random order; each byte occurs once.

    Args:
        sample: the sample.
        seed: of the cuts and of the order.
    """
    generator = random.Random(seed)  # noqa: S311
    found = [
        piece
        for spec in sample.manifest.tensors.values()
        if spec.size
        for piece in _cut(spec, sample.contents[spec.path], generator)
    ]
    generator.shuffle(found)
    return found


def random_bytes(spec: TensorSpec, generator: random.Random) -> bytes:
    """Random canonical bytes of a tensor, each element valid for its dtype."""
    raw = generator.randbytes(spec.nbytes)
    if spec.dtype == "bool":
        return raw.translate(bytes(byte & 1 for byte in range(256)))
    narrow = _narrow_bits(spec.dtype)
    if narrow is None:
        return raw
    most = 1 << narrow
    offset = most >> 1 if spec.dtype.startswith("int") else 0
    return raw.translate(bytes((byte % most - offset) & 0xFF for byte in range(256)))


def _bits(dtype: str) -> int:
    """Bits of an element, or of a block of them."""
    return _BYTE * dtypes.canonical_size(dtype, 1) if dtypes.block_elements(dtype) > 1 else dtypes.bits(dtype)


def _narrow_bits(dtype: str) -> int | None:
    """Bits of an element that canonical bytes widen to a byte; None for all other dtypes."""
    names = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
    return names.get(dtype)


def _specs(row: Format, of: Collection[str]) -> Iterator[TensorSpec]:
    names = sorted(of)
    shapes = cycle(shape for shape in SHAPES if row.holds.rank is None or len(shape) <= row.holds.rank)
    for name in names:
        packed, elements = dtypes.opaque(name) or _narrow_bits(name) is not None, dtypes.block_elements(name)
        for shape in _EVEN_SHAPES if packed else islice(shapes, _SHAPES_A_DTYPE):
            yield TensorSpec((), (*shape[:-1], shape[-1] * elements) if packed else shape, name)
    if row.holds.zero_size:
        yield from (TensorSpec((), shape, names[-1]) for shape in _EMPTY_SHAPES)


def _narrowest(row: Format) -> str:
    # one byte per element, or more if the format has no such dtype
    return min(sorted(row.holds.dtypes), key=lambda name: (_bits(name) < _BYTE, _bits(name)))


def _paths(holds: Holds) -> Iterator[KeyPath]:
    """Key paths that the format needs, then of several depths; `blocks` and `blocks/<n>/rows` are lists."""
    yield from holds.names
    depth = holds.depth
    for number in count():
        if holds.ranks:
            yield str(number % _RANKS), f"{_PARTS[number // _RANKS % 3]}.{number // _RANKS}"
            continue
        last = f"{_PARTS[number % 3]}.{number}"
        path = (last,) if number % 2 else (*_PARTS, last)
        if depth is not None:
            yield (*path[: depth - 1], last)
        else:
            yield path if number % 4 else ("blocks", str(number // 4), "rows", "0")


def _cut(spec: TensorSpec, data: bytes, generator: random.Random) -> Iterator[Piece]:
    if spec.chunks is not None:
        for region in cells(spec.whole, spec.chunks):
            yield Piece(spec.path, region, _region_bytes(spec, data, region))
        return
    grain = math.lcm(_bits(spec.dtype), 2 * _BYTE) // _BYTE * (1 if spec.nbytes > _BYTE else 0)
    inner = {generator.randrange(0, spec.nbytes, grain) for _ in range(4)} if grain else set[int]()
    places = sorted({0, spec.nbytes, *inner})
    for start, stop in pairwise(places):
        yield Piece(spec.path, Span(start, stop), data[start:stop])


def _region_bytes(spec: TensorSpec, data: bytes, region: Region) -> bytes:
    span = region_span(spec, region)
    # Contiguous in the tensor's bytes are single indices, then a range, then whole dimensions.
    shape = region_shape(region)
    first = next((axis for axis, extent in enumerate(shape) if extent != 1), len(shape))
    if span == Span(0, spec.nbytes) or shape[first + 1 :] == spec.shape[first + 1 :]:
        return data[span.start : span.stop]
    import numpy as np

    return np.frombuffer(data, dtypes.numpy_dtype(spec.dtype)).reshape(spec.shape)[region].tobytes()
