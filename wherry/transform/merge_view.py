"""merge_view: several opened checkpoints as one, and the checkpoint that a merge makes of them.

Joined checkpoints are read and hashed in one pass. The tensor `a/b` of the checkpoint at place 1 is `1/a/b`; companions
and files are those of the first.

A recipe says how the elements of a merged tensor are computed from regions of source tensors. Arithmetic is in float32,
in float64 where an element type is wider; the result is rounded to the target's type once.

The result has the tree, the companions and the format of the first checkpoint, so that plan, mover, journal and
verification treat it as any source; a layout of another system may lie over it. `weighted_sum` merges checkpoints of
one tree: the same key paths, shapes and element types in each. The weights are taken as they are stated, and not made
to sum to 1. `merged_adapter` merges a base with an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from wherry.core import dtypes
from wherry.core.dtypes import canonical_size
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Region, TensorSpec, region_shape
from wherry.core.units import plural
from wherry.cures import Blank, Command, Cure
from wherry.errors import UnrepresentableError, UsageError
from wherry.formats.checkpoint import Checkpoint, JoinedPart
from wherry.formats.format import Absent, Contents, ContentsOver, Opened
from wherry.layout.copies import Read
from wherry.layout.losses import note
from wherry.layout.tree_reading import read_tree
from wherry.mover.read import read_array
from wherry.transform.view import Transform, TransformReader, View, with_files

if TYPE_CHECKING:
    import numpy as np

_SINGLE, _DOUBLE = "float32", "float64"
_SHOWN = 3
_CURE = Cure(
    "merge checkpoints of one model and one training, in one form; {} compares two",
    Command("diff", Blank("A"), Blank("B")),
)


def at(place: int, path: KeyPath) -> KeyPath:
    """The key path of a tensor of the checkpoint at a place."""
    return (str(place), *path)


class JoinedCheckpoint(Checkpoint):
    """Several checkpoints, which must stay open while this one is used; their owner closes them."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Join checkpoints; nothing is read."""
        first = checkpoints[0]
        self.parts = tuple(JoinedPart((str(place),), one) for place, one in enumerate(checkpoints))
        tensors = {
            at(place, path): replace(spec, path=at(place, path))
            for place, one in enumerate(checkpoints)
            for path, spec in one.manifest.tensors.items()
        }
        manifest = Manifest(tensors, step=first.manifest.step, kind=first.manifest.kind)
        ignored = tuple(entry for one in checkpoints for entry in one.ignored)
        super().__init__(Opened(first.detection, manifest, JoinedReader(checkpoints), ignored))
        self.opaque = first.opaque

    @property
    def parameters(self) -> int:
        """The number of elements of the first checkpoint: a target holds the model of it."""
        return self.parts[0].checkpoint.parameters


class JoinedReader(ContentsOver):
    """Reads each tensor from the checkpoint that has it; companions and files are those of the first."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Nothing is read yet."""
        self._checkpoints = tuple(checkpoints)
        self.base = checkpoints[0].reader

    def inner(self, spec: TensorSpec) -> tuple[Contents, TensorSpec]:
        """The reader at the place in front of the key path, and the spec without it."""
        place, *path = spec.path
        return self._checkpoints[int(place)].reader, replace(spec, path=tuple(path))

    def absent(self) -> Iterator[Absent]:
        """The missing chunks of all checkpoints."""
        for place, one in enumerate(self._checkpoints):
            yield from (replace(piece, path=at(place, piece.path)) for piece in one.reader.absent())

    def shortfall(self) -> str | None:
        """The missing parts of the first checkpoint that is incomplete."""
        return next(filter(None, (one.reader.shortfall() for one in self._checkpoints)), None)

    def close(self) -> None:
        """Nothing: the owner of the checkpoints closes them."""


class Recipe(Protocol):
    """The source tensors of a merged tensor, and how it is computed from them."""

    @property
    def sources(self) -> tuple[KeyPath, ...]:
        """The source tensors."""
        ...

    def values(self, region: Region, read: Read) -> np.ndarray:
        """The elements of a region, not yet rounded.

        Args:
            region: of the merged tensor.
            read: returns the elements of a region of a source tensor.
        """
        ...

    def memory(self, region: Region, specs: Mapping[KeyPath, TensorSpec]) -> int:
        """Bytes that `values` holds for a region, its result included."""
        ...


@dataclass(frozen=True, slots=True)
class UnchangedTensor:
    """The elements of one source tensor, unchanged."""

    source: KeyPath

    @property
    def sources(self) -> tuple[KeyPath, ...]:
        """The one source tensor."""
        return (self.source,)

    def values(self, region: Region, read: Read) -> np.ndarray:
        """The elements themselves."""
        return read(self.source, region)

    def memory(self, region: Region, specs: Mapping[KeyPath, TensorSpec]) -> int:
        """The elements themselves."""
        return _nbytes(specs[self.source].dtype, region)


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """The sum of source tensors of one shape, each times its weight, added in their order."""

    terms: tuple[tuple[KeyPath, float], ...]

    @property
    def sources(self) -> tuple[KeyPath, ...]:
        """The source tensors, in the order in which they are added."""
        return tuple(path for path, _weight in self.terms)

    def values(self, region: Region, read: Read) -> np.ndarray:
        """Σ weight × element."""
        (path, weight), *rest = self.terms
        total = _wide(read(path, region))
        total *= total.dtype.type(weight)
        for path, weight in rest:
            term = _wide(read(path, region))
            term *= term.dtype.type(weight)
            total += term
        return total

    def memory(self, region: Region, specs: Mapping[KeyPath, TensorSpec]) -> int:
        """The sum, one term, and the elements that it is made of."""
        dtype = specs[self.terms[0][0]].dtype
        return 2 * _nbytes(_wide_name(dtype), region) + _nbytes(dtype, region)


@dataclass(frozen=True, slots=True)
class LowRank:
    """A matrix plus the scaled product of two narrow ones: W + s·B·A, or W + s·(B·A)ᵀ.

    Attributes:
        base: W, [out, in]; [in, out] if transposed.
        down: A, [rank, in].
        up: B, [out, rank].
        rank: rows of A, columns of B.
        scale: s.
        transposed: whether W has its inputs first.
    """

    base: KeyPath
    down: KeyPath
    up: KeyPath
    rank: int
    scale: float
    transposed: bool = False

    @property
    def sources(self) -> tuple[KeyPath, ...]:
        """W, A and B."""
        return (self.base, self.down, self.up)

    def values(self, region: Region, read: Read) -> np.ndarray:
        """The elements of a region; only its rows of B and its columns of A are read."""
        outs, ins = region[::-1] if self.transposed else region
        ranks = slice(0, self.rank)
        delta = _wide(read(self.up, (outs, ranks))) @ _wide(read(self.down, (ranks, ins)))
        delta *= delta.dtype.type(self.scale)
        base = _wide(read(self.base, region))
        base += delta.T if self.transposed else delta
        return base

    def memory(self, region: Region, specs: Mapping[KeyPath, TensorSpec]) -> int:
        """W in float32 and as it is stored, the product, and the parts of A and B."""
        dtype = specs[self.base].dtype
        narrow = 2 * canonical_size(_DOUBLE, self.rank * sum(region_shape(region)))
        return 2 * _nbytes(_wide_name(dtype), region) + _nbytes(dtype, region) + narrow


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """A matrix whose rows, those of each output, are scaled to given lengths: DoRA, m · V / |V| with V = W + s·B·A.

    Attributes:
        matrix: V.
        magnitude: m, [out].
        inputs: the length of a row.
    """

    matrix: LowRank
    magnitude: KeyPath
    inputs: int

    @property
    def sources(self) -> tuple[KeyPath, ...]:
        """W, A, B and m."""
        return (*self.matrix.sources, self.magnitude)

    def values(self, region: Region, read: Read) -> np.ndarray:
        """The elements of a region; the lengths of its rows are computed from whole rows, piece by piece."""
        outs, ins = region[::-1] if self.matrix.transposed else region
        found = self.matrix.values(region, read)
        wanted = read(self.magnitude, (outs,)).astype(found.dtype)
        factor = wanted / self._lengths(outs, ins, found, read).astype(found.dtype)
        found *= factor if self.matrix.transposed else factor[:, None]
        return found

    def _lengths(self, outs: slice, ins: slice, found: np.ndarray, read: Read) -> np.ndarray:
        """The length of each row, of which `found` has the columns `ins`."""
        axis, width = (0 if self.matrix.transposed else 1), ins.stop - ins.start
        squares = (found.astype(_DOUBLE) ** 2).sum(axis)
        for first, last in ((0, ins.start), (ins.stop, self.inputs)):
            for start in range(first, last, width):
                part = slice(start, min(start + width, last))
                region = (part, outs) if self.matrix.transposed else (outs, part)
                squares += (self.matrix.values(region, read).astype(_DOUBLE) ** 2).sum(axis)
        return squares**0.5

    def memory(self, region: Region, specs: Mapping[KeyPath, TensorSpec]) -> int:
        """The region, the squares of a part, and the part."""
        return 2 * self.matrix.memory(region, specs) + 2 * _nbytes(_DOUBLE, region)


@dataclass(frozen=True, slots=True)
class ExpertLowRank:
    """A matrix of each expert, or of one, plus the scaled product of its two narrow ones: W_e + s·B_e·A_e.

    The narrow matrices of all experts are two tensors: the rows of A are those of expert 0, then of expert 1; the
    columns of B are the first of each expert, then the second of each.

    Attributes:
        base: W, [expert, out, in], or of one expert [out, in]; with the last two exchanged if transposed.
        down: A, [experts · rank, in].
        up: B, [out, rank · experts].
        rank: rows of A, columns of B, of one expert.
        experts: their number.
        scale: s.
        transposed: whether W has its inputs first.
        expert: the number of the expert that a matrix belongs to; None if the matrices hold all experts.
        first: the row of the product that the first row of W gets: several tensors of a base are one for PEFT.
    """

    base: KeyPath
    down: KeyPath
    up: KeyPath
    rank: int
    experts: int
    scale: float
    transposed: bool = False
    expert: int | None = None
    first: int = 0

    @property
    def sources(self) -> tuple[KeyPath, ...]:
        """W, A and B."""
        return (self.base, self.down, self.up)

    def values(self, region: Region, read: Read) -> np.ndarray:
        """The elements of a region."""
        base = _wide(read(self.base, region))
        rows, columns = region[-2:]
        rows = slice(rows.start + self.first, rows.stop + self.first)
        outs, ins = (columns, rows) if self.transposed else (rows, columns)
        up = _wide(read(self.up, (outs, slice(0, self.rank * self.experts))))
        matrices, numbers = (base, range(region[0].start, region[0].stop))
        if self.expert is not None:
            matrices, numbers = base[None], range(self.expert, self.expert + 1)
        for place, number in enumerate(numbers):
            ranks = slice(number * self.rank, (number + 1) * self.rank)
            delta = up[:, number :: self.experts] @ _wide(read(self.down, (ranks, ins)))
            delta *= delta.dtype.type(self.scale)
            matrices[place] += delta.T if self.transposed else delta
        return base

    def memory(self, region: Region, specs: Mapping[KeyPath, TensorSpec]) -> int:
        """W in float32 and as it is stored, the product of one expert, and the parts of A and B."""
        dtype, shape = specs[self.base].dtype, region_shape(region)
        narrow = 2 * canonical_size(_DOUBLE, self.rank * (self.experts + 1) * sum(shape[-2:]))
        return 2 * _nbytes(_wide_name(dtype), region) + _nbytes(dtype, region) + narrow


@dataclass(frozen=True, slots=True)
class ReplacedRows:
    """A matrix of which some rows are those of another tensor.

    Attributes:
        base: the matrix.
        rows: the tensor that holds the rows.
        numbers: the number in the matrix of each of its rows, each once.
    """

    base: KeyPath
    rows: KeyPath
    numbers: tuple[int, ...]

    @property
    def sources(self) -> tuple[KeyPath, ...]:
        """The matrix and the rows."""
        return (self.base, self.rows)

    def values(self, region: Region, read: Read) -> np.ndarray:
        """The elements of a region; each of its rows is read separately."""
        found = read(self.base, region).copy()
        lines, columns = region
        for place, number in enumerate(self.numbers):
            if lines.start <= number < lines.stop:
                row = read(self.rows, (slice(place, place + 1), columns))
                found[number - lines.start] = row[0].astype(found.dtype)
        return found

    def memory(self, region: Region, specs: Mapping[KeyPath, TensorSpec]) -> int:
        """The region as it is read, its copy, and one row."""
        return 3 * _nbytes(specs[self.base].dtype, region)


def is_summable(dtype: str) -> bool:
    """Whether arithmetic in float32 or float64 holds the values of an element type."""
    return dtype.startswith(("float", "bfloat")) and dtype in dtypes.NUMPY


def _wide_name(dtype: str) -> str:
    return _DOUBLE if dtype == _DOUBLE else _SINGLE


def _wide(values: np.ndarray) -> np.ndarray:
    """A copy in the type of the arithmetic."""
    return values.astype(_wide_name(values.dtype.name))


def _nbytes(dtype: str, region: Region) -> int:
    return canonical_size(dtype, math.prod(region_shape(region)))


class Merge(Transform):
    """Tensors that recipes make of those of joined checkpoints."""

    def __init__(self, stored: Mapping[KeyPath, TensorSpec], recipes: Mapping[KeyPath, Recipe]) -> None:
        """Nothing is read yet.

        Args:
            stored: the tensors of the joined checkpoints.
            recipes: key path → how the tensor is computed, of every tensor of the result.
        """
        super().__init__(stored)
        self._recipes = recipes

    def sources(self, path: KeyPath) -> Collection[KeyPath]:
        """The tensors of the recipe."""
        return self._recipes[path].sources

    def unchanged(self, spec: TensorSpec) -> KeyPath | None:
        """The only tensor of the recipe."""
        sources = self._recipes[spec.path].sources
        return sources[0] if len(sources) == 1 else None

    def parameters(self, source: Checkpoint, manifest: Manifest) -> int:  # noqa: ARG002
        """The number of parameters of the result."""
        return manifest.parameters

    def compute(self, spec: TensorSpec, region: Region, out: np.ndarray, source: TransformReader) -> None:
        """Compute the elements of a region, rounded to the tensor's element type."""

        def read(path: KeyPath, part: Region) -> np.ndarray:
            return read_array(source.base, self.stored[path], part)

        values = self._recipes[spec.path].values(region, read)
        made = values.astype(out.dtype, copy=False)
        note(values, made)
        out[...] = made

    def memory(self, spec: TensorSpec, region: Region, source: TransformReader) -> int:  # noqa: ARG002
        """The memory of the arithmetic."""
        own = canonical_size(spec.dtype, math.prod(region_shape(region)))
        return self._recipes[spec.path].memory(region, self.stored) + own

    def absent(self, missing: Iterable[Absent]) -> Iterator[Absent]:
        """The missing chunks of the sources, each for the merged tensors that need it."""
        pieces = {piece.path: piece for piece in missing}
        for path, recipe in self._recipes.items():
            yield from (replace(pieces[one], path=path) for one in recipe.sources if one in pieces)


def merged_view(
    joined: JoinedCheckpoint,
    recipes: Mapping[KeyPath, Recipe],
    merge: Mapping[str, Any],
    notes: tuple[str, ...],
    *,
    added: Iterable[TensorSpec] = (),
    files: Mapping[str, bytes] | None = None,
) -> View:
    """What a merge makes of joined checkpoints, which must stay open while the view is used.

    Args:
        joined: the sources.
        recipes: how each tensor is computed.
        merge: what is recorded of the merge, in the manifest's `origin`; the plan's digest covers it.
        notes: the merge in words, and messages about it, for the plan.
        added: the tensors that the first checkpoint has not.
        files: new companion files, by name; they replace those of the first checkpoint.
    """
    first = joined.parts[0].checkpoint.manifest
    manifest = replace(
        with_files(first, files or {}),
        tensors={**first.tensors, **{spec.path: spec for spec in added}},
        origin={**first.origin, "merge": dict(merge)},
        digests={},
    )
    return View(joined, Merge(joined.manifest.tensors, recipes), manifest, files, notes)


def weighted_sum(sources: Sequence[tuple[Checkpoint, float]]) -> View:
    """The sum of checkpoints, each times its weight.

    Raises:
        UsageError: a weight is not finite.
        UnrepresentableError: key paths, shapes or element types differ, or a tensor has no floating-point type.
    """
    for checkpoint, weight in sources:
        if not math.isfinite(weight):
            raise UsageError(f"invalid weight {weight}", uri=checkpoint.uri, cure="state a finite number")
    first, *others = (checkpoint for checkpoint, _weight in sources)
    paths = [{path: path for path in first.manifest.tensors}, *(_paths_in(first, other) for other in others)]
    for other, named in zip(others, paths[1:], strict=True):
        _require_alike(first, other, named)
    for path, spec in first.manifest.tensors.items():
        if not is_summable(spec.dtype):
            raise UnrepresentableError(
                f"cannot add tensors of type {spec.dtype}", uri=first.uri, path=render(path),
                cure="merge checkpoints whose tensors are floating point",
            )  # fmt: skip
    recipes = {
        path: WeightedSum(
            tuple((at(place, paths[place][path]), weight) for place, (_one, weight) in enumerate(sources))
        )
        for path in first.manifest.tensors
    }
    merge = {
        "kind": "linear",
        "sources": [{"uri": one.uri, "weight": weight} for one, weight in sources],
    }
    terms = " + ".join(f"{weight:g} × {one.uri}" for one, weight in sources)
    return merged_view(
        JoinedCheckpoint([one for one, _weight in sources]), recipes, merge, (f"merged: {terms}",)
    )


def _paths_in(first: Checkpoint, other: Checkpoint) -> Mapping[KeyPath, KeyPath]:
    """Key path in the first source → key path of the same parameter in another, which may have other wrappers."""
    same = {path: path for path in other.manifest.tensors}
    if same.keys() == first.manifest.tensors.keys():
        return same
    known = [tree for tree in read_tree(first.manifest).trees if not tree.outside]
    for tree in read_tree(other.manifest).trees:
        paths = {name: path for path, name in tree.names.items()}
        for own in known:
            if not tree.outside and set(own.names.values()) == paths.keys():
                return {path: paths[name] for path, name in own.names.items()}
    return same


def _require_alike(one: Checkpoint, other: Checkpoint, paths: Mapping[KeyPath, KeyPath]) -> None:
    """Compare two sources.

    Args:
        one, other: the sources.
        paths: key path in the first → key path in the other.
    """
    tensors = one.manifest.tensors
    other_tensors = {path: other.manifest.tensors[stored] for path, stored in paths.items()}
    odd = sorted(set(tensors) ^ set(other_tensors))
    if odd:
        raise UnrepresentableError(
            f"{plural(len(odd), 'tensor')} of only one of {one.uri} and {other.uri}: {_name_paths(odd)}",
            uri=other.uri, cure=_CURE,
        )  # fmt: skip
    for path, spec in tensors.items():
        for what, here, there in (
            ("shape", spec.shape, other_tensors[path].shape),
            ("type", spec.dtype, other_tensors[path].dtype),
        ):
            if here != there:
                raise UnrepresentableError(
                    f"{what} is {here} in {one.uri} and {there} in {other.uri}",
                    uri=other.uri, path=render(path), cure=_CURE,
                )  # fmt: skip


def _name_paths(paths: Sequence[KeyPath]) -> str:
    return ", ".join([*map(render, paths[:_SHOWN]), *(["…"] if len(paths) > _SHOWN else [])])
