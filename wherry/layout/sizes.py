"""Sizes: the extent of every axis, from the config and from the shapes, checked against each other.

The config and the user state sizes; each stored tensor's dimension is an equation (the product of its axes is its
extent), and so is the number of tensors that a template's index runs over. Equations with one unknown are solved in
turn. A contradiction is an error that names the parameter, the axis, both values and where they come from. Nothing is
guessed: an axis that the equations leave open is an error that asks for it.
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
    """A size that someone states.

    Attributes:
        axis: its name.
        value: its extent.
        source: who says so, for messages.
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
    """Sizes and where each comes from.

    Attributes:
        sizes: axis → extent.
        sources: axis → in words.
    """

    sizes: Mapping[str, int]
    sources: Mapping[str, str]


def solve(
    stated: Iterable[StatedSize], equations: Sequence[Equation], *, wanted: Iterable[str], cure: str
) -> SolvedSizes:
    """Find every size.

    Args:
        stated: what config, constants and user say.
        equations: what the shapes say.
        wanted: axes that must be known in the end.
        cure: what to do where they are not.

    Raises:
        MismatchError: two sources contradict each other.
        AmbiguousError: an axis is left open.
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
    _propagate(loose, sizes, sources)  # nobody states the true size: the stored one is all that is known
    for one in distinct:
        _check(one, sizes, sources)
    _complete(wanted, distinct, sizes, cure)
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
                raise _indivisible(one, unknown[0], known, sizes, sources)
            sizes[unknown[0]], sources[unknown[0]] = value, one.source
            progress = True


def _indivisible(
    one: Equation, axis: str, known: int, sizes: Mapping[str, int], sources: Mapping[str, str]
) -> MismatchError:
    others = ", ".join(f"{name} = {sizes[name]} by {sources[name]}" for name in one.names if name in sizes)
    return MismatchError(
        f"{one.parameter}: axis {axis} would be {one.extent} / {known}: {one.source}; {others}",
        cure="correct the config; one of these is wrong",
    )


def _check(one: Equation, sizes: Mapping[str, int], sources: Mapping[str, str]) -> None:
    if _unknown(one, sizes) or not one.names:
        return
    value = math.prod(sizes[name] for name in one.names)
    if value == one.extent or (one.padded and value < one.extent):
        return
    stated = [f"{name} = {sizes[name]} by {sources[name]}" for name in one.names]
    source = "; ".join(stated) if len(stated) > 1 else sources[one.names[0]]
    raise _contradiction(" × ".join(one.names), value, source, one.extent, one.source, one.parameter)


def _contradiction(
    axis: str, first: int, first_source: str, second: int, second_source: str, parameter: str | None
) -> MismatchError:
    return MismatchError(
        f"{f'{parameter}: ' if parameter else ''}axis {axis} is {first} by {first_source}, "
        f"but {second} by {second_source}",
        cure="correct the config, or choose the family and options that fit this checkpoint",
    )


def _complete(
    wanted: Iterable[str], equations: Sequence[Equation], sizes: Mapping[str, int], cure: str
) -> None:
    missing = [name for name in wanted if name not in sizes]
    if missing:
        where = next((one for one in equations if missing[0] in one.names), None)
        seen = f": {where.source} is only the product {' × '.join(where.names)}" if where else ""
        raise AmbiguousError(f"the size of axis {missing[0]} cannot be told{seen}", cure=cure)
