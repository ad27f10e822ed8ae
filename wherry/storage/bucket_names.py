"""stores: the name of the store behind a URI, under which conversions at a time are counted over all flows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def store_of(uri: str) -> str:
    """`file` for local paths, else protocol and bucket: `gs-models`."""
    protocol, separator, rest = uri.partition("://")
    if not separator or protocol == "file":
        return "file"
    return f"{'gs' if protocol == 'gcs' else protocol}-{rest.partition('/')[0]}"


def limits_of(uris: Iterable[str], limited: Collection[str]) -> list[str]:
    """The stores of these URIs that have a limit, each once."""
    return sorted({store for uri in uris if (store := store_of(uri)) in limited})
