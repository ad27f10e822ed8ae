"""Pieces: tensors as pieces of parameters, once sizes are known, and the check that none is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Argument, Cure
from wherry.errors import CorruptError, IncompleteError, MismatchError, UsageError
from wherry.families.sizes import dimensions_of
from wherry.layout.copies import Groups, Parameter, StoredTensor, TensorPiece
from wherry.layout.expr import evaluate
from wherry.layout.layout import Dimension, Layout
from wherry.layout.words import Elementwise, Scale, parse_word

if TYPE_CHECKING:
    from wherry.families.facts import ConfigFacts
    from wherry.families.schema import Family, System
    from wherry.families.templates import Match, Template

# With w' = s · w a gradient is g / s, so the first moment scales with s^-1 and the second with s^-2.
MOMENTS = {"mu": 1, "nu": 2}


def stored_tensors(
    system: System, matches: Sequence[Match], sizes: Mapping[str, int], config_facts: ConfigFacts
) -> dict[KeyPath, StoredTensor]:
    """Every tensor as pieces.

    Raises:
        MismatchError: the shape of a tensor contradicts the sizes.
    """
    forms: dict[Hashable, list[PieceForm]] = {}
    stored: dict[KeyPath, StoredTensor] = {}
    for match in matches:
        if match.form not in forms:
            template, words = match.template, words_of(match.template, sizes, config_facts.facts)
            rows = [
                dimensions_of(system, layout, match) or layout.present(sizes) for layout in template.layouts
            ]
            forms[match.form], total = join_pieces(template, rows, sizes, words)
            _check_shape(match, tuple(one.names for one in rows[0]), sizes, total)
        pieces = tuple([_piece(form, match, sizes) for form in forms[match.form]])
        stored[match.spec.path] = StoredTensor(match.spec, pieces)
    return stored


@dataclass(frozen=True, slots=True)
class PieceForm:
    """What the pieces of one parameter have in common, for example those of all layers.

    Attributes:
        parameter: slot and name of the parameter.
        layout: its layout.
        hidden: axes that have no dimension, with their index: 0 of those of size 1.
        groups, start, words: see TensorPiece.
    """

    parameter: Parameter
    layout: Layout
    hidden: tuple[tuple[str, int], ...]
    groups: Groups
    start: tuple[int, ...]
    words: tuple[Elementwise, ...]

    def piece(self, at: Mapping[str, int]) -> TensorPiece:
        """The piece at one index of each unrolled axis."""
        place = (*at.items(), *self.hidden)
        return TensorPiece(self.parameter, place, self.groups, self.start, self.words)


def _piece(form: PieceForm, match: Match, sizes: Mapping[str, int]) -> TensorPiece:
    at = form.layout.at(match.numbers, sizes)
    if at is None:
        raise MismatchError(
            f"index of {form.parameter[1]} out of range for layout {form.layout.text}", path=match.spec.name,
            cure="correct the config, or remove the tensor if it does not belong to the model",
        )  # fmt: skip
    return form.piece(at)


def join_pieces(
    template: Template,
    rows: Sequence[tuple[Dimension, ...]],
    sizes: Mapping[str, int],
    words: tuple[Elementwise, ...],
) -> tuple[list[PieceForm], int]:
    """The pieces of a tensor, one after the other along a dimension, and its extent in this dimension.

    Args:
        template: of the tensor; its axis `each` makes a piece of every index, so that parameters alternate.
        rows: for each parameter the dimensions that the tensor has.
        sizes: the extent of every axis.
        words: value words.
    """
    forms: list[PieceForm] = []
    start = 0
    for index in range(sizes[template.each]) if template.each else (0,):
        for name, layout, whole in zip(template.parameters, template.layouts, rows, strict=True):
            dimensions = _one_of(template, whole)
            shown = {axis for one in dimensions for axis in one.names}
            # axes without a dimension have size 1, or one index
            hidden = tuple(
                (axis, index if axis == template.each else 0) for axis in layout.held if axis not in shown
            )
            place = tuple(
                start if dimension == template.along and len(template.parameters) > 1 else 0
                for dimension in range(len(dimensions))
            )
            groups = tuple(one.names for one in dimensions)
            forms.append(PieceForm((template.slot, name), layout, hidden, groups, place, words))
            start += dimensions[template.along].extent(sizes) if dimensions else 0
    return forms, start


def _one_of(template: Template, dimensions: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
    """The dimensions of one index of the axis `each`."""
    if template.each is None:
        return dimensions
    joined_ = dimensions[template.along]
    if joined_.names[:1] != (template.each,):
        raise UsageError(
            f"{'+'.join(template.parameters)}: {template.each} is not the first axis of dimension {template.along}",
            cure=f"correct the layout {template.layouts[0].text}",
        )
    inner = replace(joined_, names=joined_.names[1:])
    return (*dimensions[: template.along], inner, *dimensions[template.along + 1 :])


def words_of(
    template: Template, sizes: Mapping[str, int], facts: Mapping[str, object]
) -> tuple[Elementwise, ...]:
    """The value words of a parameter, or of one of its moments, with their numbers."""
    words: list[Elementwise] = []
    for text in template.words:
        if not text.strip():
            continue
        kind, _, expression = text.partition(" ")
        value = evaluate(expression, {**facts, **sizes})
        if value is None:
            raise UsageError(
                f"cannot evaluate {text!r} of {'+'.join(template.parameters)}: sizes and config do not state it",
                cure=Cure("pass the model's config with {}", Argument("config")),
            )
        word = parse_word(kind, value)
        words.append(word if template.slot == "params" else word.moment(MOMENTS.get(template.slot, 0)))
    return tuple(word for word in words if word != Scale(1.0))


def _check_shape(match: Match, groups: Groups, sizes: Mapping[str, int], total: int) -> None:
    template = match.template
    dimensions = tuple(prod(sizes[name] for name in names) for names in groups)
    if len(template.parameters) > 1:
        dimensions = tuple(
            total if place == template.along else extent for place, extent in enumerate(dimensions)
        )
    padded = [one.padded for one in template.layouts[0].dimensions]
    padded += [False] * len(dimensions)
    shape = match.spec.shape
    if len(shape) != len(dimensions) or any(
        extent != wanted and not (padded[place] and extent > wanted)
        for place, (extent, wanted) in enumerate(zip(shape, dimensions, strict=True))
    ):
        raise MismatchError(
            f"shape mismatch for {'+'.join(template.parameters)}: expected {list(dimensions)} from the sizes, "
            f"got {list(shape)}, in layout {template.layouts[0].text}",
            path=match.spec.name,
            cure="correct the config, or choose the family and options that fit this checkpoint",
        )


def require_complete(
    family: Family,
    templates: Sequence[Template],
    stored: Mapping[KeyPath, StoredTensor],
    sizes: Mapping[str, int],
    *,
    sparse: bool,
) -> dict[str, frozenset[str]]:
    """Slot → existing parameters, each with all its tensors and without duplicates.

    With a `sparse` optimizer a parameter need not have every moment.

    Raises:
        IncompleteError: a tensor of a parameter is missing; its key path is named.
        CorruptError: two tensors hold the same part of a parameter.
    """
    there: defaultdict[tuple[str, str], dict[tuple[tuple[str, int], ...], KeyPath]] = defaultdict(dict)
    for path, one in stored.items():
        for piece in one.pieces:
            other = there[piece.parameter].setdefault(tuple(sorted(piece.at)), path)
            if other != path:
                raise CorruptError(
                    f"duplicate tensor for parameter {piece.parameter[1]}: {render(other)} and {render(path)}"
                )
    slots = {slot for slot, _name in there}
    parts = {family.parameters[name].part for slot, name in there if slot == "params"}
    for template in templates:
        if template.slot in slots:
            _require_all(family, template, there, sizes, parts, sparse=sparse)
    return {slot: frozenset(name for one, name in there if one == slot) for slot in slots}


def _require_all(
    family: Family,
    template: Template,
    there: Mapping[tuple[str, str], Mapping[tuple[tuple[str, int], ...], KeyPath]],
    sizes: Mapping[str, int],
    parts: set[str | None],
    *,
    sparse: bool,
) -> None:
    layout = template.layouts[0]
    for name in template.parameters:
        found = there.get((template.slot, name), {})
        parameter = family.parameters[name]
        optional = parameter.optional and (parameter.part is None or parameter.part not in parts)
        lacking = template.slot != "params" and (sparse or ("params", name) not in there)
        if not found and (optional or lacking):
            continue
        known = {one for index in layout.indices for one in index.needed} <= set(sizes)
        if not known:
            raise IncompleteError(
                f"missing parameter {name}: {layout.text}", cure="choose the family that fits this checkpoint"
            )
        count = sizes[template.each] if template.each else 1
        if len(found) != count * prod(sizes[axis] for axis in layout.unrolled):
            have = set(found.values())
            first = next(
                (path for at in layout.places(sizes) if (path := layout.path(at, sizes)) not in have), None
            )
            raise IncompleteError(
                f"missing tensor of parameter {name}: {render(first) if first else layout.text}",
                cure="restore the missing tensors, or choose the family that fits this checkpoint",
            )
