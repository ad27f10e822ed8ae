"""facts: what a model version tells besides its sidecar: what the ledger knows, and which run registers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.ledger.nodes import nodes, verifications

if TYPE_CHECKING:
    from wherry.ledger.database import Ledger
    from wherry.storage.sidecar import Sidecar


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """Facts about a version at the moment when it is registered.

    Attributes:
        verified: the last verification, for people: level, verdict and time; empty if none is recorded.
        max_error: largest error of a value; 0 after a lossless conversion, None if it is unknown.
        run_page: URL of the workflow run that registers it; empty if there is none.
    """

    verified: str = ""
    max_error: float | None = None
    run_page: str = ""


def facts_of(ledger: Ledger, sidecar: Sidecar, run_page: str = "") -> VersionFacts:
    """The facts that ledger and sidecar have about a checkpoint.

    Raises:
        StorageError: the ledger cannot be read.
    """
    return VersionFacts(_last_verification(ledger, sidecar), _max_error(ledger, sidecar), run_page)


def verified_words(level: str, verdict: str, time: str) -> str:
    """A verification in one line, such as `digest: ok, 2026-11-23 21:04 UTC`; the time is in UTC."""
    return f"{level}: {verdict}, {time[:16].replace('T', ' ')} UTC"


def _last_verification(ledger: Ledger, sidecar: Sidecar) -> str:
    """The last recorded verification, else the one before the commit."""
    digest = sidecar.checkpoint.checkpoint_digest
    node = nodes(ledger, [digest]).get(digest)
    if node is not None and node.verified is not None:
        return verified_words(node.verified.level, node.verified.verdict, node.verified.time)
    receipt = sidecar.receipt
    proof = receipt.verification if receipt else None
    if receipt is None or not proof or not proof.get("ok"):
        return ""
    return verified_words(str(proof["level"]), "ok", receipt.finished)


def _max_error(ledger: Ledger, sidecar: Sidecar) -> float | None:
    """Zero for a lossless conversion; else what a roundtrip to its source has measured."""
    receipt = sidecar.receipt
    if receipt is None:
        return None
    if receipt.lossless:
        return 0.0
    roundtrip = verifications(ledger, sidecar.checkpoint.checkpoint_digest).get("roundtrip", {})
    measured = roundtrip.get("lossy") if roundtrip.get("against") == receipt.source.uri else None
    return None if measured is None else float(measured["error"])
