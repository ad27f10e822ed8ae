"""prune: remove converted checkpoints that the retention of their route does not keep; a dry run by default.

Only checkpoints that a route made, by the product notes of the ledger, are removed: never a source, never foreign
files. These are always kept: a model version with an alias, or in a registry that cannot be queried; the only copy,
that is, one whose source is missing or changed and whose weights exist nowhere else; a checkpoint that a running job
reads or writes. A removal hides the checkpoint, marks it in the registry, records it in the ledger, and then deletes
it. All checkpoints are examined before the first removal, so that two copies never justify each other's removal.

The rules of retention (`superfluous`) are a pure function and count within one run and one target format. A checkpoint
is kept if any rule keeps it: among the newest steps, among the best by a metric, younger than N days. Without rules
everything is kept. With `keep_best`, a checkpoint whose metric is unknown is kept, because it might be one of the best.

The registry is queried once, and only if there is one: configured, the embedded store's file, or a registration in the
ledger. A version in another registry than the configured one cannot be queried, so its checkpoint is kept.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from wherry.config.settings import configured_value, mlflow_registry_uri, mlflow_tracking_uri
from wherry.core.lazy_dataclass import dataclass
from wherry.core.request import SourceRequest
from wherry.core.services import service
from wherry.cures import Command, Cure
from wherry.errors import TargetInUseError, UsageError, WherryError
from wherry.formats.checkpoint import open_source, present_fingerprint
from wherry.ledger.nodes import LineageNode
from wherry.ledger.replay import ConversionRecord, ProductNote
from wherry.ledger.resolve import DIGEST_TAG
from wherry.ledger.statements import stored_time
from wherry.nightly.removal import removing, strangers
from wherry.store.home import sqlite_file, user_name, without_secrets
from wherry.store.local_store import locate
from wherry.target.clean import clean
from wherry.target.janitor import uris_in_use
from wherry.target.leftovers import CleanReport

if TYPE_CHECKING:
    from wherry.config.schema import Retention, Route
    from wherry.ledger.record import Ledger


@dataclass(frozen=True, slots=True)
class PrunedCheckpoint:
    """One checkpoint that a route made, with the outcome of pruning.

    Attributes:
        uri: its URI.
        route: the route that made it.
        checkpoint_digest: its identity.
        nbytes: bytes of its tensors.
        action: `keep`, `remove` (in a dry run), `removed`, or `failed`.
        reason: why.
    """

    uri: str
    route: str
    checkpoint_digest: str
    nbytes: int
    action: Literal["keep", "remove", "removed", "failed"]
    reason: str


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Result of `prune`: the checkpoints, and the staging areas that killed conversions left."""

    checkpoints: tuple[PrunedCheckpoint, ...]
    staging: tuple[CleanReport, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that were removed, or would be."""
        return sum(one.nbytes for one in self.checkpoints if one.action in ("remove", "removed"))


@dataclass(frozen=True, slots=True)
class _Product:
    """An existing target that a route made: the note, the conversion, the checkpoint, and when it was recorded."""

    note: ProductNote
    done: ConversionRecord
    node: LineageNode
    recorded: str


def prune(routes: Iterable[Route], *, dry_run: bool = True, now: datetime | None = None) -> PruneReport:
    """Remove the targets that the retention of these routes does not keep.

    Args:
        routes: the routes.
        dry_run: only report what would be removed.
        now: the current time, for `keep_days`.

    Raises:
        StorageError: the ledger or the registry cannot be queried, or the clock of this machine does not fit
            the ledger; nothing was removed.
        MissingExtraError: there is a registry and mlflow is not installed.
    """
    from wherry.ledger.check import require_agreement
    from wherry.ledger.record import open_ledger

    chosen = tuple(routes)
    with open_ledger() as ledger:
        if now is None:
            require_agreement(ledger)
        products = _products(ledger, chosen)
        registry = ask(one.node for one in products)
        ruled: dict[str, str | None] = {}
        for route in chosen:
            made = (
                RetentionEntry(
                    p.done.target_uri, p.note.run, p.done.format, p.note.step, p.recorded, p.note.score,
                    p.done.statement,
                )
                for p in products
                if p.note.route == route.name
            )  # fmt: skip
            ruled |= superfluous(route.retention, made, now)
        rows = [
            _row(one, "keep", reason) if reason else _remove(ledger, one, registry, dry_run=dry_run)
            for one, reason in _judge_products(ledger, products, registry, ruled)
        ]
    return PruneReport(tuple(rows), tuple(_staging(chosen, dry_run=dry_run)))


def _products(ledger: Ledger, routes: Iterable[Route]) -> list[_Product]:
    """The existing targets that the routes made, route by route."""
    from wherry.ledger.nodes import nodes, present
    from wherry.ledger.statements import statements_of

    state = present(ledger)
    there = [
        (note, done)
        for route in dict.fromkeys(one.name for one in routes)
        for (name, uri), note in state.products.items()
        if name == route
        and (done := state.by_target.get(uri)) is not None
        and done.gone is None
        and locate(uri).exists()
    ]
    known = nodes(ledger, {done.target_digest for _note, done in there})
    made = statements_of(ledger, {done.statement for _note, done in there})
    times = {statement.seq: statement.storage_time for statement in made}
    return [_Product(note, done, known[done.target_digest], times[done.statement]) for note, done in there]


def _judge_products(
    ledger: Ledger, made: list[_Product], registry: RegistryVersions, ruled: Mapping[str, str | None]
) -> list[tuple[_Product, str]]:
    """Each target with the reason why it is kept; an empty reason means removal."""
    going = {uri for uri, reason in ruled.items() if reason is None}
    read = uris_in_use(sorted(going))
    rows: list[tuple[_Product, str]] = []
    for one in made:
        uri = one.done.target_uri
        reason = ruled[uri] or _protection(ledger, one, registry, going, read)
        rows.append((one, reason))
        if reason:
            going.discard(uri)
    return rows


def _protection(
    ledger: Ledger, one: _Product, registry: RegistryVersions, going: set[str], read: set[str]
) -> str:
    """Why a target is kept regardless of the rules; empty where it is not."""
    bound = registry.holds(one.node)
    if bound:
        return bound
    if one.done.target_uri in read:
        return "a running job reads it"
    mark = next((place.fingerprint for place in one.node.places if place.uri == one.done.target_uri), None)
    if not _is_unchanged(one.done.target_uri, one.done.format, mark):
        return "its files have changed since wherry wrote them"
    strange = strangers(one.note.committed, one.done.target_uri, one.done.format)
    if strange:
        return f"its folder also holds {strange[0]}, which is not part of it"
    if _is_unchanged(one.done.source_uri, None, one.done.source_fingerprint):
        return ""
    return (
        ""
        if _lies_elsewhere(ledger, one.node, going)
        else "it is the only copy: its source is missing or changed"
    )


def _is_unchanged(uri: str, format: str | None, mark: str | None) -> bool:
    """Whether the files of a checkpoint are those that the ledger has recorded."""
    try:
        with open_source(SourceRequest(uri, format)) as opened:
            local = locate(uri).store.capabilities.local
            return mark is not None and present_fingerprint(opened, marks=local or format is None) == mark
    except WherryError:
        return False  # missing or damaged: in both cases not a copy to rely on


def _lies_elsewhere(ledger: Ledger, node: LineageNode, going: set[str]) -> bool:
    """Whether an intact copy of the same weights exists at another place that is not removed."""
    from wherry.ledger.nodes import digests_starting, nodes

    for other in nodes(ledger, digests_starting(ledger, node.weights_digest)).values():
        for place in other.places:
            stays = place.gone is None and place.uri not in going
            if stays and _is_unchanged(place.uri, other.format, place.fingerprint):
                return True
    return False


def _remove(ledger: Ledger, one: _Product, registry: RegistryVersions, *, dry_run: bool) -> PrunedCheckpoint:
    """Carry out one removal; a failure is reported and does not stop the others."""
    from wherry.ledger.record import record_event

    reason = "no rule of its route keeps it"
    if dry_run:
        return _row(one, "remove", reason)
    who, uri = user_name(), one.done.target_uri
    body = {
        "checkpoint_digest": one.done.target_digest,
        "uri": uri,
        "reason": f"{one.note.route}: {reason}",
    }
    try:
        with removing(one.note.committed, uri, one.done.format):
            _require_unregistered(ledger, one.node)
            with registry.marked_deleted(one.node, uri, by=who, reason=reason):
                record_event(ledger, "deletion", None, {**body, "by": who})
    except (UsageError, TargetInUseError) as error:  # an alias was set, or a job started, meanwhile
        return _row(one, "keep", error.what)
    except WherryError as error:
        return _row(one, "failed", error.what)
    return _row(one, "removed", reason)


def _require_unregistered(ledger: Ledger, node: LineageNode) -> None:
    """Refuse a checkpoint that was registered after the registry was queried, by its claim in the ledger."""
    from wherry.ledger.nodes import referenced_nodes

    if (
        referenced_nodes(ledger, {node.checkpoint_digest})[node.checkpoint_digest].registrations
        != node.registrations
    ):
        raise TargetInUseError(
            "it was registered meanwhile", cure=Cure("run {} again", Command("prune")), retryable=True
        )


def _row(one: _Product, action: Any, reason: str) -> PrunedCheckpoint:
    return PrunedCheckpoint(
        one.done.target_uri, one.note.route, one.done.target_digest, one.node.nbytes, action, reason
    )


def _staging(routes: Iterable[Route], *, dry_run: bool) -> list[CleanReport]:
    """Stale staging areas below the fixed parts of the targets' URIs."""
    folders: set[str] = set()
    for route in routes:
        for rule in route.targets:
            fixed = locate(rule.uri.partition("{")[0].rpartition("/")[0] or "/")
            if fixed.store.capabilities.local and fixed.path != "/" and fixed.exists():
                folders.add(fixed.path)
    outer = {
        one for one in folders if not any(one != other and one.startswith(f"{other}/") for other in folders)
    }
    return [found for folder in sorted(outer) for found in clean(folder, dry_run=dry_run)]


@dataclass(frozen=True, slots=True)
class RetentionEntry:
    """A checkpoint that a route made, as input of the retention rules.

    Attributes:
        uri: its URI.
        run: run of its source.
        format: its format.
        step: step of its source, where known.
        time: when the ledger recorded it, by the clock of the ledger's storage; UTC, ISO 8601.
        score: metric of its source, where known.
        statement: number of the statement that recorded it, which orders entries of one step.
    """

    uri: str
    run: str
    format: str
    step: int | None
    time: str
    score: float | None = None
    statement: int = 0


def superfluous(
    rules: Retention, made: Iterable[RetentionEntry], now: datetime | None = None
) -> dict[str, str | None]:
    """URI → why a rule keeps it, or None where no rule does.

    Args:
        rules: retention of the route.
        made: the existing checkpoints that the route made.
        now: the current time, for `keep_days`.
    """
    moment = now or datetime.now(UTC)
    groups: dict[tuple[str, str], list[RetentionEntry]] = defaultdict(list)
    for one in made:
        groups[one.run, one.format].append(one)
    kept: dict[str, str | None] = {}
    for group in groups.values():
        kept |= _of_group(rules, group, moment)
    return kept


def _of_group(rules: Retention, group: list[RetentionEntry], now: datetime) -> Mapping[str, str | None]:
    reasons: dict[str, str | None] = {one.uri: None for one in group}
    if rules.states_nothing:
        return {one.uri: "the route states no retention" for one in group}
    newest = sorted(
        group, key=lambda one: (-1 if one.step is None else one.step, one.statement), reverse=True
    )
    if rules.keep_days is not None:
        since = now - timedelta(days=rules.keep_days)
        young = (one for one in group if stored_time(one.time) >= since)
        reasons |= {one.uri: f"converted within {rules.keep_days:g} days" for one in young}
    if rules.keep_best is not None:
        scored = [(one.score, one) for one in newest if one.score is not None]
        ranked = sorted(scored, key=lambda pair: pair[0], reverse=rules.highest)
        reasons |= {
            one.uri: f"one of the best {rules.keep_best} by {rules.metric}, {value:g}"
            for value, one in ranked[: rules.keep_best]
        }
        reasons |= {one.uri: f"its {rules.metric} is unknown" for one in newest if one.score is None}
    if rules.keep_last is not None:
        reasons |= {one.uri: f"one of the newest {rules.keep_last}" for one in newest[: rules.keep_last]}
    return reasons


@dataclass(frozen=True, slots=True)
class RegistryVersions:
    """The versions of the configured registry, by checkpoint digest; empty where there is no registry."""

    uri: str
    versions: Mapping[str, list[Any]] = field(default_factory=dict[str, "list[Any]"])

    def holds(self, node: LineageNode) -> str:
        """Why a checkpoint is kept for the registry; empty where it is not."""
        for row in node.registrations:
            if row.state == "pending":
                return f"a registration as {row.name} is in progress"
            if row.registry != self.uri:
                return (
                    f"it is registered as {row.name} in {row.registry}, which is not the configured registry"
                )
        for one in self.versions.get(node.checkpoint_digest, []):
            if one.aliases:
                return f"{one.name} version {one.version} has the alias {', '.join(sorted(one.aliases))}"
        return ""

    @contextmanager
    def marked_deleted(self, node: LineageNode, uri: str, *, by: str, reason: str) -> Generator[None]:
        """Mark every version of a checkpoint as deleted, unless another copy exists.

        The marks are removed again where the block fails, or where one of the versions cannot be marked.

        Raises:
            UsageError: an alias was set on one meanwhile.
            StorageError: the registry cannot be reached.
        """
        elsewhere = any(place.gone is None and place.uri != uri for place in node.places)
        versions = [] if elsewhere else self.versions.get(node.checkpoint_digest, [])
        stores = {"tracking_uri": mlflow_tracking_uri(), "registry_uri": mlflow_registry_uri()}
        marked: list[Any] = []
        try:
            for one in versions:
                service("mlflow").mark_deleted(one.name, one.version, by=by, reason=reason, **stores)
                marked.append(one)
            yield
        except BaseException as error:
            for one in marked:
                try:
                    service("mlflow").unmark_deleted(one.name, one.version, **stores)
                except WherryError as failure:  # the first error is raised, with this one as a note
                    error.add_note(f"{one.name} version {one.version} is still marked as deleted: {failure}")
            raise


def ask(nodes: Iterable[LineageNode]) -> RegistryVersions:
    """The current versions of the registry.

    Raises:
        StorageError: it cannot be reached.
        MissingExtraError: mlflow is not installed.
    """
    uri = mlflow_registry_uri()
    if not any(node.registrations for node in nodes) and not _is_there(uri):
        return RegistryVersions(without_secrets(uri))
    versions: dict[str, list[Any]] = {}
    for one in service("mlflow").registered_versions(mlflow_tracking_uri(), uri):
        versions.setdefault(one.tags[DIGEST_TAG], []).append(one)
    return RegistryVersions(without_secrets(uri), versions)


def _is_there(uri: str) -> bool:
    """Whether there is a registry: it is configured, or the embedded store exists."""
    file = sqlite_file(uri)
    if file is not None:
        return file.is_file()
    variables = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
    stated = any(os.environ.get(name) for name in variables)
    return stated or any(configured_value(f"mlflow.{name}") for name in ("tracking_uri", "registry_uri"))
