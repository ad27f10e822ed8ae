"""address: where `wherry lineage serve` shows a checkpoint, for links on other pages."""

from __future__ import annotations

from urllib.parse import quote

PORT = 8047  # of the loopback interface, unless --port says another


def lineage_url(checkpoint_digest: str) -> str:
    """URL of the lineage page of a checkpoint; it opens where `wherry lineage serve` runs."""
    digest = quote(checkpoint_digest, safe=":")
    return f"http://127.0.0.1:{PORT}/lineage/{digest}#{digest}"
