"""Sizes: the extent of every axis, from the config and from the shapes, checked against each other.

The config and the user state sizes; each dimension of a stored tensor is an equation (the product of its axes is its
extent), and so is the number of tensors that a template's index runs over. Equations with one unknown are solved in
turn. A contradiction is an error that names the parameter, the axis, both values and their sources. Nothing is
guessed: an axis that the equations do not determine is an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.errors import AmbiguousError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class StatedSize:
    """A size that the config, the family or the user states.

    Attributes:
        axis: its name.
        value: its extent.
        source: where it is stated, for messages.
    """

    axis: str
    value: int
    source: str


@dataclass(frozen=True, slots=True)
class Equation:
    """The product of some axes is an extent.

    Attributes:
        names: the axes.
        extent: their product.
        parameter: the canonical parameter.
        source: the tensor and dimension, for messages.
        padded: whether the extent may be longer than the product.
    """

    names: tuple[str, ...]
    extent: int
    parameter: str
    source: str
    padded: bool = False


@dataclass(frozen=True, slots=True)
class SolvedSizes:
    """Sizes and their sources.

    Attributes:
        sizes: axis → extent.
        sources: axis → source, as text.
    """

    sizes: Mapping[str, int]
    sources: Mapping[str, str]


def solve(
    stated: Iterable[StatedSize], equations: Sequence[Equation], *, wanted: Iterable[str], cure: str
) -> SolvedSizes:
    """Find every size.

    Args:
        stated: sizes from config, constants and user.
        equations: equations from the shapes.
        wanted: axes whose size must be found.
        cure: the cure if one is not found.

    Raises:
        MismatchError: two sources contradict each other.
        AmbiguousError: the size of an axis cannot be determined.
    """
    sizes: dict[str, int] = {}
    sources: dict[str, str] = {}
    for one in stated:
        if one.axis in sizes and sizes[one.axis] != one.value:
            raise _contradiction(one.axis, sizes[one.axis], sources[one.axis], one.value, one.source, None)
        sizes[one.axis], sources[one.axis] = one.value, one.source
    distinct = list({(one.names, one.extent, one.padded): one for one in reversed(equations)}.values())[::-1]
    exact = [one for one in distinct if not one.padded]
    _propagate(exact, sizes, sources)
    loose = [one for one in distinct if one.padded and _unknown(one, sizes)]
    _propagate(loose, sizes, sources)  # the true size is not stated: take the stored one
    for one in distinct:
        _check(one, sizes, sources)
    missing = [name for name in wanted if name not in sizes]
    if missing:
        where = next((one for one in distinct if missing[0] in one.names), None)
        seen = f": {where.source} states only the product {' × '.join(where.names)}" if where else ""
        raise AmbiguousError(f"cannot determine the size of axis {missing[0]}{seen}", cure=cure)
    return SolvedSizes(sizes, sources)


def _unknown(equation: Equation, sizes: Mapping[str, int]) -> list[str]:
    return [name for name in equation.names if name not in sizes]


def _propagate(equations: Sequence[Equation], sizes: dict[str, int], sources: dict[str, str]) -> None:
    progress = True
    while progress:
        progress = False
        for one in equations:
            unknown = _unknown(one, sizes)
            if len(unknown) != 1:
                continue
            known = math.prod(sizes[name] for name in one.names if name in sizes)
            value, remainder = divmod(one.extent, known) if known else (0, 1)
            if remainder:
                others = [
                    f"{name} = {sizes[name]} from {sources[name]}" for name in one.names if name in sizes
                ]
                raise MismatchError(
                    f"{one.parameter}: the size of axis {unknown[0]} would not be an integer: "
                    f"{one.extent} / {known}, from {one.source}; {', '.join(others)}",
                    cure="correct the config; one of these sizes is wrong",
                )
            sizes[unknown[0]], sources[unknown[0]] = value, one.source
            progress = True


def _check(one: Equation, sizes: Mapping[str, int], sources: Mapping[str, str]) -> None:
    if _unknown(one, sizes) or not one.names:
        return
    value = math.prod(sizes[name] for name in one.names)
    if value == one.extent or (one.padded and value < one.extent):
        return
    stated = [f"{name} = {sizes[name]} from {sources[name]}" for name in one.names]
    source = "; ".join(stated) if len(stated) > 1 else sources[one.names[0]]
    raise _contradiction(" × ".join(one.names), value, source, one.extent, one.source, one.parameter)


def _contradiction(
    axis: str, first: int, first_source: str, second: int, second_source: str, parameter: str | None
) -> MismatchError:
    return MismatchError(
        f"{f'{parameter}: ' if parameter else ''}axis {axis} is {first} according to {first_source}, "
        f"but {second} according to {second_source}",
        cure="correct the config, or choose the family and options that fit this checkpoint",
    )
