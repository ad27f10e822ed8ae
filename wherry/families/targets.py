"""Targets: the tensors of a target system, with their pieces, shapes, types and axis names."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from wherry.core.keypath import parse
from wherry.core.tensorspec import TensorSpec
from wherry.errors import UsageError
from wherry.families.pieces import join_pieces, words_of
from wherry.families.scalars import tied_keys
from wherry.families.templates import DIMENSION, replace_macros, templates
from wherry.layout.copies import StoredTensor, TensorPiece

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.families.bind import BoundFamily
    from wherry.families.schema import Optimizer, System
    from wherry.families.templates import Template
    from wherry.layout.copies import Pieces
    from wherry.layout.layout import Dimension


def place_tensors(
    bound: BoundFamily,
    system: System,
    kept: list[Template],
    pieces: Pieces,
    dtype: str | None,
    pads: Mapping[str, int],
) -> Iterator[StoredTensor]:
    """The tensors that hold parameters and moments."""
    sizes = bound.solved.sizes
    there = {axis for name in bound.present["params"] for axis in bound.family.parameters[name].axes}
    for template in kept:
        offsets = {axis for index in template.layouts[0].indices for axis in index.offset}
        # axes that only shift indices and that no parameter of this model has: no layers of that kind
        sizes = {**dict.fromkeys(offsets - there, 0), **sizes}
        held = [next(iter(pieces.held[(template.slot, name)].values()))[0] for name in template.parameters]
        own = dtype if dtype and template.slot == "params" else held[0].dtype
        words = words_of(template, sizes, bound.config_facts.facts)
        rows = [layout.present(sizes) for layout in template.layouts]
        forms, total = join_pieces(template, rows, sizes, words)
        shape = [_pad_extent(one, sizes, pads) for one in rows[0]]
        if len(template.parameters) > 1:
            shape[template.along] = total
        axes = axis_names(system, template.layouts[0].present(sizes), sizes)
        for at in template.layouts[0].places(sizes):
            spec = TensorSpec(template.layouts[0].path(at, sizes), tuple(shape), own, axes=axes)
            yield StoredTensor(spec, tuple([form.piece(at) for form in forms]))


def _pad_extent(dimension: Dimension, sizes: Mapping[str, int], pads: Mapping[str, int]) -> int:
    extent = dimension.extent(sizes)
    multiple = pads.get(dimension.names[0], 1) if dimension.padded else 1
    return -(-extent // multiple) * multiple


def axis_names(
    system: System, dimensions: tuple[Dimension, ...], sizes: Mapping[str, int]
) -> tuple[str, ...] | None:
    """The system's names for the dimensions; None if it stores no names.

    A name that stands for several axes is used if all but one of them have size 1: Penzai's `heads` is its
    `head_groups` if there is one query head in each.
    """
    if not system.names:
        return None
    meanings = {name: text.split() for name, text in system.names.items()}

    def name_of(dimension: Dimension) -> str:
        wanted = [axis for axis in dimension.names if sizes[axis] > 1] or list(dimension.names)
        fits = [
            name
            for name, axes in meanings.items()
            if axes[0] in dimension.names
            and ([axis for axis in axes if sizes.get(axis, 1) > 1] == wanted or axes == list(dimension.names))
        ]
        if not fits:
            raise UsageError(f"{system.name} has no name for the axes {' '.join(dimension.names)}")
        return max(fits, key=lambda name: len(meanings[name]))

    return tuple(name_of(one) for one in dimensions)


def fillers(
    bound: BoundFamily,
    system: System,
    chosen: Mapping[str, str],
    optimizer: Optimizer,
    targets: Mapping[KeyPath, StoredTensor],
) -> Iterator[tuple[KeyPath, StoredTensor]]:
    """Zeros of shape [1] for every missing moment of a parameter."""
    slots = {slot: texts[:1] for slot, texts in optimizer.slots.items()}
    for template in templates(bound.family, system, chosen, slots):
        if set(template.parameters) <= bound.present["params"]:
            for at in template.layouts[0].places(bound.solved.sizes):
                path = template.layouts[0].path(at, bound.solved.sizes)
                if path not in targets:
                    yield path, StoredTensor(TensorSpec(path, (1,), str(optimizer.filler)), ())


def tied_tensors(
    bound: BoundFamily, system: System, chosen: Mapping[str, str], targets: Mapping[KeyPath, StoredTensor]
) -> Iterator[StoredTensor]:
    """Second copies that the target stores of the parameter to which a missing one is tied."""
    for name in system.tied:
        tie = bound.family.parameters[name].tie
        if tie is None or name in bound.present["params"]:
            continue
        twin = next(one for one in targets.values() if one.pieces[0].parameter == ("params", tie))
        yield replace(twin, spec=replace(twin.spec, path=parse(tied_keys(system, name, chosen)[0])))


def moment_paths(optimizer: Optimizer, slot: str) -> tuple[str, ...]:
    """The key paths of a target's moments."""
    return optimizer.written.get(slot, optimizer.slots[slot][:1])


def fill_sizes(texts: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Key paths with sizes filled in."""
    return tuple(re.sub(r"%(\w+)%", lambda found: str(sizes[found[1]]), text) for text in texts)


def repeated_numbers(
    bound: BoundFamily, system: System, chosen: Mapping[str, str], optimizer: Optimizer, pieces: Pieces
) -> Iterator[tuple[KeyPath, StoredTensor]]:
    """Numbers of the run that the target repeats for every layer of a stack."""
    stacks = [stack for stack in system.stacks.values() if stack.form is None or chosen[stack.form] == "true"]
    for name, source in bound.scalars.items():
        texts = [text[1:] for text in optimizer.written.get(name, ()) if text[0] == "+"]
        for stack in stacks if texts else []:
            spec = bound.specs[source]
            parameter = ("scalars", name)
            pieces.add(StoredTensor(spec, (TensorPiece(parameter, (), (), ()),)))
            groups = tuple(tuple(one.strip("()").split()) for one in DIMENSION.findall(stack.axis))
            shape = tuple(prod(bound.solved.sizes[axis] for axis in group) for group in groups)
            piece = TensorPiece(parameter, (), groups, (0,) * len(groups))
            for text in fill_sizes(tuple(texts), bound.solved.sizes):
                path = parse(replace_macros(text, system, chosen))
                yield path, StoredTensor(TensorSpec(path, shape, spec.dtype), (piece,))


def zeros(system: System, scalars: Mapping[KeyPath, KeyPath]) -> Iterator[tuple[KeyPath, StoredTensor]]:
    """Numbers that are 0 in a target without moments, unless the source has them."""
    for text, dtype in system.zeros.items():
        if parse(text) not in scalars:
            yield parse(text), StoredTensor(TensorSpec(parse(text), (), dtype), ())
