"""address: where the pages of `wherry lineage serve` are, for links on other pages."""

from __future__ import annotations

from urllib.parse import quote

from wherry.config.settings import pages_url

PORT = 8047  # unless --port says another


def lineage_url(checkpoint_digest: str) -> str | None:
    """URL of the lineage page of a checkpoint; None if no setting says where others reach the pages.

    Raises:
        UsageError: the setting is no address.
    """
    base, digest = pages_url(), quote(checkpoint_digest, safe=":")
    return f"{base}/lineage/{digest}#{digest}" if base else None
