"""Sizes: the extent of every axis, from the config and from the shapes, checked against each other.

The config and the user state sizes; each dimension of a stored tensor is an equation (the product of its axes is its
extent), and so is the number of tensors that a template's index runs over. Equations with one unknown are solved in
turn. A contradiction is an error that names the parameter, the axis, both values and their sources. Nothing is
guessed: an axis that the equations do not determine is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Argument, Blank, Cure
from wherry.errors import AmbiguousError, IncompleteError, MismatchError, UnrepresentableError
from wherry.layout.layout import Dimension, IndexSlot, Layout

if TYPE_CHECKING:
    from wherry.families.facts import ConfigFacts
    from wherry.families.schema import Family, System
    from wherry.families.templates import FamilyMatch, Match

_CURE = Cure("pass the model's config with {}", Argument("config", Blank("FILE")))
_COMMON = "config.json"
_ROWS = "vocab"  # the axis whose entries are parameters of their own: a row for each token


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


def solved_sizes(
    family: Family, system: System, matching: FamilyMatch, config_facts: ConfigFacts, given: Mapping[str, int]
) -> tuple[SolvedSizes, list[Match]]:
    """The size of every axis that this checkpoint needs, and the one template of each tensor.

    Raises:
        MismatchError, AmbiguousError, IncompleteError, UnrepresentableError: see `bind.bind`.
    """
    stated = [
        *(
            StatedSize(axis, value, "the family")
            for axis, value in family.constants.items()
            if axis not in config_facts.sizes and axis not in given
        ),
        *(StatedSize(axis, value, "the user") for axis, value in given.items()),
        *(
            StatedSize(axis, value, f"{config_facts.source} ({system.config.sizes[axis]})")
            for axis, value in config_facts.sizes.items()
        ),
    ]
    sure = [matches[0] for matches in matching.found.values() if len(matches) == 1]
    files = dict.fromkeys(one for one in (system.write.file, _COMMON) if one)
    cure = Cure("{} (its {})", _CURE, " or ".join(files))
    _require_rows(system, sure, config_facts)
    _require_counts(family, system, sure, config_facts)
    first = solve(stated, list(_equations(system, sure)), wanted=(), cure=cure)
    matches = [_decide(options, first.sizes) for options in matching.found.values()]
    _require_counts(family, system, matches, config_facts)
    equations = list(_equations(system, matches))
    used = {id(one.template): one.template for one in matches}.values()
    wanted = sorted({name for one in used for layout in one.layouts for name in layout.names})
    offsets = {name for one in used for index in one.layouts[0].indices for name in index.needed}
    return solve(stated, equations, wanted=[*wanted, *sorted(offsets - set(wanted))], cure=cure), matches


def _decide(options: Sequence[Match], sizes: Mapping[str, int]) -> Match:
    """The only template for which a key path's numbers are in range."""
    fits = options if len(options) == 1 else [one for one in options if _in_range(one, sizes)]
    if len(fits) == 1:
        return fits[0]
    names = " or ".join("+".join(one.template.parameters) for one in options)
    raise UnrepresentableError(
        f"ambiguous tensor: it can be {names}, and the sizes do not decide",
        path=options[0].spec.name,
        cure=_CURE,
    )


def _in_range(match: Match, sizes: Mapping[str, int]) -> bool:
    layout = match.template.layouts[0]
    needed = {name for index in layout.indices for name in index.needed}
    return needed <= set(sizes) and layout.at(match.numbers, sizes) is not None


def _equations(system: System, matches: Sequence[Match]) -> Iterator[Equation]:
    first: dict[Hashable, Match] = {}
    for match in matches:  # tensors of one form, for example all experts, give the same equations
        first.setdefault(match.form, match)
    for match in first.values():
        yield from _shape_equations(system, match)
    for group in _by_template(matches):
        yield from _index_equations(group)


def _by_template(matches: Iterable[Match]) -> Iterable[list[Match]]:
    groups: defaultdict[int, list[Match]] = defaultdict(list)
    for match in matches:
        groups[id(match.template)].append(match)
    return groups.values()


def dimensions_of(system: System, layout: Layout, match: Match) -> tuple[Dimension, ...] | None:
    """The dimensions of one tensor: from its stored axis names if it has them; None if sizes must decide.

    Raises:
        MismatchError: the tensor has a different number of dimensions.
    """
    spec = match.spec
    if system.names and spec.axes is not None and all(isinstance(name, str) for name in spec.axes):
        own = set(layout.held)
        unknown = [name for name in spec.axes if name not in system.names]
        if unknown:
            raise UnrepresentableError(
                f"unknown axis {unknown[0]!r} for system {system.name}", path=spec.name
            )
        return tuple(
            Dimension(tuple(one for one in system.names[str(name)].split() if one in own))
            for name in spec.axes
        )
    optional = [one for one in layout.dimensions if one.optional]
    missing = len(layout.dimensions) - len(spec.shape)
    if missing == 0:
        return layout.dimensions
    if 0 < missing == len(optional):
        return tuple(one for one in layout.dimensions if not one.optional)
    if 0 < missing < len(optional):
        return None
    raise MismatchError(
        f"{'+'.join(match.template.parameters)} has shape {list(spec.shape)}, but its layout is {layout.text}",
        path=spec.name,
        cure="choose the family and options that fit this checkpoint",
    )


def _shape_equations(system: System, match: Match) -> Iterator[Equation]:
    template = match.template
    for name, layout in zip(template.parameters, template.layouts, strict=True):
        dimensions = dimensions_of(system, layout, match)
        if dimensions is None:
            continue
        for place, (one, extent) in enumerate(zip(dimensions, match.spec.shape, strict=True)):
            source = f"dimension {place} of {match.spec.name} {list(match.spec.shape)}"
            if len(template.parameters) == 1 or place != template.along:
                yield Equation(one.names, extent, name, source, padded=one.padded)
        left = set(layout.held) - {axis for one in dimensions for axis in one.names}
        for axis in sorted(left):
            yield Equation(
                (axis,), 1, name, f"{match.spec.name} {list(match.spec.shape)}, which does not have this axis"
            )


def _index_equations(group: list[Match]) -> Iterator[Equation]:
    template = group[0].template
    for place, index in enumerate(template.layouts[0].indices):
        numbers = sorted({match.numbers[place] for match in group})
        source = f"the indices {numbers[0]} to {numbers[-1]} of {template.layouts[0].text}"
        if index.offset:
            yield Equation(index.offset, numbers[0], "+".join(template.parameters), source)
        first = numbers[0] if index.offset else 0
        if not index.steps and (numbers[0] != first or numbers[-1] - first + 1 != len(numbers)):
            there = set(numbers)
            missing = next(number for number in range(first, numbers[-1] + 1) if number not in there)
            raise IncompleteError(
                f"missing index {missing} of {'+'.join(template.parameters)} in {template.layouts[0].text}",
                cure="restore the missing tensors, or choose another step",
            )
        yield Equation(index.names, len(numbers), "+".join(template.parameters), source)


def _require_rows(system: System, matches: Iterable[Match], config_facts: ConfigFacts) -> None:
    """Compare the rows of embeddings with the vocabulary that the config states, unless padding is allowed."""
    wanted = config_facts.sizes.get(_ROWS)
    for match in matches if wanted is not None else ():
        for layout in match.template.layouts:
            for place, one in enumerate(dimensions_of(system, layout, match) or ()):
                rows = match.spec.shape[place]
                if one.names == (_ROWS,) and not one.padded and rows != wanted:
                    raise _other_rows(match, rows, wanted or 0, config_facts, system)


def _other_rows(
    match: Match, rows: int, wanted: int, config_facts: ConfigFacts, system: System
) -> IncompleteError | UnrepresentableError:
    said = f"{config_facts.source} ({system.config.sizes[_ROWS]}) states {wanted}"
    if rows < wanted:
        return IncompleteError(
            f"missing entries of the vocabulary: {said}, but the files have {rows}", path=match.spec.name,
            cure="restore the missing rows, or correct the config",
        )  # fmt: skip
    return UnrepresentableError(
        f"{rows - wanted} entries beyond the vocabulary: {said}, but the files have {rows}", path=match.spec.name,
        cure=f"correct the config to {rows}, as the software that loads it requires, or remove the rows",
    )  # fmt: skip


def _require_counts(
    family: Family, system: System, matches: Sequence[Match], config_facts: ConfigFacts
) -> None:
    """Compare the numbers of layers and experts in key paths with those that the config states."""
    sizes = {**family.constants, **config_facts.sizes}
    for group in _by_template(matches):
        for place, index in enumerate(group[0].template.layouts[0].indices):
            stated = [system.config.sizes[name] for name in index.names if name in config_facts.sizes]
            if stated and index.needed <= set(sizes):
                _require_numbers(group, place, index, sizes, f"{config_facts.source} ({' × '.join(stated)})")


def _require_numbers(
    group: Sequence[Match], place: int, index: IndexSlot, sizes: Mapping[str, int], said: str
) -> None:
    """Require every number that an index has with these sizes, and no greater one."""
    by_number = {match.numbers[place]: match for match in group}
    template = group[0].template
    name = "+".join(template.parameters)
    last, count = max(by_number), prod(sizes[name] for name in index.names)
    missing = next((number for number in index.numbers(sizes) if number not in by_number), None)
    if last > index.number({name: sizes[name] - 1 for name in index.names}, sizes):
        raise UnrepresentableError(
            f"{said} states {count} of {name} in {template.layouts[0].text}, but the files have index {last}",
            path=by_number[last].spec.name,
            cure="correct the config, or remove the tensors that do not belong to the model",
        )
    if missing is not None:
        raise IncompleteError(
            f"missing index {missing} of {name} in {template.layouts[0].text}, which {said} implies: {count}",
            cure="restore the missing tensors, or correct the config",
        )
    if odd := by_number.keys() - set(index.numbers(sizes)):
        raise UnrepresentableError(
            f"{name} in {template.layouts[0].text} has no index {min(odd)}: {said} states another kind there",
            path=by_number[min(odd)].spec.name,
            cure="correct the config, or remove the tensors that do not belong to the model",
        )


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
            known = prod(sizes[name] for name in one.names if name in sizes)
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
    value = prod(sizes[name] for name in one.names)
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
