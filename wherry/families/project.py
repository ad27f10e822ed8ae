"""Projection: the tensors in which a system stores a bound checkpoint, and how each is made of source tensors.

Every target tensor is written once. Every parameter of the source must have a layout in the target, otherwise the
projection fails and names it. Moments follow the layout of their parameter. The loss of values is computed before any
byte moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

from wherry.core.account import IgnoredEntry
from wherry.core.keypath import parse
from wherry.core.manifest import Manifest
from wherry.errors import UnrepresentableError, UsageError
from wherry.families.adapters import is_of_adapters
from wherry.families.scalars import scalar_texts
from wherry.families.targets import (
    fill_sizes,
    fillers,
    moment_paths,
    place_tensors,
    repeated_numbers,
    tied_tensors,
    zeros,
)
from wherry.families.templates import Template, form_choices, replace_macros, templates
from wherry.layout import words
from wherry.layout.copies import Pieces, StoredTensor, gather
from wherry.layout.expr import evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region
    from wherry.families.bind import BoundFamily
    from wherry.families.schema import Optimizer, System
    from wherry.layout.copies import Compute, Cut, Read

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
        slots.update({slot: fill_sizes(moment_paths(tree, slot), bound.solved.sizes) for slot in moments})
    wanted = check_forms(system, {**({} if tree else system.bare_forms), **(forms or {})})
    chosen, kept = _place(bound, system, slots, conventions, wanted, tree)
    pieces = bound.pieces
    targets = {one.spec.path: one for one in place_tensors(bound, system, kept, pieces, dtype, pads or {})}
    targets.update({one.spec.path: one for one in tied_tensors(bound, system, chosen, targets)})
    scalars, unwritten = _scalars(bound, system, optimizer, chosen)
    carried = {bound.names.get(one.path, one.path): one.path for one in bound.apart} \
        if system is bound.system else {}  # fmt: skip
    unwritten += [] if system is bound.system else bound.apart
    if tree and tree.filler:
        targets.update(fillers(bound, system, chosen, tree, targets))
    if tree:
        targets.update(repeated_numbers(bound, system, chosen, tree, pieces))
    left: list[IgnoredEntry] = []
    if dropped is not None:
        left = [
            IgnoredEntry(path, _ONLY, dropped)
            for path, one in bound.stored.items()
            if all(piece.parameter[0] != "params" for piece in one.pieces)
        ]
    empties = tree.empties if tree else system.empties
    if not tree:
        targets.update(zeros(system, scalars))
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
        if whole and not any("*" in text for slot in moments for text in moment_paths(one, slot)):
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
                    cure="add its layout with --family-file",
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
