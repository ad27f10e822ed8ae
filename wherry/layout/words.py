"""Value words: the changes of values by which systems store a parameter, which axis names cannot express.

    cast bfloat16         another element type
    scale 1/sqrt(pair)    stored = value × factor (MaxText folds the query scale, Gemma the embedding scale)
    shift 1               stored = value + offset (norms stored as w or 1 + w)
    concat 64 32 32       several parameters in one tensor, unequal parts along one dimension
    pad 256128            a dimension longer than its axis; the rest is zeros
    tie embedding         the tensor is a second copy of another parameter

Each has `forward` (from the canonical value to the stored one) and `inverse`, states whether a round trip is exact, and
bounds the error if it is not: |error| ≤ relative × |value| + absolute. What is called exact is exact as long as no
value over- or underflows: the absolute part of a bound is what underflow can take, and `wherry.layout.losses` counts
both. Arithmetic is in float32, or in float64 if either side is. The elementwise words form the chain of a copy; two
words that cancel are left out of it, so that scanning a scaled parameter copies bits. The words that change shapes
(concat, pad, tie) are pieces of `wherry.layout.copies`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from wherry.core import dtypes
from wherry.core.account import Bound
from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Argument, Cure
from wherry.errors import UnrepresentableError, UsageError

if TYPE_CHECKING:
    import numpy as np

_SINGLE = 2.0**-24  # half a unit in the last place of float32
_MARGIN = 4.0  # for the few roundings of the arithmetic itself
_GUARD_BITS = 3  # with this many more bits in the target a scale can be undone exactly


@dataclass(frozen=True, slots=True)
class Scale:
    """The stored value is the canonical one times a factor."""

    factor: float

    @property
    def text(self) -> str:
        """The text that a plan prints."""
        return f"scale {self.factor:.9g}"

    def forward(self, values: np.ndarray) -> np.ndarray:
        """Canonical to stored; `values` are float32 or wider."""
        return values * values.dtype.type(self.factor)

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """Turn stored values into canonical ones by a division, so that the factor is not rounded a second time."""
        return values / values.dtype.type(self.factor)

    def exact(self, source: str, target: str) -> bool:
        """Whether a round trip restores the same bits: powers of two, or a target with enough extra bits."""
        power = abs(math.frexp(self.factor)[0]) == 0.5  # noqa: PLR2004  the mantissa of a power of two
        return widens(source, target) and (power or _bits(target) >= _bits(source) + _GUARD_BITS)

    def bound(self, source: str, target: str) -> Bound:
        """Error of there and back."""
        relative = 0.0 if self.exact(source, target) else _unit(source) + _unit(target) + _MARGIN * _SINGLE
        wide = _tiny(_wide(source, target))
        return Bound(relative, (_tiny(target) + wide) / abs(self.factor) + _tiny(source) + wide)

    def moment(self, order: int) -> Scale:
        """The scale of a moment of the gradient: with w' = s·w a gradient is g / s."""
        return Scale(self.factor**-order)


@dataclass(frozen=True, slots=True)
class Shift:
    """The stored value is the canonical one plus an offset."""

    offset: float

    @property
    def text(self) -> str:
        """The text that a plan prints."""
        return f"shift {self.offset:.9g}"

    def forward(self, values: np.ndarray) -> np.ndarray:
        """Canonical to stored; `values` are float32 or wider."""
        return values + values.dtype.type(self.offset)

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """Stored to canonical."""
        return values - values.dtype.type(self.offset)

    def exact(self, source: str, target: str) -> bool:
        """Not exact in general: low bits of a small value are lost when the offset is added."""
        return self.offset == 0 and widens(source, target)

    def bound(self, source: str, target: str) -> Bound:
        """Error of there and back."""
        if self.exact(source, target):
            return Bound()
        unit = _unit(target) + _MARGIN * _SINGLE
        return Bound(unit + _unit(source), unit * abs(self.offset) * 2 + _tiny(target) + _tiny(source))

    def moment(self, order: int) -> Scale:
        """A shift does not change gradients."""
        del order
        return Scale(1.0)


Elementwise: TypeAlias = Scale | Shift


@dataclass(frozen=True, slots=True)
class Cast:
    """The stored element type differs."""

    source: str
    target: str

    @property
    def text(self) -> str:
        """The text that a plan prints."""
        return f"cast {self.source} {self.target}"

    def forward(self, values: np.ndarray) -> np.ndarray:
        """Cast to the target type, rounding to nearest even."""
        return values.astype(dtypes.numpy_dtype(self.target))

    def inverse(self, values: np.ndarray) -> np.ndarray:
        """Back to the source type."""
        return values.astype(dtypes.numpy_dtype(self.source))

    @property
    def exact(self) -> bool:
        """Whether every value of the source type is one of the target type."""
        return widens(self.source, self.target)

    @property
    def bound(self) -> Bound:
        """Error of there and back."""
        return Bound() if self.exact else rounding(self.target)


def parse_word(text: str, value: float) -> Elementwise:
    """An elementwise word with its number, already evaluated.

    Raises:
        UsageError: the word is unknown, or the factor is zero or not finite.
    """
    if text == "scale" and value and math.isfinite(value):
        return Scale(float(value))
    if text == "shift" and math.isfinite(value):
        return Shift(float(value))
    raise UsageError(
        f"invalid value word {text} {value}", cure="write scale with a nonzero number, or shift with a number"
    )


@dataclass(frozen=True, slots=True)
class WordStep:
    """One word of a chain, in one direction."""

    word: Elementwise
    forward: bool

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """The values after this step."""
        return self.word.forward(values) if self.forward else self.word.inverse(values)

    def undo(self, values: np.ndarray) -> np.ndarray:
        """The values before this step."""
        return self.word.inverse(values) if self.forward else self.word.forward(values)

    def bound(self, source: str, target: str) -> Bound:
        """Error of this step and back."""
        word = self.word
        if isinstance(word, Scale) and not self.forward:
            word = Scale(1 / word.factor)
        return word.bound(source, target)

    @property
    def gain(self) -> float:
        """The factor by which the step enlarges differences of values."""
        factor = abs(self.word.factor) if isinstance(self.word, Scale) else 1.0
        return factor if self.forward else 1 / factor


def chain(source: Iterable[Elementwise], target: Iterable[Elementwise]) -> tuple[WordStep, ...]:
    """The steps from a value stored by one system to that of another: undo the source's words, apply the target's.

    Words that both systems have cancel, innermost first.
    """
    undo, do = list(source), list(target)
    while undo and do and undo[0] == do[0]:
        del undo[0], do[0]
    steps = [
        *(WordStep(word, forward=False) for word in reversed(undo)),
        *(WordStep(word, forward=True) for word in do),
    ]
    return tuple(step for step in steps if step.word not in (Scale(1.0), Shift(0.0)))


def apply_steps(steps: Sequence[WordStep], values: np.ndarray, target: str) -> np.ndarray:
    """The values after a chain, in another element type.

    Args:
        steps: the chain; an empty one is a cast.
        values: in the source's element type.
        target: element type of the result.

    Raises:
        UnrepresentableError: the values are not floating point.
    """
    import numpy as np

    wide = dtypes.numpy_dtype(_wide(values.dtype.name, target))
    if not steps:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return values.astype(dtypes.numpy_dtype(target))
    if not _floating(values.dtype.name) or not _floating(target):
        raise UnrepresentableError(
            f"cannot apply {steps[0].word.text} from {values.dtype.name} to {target}: it needs floating point"
        )
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        wider: Any = values.astype(wide)
        for step in steps:
            wider = step(wider)
        return wider.astype(dtypes.numpy_dtype(target))


def loss(steps: Sequence[WordStep], source: str, target: str, name: str | None = None) -> Bound | None:
    """The error bound of a round trip through a chain; None if no value can change, not even by underflow.

    Args:
        steps: the chain; an empty one is a cast.
        source: element type of the stored values.
        target: element type of the result.
        name: the tensor, for messages.

    Raises:
        UnrepresentableError: values of one of the types have no such bound, because they are not floating point.
    """
    words = [step.word for step in steps]
    if not words and widens(source, target):
        return None
    # a cast of integers rounds them; everything else needs floating point
    if not _floating(target) or not (_floating(source) or (not words and "int" in source)):
        raise UnrepresentableError(
            f"cannot {words[0].text if words else 'cast'} from {source} to {target}: it needs floating point",
            path=name, cure=Cure("choose another {}, or restore the tensor if its type is wrong", Argument("dtype")),
        )  # fmt: skip
    if not words:
        return Cast(source, target).bound
    exact = all(word.exact(source, target) for word in words)
    relative, absolute, gain = 0.0, 0.0, 1.0
    for step in steps:
        bound = step.bound(source, target)
        relative, absolute = relative + bound.relative, absolute + bound.absolute / gain
        gain *= step.gain
    return Bound(0.0 if exact else relative, absolute)


@cache
def widens(source: str, target: str) -> bool:
    """Whether every value of one type is a value of the other."""
    if source == target:
        return True
    if not (_floating(source) and _floating(target)):
        import numpy as np

        return bool(np.can_cast(dtypes.numpy_dtype(source), dtypes.numpy_dtype(target), casting="safe"))
    one, other = _info(source), _info(target)
    return (
        other.nmant >= one.nmant
        and float(other.max) >= float(one.max)
        and float(other.smallest_subnormal) <= float(one.smallest_subnormal)
    )


def _floating(name: str) -> bool:
    return name.startswith(("float", "bfloat"))


def rounding(name: str) -> Bound:
    """The error bound of values that are rounded to a floating-point type: half a unit, or half a subnormal."""
    return Bound(_unit(name), _tiny(name))


def significant(name: str) -> int:
    """Significant bits of a floating-point type, the leading one included."""
    return _bits(name) + 1


def _bits(name: str) -> int:
    return int(_info(name).nmant)


def _unit(name: str) -> float:
    """Half a unit in the last place, relative."""
    return 2.0 ** -(_bits(name) + 1)


def _tiny(name: str) -> float:
    """Half the smallest subnormal: what a value that underflows is off, at most."""
    return float(_info(name).smallest_subnormal) / 2


def _wide(source: str, target: str) -> str:
    """The element type of the arithmetic between two others."""
    return "float64" if "float64" in (source, target) else "float32"


@cache
def _info(name: str) -> Any:
    import ml_dtypes

    return ml_dtypes.finfo(dtypes.numpy_dtype(name))
