"""differences: what differs between two checkpoints: trees, dtypes, values with their largest error, config attributes.

Two checkpoints are compared key path by key path. If they have no key path in common and are of different formats, the
second is compared in the layout of the first one's system, as a conversion would write it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from wherry.config.settings import digest_choice
from wherry.core import dtypes, threads
from wherry.core.json_document import parse_json
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import OnProgress
from wherry.core.request import PLAIN, LayoutRequest
from wherry.core.tensorspec import TensorSpec, row_bands
from wherry.core.units import DEFAULT_MEMORY, parse_budget
from wherry.errors import CorruptError, HostileError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.companions import file_digest
from wherry.formats.registry import find_format
from wherry.ledger.resolve import open_checkpoint
from wherry.mover.hashing import hash_checkpoint
from wherry.prove.statistics import is_match, matching
from wherry.transform.choose import plan_view

if TYPE_CHECKING:
    import numpy as np


ONLY_A, ONLY_B, SHAPE, DTYPE, VALUES = "only in A", "only in B", "shape", "dtype", "values"


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor that differs.

    Attributes:
        path: its printed key path.
        what: `only in A`, `only in B`, `shape`, `dtype` or `values`.
        a, b: dtype and shape of both sides, such as `float32[3, 4]`; None where there is none.
        error: largest absolute difference of a value; None if the values were not compared.
        elements: number of elements that differ; None if the values were not compared. With `values` and no such
            element only the bytes differ: zeros with another sign, or NaNs with other bits.
    """

    path: str
    what: Literal["only in A", "only in B", "shape", "dtype", "values"]
    a: str | None
    b: str | None
    error: float | None = None
    elements: int | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `diff`.

    Attributes:
        a, b: URIs of the two checkpoints.
        formats: of the two.
        layout: the format in whose layout B was compared; empty if it was compared as it is stored.
        tensors: number of key paths in both.
        equal: number of tensors without a difference.
        values_read: whether values were compared.
        differences: the tensors that differ, by key path.
        attributes: differences of companion files, values of the tree, and the step.
    """

    a: str
    b: str
    formats: tuple[str, str]
    layout: str
    tensors: int
    equal: int
    values_read: bool
    differences: tuple[TensorDifference, ...]
    attributes: tuple[AttributeDifference, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences and not self.attributes

    def to_json(self) -> dict[str, Any]:
        """The output of `diff --json`; an infinite error is the text `inf`."""
        data = asdict(self)
        for row in data["differences"]:
            row["error"] = "inf" if row["error"] == float("inf") else row["error"]
        return {"schema": 1, "same": self.same, **data}


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    values: bool = True,
    filter: str | None = None,
    family: str | None = None,
    options: Mapping[str, Any] | None = None,
    memory: str | int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
) -> Comparison:
    """Compare two checkpoints; both are read once, and tensors that differ a second time.

    Args:
        a, b: checkpoints, steps or runs.
        values: compare the values; without it only metadata is read.
        filter: a shell pattern for the key paths of A and B that are compared.
        family: the model family, if B has to be compared in the layout of A's system.
        options: layout options of A's system, as for `convert`.
        memory: budget for reading.
        progress: called a few times a second.

    Raises:
        NotFoundError: the filter matches no tensor of A.
        AmbiguousError, UnrepresentableError, UsageError: B cannot be compared in the layout of A's system.
        WherryError: a checkpoint cannot be opened, or its bytes cannot be read.
    """
    with ExitStack() as stack:
        one, two = (stack.enter_context(open_checkpoint(side)) for side in (a, b))
        other = _in_layout_of(one, two, options or {}, LayoutRequest(family=family) if family else PLAIN)
        if other is not two:
            stack.enter_context(other)
        matching(one, filter)
        a_specs, b_specs = (
            {path: spec for path, spec in side.manifest.tensors.items() if is_match(spec.name, filter)}
            for side in (one, other)
        )
        found = [*_of_trees(a_specs, b_specs)]
        if values:
            found = [*_of_values(one, other, a_specs, b_specs, found, parse_budget(memory), progress)]
        shared = a_specs.keys() & b_specs.keys()
        attributes: tuple[AttributeDifference, ...] = ()
        if other is two:
            attributes = (
                *value_differences({"step": one.manifest.step}, {"step": two.manifest.step}),
                *value_differences(_values(one), _values(two)),
                *config_differences(one, two),
            )
        return Comparison(
            a=one.uri,
            b=two.uri,
            formats=(one.detection.format, two.detection.format),
            layout="" if other is two else one.detection.format,
            tensors=len(shared),
            equal=len(shared) - sum(row.what not in (ONLY_A, ONLY_B) for row in found),
            values_read=values,
            differences=tuple(sorted(found, key=lambda row: row.path)),
            attributes=attributes,
        )


def _in_layout_of(
    one: Checkpoint, other: Checkpoint, options: Mapping[str, Any], layout: LayoutRequest
) -> Checkpoint:
    """The other checkpoint, in the layout of the first one's system if they have no key path in common."""
    same_format = one.detection.format == other.detection.format
    shared = one.manifest.tensors.keys() & other.manifest.tensors.keys()
    if not (options or layout.explicit) and (same_format or shared):
        return other
    row = find_format(one.detection.format)
    seen, _left, _only = plan_view(other, row, options, layout, None, files=False)
    return seen


def _of_trees(
    a_specs: Mapping[KeyPath, TensorSpec], b_specs: Mapping[KeyPath, TensorSpec]
) -> Iterator[TensorDifference]:
    """Tensors of one side only, and those whose shape or dtype differs."""
    for path in a_specs.keys() | b_specs.keys():
        one, other = a_specs.get(path), b_specs.get(path)
        texts = _text(one), _text(other)
        if one is None or other is None:
            yield TensorDifference(render(path), ONLY_B if one is None else ONLY_A, *texts)
        elif one.shape != other.shape:
            yield TensorDifference(render(path), SHAPE, *texts)
        elif one.dtype != other.dtype:
            yield TensorDifference(render(path), DTYPE, *texts)


def _of_values(
    one: Checkpoint,
    other: Checkpoint,
    a_specs: Mapping[KeyPath, TensorSpec],
    b_specs: Mapping[KeyPath, TensorSpec],
    found: list[TensorDifference],
    memory: int,
    progress: OnProgress | None,
) -> Iterator[TensorDifference]:
    """The same differences with their errors, and the tensors whose bytes alone differ."""
    apart = {row.path for row in found}
    alike = [path for path in a_specs if path in b_specs and render(path) not in apart]
    algorithm = digest_choice().algorithm
    one_hashed, other_hashed = (
        hash_checkpoint(side, algorithm, memory=memory, progress=progress, stage="diff", paths=alike).digests
        for side in (one, other)
    )
    unequal = [path for path in alike if one_hashed.get(path) != other_hashed.get(path)]
    retyped = [path for path in a_specs if path in b_specs and a_specs[path].shape == b_specs[path].shape]
    retyped = [path for path in retyped if a_specs[path].dtype != b_specs[path].dtype]
    yield from (row for row in found if row.what != DTYPE)
    dtypes.ready()
    with threads.executor(threads.worker_count()) as executor:
        measured = executor.map(partial(distance, one, other), [*unequal, *retyped])
        for path, far in zip([*unequal, *retyped], measured, strict=True):
            what = DTYPE if path in retyped else VALUES
            texts = _text(a_specs[path]), _text(b_specs[path])
            error, elements = (None, None) if far is None else far
            yield TensorDifference(render(path), what, *texts, error, elements)


def _values(checkpoint: Checkpoint) -> dict[str, Any]:
    return {render(path): value for path, value in checkpoint.manifest.values.items()}


def _text(spec: TensorSpec | None) -> str | None:
    return None if spec is None else f"{spec.dtype}[{', '.join(map(str, spec.shape))}]"


# ---- values, read in bands of bounded size ---------------------------------------------------------------------------


_BAND_ELEMENTS = 1 << 18


class Distance(NamedTuple):
    """How far the values of two tensors differ.

    Attributes:
        error: the largest absolute difference; infinite if only one of two values is NaN or infinite.
        elements: number of elements that differ; two NaNs do not.
    """

    error: float
    elements: int


def distance(a: Checkpoint, b: Checkpoint, path: KeyPath) -> Distance | None:
    """How far a tensor of equal shape differs; None if its values cannot be calculated with.

    Raises:
        DamagedError: bytes are missing or corrupt.
        StorageError: the storage failed.
    """
    a_spec, b_spec = a.manifest.tensors[path], b.manifest.tensors[path]
    if dtypes.opaque(a_spec.dtype) or dtypes.opaque(b_spec.dtype):
        return None
    found = Distance(0.0, 0)
    limit = dtypes.canonical_size(a_spec.dtype, _BAND_ELEMENTS)
    for region, _span in row_bands(a_spec, limit):
        one = _of_arrays(a.read(path, region), b.read(path, region))
        found = Distance(max(found.error, one.error), found.elements + one.elements)
    return found


def _of_arrays(a: np.ndarray, b: np.ndarray) -> Distance:
    import numpy as np

    exact = a.dtype == b.dtype and a.dtype.kind in "biu"
    wide_a, wide_b = _wide(a), _wide(b)
    both_nan = np.isnan(wide_a) & np.isnan(wide_b)
    apart = (a != b) if exact else (wide_a != wide_b) & ~both_nan
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(wide_a - wide_b)[apart]
    error[~np.isfinite(error)] = np.inf
    return Distance(float(error.max(initial=0.0)), int(np.count_nonzero(apart)))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype("complex128" if array.dtype.kind == "c" else "float64")


# ---- attributes of companion files -----------------------------------------------------------------------------------


_MOST_BYTES = 4 << 20  # larger files, such as a tokenizer, are compared as a whole


@dataclass(frozen=True, slots=True)
class AttributeDifference:
    """An attribute of a companion file, or a value of the tree, that differs.

    Attributes:
        file: name of the companion file; empty for a value of the checkpoint's own tree.
        name: of the attribute, nested ones joined by `.`; empty for the file as a whole.
        a, b: the two values as text; None where there is none.
    """

    file: str
    name: str
    a: str | None
    b: str | None


def config_differences(a: Checkpoint, b: Checkpoint) -> Iterator[AttributeDifference]:
    """The attributes of JSON companions, and the other companions, that differ.

    Raises:
        NotFoundError, StorageError: a companion cannot be read.
    """
    a_sizes = {one.name: one.size for one in a.manifest.companions}
    b_sizes = {one.name: one.size for one in b.manifest.companions}
    for name in sorted(a_sizes.keys() | b_sizes.keys()):
        if name not in a_sizes or name not in b_sizes:
            yield AttributeDifference(name, "", _size(a_sizes.get(name)), _size(b_sizes.get(name)))
            continue
        a_digest, b_digest = (file_digest(side.reader.companion(name)) for side in (a, b))
        if a_digest == b_digest:
            continue
        is_small = max(a_sizes[name], b_sizes[name]) <= _MOST_BYTES
        parsed = [_attributes(side, name) for side in (a, b)] if is_small else [None]
        a_attributes, b_attributes = parsed[0], parsed[-1]
        if a_attributes is None or b_attributes is None:
            yield AttributeDifference(name, "", f"sha256 {a_digest}", f"sha256 {b_digest}")
        else:
            yield from value_differences(a_attributes, b_attributes, name)


def value_differences(
    a: Mapping[str, Any], b: Mapping[str, Any], file: str = ""
) -> Iterator[AttributeDifference]:
    """The names whose values differ between two mappings."""
    for name in sorted(a.keys() | b.keys()):
        a_text, b_text = (repr(side[name]) if name in side else None for side in (a, b))
        if a_text != b_text:
            yield AttributeDifference(file, name, a_text, b_text)


def _attributes(checkpoint: Checkpoint, name: str) -> dict[str, Any] | None:
    """The attributes of a JSON companion by their joined names; None if it is no JSON object."""
    if not name.endswith(".json"):
        return None
    place = checkpoint.reader.companion(name)
    try:
        found = parse_json(b"".join(place.pieces()), name, uri=place.uri)
    except (CorruptError, HostileError):
        return None
    if not isinstance(found, dict):
        return None
    # Under the names that transformers 5 writes: `torch_dtype` of transformers 4 is its `dtype`.
    attributes = dict(_flat(found, ""))
    names = {name: re.sub(r"(^|\.)torch_dtype$", r"\1dtype", name) for name in attributes}
    return {name if names[name] in attributes else names[name]: value for name, value in attributes.items()}


def _flat(found: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(found, dict) or not found:
        yield prefix, found
        return
    for name, value in found.items():
        yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))


def _size(nbytes: int | None) -> str | None:
    return None if nbytes is None else f"{nbytes} bytes"
