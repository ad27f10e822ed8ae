"""verified: the verification that a workflow makes: its outcome goes to the ledger, and what does not pass is an error.

The error's cure is the command that makes the checkpoint again as it was made, where its receipt tells.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from wherry.converter.command import command
from wherry.errors import IncompleteError, MismatchError, NotRecordedError, WherryError
from wherry.ledger.recording import RECORDED, record_outcome
from wherry.storage.sidecar import read_sidecar
from wherry.storage.stores import locate
from wherry.verifier.verify import verify

if TYPE_CHECKING:
    from wherry.storage.sidecar import Sidecar
    from wherry.verifier.verify import Verification

_COMPARING = ("roundtrip", "logits")  # levels that need the source


def comparison(level: str, source: str, family_file: str | None) -> dict[str, Any]:
    """The arguments of `verified` after a conversion: the level, and what it needs to know of the source.

    Args:
        level: one of `wherry.verifier.verify.LEVELS`.
        source: URI of what was converted.
        family_file: the file that declared the family, where one did.
    """
    return {"level": level} | ({"against": source, "family_file": family_file} if level in _COMPARING else {})


def verified(uri: str, **how: Any) -> tuple[Verification, str]:
    """Verify a checkpoint and record the outcome.

    Args:
        uri: the checkpoint.
        how: further arguments of `wherry.verify`.

    Returns:
        The outcome, and whether the ledger has it, in words.

    Raises:
        NotRecordedError: it passed, but the ledger cannot be used; `result` is the outcome.
        IncompleteError: something is missing.
        MismatchError: something is not what was recorded, or not what the source holds.
    """
    outcome = verify(uri, **how)
    sidecar = read_sidecar(locate(outcome.uri))
    try:
        if sidecar is not None:
            record_outcome(sidecar.checkpoint, outcome.to_json())
    except NotRecordedError as error:
        error.result = outcome
        raise
    finally:
        if not outcome.ok:
            raise _failure(outcome, sidecar)
    return outcome, "not recorded: it has no sidecar" if sidecar is None else RECORDED


def _failure(outcome: Verification, sidecar: Sidecar | None) -> WherryError:
    kind = IncompleteError if outcome.verdict == "incomplete" else MismatchError
    first = outcome.failed[0]
    more = f"; {len(outcome.failed) - 1} more" if len(outcome.failed) > 1 else ""
    return kind(
        f"verification failed: {first.reason}{more}",
        uri=outcome.uri,
        path=first.path,
        cure=_cure(outcome.uri, sidecar),
        stage="verify",
    )


def _cure(uri: str, sidecar: Sidecar | None) -> str:
    if sidecar is None or sidecar.receipt is None:
        return "restore the checkpoint"
    try:
        again = command(sidecar.receipt, target=uri)
    except WherryError as error:
        return f"restore the checkpoint, or {error.cure}"
    return f"move it away ({shlex.quote(uri)}) and convert again: {again}"
