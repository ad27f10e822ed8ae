"""A system's layouts for chosen forms and conventions: macros are replaced, stacks are stacked or unrolled.

A tensor matches the templates with its key path; if there are several, sizes decide later.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING

from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import TensorSpec
from wherry.errors import UsageError
from wherry.layout.layout import Layout, parse_layout, skeleton, skeletons, without

if TYPE_CHECKING:
    from wherry.families.schema import Family, Optimizer, Row, Stack, System

_MACRO = re.compile(r"<([a-z_]+)>")
DIMENSION = re.compile(r"\([^()]*\)[~?]?|\S+")


@dataclass(frozen=True, slots=True)
class Template:
    """One or several parameters in one tensor, or in one tensor per unrolled index.

    Attributes:
        slot: `params`, or a moment of an optimizer.
        parameters: their names.
        layouts: of each.
        along: the dimension along which several are concatenated.
        words: value words, as text.
        each: the outermost axis of that dimension, for each index of which they follow one another; None if they do
            so once.
    """

    slot: str
    parameters: tuple[str, ...]
    layouts: tuple[Layout, ...]
    along: int
    words: tuple[str, ...]
    each: str | None = None


def form_choices(system: System, given: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Every combination of forms that agrees with the given ones, the defaults first."""
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
        family: declares the axes that each parameter must have.
        system: the system.
        chosen: form or convention → choice.
        slots: slot → key paths with @ for the parameter's own; several are alternatives.
        optimizer: declares which axes a slot does not have.

    Raises:
        UsageError: a macro or parameter is unknown, or a layout's axes differ from the parameter's.
    """
    rows = [
        (row, spelled) for row in system.layouts if (spelled := _row_layouts(system, row, chosen)) is not None
    ]
    made: list[Template] = []
    for slot, texts in slots.items():
        for text in texts:
            around = replace_macros(text.removeprefix("+"), system, chosen)
            apart = any(one.startswith("+") for one in texts)
            for row, (key, axes, along, stacked) in rows:
                if apart and text.startswith("+") != stacked:
                    continue
                whole = around.replace("@", key) if not key.startswith("//") else key[2:]
                if key.startswith("//") and slot != "params":
                    continue
                layouts = tuple(parse_layout(whole, one) for one in axes)
                _check_axes(family, system, row, layouts)
                lacking = optimizer.without.get(slot) if optimizer else None
                if lacking:
                    layouts = tuple(without(layout, lacking) for layout in layouts)
                words = tuple(replace_macros(word, system, chosen) for word in row.words)
                made.append(Template(slot, row.parameters, layouts, along, words, row.each))
    return made


def _row_layouts(
    system: System, row: Row, chosen: Mapping[str, str]
) -> tuple[str, tuple[str, ...], int, bool] | None:
    """Key path, axes and dimension of concatenation of a row, and whether any of its stacks is one tensor.

    None if it does not exist with these choices.
    """
    along = row.along
    stacks = {name: stack for name, stack in system.stacks.items() if f"<{name}>" in row.key}
    stacked = {name: stack for name, stack in stacks.items() if is_stacked(stack, chosen)}
    spelled = {name: stack.stacked if name in stacked else stack.unrolled for name, stack in stacks.items()}
    key = replace_macros(row.key, system, chosen, spelled)
    if "-" in key.split("/"):
        return None
    axes = [replace_macros(one, system, chosen) for one in row.axes]
    for stack in stacked.values():
        place = int(chosen[stack.at]) if isinstance(stack.at, str) else stack.at
        inserted = [_insert_axis(one, stack.axis, place) for one in axes]
        if len(axes) > 1 and inserted != axes and place <= along:
            along += len(DIMENSION.findall(stack.axis))
        axes = inserted
    return key, tuple(axes), along, bool(stacked)


def is_stacked(stack: Stack, chosen: Mapping[str, str]) -> bool:
    """Whether a stack is one tensor with these choices."""
    return stack.form is None or chosen[stack.form] == "true"


def _insert_axis(axes: str, axis: str, place: int) -> str:
    """Axes with one more dimension, or several, unless the layout itself contains it."""
    dimensions = DIMENSION.findall(axes)
    if any(re.search(rf"\b{axis}\b", one) for one in dimensions):
        return axes
    place = min(place, len(dimensions))
    return " ".join([*dimensions[:place], axis, *dimensions[place:]])


def replace_macros(
    text: str, system: System, chosen: Mapping[str, str], spelled: Mapping[str, str] = MappingProxyType({})
) -> str:
    """A text of the system with its macros replaced, and its stacks as they are `spelled`."""

    def one(found: re.Match[str]) -> str:
        name = found[1]
        if name in spelled:
            return spelled[name]
        macro = system.macros.get(name, {"by": ""})
        choice = " ".join(chosen.get(one, "?") for one in macro["by"].split())
        if choice not in macro:
            raise UsageError(f"{system.name}: undefined macro <{name}> in {text!r} for {dict(chosen)}")
        return macro[choice]

    return _MACRO.sub(one, text)


def _check_axes(family: Family, system: System, row: Row, layouts: tuple[Layout, ...]) -> None:
    for name, layout in zip(row.parameters, layouts, strict=True):
        if name not in family.parameters:
            raise UsageError(f"{system.name}: layout for unknown parameter {name!r} of family {family.name}")
        wanted = frozenset(family.parameters[name].axes)
        if layout.names != wanted:
            raise UsageError(
                f"{family.name}: axes of {name} in {system.name} differ: "
                f"expected {sorted(wanted)}, got {sorted(layout.names)}",
                cure=f"correct the layout {layout.text}",
            )
        unknown = wanted - set(family.axes)
        if unknown:
            raise UsageError(f"{family.name}: undeclared axis {', '.join(sorted(unknown))} of {name}")


@dataclass(frozen=True, slots=True)
class Match:
    """A tensor that matches a template.

    Attributes:
        spec: the tensor.
        template: the template.
        numbers: at each index of the template's key path.
    """

    spec: TensorSpec
    template: Template
    numbers: tuple[int, ...]

    @property
    def form(self) -> Hashable:
        """A key that is equal for tensors that differ only in their numbers."""
        return id(self.template), self.spec.shape, self.spec.axes


@dataclass(frozen=True, slots=True)
class FamilyMatch:
    """The result of matching key paths.

    Attributes:
        found: tensor → the templates that match it.
        unmatched: tensors that match no template.
    """

    found: Mapping[KeyPath, tuple[Match, ...]]
    unmatched: tuple[KeyPath, ...]


def match_tensors(specs: Iterable[TensorSpec], templates: Iterable[Template]) -> FamilyMatch:
    """Find the templates of every tensor."""
    index: defaultdict[str, list[Template]] = defaultdict(list)
    for template in templates:
        for shape in set(skeletons(template.layouts[0])):
            index[shape].append(template)
    found: dict[KeyPath, tuple[Match, ...]] = {}
    unmatched: list[KeyPath] = []
    for spec in specs:
        matches = tuple(
            [
                Match(spec, template, numbers)
                for template in index.get(skeleton(spec.path), ())
                if (numbers := template.layouts[0].match(spec.path)) is not None
            ]
        )
        if matches:
            found[spec.path] = matches
        else:
            unmatched.append(spec.path)
    return FamilyMatch(found, tuple(unmatched))
