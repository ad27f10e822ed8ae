"""Binding: assign every tensor of a checkpoint to a parameter of a family, or ignore it by a named rule.

The forms of a checkpoint (scanned or not, which scan axis) are those in which every key path belongs to a parameter and
all shapes agree. If several are possible, the user must choose; nothing is guessed from one tensor. Only metadata is
read, except of second copies.

A config may say that a parameter is tied to another, while the files hold both. Then the bytes decide, for every
system whose config states a tie. If both are equal, the second copy is ignored by a named rule, and the target is tied.
If they differ, the model is untied whatever its config says, and a note names both. That is what transformers does:
`tie_weights` in `modeling_utils.py` (5.23) ties two parameters that both are in the files only if `torch.equal` holds,
and else warns that it "will NOT tie them". Tensors of different element types are different here, as only one of them
can be exact. Copies that a system always stores (Lingua's `output.tied_module.weight`, T5's
`encoder.embed_tokens.weight`) are ignored too; one that differs is refused, since no layout has a place for it.

Both are read while a conversion is planned, as its target depends on the answer: once each, in pieces of 8 MiB, and no
further than the first difference; not at all if both are the same bytes of a file, as torch saves them. A conversion
within one system keeps both tensors of a tie, and does not compare them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wherry.core.account import IgnoredEntry
from wherry.core.keypath import render
from wherry.core.units import plural
from wherry.errors import AmbiguousError, IncompleteError, UnrepresentableError, UsageError, WherryError
from wherry.families.pieces import require_complete, stored_tensors
from wherry.families.scalars import SortedTensors, concrete_slots, sort_tensors
from wherry.families.sizes import solved_sizes
from wherry.families.templates import FamilyMatch, Template, form_choices, match_tensors, templates
from wherry.layout.copies import Pieces, StoredTensor, gather
from wherry.layout.cuts import bands
from wherry.layout.expr import evaluate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import TensorSpec
    from wherry.families.facts import ConfigFacts
    from wherry.families.schema import Family, System
    from wherry.formats.checkpoint import Checkpoint
    from wherry.layout.sizes import SolvedSizes

_SHOWN = 8  # number of unmatched key paths in the message
_TIED = "tied"  # the fact that a config states
_BAND = 8 << 20


@dataclass(frozen=True, slots=True)
class BoundFamily:
    """A checkpoint whose every tensor is accounted for.

    Attributes:
        family: the model family.
        system: the system that wrote it.
        chosen: forms and conventions.
        optimizer: the optimizer whose state it holds; None if it holds none.
        solved: the extent of every axis, and its source.
        told: sizes and facts from the config.
        stored: the tensors that hold parameters or moments.
        present: slot → parameters.
        scalars: name → the key path that it is read from.
        ignored: the other tensors, each with its rule.
        apart: tensors of modules that only this system has, each with its rule.
        specs: all tensors.
        copies: the ignored tensors that are second copies → the parameter of which.
        notes: what was found in the tensors that the config does not say, as text.
    """

    family: Family
    system: System
    chosen: Mapping[str, str]
    optimizer: str | None
    solved: SolvedSizes
    told: ConfigFacts
    stored: Mapping[KeyPath, StoredTensor]
    present: Mapping[str, frozenset[str]]
    scalars: Mapping[str, KeyPath]
    ignored: tuple[IgnoredEntry, ...]
    apart: tuple[IgnoredEntry, ...]
    specs: Mapping[KeyPath, TensorSpec]
    copies: Mapping[KeyPath, str]
    notes: tuple[str, ...] = ()

    @property
    def repeated(self) -> int:
        """The number of elements of the second copies."""
        return sum(self.specs[path].size for path in self.copies)

    def holding(self, parameter: str) -> StoredTensor:
        """The first tensor that holds a parameter."""
        return _holding(self.stored, parameter)

    @property
    def pieces(self) -> Pieces:
        """The location of every parameter."""
        pieces = Pieces(self.solved.sizes)
        for stored in self.stored.values():
            pieces.add(stored)
        return pieces


def _holding(stored: Mapping[KeyPath, StoredTensor], parameter: str) -> StoredTensor:
    wanted = ("params", parameter)
    return next(one for one in stored.values() if any(piece.parameter == wanted for piece in one.pieces))


def _copy_reason(first: TensorSpec) -> str:
    """Why a second copy of a tensor is left out."""
    return f"a second copy of {first.name}, to which it is tied"


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A choice of forms and optimizer in which every key path is known."""

    forms: Mapping[str, str]
    optimizer: str | None
    templates: list[Template]
    sorted: SortedTensors
    matching: FamilyMatch


def bind(
    family: Family,
    system: System,
    manifest: Manifest,
    *,
    told: ConfigFacts,
    conventions: Mapping[str, str],
    forms: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    checkpoint: Checkpoint | None = None,
    keep: bool = True,
) -> BoundFamily:
    """Account for every tensor of a checkpoint.

    Args:
        family: the model family.
        system: the system that wrote it.
        manifest: its manifest.
        told: sizes and facts from its config, see `facts`.
        conventions: a choice for each of the system's conventions.
        forms: forms that the user or the config states.
        sizes: extents that the user states.
        checkpoint: reads second copies; without it nothing is read, and two tensors of a tie are taken for different.
        keep: whether both tensors of a tie are kept, whatever their bytes are.

    Raises:
        UnrepresentableError: a tensor does not belong to this family, or is no second copy; it is named.
        UsageError: the user states that parameters are tied which differ.
        MismatchError: shapes or config contradict each other; parameter, axis and both sources are named.
        IncompleteError: a layer or parameter is missing.
        AmbiguousError: a size or form cannot be determined; the cure says how to state it.
    """
    choices = (dict(conventions), dict(forms or {}), dict(sizes or {}))
    bound = _only_fit(family, system, manifest, told, *choices)
    if checkpoint is not None:
        _require_copies(bound, checkpoint)
    settled = bound if keep else _settle_ties(bound, checkpoint)
    if settled.told is bound.told:
        return settled
    again = _only_fit(family, system, manifest, settled.told, *choices)  # value words may depend on the tie
    return replace(again, notes=settled.notes)


def _only_fit(
    family: Family,
    system: System,
    manifest: Manifest,
    told: ConfigFacts,
    conventions: dict[str, str],
    forms: dict[str, str],
    sizes: Mapping[str, int],
) -> BoundFamily:
    """The checkpoint in the forms in which all key paths and shapes agree."""
    fits: list[BoundFamily] = []
    failures: list[WherryError] = []
    for candidate in _candidates(family, system, manifest, conventions, forms, told.known):
        try:
            fits.append(_bind(family, system, candidate, told, conventions, sizes, manifest.tensors))
        except WherryError as error:
            failures.append(error)
    if not fits:
        raise failures[0]
    if any(fit.stored != fits[0].stored for fit in fits[1:]):
        raise _ambiguous(system, fits)
    return fits[0]


def _candidates(
    family: Family,
    system: System,
    manifest: Manifest,
    conventions: dict[str, str],
    given: dict[str, str],
    known: Mapping[str, Any],
) -> Iterator[_Candidate]:
    """The forms in which every tensor is known, each with the first optimizer that accounts for all tensors."""
    worst: _Candidate | None = None
    found: dict[tuple[str, ...], _Candidate] = {}
    for forms in form_choices(system, given):
        for candidate in _with_optimizers(family, system, manifest, conventions, forms, known):
            matching = candidate.matching
            if not matching.unmatched:
                used = {match.template for matches in matching.found.values() for match in matches}
                texts = sorted(layout.text for template in used for layout in template.layouts)
                found.setdefault(tuple(texts), candidate)
                break
            if worst is None or len(matching.unmatched) < len(worst.matching.unmatched):
                worst = candidate
    if not found and worst is not None:
        raise _unmatched_error(family, system, worst)
    yield from found.values()


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


def unknown_tensors(family: Family, system: System, manifest: Manifest) -> int:
    """The number of tensors without a layout in a system, in the forms that leave the fewest."""
    conventions = {name: one.default or one.choices[0] for name, one in system.conventions.items()}
    return min(
        len(candidate.matching.unmatched)
        for forms in form_choices(system, {})
        for candidate in _with_optimizers(family, system, manifest, conventions, forms, {})
    )


def _require_implied(
    family: Family,
    system: System,
    candidate: _Candidate,
    stored: Mapping[KeyPath, StoredTensor],
    present: frozenset[str],
    told: ConfigFacts,
) -> None:
    """Compare the optional parameters with those that the config implies; a first missing or extra one is named."""
    names = {**told.config, "there": dict.fromkeys(present, True)}
    for name, text in system.config.implied.items() if told.config else ():
        wanted = evaluate(text, names)
        members = {one for one, row in family.parameters.items() if name in (one, row.part)}
        if wanted is True and not members <= present:
            raise _lacking(candidate, min(members - present), text, told)
        if wanted is False and members & present:
            path = next(
                path for path, one in stored.items() if {p.parameter[1] for p in one.pieces} & members
            )
            raise UnrepresentableError(
                f"{told.source} states a model without {name} ({text}), but the files have it",
                path=render(path),
                cure="correct the config, or remove the tensors that do not belong to the model",
            )


def _require_untied(
    system: System, candidate: _Candidate, present: frozenset[str], told: ConfigFacts
) -> None:
    """Require the parameters that this system stores even if they are tied."""
    names = {**told.facts, "there": dict.fromkeys(present, True)}
    for name, text in system.untied.items():
        if name not in present and evaluate(text, names) is True:
            raise IncompleteError(
                f"missing parameter {name}: {_layout_text(candidate, name)}; {system.name} stores it even if tied",
                cure="restore the missing tensors, or correct the config",
            )


def _layout_text(candidate: _Candidate, name: str) -> str:
    rows = (one for one in candidate.templates if one.slot == "params" and name in one.parameters)
    return next(rows).layouts[0].text


def _lacking(candidate: _Candidate, name: str, text: str, told: ConfigFacts) -> IncompleteError:
    return IncompleteError(
        f"missing parameter {name}: {_layout_text(candidate, name)}, which {told.source} implies ({text})",
        cure="restore the missing tensors, or correct the config",
    )


def _unmatched_error(family: Family, system: System, candidate: _Candidate) -> UnrepresentableError:
    names = [render(path) for path in candidate.matching.unmatched]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return UnrepresentableError(
        f"{plural(len(names), 'tensor', 'does/do')} not belong to family {family.name} as {system.name} stores it: "
        f"{', '.join(names[:_SHOWN])}{more}",
        path=names[0],
        cure="choose another family, or add layouts or `ignore` rules for them with --family-file",
    )


def _ambiguous(system: System, fits: list[BoundFamily]) -> AmbiguousError:
    differing = [name for name in system.forms if len({one.chosen[name] for one in fits}) > 1]
    choices = "; ".join(", ".join(f"{name}={one.chosen[name]}" for name in differing) for one in fits)
    return AmbiguousError(
        f"the shapes fit several forms of {system.name}: {choices}",
        cure=f"choose one with --set {differing[0]}=…"
        if differing
        else "pass the model's config with --config",
    )


def _bind(
    family: Family,
    system: System,
    candidate: _Candidate,
    told: ConfigFacts,
    conventions: dict[str, str],
    sizes: Mapping[str, int],
    specs: Mapping[KeyPath, TensorSpec],
) -> BoundFamily:
    solved, matches = solved_sizes(family, system, candidate.matching, told, sizes)
    stored = stored_tensors(system, matches, solved.sizes, told)
    own = system.optimizers.get(candidate.optimizer or "")
    present = require_complete(
        family, candidate.templates, stored, solved.sizes, sparse=bool(own and own.filler)
    )
    params = present.get("params")
    if params is None:
        raise UnrepresentableError(
            f"no tensor of the checkpoint is a parameter of {family.name} in {system.name}",
            cure="convert the checkpoint that has the model's parameters, or keep the tree with --to orbax",
        )
    _require_untied(system, candidate, params, told)
    copies = candidate.sorted.copies
    _require_first_copies(copies, params)
    _require_implied(family, system, candidate, stored, params, told)
    return BoundFamily(
        family=family,
        system=system,
        chosen={**candidate.forms, **conventions},
        optimizer=candidate.optimizer,
        solved=solved,
        told=told,
        stored=stored,
        present=present,
        scalars=candidate.sorted.scalars,
        ignored=(*candidate.sorted.ignored, *_copied_entries(copies, stored)),
        apart=candidate.sorted.apart,
        specs=specs,
        copies={path: parameter for path, (_rule, parameter) in copies.items()},
    )


def _require_first_copies(copies: Mapping[KeyPath, tuple[str, str]], present: frozenset[str]) -> None:
    for path, (_rule, parameter) in copies.items():
        if parameter not in present:
            raise IncompleteError(
                f"missing parameter {parameter}, of which {render(path)} is a second copy",
                path=render(path),
                cure="restore the missing tensors",
            )


def _copied_entries(
    copies: Mapping[KeyPath, tuple[str, str]], stored: Mapping[KeyPath, StoredTensor]
) -> Iterator[IgnoredEntry]:
    for path, (rule, parameter) in copies.items():
        yield IgnoredEntry(path, rule, _copy_reason(_holding(stored, parameter).spec))


def _require_copies(bound: BoundFamily, source: Checkpoint) -> None:
    """Prove the copies that are left out because their system always stores them.

    Raises:
        UnrepresentableError: one differs from the parameter of which it should be a copy; both are named.
    """
    pieces = bound.pieces
    for path, parameter in bound.copies.items():
        first = bound.holding(parameter)
        copy = replace(first, spec=bound.specs[path])
        if copy.spec.shape != first.spec.shape or not _is_copy(copy, pieces, source):
            raise UnrepresentableError(
                f"{render(path)} differs from {first.spec.name}, of which {bound.system.name} has it as a second copy: "
                f"no layout of {bound.family.name} has a place for both",
                path=render(path),
                cure="remove the tensor that does not belong to the model, or keep the tree with --to orbax",
            )


def _settle_ties(bound: BoundFamily, source: Checkpoint | None) -> BoundFamily:
    """Decide by their bytes whether parameters are tied that the config ties, and the files hold twice.

    Args:
        bound: the source's parameters.
        source: reads it; without one, tensors that are both there are taken for different.

    Returns:
        The source without second copies; if copies differ, with the fact that it is untied, and a note.

    Raises:
        UsageError: the user states that they are tied, and they differ.
    """
    if bound.told.facts.get(_TIED) is not True:
        return bound
    for name, parameter in bound.family.parameters.items():
        there = bound.present["params"]
        if parameter.tie and {name, parameter.tie} <= there:
            bound = _settled_tie(bound, name, parameter.tie, source)
    return bound


def _settled_tie(bound: BoundFamily, name: str, tie: str, source: Checkpoint | None) -> BoundFamily:
    copies = list(_as_copies(bound, name, tie))
    if source is not None and all(_is_copy(one, bound.pieces, source) for one in copies):
        paths = {one.spec.path for one in copies}
        reason = _copy_reason(bound.holding(tie).spec)
        return replace(
            bound,
            stored={path: one for path, one in bound.stored.items() if path not in paths},
            present={slot: names - {name} for slot, names in bound.present.items()},
            copies={**bound.copies, **dict.fromkeys(paths, tie)},
            ignored=(*bound.ignored, *(IgnoredEntry(path, f"tied {name}", reason) for path in sorted(paths))),
        )
    first, second = bound.holding(tie).spec.name, bound.holding(name).spec.name
    if _TIED in bound.told.stated:
        raise UsageError(
            f"{_TIED}=true is stated, but {second} differs from {first}",
            cure=f"leave it out, or state --set {_TIED}=false",
        )
    note = (
        f"{bound.told.source} ties {second} to {first}, but the two differ: the target is untied, with both"
    )
    told = replace(bound.told, facts={**bound.told.facts, _TIED: False})
    return replace(bound, told=told, notes=(*bound.notes, *([note] if source is not None else [])))


def _as_copies(bound: BoundFamily, name: str, tie: str) -> Iterator[StoredTensor]:
    """The tensors of a parameter and of its moments, as if they held the one that it is tied to."""
    for one in bound.stored.values():
        if any(piece.parameter[1] == name for piece in one.pieces):
            renamed = [replace(piece, parameter=(piece.parameter[0], tie)) for piece in one.pieces]
            yield StoredTensor(one.spec, tuple(renamed))


def _is_copy(copy: StoredTensor, pieces: Pieces, source: Checkpoint) -> bool:
    """Whether a tensor holds, byte for byte, the values of the parameters that its pieces name."""
    held = [spec for piece in copy.pieces for spec, _piece in pieces.held.get(piece.parameter, {}).values()]
    if not held or any(spec.dtype != copy.spec.dtype for spec in held):
        return False
    import numpy as np

    extents = source.reader.extents(copy.spec)
    if extents is not None and [extents] == [source.reader.extents(spec) for spec in held]:
        return copy.spec.shape == held[0].shape
    return all(
        np.array_equal(
            _bytes(source.read(copy.spec.path, region)), _bytes(gather(copy, region, pieces, source.read))
        )
        for region, _span in bands(copy, _BAND, pieces)
    )


def _bytes(array: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
