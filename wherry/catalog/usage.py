"""usage: bytes of the checkpoints in the ledger, summed by run, format or age, and what `prune` would free of them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, get_args

from wherry.catalog.listing import listing
from wherry.core.steps import step_number
from wherry.errors import UsageError
from wherry.ledger.statements import stored_time
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from wherry.catalog.entries import CatalogEntry
    from wherry.config.schema import Route

Grouping = Literal["run", "format", "family", "age"]
_AGES = ((1, "up to a day"), (7, "up to a week"), (30, "up to 30 days"), (365, "up to a year"))


@dataclass(frozen=True, slots=True)
class Usage:
    """The checkpoints of one group.

    Attributes:
        group: the run's URI, the format, the family or the age.
        checkpoints: how many there are.
        nbytes: bytes of their tensors.
        prunable: bytes of those that `wherry prune` would remove.
    """

    group: str
    checkpoints: int
    nbytes: int
    prunable: int

    def to_json(self) -> dict[str, Any]:
        """One row of `du --json`."""
        return asdict(self)


def usage(
    below: str | None = None,
    *,
    by: Grouping = "run",
    routes: Iterable[Route] = (),
    now: datetime | None = None,
) -> list[Usage]:
    """Bytes of the checkpoints that the ledger knows, largest group first; `wherry du`.

    Args:
        below: only checkpoints at or below this URI.
        by: what the groups are. The age is that of the last sighting.
        routes: whose retention says what could be removed.
        now: the current time, for ages.

    Raises:
        UsageError: `by` is unknown.
        StorageError: the ledger or the model registry cannot be read.
    """
    if by not in get_args(Grouping):
        raise UsageError(f"cannot group by {by!r}", cure=f"choose one of: {', '.join(get_args(Grouping))}")
    moment = now or datetime.now(UTC)
    groups: Mapping[str, Callable[[CatalogEntry], str]] = {
        "run": run_of,
        "format": lambda entry: entry.format,
        "family": lambda entry: entry.family or "unknown",
        "age": lambda entry: _age((moment - stored_time(entry.seen)).days),
    }
    group, chosen, free = groups[by], tuple(routes), frozenset[str]()
    if chosen:
        from wherry.routes.prune import prune

        free = frozenset(one.uri for one in prune(chosen, dry_run=True).checkpoints if one.action == "remove")
    found: dict[str, list[CatalogEntry]] = defaultdict(list)
    for entry in listing(below):
        found[group(entry)].append(entry)
    rows = [
        Usage(
            name,
            len(entries),
            sum(entry.nbytes for entry in entries),
            sum(entry.nbytes for entry in entries if entry.uri in free),
        )
        for name, entries in found.items()
    ]
    return sorted(rows, key=lambda row: (-row.nbytes, row.group))


def run_of(entry: CatalogEntry) -> str:
    """The URI of the run: the folder of the step folder that holds the checkpoint, or the folder that it lies in."""
    place = locate(entry.uri)
    for step in (place, place.parent):
        if entry.step is not None and step_number(step.name, any_prefix=True) == entry.step:
            return step.parent.uri
    return place.parent.uri


def _age(days: int) -> str:
    return next((text for limit, text in _AGES if days < limit), "over a year")
