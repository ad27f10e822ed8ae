"""differences: what differs between two checkpoints: trees, dtypes, values with their largest error, config attributes.

Two checkpoints are compared key path by key path. If they have no key path in common and are of different formats, the
second is compared in the layout of the first one's system, as a conversion would write it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from wherry.compare.configs import AttributeDifference, config_differences, value_differences
from wherry.compare.statistics import is_match, matching
from wherry.compare.values import distance
from wherry.config.digests import digest_choice
from wherry.core import dtypes
from wherry.core.keypath import render
from wherry.core.request import PLAIN, LayoutRequest
from wherry.core.units import DEFAULT_MEMORY, parse_budget
from wherry.formats.registry import find_format
from wherry.ledger.resolve import open_checkpoint
from wherry.mover.hashing import hash_checkpoint
from wherry.runtime import threads
from wherry.view.choose import plan_view

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.progress import OnProgress
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.checkpoint import Checkpoint

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
    seen, _options, _only = plan_view(other, row, options, layout, None, files=False)
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
