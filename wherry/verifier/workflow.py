"""workflow: verification as a step of a workflow: the outcome is recorded, and an error says what to do.

A checkpoint about which nothing is recorded fails here too: a workflow goes on only with what was proved.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from wherry.converter.command import command, in_place_of
from wherry.core.request import SourceRequest
from wherry.errors import IncompleteError, MismatchError, NotFoundError, WherryError
from wherry.ledger.replay import READ_ONLY
from wherry.storage.sidecar import readable_sidecar
from wherry.storage.stores import locate
from wherry.verifier.verify import record_verification, verify_source

if TYPE_CHECKING:
    from wherry.verifier.verify import Verification

_COMPARING = ("roundtrip", "logits")  # levels that need the source


def comparison(level: str, source: str, below: str | None, family_file: str | None) -> dict[str, Any]:
    """The arguments of `verify_and_record` after a conversion: the level, and its data about the source.

    Args:
        level: one of `wherry.verifier.verify.LEVELS`.
        source: URI of the source of the conversion.
        below: a folder that the source must not leave; see `SourceRequest`.
        family_file: the file that declared the family, if one did.
    """
    about = {"against": source, "against_below": below, "family_file": family_file}
    return {"level": level} | (about if level in _COMPARING else {})


def verify_and_record(uri: str, *, below: str | None = None, **how: Any) -> tuple[Verification, str]:
    """Verify a checkpoint and record the outcome.

    Args:
        uri: the checkpoint.
        below: a folder that it must not leave; see `SourceRequest`.
        how: further arguments of `wherry.verify`.

    Returns:
        The outcome, and whether it was recorded, as text.

    Raises:
        NotRecordedError: it passed, but the ledger cannot be used; `result` is the outcome.
        NotFoundError: nothing is recorded that it could be compared with.
        IncompleteError: something is missing.
        MismatchError: something differs from the record, or from the source.
    """
    outcome = verify_source(SourceRequest(uri, below=below), **how)
    if outcome.verdict == READ_ONLY:
        raise unproved_error(outcome)
    done = record_verification(outcome)
    if not outcome.ok:
        raise failure_of(outcome, cure=_cure(outcome.uri))
    return outcome, done.lineage


def unproved_error(outcome: Verification) -> NotFoundError:
    """The error for a checkpoint that was read, but about which nothing is recorded."""
    where = shlex.quote(outcome.uri)
    return NotFoundError(
        "no digests are recorded for this checkpoint, so reading it proves nothing",
        uri=outcome.uri,
        cure=f"record its digests first: `wherry inspect --digest --write {where}`",
        stage="verify",
    )


def failure_of(
    outcome: Verification, *, cure: str, what: str = "verification failed", stage: str = "verify"
) -> WherryError:
    """The error for an outcome that did not pass.

    Args:
        outcome: the outcome, with at least one failure.
        cure: what to do.
        what: the beginning of the message.
        stage: the step of a workflow that failed.
    """
    kind = IncompleteError if outcome.verdict == "incomplete" else MismatchError
    first = outcome.failed[0]
    more = f"; {len(outcome.failed) - 1} more" if len(outcome.failed) > 1 else ""
    return kind(f"{what}: {first.reason}{more}", uri=outcome.uri, path=first.path, cure=cure, stage=stage)


def _cure(uri: str) -> str:
    """What makes the checkpoint again; nothing does if it was changed in place."""
    try:
        sidecar = readable_sidecar(locate(uri))
        receipt = None if sidecar is None else sidecar.receipt
        if receipt is None or receipt.source.uri == uri:
            return "restore the checkpoint"
        return in_place_of(uri, command(receipt, target=uri))
    except WherryError as error:
        return f"restore the checkpoint, or {error.cure}" if error.cure else "restore the checkpoint"
