"""Existing targets: decides whether an existing target is already the result of the same conversion.

It is if the sidecar has the same plan digest, the source has the same fingerprint as then, and the target's files still
have the fingerprint with which they were committed. Then a rerun does nothing. Any other existing target is never
touched.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from wherry.core.request import SourceRequest
from wherry.errors import TargetExistsError, UsageError, WherryError
from wherry.formats.checkpoint import Checkpoint, fingerprint, open_source, present_fingerprint
from wherry.storage.sidecar import Sidecar, read_sidecar
from wherry.target.hub_repository import CARD, is_blank

if TYPE_CHECKING:
    from wherry.core.receipt import Receipt
    from wherry.storage.location import Location


class AnyPlan(Protocol):
    """The plan of a conversion or of a rewrite."""

    @property
    def digest(self) -> str:
        """The identity of the plan: the same for the same request."""
        ...


CHOICES = ("fail", "skip", "resume")


def existing_result(
    checkpoint: Checkpoint, plan: AnyPlan, target: Location, committed: Location, if_exists: str | None
) -> Receipt | None:
    """The receipt of an existing target, marked `already`; None if the target does not exist.

    Args:
        checkpoint: the opened source.
        plan: the plan.
        target: the location of the checkpoint.
        committed: the location that would be committed in one step: the target, or the step folder around it.
        if_exists: `skip` accepts any target that wherry wrote, `resume` (the default) the result of this same
            conversion, `fail` nothing.

    Raises:
        TargetExistsError: the target is something else.
        UsageError: `if_exists` is invalid.
    """
    if if_exists not in (None, *CHOICES):
        raise UsageError(f"invalid value for if_exists: {if_exists!r}", cure=f"choose {' or '.join(CHOICES)}")
    if not committed.exists() or is_blank(committed):
        return None
    try:
        sidecar = read_sidecar(target)
    except WherryError:
        sidecar = None  # an unreadable sidecar proves nothing, so the target must not be touched
    receipt = sidecar.receipt if sidecar else None
    accepted = if_exists == "skip" or (if_exists != "fail" and _is_result(sidecar, checkpoint, plan, target))
    if receipt is not None and accepted:
        return replace(receipt, already=True)
    raise TargetExistsError(
        "target already exists and is not the result of this conversion",
        uri=committed.uri,
        cure="choose another target, or remove this one",
    )


def _is_result(sidecar: Sidecar | None, checkpoint: Checkpoint, plan: AnyPlan, target: Location) -> bool:
    receipt = sidecar.receipt if sidecar else None
    if sidecar is None or receipt is None or receipt.plan_digest != plan.digest:
        return False
    sources = [part.checkpoint for part in checkpoint.original.parts] or [checkpoint]
    if [one.fingerprint for one in receipt.sources] != [present_fingerprint(one) for one in sources]:
        return False
    try:
        which = SourceRequest(target.uri, sidecar.checkpoint.format, allow_opaque=tuple(target.opaque))
        with open_source(which) as present:
            can = target.store.capabilities
            # Without the page of a repository that wherry has added to the target.
            own = (
                CARD
                if can.one_commit and CARD not in {one.name for one in sidecar.manifest.companions}
                else ""
            )
            members = [entry for entry in present.reader.members() if entry.name != own]
            mark = fingerprint(members, target, marks=can.local)
    except WherryError:
        return False  # damaged since then: not a complete result, and not repaired here
    return mark == sidecar.checkpoint.fingerprint
