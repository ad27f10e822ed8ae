"""losses: counts what casts and value words do to values, while a move is made.

A value is lost if it becomes infinite or zero, and it may be lost to a processor without subnormals if it becomes one.
What is computed notes its values before and after, in the tally that is open around a move (`wherry.core.account`).
Each element that is written counts once, so the sums over the moves of a tensor do not depend on how it was cut, on
threads, on what an interrupted run had finished, or on the process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core import dtypes
from wherry.core.account import Losses, open_tally
from wherry.layout.words import WordStep, widens

if TYPE_CHECKING:
    import numpy as np


_BLOCK = 1 << 18  # elements that are compared at a time, so that they stay in the cache


def is_counting(steps: Sequence[WordStep], source: str, target: str) -> bool:
    """Whether a tally is open and values can change.

    Args:
        steps: the chain of words; an empty one is a cast.
        source: element type of the values.
        target: element type of the result.
    """
    return open_tally() is not None and (bool(steps) or not widens(source, target))


def note(values: np.ndarray, made: np.ndarray, steps: Sequence[WordStep] = ()) -> None:
    """Add to the open tally, if there is one, what a chain of words did to values.

    Args:
        values: before, in any shape.
        made: after, in the same shape.
        steps: the chain; an empty one is a cast.
    """
    tally = open_tally()
    if tally is not None and is_counting(steps, values.dtype.name, made.dtype.name):
        tally.losses += losses_of(values, made, steps)


def errors_of(values: np.ndarray, made: np.ndarray) -> np.ndarray | None:
    """How far values are from what was made of them, for `note_error`, before it is known which of them occur.

    Args:
        values: before, float32.
        made: after, in the same shape.

    Returns:
        float32 of the same shape, infinite for values that may be lost; None if nothing is counted.
    """
    import numpy as np

    if open_tally() is None or not is_counting((), values.dtype.name, made.dtype.name):
        return None
    with np.errstate(all="ignore"):
        errors = np.abs(values - made.astype(np.float32))
    small = _small(made.reshape(-1))
    counts = (errors.reshape(-1)[small] != 0) | (made.reshape(-1)[small] != 0)
    errors.reshape(-1)[small[counts]] = np.inf
    errors[~np.isfinite(errors)] = np.inf
    return errors


def note_error(largest: float) -> bool:
    """Add the largest error of some values to the open tally.

    Returns:
        Whether it was added; not if it is infinite, since values may be lost, each of which counts.
    """
    tally = open_tally()
    if math.isinf(largest):
        return False
    if tally is not None:
        tally.losses += Losses(error=largest)
    return True


def losses_of(values: np.ndarray, made: np.ndarray, steps: Sequence[WordStep] = ()) -> Losses:
    """What a chain of words did to values; see `note` for the arguments."""
    flat, after = values.reshape(-1), made.reshape(-1)
    total = Losses()
    for start in range(0, flat.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        total += _of_block(flat[part], after[part], steps)
    return total


def _of_block(values: np.ndarray, made: np.ndarray, steps: Sequence[WordStep]) -> Losses:
    import numpy as np

    double = values.dtype.kind in "iu" or "float64" in (values.dtype.name, made.dtype.name)
    wide = np.dtype("float64" if double else "float32")
    infinite = zero = subnormal = nan = 0
    with np.errstate(all="ignore"):
        before: np.ndarray = values.astype(wide, copy=False)
        error: np.ndarray = made.astype(wide)
        for step in reversed(steps):
            error = step.undo(error)
        np.subtract(before, error, out=error)
        largest = max(float(error.max()), -float(error.min()))
        if not np.isfinite(largest):
            finite, kept = np.isfinite(before), np.isfinite(made.astype(wide))
            infinite = int(np.count_nonzero(finite & ~kept))
            nan = int(np.count_nonzero(np.isnan(before)))
            largest = float(np.abs(error).max(initial=0.0, where=finite & kept))
        small = _small(made)
        if small.size:
            before, error, stored = before[small], error[small], made[small].astype(wide)
            shrunk = (np.abs(before) >= _smallest_normal(values.dtype.name)) & np.isfinite(stored)
            zero = int(np.count_nonzero((stored == 0) & (error != 0) & np.isfinite(before)))
            subnormal = int(np.count_nonzero((stored != 0) & shrunk))
    return Losses(infinite, zero, subnormal, nan, largest)


def _small(made: np.ndarray) -> np.ndarray:
    """The indexes of elements that are zero or subnormal."""
    import numpy as np

    form = _form(made.dtype.name)
    if form is None:
        return np.empty(0, "i8")
    return np.flatnonzero((made.view(form.word) & form.magnitude) < form.least)


class _Form(NamedTuple):
    """The bits of a floating-point type: its word, a mask of all but the sign, and the smallest normal value."""

    word: Any
    magnitude: Any
    least: Any


@cache
def _form(name: str) -> _Form | None:
    """The form of a type; None if it has no subnormals."""
    import ml_dtypes
    import numpy as np

    kind = dtypes.numpy_dtype(name)
    info = ml_dtypes.finfo(kind)
    if info.smallest_normal == info.smallest_subnormal:
        return None
    word = np.dtype(f"u{kind.itemsize}")
    least = np.array([info.smallest_normal], kind).view(word)[0]
    return _Form(word, word.type((1 << (8 * kind.itemsize - 1)) - 1), least)


@cache
def _smallest_normal(name: str) -> float:
    """The smallest normal number of a floating-point type; 0 for integers, which have no subnormals."""
    import ml_dtypes

    kind = dtypes.numpy_dtype(name)
    return 0.0 if kind.kind in "iu" else float(ml_dtypes.finfo(kind).smallest_normal)
