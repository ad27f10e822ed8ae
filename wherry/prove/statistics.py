"""statistics: minimum, maximum, mean, and the number of NaNs, infinities and zeros of each tensor, in one pass."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes, threads
from wherry.core.account import some_names
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import Meter, OnProgress
from wherry.core.tensorspec import TensorSpec
from wherry.core.units import plural
from wherry.cures import Command, Cure
from wherry.errors import NotFoundError
from wherry.mover.carrier import digest_moves
from wherry.mover.pool import Pool
from wherry.mover.source import Source

if TYPE_CHECKING:
    import numpy as np

    from wherry.formats.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class TensorStatistics:
    """Statistics of the values of one tensor.

    Attributes:
        count: number of elements.
        minimum, maximum: of the values that are not NaN; None without any, and for complex and opaque dtypes.
        mean: of the finite values, in float64; None without any, and for opaque dtypes.
        nans, infinities, zeros: how many elements are such values; None for opaque dtypes.
    """

    count: int
    minimum: float | None = None
    maximum: float | None = None
    mean: float | complex | None = None
    nans: int | None = None
    infinities: int | None = None
    zeros: int | None = None

    @property
    def is_constant(self) -> bool:
        """Whether all of several elements are the same number, and not zero."""
        return (
            self.count > 1
            and not self.nans
            and self.minimum == self.maximum
            and self.maximum not in (None, 0)
        )

    def to_json(self) -> dict[str, Any]:
        """The `statistics` of a tensor in `inspect --json`; infinities and complex numbers are text."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def is_match(name: str, pattern: str | None) -> bool:
    """Whether a printed key path matches a shell pattern such as `*/kernel`; without one it does."""
    return pattern is None or fnmatch.fnmatchcase(name, pattern)


def matching(checkpoint: Checkpoint, pattern: str | None) -> list[KeyPath]:
    """The key paths that match a shell pattern; all without one.

    Raises:
        NotFoundError: none does.
    """
    found = [path for path in sorted(checkpoint.manifest.tensors) if is_match(render(path), pattern)]
    if not found and pattern is not None:
        raise NotFoundError(
            f"no tensor matches {pattern!r}",
            uri=checkpoint.uri,
            cure=Cure(
                "run {} to list all key paths; * matches any characters, / included", Command("inspect")
            ),
        )
    return found


def statistics(
    checkpoint: Checkpoint,
    *,
    memory: int,
    progress: OnProgress | None = None,
    paths: Collection[KeyPath] | None = None,
) -> dict[KeyPath, TensorStatistics]:
    """Read tensors once and compute the statistics of each.

    Args:
        checkpoint: the opened checkpoint.
        memory: budget in bytes for data in flight.
        progress: called a few times a second.
        paths: of the tensors; all by default.

    Raises:
        DamagedError: bytes are missing or corrupt.
        StorageError: the storage failed.
    """
    dtypes.ready()
    every = checkpoint.manifest.tensors
    specs: Mapping[KeyPath, TensorSpec] = every if paths is None else {path: every[path] for path in paths}
    meter = Meter("inspect", sum(spec.nbytes for spec in specs.values()), progress)
    with (
        Source(checkpoint.reader, Pool(memory)) as source,
        threads.executor(threads.worker_count()) as executor,
    ):
        one = partial(_of_tensor, source, meter)
        return dict(zip(specs, executor.map(one, specs.values()), strict=True))


def constants_notes(found: Mapping[KeyPath, TensorStatistics]) -> list[str]:
    """A sentence for each kind of tensors whose values say little: zeros or another single value, and NaN.

    Tensors of one element do not count as constant.
    """
    kinds = (
        (
            "hold only zeros",
            [path for path, one in found.items() if one.count > 1 and one.zeros == one.count],
        ),
        ("hold a single value", [path for path, one in found.items() if one.is_constant]),
        ("contain NaN", [path for path, one in found.items() if one.nans]),
    )
    total = plural(len(found), "tensor")
    return [f"{len(paths):,} of {total} {words}: {some_names(paths)}" for words, paths in kinds if paths]


def _of_tensor(source: Source, meter: Meter, spec: TensorSpec) -> TensorStatistics:
    if dtypes.opaque(spec.dtype):
        meter.add(spec.nbytes, spec.name)
        return TensorStatistics(spec.size)
    import numpy as np

    totals = _Totals()
    for move in digest_moves([spec], source):
        with source.part(spec, move) as data:
            totals.add(np.frombuffer(data, dtypes.numpy_dtype(spec.dtype)))
        meter.add(move.span.nbytes, spec.name)
    return totals.result(spec.size)


class _Totals:
    """Statistics of the elements of a tensor so far."""

    def __init__(self) -> None:
        self._least: list[float] = []
        self._most: list[float] = []
        self._sum: complex = 0
        self._finite = self._nans = self._infinities = self._zeros = 0

    def add(self, found: np.ndarray) -> None:
        """Add elements; arrays of types that numpy cannot calculate with are widened."""
        import numpy as np

        values = found if found.dtype.kind in "biufc" else found.astype(np.float32)
        self._zeros += values.size - int(np.count_nonzero(values))
        if values.dtype.kind in "fc":
            nan = np.isnan(values)
            finite = np.isfinite(values)
            self._nans += int(nan.sum())
            self._infinities += int(values.size - nan.sum() - finite.sum())
            self._extremes(values[~nan])
            values = values[finite]
        else:
            self._extremes(values)
        self._finite += values.size
        wide = np.complex128 if values.dtype.kind == "c" else np.float64
        self._sum += values.sum(dtype=wide).item()

    def _extremes(self, values: np.ndarray) -> None:
        if values.size and values.dtype.kind != "c":
            self._least.append(values.min().item())
            self._most.append(values.max().item())

    def result(self, count: int) -> TensorStatistics:
        """The statistics of all elements."""
        mean = self._sum / self._finite if self._finite else None
        return TensorStatistics(
            count=count,
            minimum=min(self._least, default=None),
            maximum=max(self._most, default=None),
            mean=mean,
            nans=self._nans,
            infinities=self._infinities,
            zeros=self._zeros,
        )


def _plain(value: Any) -> Any:
    if isinstance(value, complex) or (isinstance(value, float) and value in (float("inf"), float("-inf"))):
        return str(value)
    return value
