"""ties: decide by their bytes whether tensors that a config ties, or that a system stores twice, are copies.

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

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.core.account import IgnoredEntry
from wherry.core.keypath import render
from wherry.cures import Argument, Cure
from wherry.errors import MismatchError, UnrepresentableError
from wherry.families.bind import copy_reason
from wherry.layout.copies import Pieces, StoredTensor, gather
from wherry.layout.cuts import bands

if TYPE_CHECKING:
    import numpy as np

    from wherry.families.bind import BoundFamily
    from wherry.families.facts import ConfigFacts
    from wherry.formats.checkpoint import Checkpoint

_TIED = "tied"  # the fact that a config states
_BAND = 8 << 20


def settle_copies(
    bound: BoundFamily,
    checkpoint: Checkpoint | None,
    *,
    keep: bool,
    again: Callable[[ConfigFacts], BoundFamily],
) -> BoundFamily:
    """The checkpoint without second copies; untied if they differ.

    Args:
        bound: the bound checkpoint, with the key paths that it is stored under.
        checkpoint: reads second copies; without it nothing is read, and two tensors of a tie are taken for different.
        keep: whether both tensors of a tie are kept, whatever their bytes are.
        again: binds the checkpoint with other facts: value words may depend on the tie.

    Raises:
        UnrepresentableError: a copy that its system always stores differs.
        MismatchError: the user states that parameters are tied which differ.
    """
    if checkpoint is not None:
        _require_copies(bound, checkpoint)
    settled = bound if keep else _settle_ties(bound, checkpoint)
    if settled.config_facts is bound.config_facts:
        return settled
    return replace(again(settled.config_facts), notes=settled.notes)


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
                cure=Cure(
                    "remove the tensor that does not belong to the model, or keep the tree with {}",
                    Argument("to", "orbax"),
                ),
            )


def _settle_ties(bound: BoundFamily, source: Checkpoint | None) -> BoundFamily:
    """Decide by their bytes whether parameters are tied that the config ties, and the files hold twice.

    Args:
        bound: the source's parameters.
        source: reads it; without one, tensors that are both there are taken for different.

    Returns:
        The source without second copies; if copies differ, with the fact that it is untied, and a note.

    Raises:
        MismatchError: the user states that they are tied, and they differ.
    """
    if bound.config_facts.facts.get(_TIED) is not True:
        return bound
    for name, parameter in bound.family.parameters.items():
        there = bound.present["params"]
        if parameter.tie and {name, parameter.tie} <= there:
            bound = _settled_tie(bound, name, parameter.tie, source)
    return bound


def _settled_tie(bound: BoundFamily, name: str, tie: str, source: Checkpoint | None) -> BoundFamily:
    copies = [  # the tensors of the parameter and of its moments, as if they held the one that it is tied to
        StoredTensor(
            one.spec,
            tuple([replace(piece, parameter=(piece.parameter[0], tie)) for piece in one.pieces]),
        )
        for one in bound.stored.values()
        if any(piece.parameter[1] == name for piece in one.pieces)
    ]
    if source is not None and all(_is_copy(one, bound.pieces, source) for one in copies):
        paths = {one.spec.path for one in copies}
        reason = copy_reason(bound.holding(tie).spec)
        return replace(
            bound,
            stored={path: one for path, one in bound.stored.items() if path not in paths},
            present={slot: names - {name} for slot, names in bound.present.items()},
            copies={**bound.copies, **dict.fromkeys(paths, tie)},
            ignored=(*bound.ignored, *(IgnoredEntry(path, f"tied {name}", reason) for path in sorted(paths))),
        )
    first, second = bound.holding(tie).spec.name, bound.holding(name).spec.name
    if _TIED in bound.config_facts.stated:
        raise MismatchError(
            f"{_TIED}=true is stated, but {second} differs from {first}",
            cure=Cure("leave it out, or state {}", Argument("set", f"{_TIED}=false")),
        )
    note = f"{bound.config_facts.source} ties {second} to {first}, but the two differ: the target is untied, with both"
    config_facts = replace(bound.config_facts, facts={**bound.config_facts.facts, _TIED: False})
    return replace(
        bound, config_facts=config_facts, notes=(*bound.notes, *([note] if source is not None else []))
    )


def _is_copy(copy: StoredTensor, pieces: Pieces, source: Checkpoint) -> bool:
    """Whether a tensor holds, byte for byte, the values of the parameters that its pieces name."""
    held = [spec for piece in copy.pieces for spec, _piece in pieces.held.get(piece.parameter, {}).values()]
    if not held or any(spec.dtype != copy.spec.dtype for spec in held):
        return False
    import numpy as np

    extents = source.reader.access(copy.spec).extents
    if extents is not None and [extents] == [source.reader.access(spec).extents for spec in held]:
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
