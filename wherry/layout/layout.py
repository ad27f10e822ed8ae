"""Layout: the key path and the axes of one parameter of a model family in one system.

A layout is a key-path template and the names of the axes, both written as text:

    model.layers.{layer}.self_attn.q_proj.weight                      (head half pair) embed
    params/params/decoder/layers/self_attention/query/kernel          embed layer head (half pair)

- `{layer}` in the template: this system stores one tensor per index of the axis.
  `{block pair}` is one number that runs over both axes, the last fastest; `{late+early}` starts at the size of
  `early` (`+a*b`: at the product); `{qkv=query|key|value}` spells the indices as words. `{block:cycle local}` counts
  `cycle` numbers for each block, of which the indices of `local` are the first: 0, 1, 2, 4, 5, 6 for three of four.
- `(head half pair)`: one fused dimension in C order, the last name varying fastest.
- `embed~`: a dimension that may be longer than the axis (padding); `group?`: one that is omitted if its size is 1.
- `1`: a dimension of no axis, of extent 1, along which parameters of one tensor follow one another.

A parameter's axes are the names of template and dimensions together. Both sides of a move must have the same names, so
that no dimension is lost. What follows from two layouts is in `wherry.layout.copies`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, cached_property
from itertools import product
from typing import TypeAlias

from wherry.core import keypath
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.errors import UsageError

Sizes: TypeAlias = "Mapping[str, int]"
At: TypeAlias = "Mapping[str, int]"

_DIGITS = re.compile(r"\d+")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_BRACE = re.compile(r"\{([^{}]*)\}")
_NO_AXIS = "1"
_DIMENSION = re.compile(r"\(([^()]*)\)([~?]?)|([a-z0-9_]+)([~?]?)")


@dataclass(frozen=True)  # without slots, so that its property is computed once
class IndexSlot:
    """A placeholder for indices in a template.

    Attributes:
        names: the axes that it runs over, the last fastest.
        words: the indices as words; empty if they are numbers.
        offset: axes whose sizes, multiplied, are the first number; empty for 0.
        steps: for each of the names the axis whose size is the difference between the numbers of two indices; None if
            it is the product of the sizes of the names after it; empty if it is so for all.
    """

    names: tuple[str, ...]
    words: tuple[str, ...] = ()
    offset: tuple[str, ...] = ()
    steps: tuple[str | None, ...] = ()

    @cached_property
    def needed(self) -> frozenset[str]:
        """The axes whose sizes relate numbers and indices."""
        return frozenset((*self.names, *self.offset, *(one for one in self.steps if one)))

    def first(self, sizes: Sizes) -> int:
        """The first number."""
        return math.prod(sizes[name] for name in self.offset) if self.offset else 0

    def strides(self, sizes: Sizes) -> tuple[int, ...]:
        """For each name, the difference between the numbers of two consecutive indices."""
        found: list[int] = []
        within = 1
        for name, step in zip(
            reversed(self.names), reversed(self.steps or (None,) * len(self.names)), strict=True
        ):
            found.append(sizes[step] if step else within)
            within *= sizes[name]
        return tuple(reversed(found))

    def number(self, at: At, sizes: Sizes) -> int:
        """The number of one index of each axis."""
        strides = self.strides(sizes)
        return self.first(sizes) + sum(at[name] * one for name, one in zip(self.names, strides, strict=True))

    def numbers(self, sizes: Sizes) -> Iterator[int]:
        """Yield the numbers of all indices in order; they are not held in memory."""
        counts = [
            math.prod(sizes[name] for name in self.names[place + 1 :]) for place in range(len(self.names))
        ]
        for turn in range(math.prod(sizes[name] for name in self.names)):
            at = {name: turn // count % sizes[name] for name, count in zip(self.names, counts, strict=True)}
            yield self.number(at, sizes)


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of a stored tensor.

    Attributes:
        names: the axes fused in it, the last fastest; none if its length is 1.
        padded: whether it may be longer than their product.
        optional: whether it is omitted if their product is 1.
    """

    names: tuple[str, ...]
    padded: bool = False
    optional: bool = False

    def extent(self, sizes: Sizes) -> int:
        """The length of the dimension without padding."""
        return math.prod(sizes[name] for name in self.names)


@dataclass(frozen=True)  # without slots, so that its properties are computed once and not for every tensor
class Layout:
    """The key path and the axes of one parameter.

    Attributes:
        key: for each part of the key path its literals and indices.
        dimensions: of each tensor.
        text: the layout as it was written, for messages.
    """

    key: tuple[tuple[str | IndexSlot, ...], ...]
    dimensions: tuple[Dimension, ...]
    text: str

    @cached_property
    def indices(self) -> tuple[IndexSlot, ...]:
        """The indices of the template, in order."""
        return tuple(piece for part in self.key for piece in part if isinstance(piece, IndexSlot))

    @cached_property
    def unrolled(self) -> tuple[str, ...]:
        """The axes that are stored as one tensor per index."""
        return tuple(name for index in self.indices for name in index.names)

    @cached_property
    def held(self) -> tuple[str, ...]:
        """The axes that one tensor holds, in order."""
        return tuple(name for dimension in self.dimensions for name in dimension.names)

    @cached_property
    def names(self) -> frozenset[str]:
        """All axes."""
        return frozenset((*self.unrolled, *self.held))

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile("".join(_pattern(piece) for piece in part)) for part in self.key)

    def present(self, sizes: Sizes) -> tuple[Dimension, ...]:
        """The dimensions that a tensor has with these sizes."""
        return tuple(one for one in self.dimensions if not (one.optional and one.extent(sizes) == 1))

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape of one tensor without padding."""
        return tuple(one.extent(sizes) for one in self.present(sizes))

    def places(self, sizes: Sizes) -> Iterator[dict[str, int]]:
        """The indices of all its tensors."""
        names = self.unrolled
        for values in product(*(range(sizes[name]) for name in names)):
            yield dict(zip(names, values, strict=True))

    def path(self, at: At, sizes: Sizes) -> KeyPath:
        """The key path of one tensor."""
        return tuple("".join(_spell(piece, at, sizes) for piece in part) for part in self.key)

    def match(self, path: KeyPath) -> tuple[int, ...] | None:
        """The number at each index of the template, or None if the path does not match this layout."""
        if len(path) != len(self.key):
            return None
        words: list[str] = []
        for pattern, text in zip(self._patterns, path, strict=True):
            found = pattern.fullmatch(text)
            if found is None:
                return None
            words += found.groups()
        pairs = zip(self.indices, words, strict=True)
        return tuple([index.words.index(word) if index.words else int(word) for index, word in pairs])

    def at(self, numbers: tuple[int, ...], sizes: Sizes) -> dict[str, int] | None:
        """The index of each unrolled axis for the numbers of `match`; None if one is out of range."""
        place: dict[str, int] = {}
        for index, number in zip(self.indices, numbers, strict=True):
            rest = number - index.first(sizes)
            for name, stride in zip(index.names, index.strides(sizes), strict=True):
                if not stride:
                    return None
                place[name], rest = divmod(rest, stride)
                if not 0 <= place[name] < sizes[name]:
                    return None
            if rest:
                return None
        return place


@cache
def parse_layout(key: str, axes: str) -> Layout:
    """Parse a layout.

    Args:
        key: the template, a printed key path with axes in braces.
        axes: the names of the axes of one tensor, for example `(head half pair) embed`.

    Raises:
        UsageError: the layout is invalid, or names an axis twice.
    """
    text = f"{key}  [{axes}]"
    parts = tuple(_part(part, text) for part in key.split("/"))
    layout = Layout(parts, _dimensions(axes, text), text)
    names = (*layout.unrolled, *layout.held)
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UsageError(f"duplicate axis {', '.join(sorted(twice))} in layout {text}")
    return layout


def without(layout: Layout, axes: frozenset[str]) -> Layout:
    """The layout without these axes, as for a factored moment of the parameter."""
    kept = [
        replace(one, names=tuple(name for name in one.names if name not in axes)) for one in layout.dimensions
    ]
    text = f"{layout.text} without {' '.join(sorted(axes))}"
    return Layout(
        layout.key,
        tuple(
            one for one, whole in zip(kept, layout.dimensions, strict=True) if one.names or not whole.names
        ),
        text,
    )


def skeletons(layout: Layout) -> Iterator[str]:
    """The layout's key paths with `#` for every run of digits; the `skeleton` of each of its tensors is one of them."""
    parts = [
        ["".join(choice) for choice in product(*(_choices(piece) for piece in part))] for part in layout.key
    ]
    for choice in product(*parts):
        yield skeleton(choice)


def skeleton(path: KeyPath) -> str:
    """A key path, printed, with every run of digits as `#`."""
    return _DIGITS.sub("#", keypath.render(path))


def _choices(piece: str | IndexSlot) -> tuple[str, ...]:
    return (piece,) if isinstance(piece, str) else piece.words or ("0",)


def _part(text: str, where: str) -> tuple[str | IndexSlot, ...]:
    literals = _BRACE.split(text)
    pieces: list[str | IndexSlot] = []
    for place, piece in enumerate(literals):
        if place % 2:
            pieces.append(_index(piece, where))
        elif piece:
            if "{" in piece or "}" in piece:
                raise UsageError(f"unmatched brace in layout {where}")
            pieces.append("/".join(keypath.parse(piece)))
    return tuple(pieces)


def _index(text: str, where: str) -> IndexSlot:
    spelled, _, words = text.partition("=")
    axes, _, offset = spelled.partition("+")
    names = [one.partition(":") for one in axes.split()]
    steps = tuple(step if colon else None for _name, colon, step in names)
    index = IndexSlot(
        tuple(name for name, _colon, _step in names),
        tuple(words.split("|")) if words else (),
        tuple(part.strip() for part in offset.split("*")) if offset else (),
        steps if any(one is not None for one in steps) else (),
    )
    if (
        any(not _NAME.fullmatch(name) for name in (*index.needed, *filter(None, steps)))
        or "" in steps
        or not names
    ):
        raise UsageError(
            f"invalid index {{{text}}} in layout {where}", cure="write {axis}, {a b=x|y+c*d} or {a:c b}"
        )
    return index


def _dimensions(axes: str, where: str) -> tuple[Dimension, ...]:
    rest = _DIMENSION.sub("", axes).strip()
    found = [
        (match[1] if match[1] is not None else match[3], match[2] or match[4] or "")
        for match in _DIMENSION.finditer(axes)
    ]
    dimensions = tuple(
        Dimension(() if names == _NO_AXIS else tuple(names.split()), padded=mark == "~", optional=mark == "?")
        for names, mark in found
    )
    bad = [name for one in dimensions for name in one.names if not _NAME.fullmatch(name)]
    if rest or bad or not all(names.strip() for names, _mark in found):
        raise UsageError(f"invalid axes in layout {where}", cure="write axes as (a b) c")
    return dimensions


def _spell(piece: str | IndexSlot, at: At, sizes: Sizes) -> str:
    if isinstance(piece, str):
        return piece
    number = piece.number(at, sizes)
    return piece.words[number] if piece.words else str(number)


def _pattern(piece: str | IndexSlot) -> str:
    if isinstance(piece, str):
        return re.escape(piece)
    if piece.words:
        return "(" + "|".join(re.escape(word) for word in sorted(piece.words, key=len, reverse=True)) + ")"
    return "(0|[1-9][0-9]{0,8})"  # more digits are not an index; int() rejects thousands of them
