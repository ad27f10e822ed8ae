"""listing: the checkpoints of the ledger that match some filters; it asks only the ledger, no storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.catalog.entries import entries
from wherry.formats.registry import find_format
from wherry.ledger.resolve import known_digest
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.catalog.entries import CatalogEntry


def listing(
    below: str | None = None,
    *,
    format: str | None = None,
    family: str | None = None,
    model: str | None = None,
    deleted: bool = False,
) -> list[CatalogEntry]:
    """The checkpoints that the ledger knows, sorted by URI; `wherry ls`.

    Args:
        below: only those at or below this URI, or whose digest begins so.
        format: only those of this format, a name or alias.
        family: only those of this model family.
        model: only versions of this registered model.
        deleted: also those whose deletion is recorded.

    Raises:
        UsageError: the format is unknown.
        AmbiguousError: several checkpoints have a digest with this beginning.
        StorageError: the ledger cannot be read.
    """
    name = None if format is None else find_format(format).name
    is_meant = _filter_below(below)
    found = (
        entry
        for entry in entries()
        if (deleted or entry.gone is None)
        and (name is None or entry.format == name)
        and (family is None or entry.family == family)
        and is_meant(entry)
        and (model is None or any(version.split(" ")[0] == model for version in entry.versions))
    )
    return sorted(found, key=lambda entry: (entry.uri, entry.seen))


def _filter_below(below: str | None) -> Callable[[CatalogEntry], bool]:
    """Whether an entry is below a URI, or has the digest that begins so."""
    if below is None:
        return lambda _entry: True
    digest = known_digest(below)
    if digest is not None:
        return lambda entry: entry.checkpoint_digest == digest
    root = locate(below).uri.rstrip("/")
    return lambda entry: f"{entry.uri}/".startswith(f"{root}/")
