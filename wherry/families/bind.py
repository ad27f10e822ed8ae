"""Binding: assign every tensor of a checkpoint to a parameter of a family, or ignore it by a named rule.

The forms of a checkpoint (scanned or not, which scan axis) are those in which every key path belongs to a parameter and
all shapes agree. If several are possible, the user must choose; nothing is guessed from one tensor. Only metadata is
read.

The state of an optimizer never keeps a model from its target: it is bound if an optimizer of the system has a layout
for all of it and it is complete (every moment, of every parameter); else it is left out as a whole, by a named rule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from wherry.core.account import OTHERS, TRAINING_STATE, IgnoredEntry
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.core.units import plural
from wherry.cures import Argument, Blank, Cure
from wherry.errors import AmbiguousError, IncompleteError, UnrepresentableError, WherryError
from wherry.families.pieces import require_complete, stored_tensors
from wherry.families.scalars import SortedTensors, concrete_slots, sort_tensors
from wherry.families.sizes import solved_sizes
from wherry.families.templates import FamilyMatch, Template, form_choices, match_tensors, templates
from wherry.layout.copies import Pieces, StoredTensor
from wherry.layout.expr import evaluate
from wherry.layout.tree_reading import LeafKind

if TYPE_CHECKING:
    from wherry.families.facts import ConfigFacts
    from wherry.families.schema import Family, System
    from wherry.families.sizes import SolvedSizes

# What becomes of leaves that no layout has and that are no weights → what they are, and why they are left out.
_LEFT_OUT: Mapping[str, tuple[str, str]] = {
    "optimizer": (
        "optimizer state",
        "no layout has this form of an optimizer's state, or it is not complete",
    ),
    "counter": ("number of the run", "the model does not have it"),
    "key": ("random-number key", "the model does not have it"),
}
_SHOWN = 8  # number of unmatched key paths in the message


@dataclass(frozen=True, slots=True)
class BoundFamily:
    """A checkpoint whose every tensor is accounted for.

    Attributes:
        family: the model family.
        system: the system that wrote it.
        chosen: forms and conventions.
        optimizer: the optimizer whose state it holds; None if it holds none.
        solved: the extent of every axis, and its source.
        config_facts: sizes and facts from the config.
        stored: the tensors that hold parameters or moments.
        present: slot → parameters.
        scalars: name → the key path that it is read from.
        ignored: the other tensors, each with its rule.
        apart: tensors of modules that only this system has, each with its rule.
        specs: all tensors.
        names: key path of a tensor → its name in this system, where they differ; everything else here has key paths.
        copies: the ignored tensors that are second copies → the parameter of which.
        notes: what was found in the tensors that the config does not say, as text.
    """

    family: Family
    system: System
    chosen: Mapping[str, str]
    optimizer: str | None
    solved: SolvedSizes
    config_facts: ConfigFacts
    stored: Mapping[KeyPath, StoredTensor]
    present: Mapping[str, frozenset[str]]
    scalars: Mapping[str, KeyPath]
    ignored: tuple[IgnoredEntry, ...]
    apart: tuple[IgnoredEntry, ...]
    specs: Mapping[KeyPath, TensorSpec]
    names: Mapping[KeyPath, KeyPath] = field(default_factory=dict["KeyPath", "KeyPath"])
    copies: Mapping[KeyPath, str] = field(default_factory=dict["KeyPath", str])
    notes: tuple[str, ...] = ()

    @property
    def repeated(self) -> int:
        """The number of elements of the second copies."""
        return sum(self.specs[path].size for path in self.copies)

    def holding(self, parameter: str) -> StoredTensor:
        """The first tensor that holds a parameter."""
        return holding(self.stored, parameter)

    @property
    def pieces(self) -> Pieces:
        """The location of every parameter."""
        pieces = Pieces(self.solved.sizes)
        for stored in self.stored.values():
            pieces.add(stored)
        return pieces


def holding(stored: Mapping[KeyPath, StoredTensor], parameter: str) -> StoredTensor:
    """The first of these tensors that holds a parameter."""
    wanted = ("params", parameter)
    return next(one for one in stored.values() if any(piece.parameter == wanted for piece in one.pieces))


def copy_reason(first: TensorSpec) -> str:
    """Why a second copy of a tensor is left out."""
    return f"a second copy of {first.name}, to which it is tied"


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A choice of forms and optimizer in which every key path of the model is known.

    Attributes:
        left: what is outside the model and has no layout.
    """

    forms: Mapping[str, str]
    optimizer: str | None
    templates: list[Template]
    sorted: SortedTensors
    matching: FamilyMatch
    left: tuple[IgnoredEntry, ...] = ()


def bind(
    family: Family,
    system: System,
    manifest: Manifest,
    *,
    config_facts: ConfigFacts,
    conventions: Mapping[str, str],
    forms: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    outside: Mapping[KeyPath, LeafKind] | None = None,
) -> BoundFamily:
    """Account for every tensor of a checkpoint.

    Args:
        family: the model family.
        system: the system that wrote it.
        manifest: its manifest.
        config_facts: sizes and facts from its config, see `facts`.
        conventions: a choice for each of the system's conventions.
        forms: forms that the user or the config states.
        sizes: extents that the user states.
        outside: leaves that are no part of the model, and what they are: they need no layout.

    Raises:
        UnrepresentableError: a tensor does not belong to this family; it is named.
        MismatchError: shapes or config contradict each other; parameter, axis and both sources are named.
        IncompleteError: a layer or parameter is missing.
        AmbiguousError: a size or form cannot be determined; the cure says how to state it.
    """
    fits: list[BoundFamily] = []
    failures: list[WherryError] = []
    for candidate in _candidates(
        family, system, manifest, dict(conventions), dict(forms or {}), config_facts.known, outside or {}
    ):
        try:
            fits.append(
                _bind(
                    family, system, candidate, config_facts, dict(conventions), sizes or {}, manifest.tensors
                )
            )
        except WherryError as error:
            failures.append(error)
    if not fits:
        raise failures[0]
    if any(fit.stored != fits[0].stored for fit in fits[1:]):
        differing = [name for name in system.forms if len({one.chosen[name] for one in fits}) > 1]
        choices = "; ".join(", ".join(f"{name}={one.chosen[name]}" for name in differing) for one in fits)
        raise AmbiguousError(
            f"the shapes fit several forms of {system.name}: {choices}",
            cure=Cure("choose one with {}", Argument("set", Blank(f"{differing[0]}=…")))
            if differing
            else Cure("pass the model's config with {}", Argument("config")),
        )
    return fits[0]


def _candidates(
    family: Family,
    system: System,
    manifest: Manifest,
    conventions: dict[str, str],
    given: dict[str, str],
    known: Mapping[str, Any],
    outside: Mapping[KeyPath, LeafKind],
) -> Iterator[_Candidate]:
    """The forms in which every tensor of the model is known, each with the optimizer that accounts for its state."""
    worst: _Candidate | None = None
    found: dict[tuple[str, ...], _Candidate] = {}
    for forms in form_choices(system, given):
        for made in _with_optimizers(family, system, manifest, conventions, forms, known):
            candidate = _without_outside(made, system, outside)
            if candidate is None:
                continue
            matching = candidate.matching
            if matching.unmatched:
                if worst is None or len(matching.unmatched) < len(worst.matching.unmatched):
                    worst = candidate
                continue
            used = {match.template for matches in matching.found.values() for match in matches}
            texts = sorted(layout.text for template in used for layout in template.layouts)
            earlier = found.get(tuple(texts))
            if earlier is None or len(candidate.left) < len(earlier.left):
                found[tuple(texts)] = candidate
            if not candidate.left:
                break
    if not found and worst is not None:
        names = [render(path) for path in worst.matching.unmatched]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise UnrepresentableError(
            f"{plural(len(names), 'tensor', 'does/do')} not belong to family {family.name} as {system.name} stores it: "
            f"{', '.join(names[:_SHOWN])}{more}",
            path=names[0],
            cure=Cure(
                "choose another family, or add layouts or `ignore` rules for them with {}",
                Argument("family-file"),
            ),
        )
    least = min((len(candidate.left) for candidate in found.values()), default=0)
    yield from (candidate for candidate in found.values() if len(candidate.left) == least)


def _without_outside(
    candidate: _Candidate, system: System, outside: Mapping[KeyPath, LeafKind]
) -> _Candidate | None:
    """A candidate that leaves out the leaves outside the model without a layout; None if its optimizer is another one.

    An optimizer is the right one if it has a layout for all of its state, and the state is complete.
    """
    left = [path for path in candidate.matching.unmatched if path in outside]
    if candidate.optimizer is not None and (
        any(outside[path] == "optimizer" for path in left) or not _has_whole_state(candidate, system)
    ):
        return None
    if not left:
        return candidate
    rest = tuple(path for path in candidate.matching.unmatched if path not in outside)
    rows = tuple(_outside_entry(path, outside[path]) for path in left)
    return replace(candidate, matching=replace(candidate.matching, unmatched=rest), left=rows)


def _has_whole_state(candidate: _Candidate, system: System) -> bool:
    """Whether the state has every moment of its optimizer, and one of each for every parameter that has moments.

    A single moment (Lion), or moments of some parameters only (others are frozen or masked), are another optimizer's.
    Moments that differ in their parameters are damage, which binding names.
    """
    own = system.optimizers[candidate.optimizer or ""]
    members: defaultdict[str, set[tuple[tuple[str, ...], tuple[int, ...]]]] = defaultdict(set)
    for matches in candidate.matching.found.values():
        members[matches[0].template.slot].add((matches[0].template.parameters, matches[0].numbers))
    moments = [members[slot] for slot in own.slots if slot in members]
    if own.filler or not moments:
        return True
    alike = all(one == moments[0] for one in moments)
    placed = {made.parameters for made in candidate.templates if made.slot != "params"}
    expected = {member for member in members["params"] if member[0] in placed}
    return len(moments) == len(own.slots) and not (alike and moments[0] < expected)


def _outside_entry(path: KeyPath, kind: LeafKind) -> IgnoredEntry:
    """The rule that ignores a leaf outside the model without a layout."""
    if kind in _LEFT_OUT:
        what, reason = _LEFT_OUT[kind]
        return IgnoredEntry(path, TRAINING_STATE, reason, what)
    return IgnoredEntry(path, OTHERS, "it is outside the model that is converted", weights=True)


def _with_optimizers(
    family: Family,
    system: System,
    manifest: Manifest,
    conventions: dict[str, str],
    forms: dict[str, str],
    known: Mapping[str, Any],
) -> Iterator[_Candidate]:
    """The candidates of one choice of forms: without an optimizer, and with each of the system's."""
    for optimizer in (None, *system.optimizers):
        chosen = {**forms, **conventions}
        sorted_ = sort_tensors(manifest, family, system, optimizer, chosen, known)
        slots = concrete_slots(system, optimizer, chosen, manifest)
        made = templates(family, system, chosen, slots, system.optimizers.get(optimizer or ""))
        matching = match_tensors([manifest.tensors[path] for path in sorted_.rest], made)
        yield _Candidate(forms, optimizer, made, sorted_, matching)


def unknown_tensors(
    family: Family, system: System, manifest: Manifest, outside: Collection[KeyPath] = ()
) -> int:
    """The number of tensors of a model without a layout in a system, in the forms that leave the fewest.

    Args:
        family: the model family.
        system: the system.
        manifest: what the checkpoint holds.
        outside: leaves that are no part of the model.
    """
    conventions = {name: one.usual for name, one in system.conventions.items()}
    return min(
        sum(path not in outside for path in candidate.matching.unmatched)
        for forms in form_choices(system, {})
        for candidate in _with_optimizers(family, system, manifest, conventions, forms, {})
    )


def _require_implied(
    family: Family,
    system: System,
    candidate: _Candidate,
    stored: Mapping[KeyPath, StoredTensor],
    present: frozenset[str],
    config_facts: ConfigFacts,
) -> None:
    """Compare the optional parameters with those that the config implies; a first missing or extra one is named."""
    names = {**config_facts.config, "there": dict.fromkeys(present, True)}
    for name, text in system.config.implied.items() if config_facts.config else ():
        wanted = evaluate(text, names)
        members = {one for one, row in family.parameters.items() if name in (one, row.part)}
        if wanted is True and not members <= present:
            first = min(members - present)
            raise IncompleteError(
                f"missing parameter {first}: {_layout_text(candidate, first)}, which {config_facts.source} implies "
                f"({text})",
                cure="restore the missing tensors, or correct the config",
            )
        if wanted is False and members & present:
            path = next(
                path for path, one in stored.items() if {p.parameter[1] for p in one.pieces} & members
            )
            raise UnrepresentableError(
                f"{config_facts.source} states a model without {name} ({text}), but the files have it",
                path=render(path),
                cure="correct the config, or remove the tensors that do not belong to the model",
            )


def _layout_text(candidate: _Candidate, name: str) -> str:
    rows = (one for one in candidate.templates if one.slot == "params" and name in one.parameters)
    return next(rows).layouts[0].text


def _bind(
    family: Family,
    system: System,
    candidate: _Candidate,
    config_facts: ConfigFacts,
    conventions: dict[str, str],
    sizes: Mapping[str, int],
    specs: Mapping[KeyPath, TensorSpec],
) -> BoundFamily:
    solved, matches = solved_sizes(family, system, candidate.matching, config_facts, sizes)
    stored = stored_tensors(system, matches, solved.sizes, config_facts)
    own = system.optimizers.get(candidate.optimizer or "")
    present = require_complete(
        family, candidate.templates, stored, solved.sizes, sparse=bool(own and own.filler)
    )
    params = present.get("params")
    if params is None:
        raise UnrepresentableError(
            f"no tensor of the checkpoint is a parameter of {family.name} in {system.name}",
            cure=Cure(
                "convert the checkpoint that has the model's parameters, or keep the tree with {}",
                Argument("to", "orbax"),
            ),
        )
    names = {**config_facts.facts, "there": dict.fromkeys(params, True)}
    for name, text in system.untied.items():
        if name not in params and evaluate(text, names) is True:
            raise IncompleteError(
                f"missing parameter {name}: {_layout_text(candidate, name)}; {system.name} stores it even if tied",
                cure="restore the missing tensors, or correct the config",
            )
    copies = candidate.sorted.copies
    for path, (_rule, parameter) in copies.items():
        if parameter not in params:
            raise IncompleteError(
                f"missing parameter {parameter}, of which {render(path)} is a second copy",
                path=render(path),
                cure="restore the missing tensors",
            )
    _require_implied(family, system, candidate, stored, params, config_facts)
    copied = [
        IgnoredEntry(path, rule, copy_reason(holding(stored, parameter).spec))
        for path, (rule, parameter) in copies.items()
    ]
    return BoundFamily(
        family=family,
        system=system,
        chosen={**candidate.forms, **conventions},
        optimizer=candidate.optimizer,
        solved=solved,
        config_facts=config_facts,
        stored=stored,
        present=present,
        scalars=candidate.sorted.scalars,
        ignored=(*candidate.sorted.ignored, *copied, *candidate.left),
        apart=candidate.sorted.apart,
        specs=specs,
        copies={path: parameter for path, (_rule, parameter) in copies.items()},
    )
