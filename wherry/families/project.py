"""Projection: the tensors in which a system stores a bound checkpoint, and how each is made of source tensors.

Every target tensor is written once. Every parameter of the source must have a layout in the target, otherwise the
projection fails and names it. Moments follow the layout of their parameter. The loss of values is computed before any
byte moves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from functools import reduce
from math import prod
from typing import TYPE_CHECKING

from wherry.core.account import IgnoredEntry
from wherry.core.keypath import KeyPath, parse
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Region, TensorSpec
from wherry.cures import Argument, Cure
from wherry.errors import UnrepresentableError, UsageError
from wherry.families.adapters import is_of_adapters
from wherry.families.pieces import join_pieces, words_of
from wherry.families.scalars import scalar_texts, tied_keys
from wherry.families.templates import DIMENSION, Template, form_choices, is_stacked, replace_macros, templates
from wherry.layout import words
from wherry.layout.copies import Compute, Cut, Pieces, Read, StoredTensor, TensorPiece, gather
from wherry.layout.expr import evaluate
from wherry.layout.layout import Dimension

if TYPE_CHECKING:
    import numpy as np

    from wherry.families.bind import BoundFamily
    from wherry.families.schema import Optimizer, System

_ONLY = "only params"


@dataclass(frozen=True, slots=True)
class Projection:
    """A target, tensor by tensor.

    Attributes:
        source: the bound source.
        system: the target's system.
        chosen: its forms and conventions; recorded with the conversion.
        targets: the tensors that hold parameters or moments.
        pieces: their location in the source.
        scalars: target key path → source key path of tensors that are copied unchanged: the run's numbers, and modules
            that only this system has.
        lists, empties: nodes of the target's tree that are not tensors.
        ignored: source tensors that are not carried, each with its rule.
        bounds: target key path → error bound of a round trip, of tensors whose values can change, if only by underflow.
    """

    source: BoundFamily
    system: System
    chosen: Mapping[str, str]
    targets: Mapping[KeyPath, StoredTensor]
    pieces: Pieces
    scalars: Mapping[KeyPath, KeyPath]
    lists: frozenset[KeyPath] = frozenset()
    empties: Mapping[KeyPath, str] = field(default_factory=dict["KeyPath", str])
    ignored: tuple[IgnoredEntry, ...] = ()
    bounds: Mapping[KeyPath, words.Bound] = field(default_factory=dict["KeyPath", words.Bound])

    @property
    def lossy(self) -> dict[KeyPath, words.Bound]:
        """The bounds of tensors that change even where nothing underflows."""
        return {path: bound for path, bound in self.bounds.items() if not bound.exact}

    def gather(
        self,
        path: KeyPath,
        region: Region,
        read: Read,
        out: np.ndarray | None = None,
        cut: Cut | None = None,
        compute: Compute | None = None,
    ) -> np.ndarray:
        """The elements of a region of a target tensor; see `copies.gather`."""
        return gather(self.targets[path], region, self.pieces, read, out, cut=cut, compute=compute)


def project(
    bound: BoundFamily,
    system: System,
    *,
    conventions: Mapping[str, str],
    forms: Mapping[str, str] | None = None,
    only: str | None = None,
    dtype: str | None = None,
    pads: Mapping[str, int] | None = None,
) -> Projection:
    """The tensors in which a system stores a checkpoint.

    Args:
        bound: the source.
        system: the target's system.
        conventions: a choice for each of its conventions.
        forms: the forms of the target; the system's defaults otherwise, without moments those of `bare`.
        only: `params` omits the optimizer's state.
        dtype: element type of the parameters; the source's by default.
        pads: axis → multiple to which dimensions marked ~ are padded.

    Raises:
        UnrepresentableError: the system cannot store a parameter or the optimizer's state, which is named.
        UsageError: a form is unknown.
    """
    moments = {slot for slot in bound.present if slot != "params"}
    optimizer, dropped = _optimizer(system, moments, only, bound)
    tree = system.optimizers[optimizer] if optimizer else None
    slots = {"params": system.slots["params"][:1]}
    if tree:
        slots.update({slot: _fill_sizes(_moment_paths(tree, slot), bound.solved.sizes) for slot in moments})
    wanted = check_forms(system, {**({} if tree else system.bare_forms), **(forms or {})})
    chosen, kept = _place(bound, system, slots, conventions, wanted, tree)
    pieces = bound.pieces
    targets = {one.spec.path: one for one in _place_tensors(bound, system, kept, pieces, dtype, pads or {})}
    targets.update({one.spec.path: one for one in _tied_tensors(bound, system, chosen, targets)})
    scalars, unwritten = _scalars(bound, system, optimizer, chosen)
    carried = {bound.names.get(one.path, one.path): one.path for one in bound.apart} \
        if system is bound.system else {}  # fmt: skip
    unwritten += [] if system is bound.system else bound.apart
    if tree and tree.filler:
        targets.update(_fillers(bound, system, chosen, tree, targets))
    if tree:
        targets.update(_repeated_numbers(bound, system, chosen, tree, pieces))
    left: list[IgnoredEntry] = []
    if dropped is not None:
        left = [
            IgnoredEntry(path, _ONLY, dropped)
            for path, one in bound.stored.items()
            if all(piece.parameter[0] != "params" for piece in one.pieces)
        ]
    empties = tree.empties if tree else system.empties
    if not tree:  # numbers that are 0 in a target without moments, unless the source has them
        for text, kind in system.zeros.items():
            if (path := parse(text)) not in scalars:
                targets[path] = StoredTensor(TensorSpec(path, (), kind), ())
    return Projection(
        source=bound,
        system=system,
        chosen=chosen,
        targets=targets,
        pieces=pieces,
        scalars={**scalars, **carried},
        lists=frozenset(parse(text) for text in tree.lists) if tree else frozenset(),
        empties={parse(text): kind for text, kind in empties.items()},
        ignored=(*bound.ignored, *left, *unwritten),
        bounds=_bounds(targets, pieces),
    )


def target_manifest(projected: Projection, source: Manifest) -> Manifest:
    """The target's manifest before its format prepares it: tensors, the run's numbers, lists and empty nodes.

    The family, both systems, every form and convention, and the facts that the user stated are recorded in `origin`; of
    an adapter also the sizes and facts of its base, whose config is not stored with it.
    """
    bound = projected.source
    of_adapter = is_of_adapters(bound.family)
    facts = dict(bound.config_facts.facts if of_adapter else bound.config_facts.stated)
    scalars = {
        path: replace(source.tensors[taken], path=path, chunks=None, axes=None, sharding=None)
        for path, taken in projected.scalars.items()
    }
    targets = projected.targets
    moments = any(piece.parameter[0] != "params" for one in targets.values() for piece in one.pieces)
    # by the config, which counts the second copies that the files have
    expected = source.origin.get("expected_parameters")
    counted = {} if expected is None else {"expected_parameters": expected - bound.repeated}
    layout = {
        "family": bound.family.name,
        "from": {"system": bound.system.name, **bound.chosen},
        "to": {"system": projected.system.name, **projected.chosen},
        **({"facts": facts} if facts else {}),
        **({"sizes": dict(bound.solved.sizes)} if of_adapter else {}),
    }
    return Manifest(
        tensors={**{path: one.spec for path, one in targets.items()}, **scalars},
        empties=projected.empties,
        lists=projected.lists,
        step=source.step,
        kind="train-state" if moments else "params",
        companions=source.companions,
        origin={**source.origin, **counted, "layout": layout},
    )


def _place(
    bound: BoundFamily,
    system: System,
    slots: Mapping[str, tuple[str, ...]],
    conventions: Mapping[str, str],
    given: Mapping[str, str],
    optimizer: Optimizer | None,
) -> tuple[dict[str, str], list[Template]]:
    """The first forms in which every parameter has a layout, and the templates of the source's parameters."""
    failures: list[UnrepresentableError] = []
    ties = tied_copies(bound, system)
    for forms in form_choices(system, given):
        chosen = {**forms, **conventions}
        try:
            made = templates(bound.family, system, chosen, slots, optimizer)
            kept = [one for one in made if _is_wanted(one, bound)]
            _require_place(bound, system, kept)
            kept += [
                replace(one, parameters=(ties[one.parameters[0]],))
                for one in made
                if one.slot == "params" and one.parameters[0] in ties
            ]
        except UnrepresentableError as error:
            failures.append(error)
        else:
            return chosen, kept
    raise failures[0]


def check_forms(system: System, given: dict[str, str]) -> dict[str, str]:
    """The stated forms of a system.

    Raises:
        UsageError: a form is unknown, or its value is not one of the choices.
    """
    for name, choice in given.items():
        if name not in system.forms or choice not in system.forms[name].choices:
            options = {key: "|".join(form.choices) for key, form in system.forms.items()}
            raise UsageError(
                f"invalid form {name}={choice} for system {system.name}",
                cure="choose one of: "
                + (", ".join(f"{key}={text}" for key, text in options.items()) or "none"),
            )
    return given


def _optimizer(
    system: System, moments: set[str], only: str | None, bound: BoundFamily
) -> tuple[str | None, str | None]:
    """The optimizer as which the moments are written, or the reason why they are dropped."""
    if not moments:
        return None, None
    if only == "params":
        return None, "only parameters were requested"
    if not system.optimizers:
        return None, f"{system.name} stores only parameters"
    own = bound.optimizer if system is bound.system else None
    for name in sorted(system.optimizers, key=lambda name: name != own):
        one = system.optimizers[name]
        whole = moments == set(one.slots) or (one.filler is not None and moments <= set(one.slots))
        if whole and not any("*" in text for slot in moments for text in _moment_paths(one, slot)):
            return name, None
    return None, f"{system.name} has no layout for the optimizer state {', '.join(sorted(moments))}"


def _is_wanted(template: Template, bound: BoundFamily) -> bool:
    there = bound.present.get(template.slot, frozenset[str]())
    names = set(template.parameters)
    if names & there and not names <= there:
        raise UnrepresentableError(
            f"the target needs {', '.join(sorted(names))} in one tensor; missing: {', '.join(sorted(names - there))}"
        )
    return names <= there


def tied_copies(bound: BoundFamily, system: System) -> dict[str, str]:
    """Tied parameters that the target stores nevertheless → the parameters of which they are copies."""
    there = bound.present["params"]
    names = {**bound.config_facts.facts, "there": dict.fromkeys(there, True)}
    ties = {name: bound.family.parameters[name].tie for name in system.untied}
    return {
        name: tie
        for name, tie in ties.items()
        if tie and name not in there and evaluate(system.untied[name], names) is True
    }


def _require_place(bound: BoundFamily, system: System, kept: list[Template]) -> None:
    placed = {(one.slot, name) for one in kept for name in one.parameters}
    slots = {slot for slot, _name in placed}
    for slot in slots:
        for name in sorted(bound.present[slot]):
            if (slot, name) not in placed:
                raise UnrepresentableError(
                    f"{system.name} has no layout for parameter {name} of family {bound.family.name}",
                    cure=Cure("add its layout with {}", Argument("family-file")),
                )


def _scalars(
    bound: BoundFamily, system: System, optimizer: str | None, chosen: Mapping[str, str]
) -> tuple[dict[KeyPath, KeyPath], list[IgnoredEntry]]:
    texts = scalar_texts(system, optimizer, chosen)
    own = system.optimizers[optimizer].written if optimizer else {}
    texts.update({name: tuple(text for text in own[name] if text[0] != "+") for name in texts if name in own})
    carried: dict[KeyPath, KeyPath] = {}
    ignored: list[IgnoredEntry] = []
    for name, path in bound.scalars.items():
        places = [text for text in texts.get(name, ()) if "*" not in text]
        carried.update({parse(replace_macros(text, system, chosen)): path for text in places})
        if not places:
            ignored.append(
                IgnoredEntry(path, f"no {name}", f"{system.name} does not store it with the carried tensors")
            )
    return carried, ignored


def _bounds(targets: Mapping[KeyPath, StoredTensor], pieces: Pieces) -> dict[KeyPath, words.Bound]:
    """The error bound of each tensor's copies together."""
    sources = {
        parameter: {(held.words, spec.dtype) for spec, held in there.values()}
        for parameter, there in pieces.held.items()
    }
    bounds: dict[KeyPath, words.Bound] = {}
    for path, target in targets.items():
        every = [
            words.loss(words.chain(source, piece.words), dtype, target.spec.dtype, target.spec.name)
            for piece in target.pieces
            for source, dtype in sources[piece.parameter]
        ]
        found = [one for one in every if one is not None]
        if found:
            bounds[path] = reduce(words.Bound.joined, found)
    return bounds


def _place_tensors(
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
        axes = _axis_names(system, template.layouts[0].present(sizes), sizes)
        for at in template.layouts[0].places(sizes):
            spec = TensorSpec(template.layouts[0].path(at, sizes), tuple(shape), own, axes=axes)
            yield StoredTensor(spec, tuple([form.piece(at) for form in forms]))


def _pad_extent(dimension: Dimension, sizes: Mapping[str, int], pads: Mapping[str, int]) -> int:
    extent = dimension.extent(sizes)
    multiple = pads.get(dimension.names[0], 1) if dimension.padded else 1
    return -(-extent // multiple) * multiple


def _axis_names(
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


def _fillers(
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


def _tied_tensors(
    bound: BoundFamily, system: System, chosen: Mapping[str, str], targets: Mapping[KeyPath, StoredTensor]
) -> Iterator[StoredTensor]:
    """Second copies that the target stores of the parameter to which a missing one is tied."""
    for name in system.tied:
        tie = bound.family.parameters[name].tie
        if tie is None or name in bound.present["params"]:
            continue
        twin = next(one for one in targets.values() if one.pieces[0].parameter == ("params", tie))
        yield replace(twin, spec=replace(twin.spec, path=parse(tied_keys(system, name, chosen)[0])))


def _moment_paths(optimizer: Optimizer, slot: str) -> tuple[str, ...]:
    """The key paths of a target's moments."""
    return optimizer.written.get(slot, optimizer.slots[slot][:1])


def _fill_sizes(texts: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Key paths with sizes filled in."""
    return tuple(re.sub(r"%(\w+)%", lambda found: str(sizes[found[1]]), text) for text in texts)


def _repeated_numbers(
    bound: BoundFamily, system: System, chosen: Mapping[str, str], optimizer: Optimizer, pieces: Pieces
) -> Iterator[tuple[KeyPath, StoredTensor]]:
    """Numbers of the run that the target repeats for every layer of a stack."""
    stacks = [stack for stack in system.stacks.values() if is_stacked(stack, chosen)]
    for name, source in bound.scalars.items():
        texts = [text[1:] for text in optimizer.written.get(name, ()) if text[0] == "+"]
        for stack in stacks if texts else []:
            spec = bound.specs[source]
            parameter = ("scalars", name)
            pieces.add(StoredTensor(spec, (TensorPiece(parameter, (), (), ()),)))
            groups = tuple(tuple(one.strip("()").split()) for one in DIMENSION.findall(stack.axis))
            shape = tuple(prod(bound.solved.sizes[axis] for axis in group) for group in groups)
            piece = TensorPiece(parameter, (), groups, (0,) * len(groups))
            for text in _fill_sizes(tuple(texts), bound.solved.sizes):
                path = parse(replace_macros(text, system, chosen))
                yield path, StoredTensor(TensorSpec(path, shape, spec.dtype), (piece,))
