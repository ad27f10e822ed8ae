"""Entries of the catalog: each checkpoint at each place, their listing, and the sums of their sizes.

Only the ledger is read, no storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, get_args

from wherry.core.lazy_dataclass import dataclass
from wherry.core.steps import step_number
from wherry.errors import UsageError
from wherry.formats.registry import find_format
from wherry.ledger.resolve import known_digest
from wherry.ledger.statements import stored_time
from wherry.store.local_store import locate

if TYPE_CHECKING:
    from wherry.config.schema import Route


_LEVELS = {"digest": "read-back"}  # level of the comparison in a conversion → its name in the list


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A checkpoint at one place.

    Attributes:
        uri: the place.
        checkpoint_digest, weights_digest: its identity, and that of its parameters.
        format: its format.
        family: its model family; empty if no conversion between layouts has stated it.
        kind: `params`, `train-state` or `other`.
        step: training step; None if it is unknown.
        tensors, parameters, nbytes: number of tensors, of their elements and of their bytes.
        versions: the model versions of its digest, such as `llama version 3`.
        verified: `level: verdict` of the last verification; `read-back: ok` if that was the reading of every byte
            when it was written, `store: ok` if the store's checksums were compared then. Empty without one.
        verified_at: when that was recorded (UTC); empty without one.
        seen: when it was last seen there (UTC).
        gone: when it was deleted there (UTC); None if it was not.
    """

    uri: str
    checkpoint_digest: str
    weights_digest: str
    format: str
    family: str
    kind: str
    step: int | None
    tensors: int
    parameters: int
    nbytes: int
    versions: tuple[str, ...]
    verified: str
    verified_at: str
    seen: str
    gone: str | None

    def to_json(self) -> dict[str, Any]:
        """One row of `ls --json`."""
        return asdict(self)


def entries() -> Iterator[CatalogEntry]:
    """Every checkpoint at every place that the ledger knows, deleted ones too.

    Raises:
        StorageError: the ledger cannot be read.
    """
    from wherry.ledger.nodes import every_digest, families_and_read_backs, nodes
    from wherry.ledger.record import open_ledger

    with open_ledger() as ledger:
        families, written = families_and_read_backs(ledger)
        known = nodes(ledger, every_digest(ledger))
    for node in known.values():
        digest = node.checkpoint_digest
        for place in node.places:
            read_back = written.get((digest, place.uri))
            last = read_back or node.verified
            names = _LEVELS if read_back else {}
            yield CatalogEntry(
                uri=place.uri,
                checkpoint_digest=digest,
                weights_digest=node.weights_digest,
                format=node.format,
                family=families.get(digest, ""),
                kind=node.kind,
                step=node.step,
                tensors=node.tensors,
                parameters=node.parameters,
                nbytes=node.nbytes,
                versions=tuple(str(row) for row in node.registrations),
                verified="" if last is None else f"{names.get(last.level, last.level)}: {last.verdict}",
                verified_at="" if last is None else last.time,
                seen=place.seen,
                gone=place.gone,
            )


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
    """Whether an entry is below a URI, or has the digest with this beginning."""
    if below is None:
        return lambda _entry: True
    digest = known_digest(below)
    if digest is not None:
        return lambda entry: entry.checkpoint_digest == digest
    root = locate(below).uri.rstrip("/")
    return lambda entry: f"{entry.uri}/".startswith(f"{root}/")


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
        from wherry.nightly.prune import prune

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
    """The URI of the run: the folder of the step folder that holds the checkpoint, or the folder that it is in."""
    place = locate(entry.uri)
    for step in (place, place.parent):
        if entry.step is not None and step_number(step.name, any_prefix=True) == entry.step:
            return step.parent.uri
    return place.parent.uri


def _age(days: int) -> str:
    return next((text for limit, text in _AGES if days < limit), "over a year")
