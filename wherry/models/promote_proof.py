"""The proof before a promotion: that what lies there is what was registered, and what the policy's gates ask about.

A sidecar can be replaced together with the bytes. So the chain begins at the registry: its digest must be what the
manifest hashes to, and the manifest's digests what the bytes hash to. Companion files count like tensors, and one that
was added counts too: a tokenizer that nobody recorded changes what the model does as surely as a swapped one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.core.services import service
from wherry.errors import IncompleteError, MismatchError, NotRecordedError
from wherry.formats.checkpoint import open_checkpoint
from wherry.ledger.recording import record_outcome
from wherry.ledger.replay import passed
from wherry.ledger.resolve import Resolved, proved_digest
from wherry.storage.sidecar import read_sidecar, unrecorded
from wherry.storage.stores import locate
from wherry.verifier.verify import verify

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherry.core.progress import OnProgress
    from wherry.ledger.record import Edge
    from wherry.models.policy import Finding, Policy
    from wherry.storage.sidecar import Sidecar


def proved(
    found: Resolved,
    policy: Policy,
    level: str,
    approver: str | None,
    memory: str | int,
    progress: OnProgress | None,
) -> tuple[Sidecar, tuple[Finding, ...]]:
    """Read a registered checkpoint again and judge it.

    Args:
        found: the version and its place.
        policy: the gates.
        level: of the verification.
        approver: the user whom the registry's server has authenticated.
        memory: budget for reading.
        progress: called a few times a second.

    Returns:
        Its sidecar, with the place where it lies now, and the findings.

    Raises:
        MismatchError: it is not what was registered, or a gate does not pass.
        IncompleteError: something is missing.
    """
    from wherry.models.policy import judge

    sidecar = read_sidecar(locate(found.uri))
    if sidecar is None or proved_digest(sidecar) != found.checkpoint_digest:
        raise MismatchError(
            "the manifest beside it is not the registered one",
            uri=found.uri,
            cure="restore the checkpoint, or register the one that is there now",
            stage="promote",
        )
    sidecar = replace(sidecar, checkpoint=replace(sidecar.checkpoint, uri=found.uri))
    _verify(found.uri, sidecar, level, memory, progress)
    findings = judge(policy, _facts(found.uri, sidecar, level, approver))
    refused = [one for one in findings if not one.passed]
    if refused:
        reasons = "; ".join(f"{one.gate}: asked for {one.asked}, found {one.found}" for one in refused)
        raise MismatchError(
            f"the policy does not admit it: {reasons}",
            uri=found.uri,
            cure="meet the gates that are named, or change the policy",
            stage="promote",
        )
    return sidecar, tuple(findings)


def _verify(uri: str, sidecar: Sidecar, level: str, memory: str | int, progress: OnProgress | None) -> None:
    """The outcome goes to the ledger, whatever it is."""
    outcome = verify(uri, level=level, memory=memory, progress=progress)
    try:
        record_outcome(sidecar.checkpoint, outcome.to_json())
    except NotRecordedError as error:
        if outcome.ok:  # what is not recorded is not promoted
            raise error.__cause__ or error from None
    if outcome.ok:
        return
    first = outcome.failed[0]
    more = f"; {len(outcome.failed) - 1} more" if len(outcome.failed) > 1 else ""
    kind = IncompleteError if outcome.verdict == "incomplete" else MismatchError
    raise kind(
        f"it is not what was registered: {first.reason}{more}",
        uri=uri,
        path=first.path,
        cure="restore the checkpoint, or convert it again",
        stage="promote",
    )


def _facts(uri: str, sidecar: Sidecar, level: str, approver: str | None) -> Any:
    from wherry.ledger.nodes import verifications
    from wherry.ledger.record import ancestors, open_ledger
    from wherry.models.policy import Facts

    digest = sidecar.checkpoint.checkpoint_digest
    with open_checkpoint(uri, format=sidecar.checkpoint.format) as checkpoint:
        extra = unrecorded(sidecar, checkpoint.manifest)
    with open_ledger() as ledger:
        outcomes, edges = verifications(ledger, digest), ancestors(ledger, digest)
    return Facts(
        uri=uri,
        sidecar=sidecar,
        level=level,
        extra=extra,
        verifications={name: outcome for name, outcome in outcomes.items() if passed(outcome)},
        lossless=_lossless(digest, sidecar, edges),
        earlier=all(edge.lossless for edge in edges if edge.target != digest),
        signed=lambda key: service("signing").require(uri, key),
        approver=approver,
    )


def _lossless(digest: str, sidecar: Sidecar, edges: Sequence[Edge]) -> bool | None:
    """Whether every conversion above was exact; None where its own conversion is not in the ledger."""
    receipt = sidecar.receipt
    if receipt is None:
        return True  # an original of which stock was taken: nothing was converted
    same = receipt.source.checkpoint_digest == digest
    if not receipt.lossless or not all(edge.lossless for edge in edges):
        return False
    return True if same or any(edge.target == digest for edge in edges) else None
