"""A system's layouts once its forms and conventions are chosen: every macro replaced, every stack made or unrolled."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from wherry.errors import UsageError
from wherry.layout.layout import Layout, parse_layout, without

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wherry.families.schema import Family, Optimizer, Row, Stack, System

_MACRO = re.compile(r"<([a-z_]+)>")
_DIMENSION = re.compile(r"\([^()]*\)[~?]?|\S+")


@dataclass(frozen=True, slots=True)
class Template:
    """One or several parameters in one tensor, or in one tensor per unrolled index.

    Attributes:
        slot: `params`, or a moment of an optimizer.
        parameters: their names.
        layouts: of each.
        along: the dimension along which several lie one after the other.
        words: value words, as text.
    """

    slot: str
    parameters: tuple[str, ...]
    layouts: tuple[Layout, ...]
    along: int
    words: tuple[str, ...]


def form_choices(system: System, given: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Every combination of forms that the given ones leave, the defaults first."""
    names = list(system.forms)
    ranges = [(given[name],) if name in given else system.forms[name].choices for name in names]
    for choice in product(*ranges):
        yield dict(zip(names, choice, strict=True))


def templates(
    family: Family,
    system: System,
    chosen: Mapping[str, str],
    slots: Mapping[str, tuple[str, ...]],
    optimizer: Optimizer | None = None,
) -> list[Template]:
    """All templates of a system.

    Args:
        family: for the axes that each parameter must have.
        system: whose layouts.
        chosen: form or convention → choice.
        slots: slot → key paths with @ for the parameter's own; several are read alike.
        optimizer: says which axes a slot has not.

    Raises:
        UsageError: a macro or parameter is unknown, or a layout's axes are not the parameter's.
    """
    rows = [
        (row, spelled) for row in system.layouts if (spelled := _row_layouts(system, row, chosen)) is not None
    ]
    made: list[Template] = []
    for slot, texts in slots.items():
        for text in texts:
            around = _replaced(text.removeprefix("+"), system, chosen, {})
            apart = any(one.startswith("+") for one in texts)
            for row, (key, axes) in rows:
                if apart and text.startswith("+") != bool(_stacks(system, row, chosen)):
                    continue
                whole = around.replace("@", key) if not key.startswith("//") else key[2:]
                if key.startswith("//") and slot != "params":
                    continue
                layouts = tuple(parse_layout(whole, one) for one in axes)
                _check_axes(family, system, row, layouts)
                lacking = optimizer.without.get(slot) if optimizer else None
                if lacking:
                    layouts = tuple(without(layout, lacking) for layout in layouts)
                words = tuple(_replaced(word, system, chosen, {}) for word in row.words)
                made.append(Template(slot, row.parameters, layouts, row.along, words))
    return made


def replaced(text: str, system: System, chosen: Mapping[str, str]) -> str:
    """A text of the system with its macros replaced (not its stacks)."""
    return _replaced(text, system, chosen, {})


def _row_layouts(system: System, row: Row, chosen: Mapping[str, str]) -> tuple[str, tuple[str, ...]] | None:
    """Key path and axes of a row; None where it does not exist with these choices."""
    stacks = {name: stack for name, stack in system.stacks.items() if f"<{name}>" in row.key}
    spelled = {
        name: stack.stacked if _is_stacked(stack, chosen) else stack.unrolled
        for name, stack in stacks.items()
    }
    key = _replaced(row.key, system, chosen, spelled)
    if "-" in key.split("/"):
        return None
    axes = [_replaced(one, system, chosen, {}) for one in row.axes]
    for stack in stacks.values():
        if _is_stacked(stack, chosen):
            place = int(chosen[stack.at]) if isinstance(stack.at, str) else stack.at
            axes = [_inserted(one, stack.axis, place) for one in axes]
    return key, tuple(axes)


def _stacks(system: System, row: Row, chosen: Mapping[str, str]) -> list[Stack]:
    """The stacks of a row that are one tensor."""
    named = [stack for name, stack in system.stacks.items() if f"<{name}>" in row.key]
    return [stack for stack in named if _is_stacked(stack, chosen)]


def _is_stacked(stack: Stack, chosen: Mapping[str, str]) -> bool:
    return stack.form is None or chosen[stack.form] == "true"


def _inserted(axes: str, axis: str, place: int) -> str:
    """Axes with one more dimension, unless the layout itself says where it is."""
    dimensions = _DIMENSION.findall(axes)
    if any(re.search(rf"\b{axis}\b", one) for one in dimensions):
        return axes
    place = min(place, len(dimensions))
    return " ".join([*dimensions[:place], axis, *dimensions[place:]])


def _replaced(text: str, system: System, chosen: Mapping[str, str], spelled: Mapping[str, str]) -> str:
    def one(found: re.Match[str]) -> str:
        name = found[1]
        if name in spelled:
            return spelled[name]
        macro = system.macros.get(name)
        if macro is None or macro["by"] not in chosen or chosen[macro["by"]] not in macro:
            raise UsageError(f"{system.name}: <{name}> in {text!r} stands for nothing with {dict(chosen)}")
        return macro[chosen[macro["by"]]]

    return _MACRO.sub(one, text)


def _check_axes(family: Family, system: System, row: Row, layouts: tuple[Layout, ...]) -> None:
    for name, layout in zip(row.parameters, layouts, strict=True):
        if name not in family.parameters:
            raise UsageError(
                f"{system.name} has a layout for {name}, which family {family.name} does not have"
            )
        wanted = frozenset(family.parameters[name].axes)
        if layout.names != wanted:
            raise UsageError(
                f"{family.name}: {name} in {system.name} has axes {sorted(layout.names)}, not {sorted(wanted)}",
                cure=f"correct the layout {layout.text}",
            )
        unknown = wanted - set(family.axes)
        if unknown:
            raise UsageError(f"{family.name}: axis {', '.join(sorted(unknown))} of {name} is not declared")
