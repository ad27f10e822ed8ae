"""prune: remove what the routes made and their retention no longer keeps; a dry run unless it is told otherwise.

Only what a route itself had made, by the ledger's own notes, is ever removed: never a source, never what somebody
else put there. Kept whatever the rules say: a version that bears an alias, or that is registered where nobody can be
asked; the only copy, which is one whose source is gone or has changed and that lies nowhere else; what a running job
reads or writes. A removal is: out of reach, tombstone in the registry, tombstone in the ledger, deleted. All candidates
are judged before the first one goes, so that two copies are never each the other's reason to go.

The rules of retention are pure (`superfluous`) and count within one run and one target format. What any rule keeps is
kept: the newest steps, the best by a metric, what is younger than so many days. Without rules everything is kept. A
checkpoint whose metric is not known is kept where the best are counted, because it might be one of them.

The registry is asked once, and only where there is one: configured, or the embedded store's file, or a registration in
the ledger. A version in a registry that is not the configured one cannot be asked about, so its checkpoint is kept.
"""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from wherry.config.settings import configured, mlflow_registry_uri, mlflow_tracking_uri
from wherry.core.services import service
from wherry.errors import TargetInUseError, UsageError, WherryError
from wherry.formats.checkpoint import open_checkpoint, present_fingerprint
from wherry.ledger.resolve import DIGEST_TAG
from wherry.routes.removal import removing, strangers
from wherry.staging.clean import CleanReport, clean
from wherry.staging.in_use import used
from wherry.storage.home import sqlite_file, user_name, without_secrets
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from wherry.config.schema import Retention, Route
    from wherry.ledger.nodes import LineageNode
    from wherry.ledger.record import Ledger
    from wherry.ledger.replay import ConversionRecord, ProductNote


@dataclass(frozen=True, slots=True)
class PrunedCheckpoint:
    """One checkpoint that a route made, and what became of it.

    Attributes:
        uri: where it lies or lay.
        route: that had it made.
        checkpoint_digest: its identity.
        nbytes: of its tensors.
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
    """Outcome of `prune`: the checkpoints and the staging areas that killed conversions left."""

    checkpoints: tuple[PrunedCheckpoint, ...]
    staging: tuple[CleanReport, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of what was removed, or would be."""
        return sum(one.nbytes for one in self.checkpoints if one.action in ("remove", "removed"))


@dataclass(frozen=True, slots=True)
class _Product:
    """A target that a route had made and that is still there: the note, the conversion and the checkpoint."""

    note: ProductNote
    done: ConversionRecord
    node: LineageNode


def prune(routes: Iterable[Route], *, dry_run: bool = True, now: datetime | None = None) -> PruneReport:
    """Remove what the retention of these routes does not keep.

    Args:
        routes: whose targets are looked at.
        dry_run: only say what would be removed.
        now: the present moment, for `keep_days`.

    Raises:
        StorageError: the ledger or the registry cannot be asked: nothing is removed then.
        MissingExtraError: there is a registry and mlflow is not installed.
    """
    from wherry.ledger.record import open_ledger

    chosen = tuple(routes)
    with open_ledger() as ledger:
        products = _products(ledger, chosen)
        registry = ask(one.node for one in products)
        ruled: dict[str, str | None] = {}
        for route in chosen:
            ruled |= superfluous(
                route.retention, map(_seen, (p for p in products if p.note.route == route.name)), now
            )
        rows = [
            _row(one, "keep", reason) if reason else _remove(ledger, one, registry, dry_run=dry_run)
            for one, reason in _judged(ledger, products, registry, ruled)
        ]
    return PruneReport(tuple(rows), tuple(_staging(chosen, dry_run=dry_run)))


def _products(ledger: Ledger, routes: Iterable[Route]) -> list[_Product]:
    """What the routes had made and is still there, route by route."""
    from wherry.ledger.nodes import nodes, present

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
    return [_Product(note, done, known[done.target_digest]) for note, done in there]


def _seen(one: _Product) -> RetentionEntry:
    note, done = one.note, one.done
    return RetentionEntry(done.target_uri, note.run, done.format, note.step, done.time, note.score)


def _judged(
    ledger: Ledger, made: list[_Product], registry: RegistryVersions, ruled: Mapping[str, str | None]
) -> list[tuple[_Product, str]]:
    """Each with the reason why it is kept; empty where it goes."""
    going = {uri for uri, reason in ruled.items() if reason is None}
    read = used(sorted(going))
    rows: list[tuple[_Product, str]] = []
    for one in made:
        uri = one.done.target_uri
        reason = ruled[uri] or _protected(ledger, one, registry, going, read)
        rows.append((one, reason))
        if reason:
            going.discard(uri)
    return rows


def _protected(
    ledger: Ledger, one: _Product, registry: RegistryVersions, going: set[str], read: set[str]
) -> str:
    """Why it is kept against the rules; empty where it is not."""
    bound = registry.holds(one.node)
    if bound:
        return bound
    if one.done.target_uri in read:
        return "a running job reads it"
    if not _is_unchanged(one.done.target_uri, one.done.format, _place_mark(one.node, one.done.target_uri)):
        return "it is not what wherry wrote there"
    strange = strangers(one.note.committed, one.done.target_uri, one.done.format)
    if strange:
        return f"{strange[0]} is there too, which is not part of it"
    if _is_unchanged(one.done.source_uri, None, one.done.source_fingerprint):
        return ""
    return (
        ""
        if _lies_elsewhere(ledger, one.node, going)
        else "its source is gone or has changed: it is the only copy"
    )


def _place_mark(node: LineageNode, uri: str) -> str | None:
    return next((place.fingerprint for place in node.places if place.uri == uri), None)


def _is_unchanged(uri: str, format: str | None, mark: str | None) -> bool:
    """Whether a checkpoint lies there whose files are those that the ledger knows."""
    try:
        with open_checkpoint(uri, format=format) as opened:
            local = locate(uri).store.capabilities.local
            return mark is not None and present_fingerprint(opened, marks=local or format is None) == mark
    except WherryError:
        return False  # gone or damaged: no copy to rely on, whichever it is


def _lies_elsewhere(ledger: Ledger, node: LineageNode, going: set[str]) -> bool:
    """Whether the same weights lie whole at another place that stays."""
    from wherry.ledger.nodes import digests_starting, nodes

    for other in nodes(ledger, digests_starting(ledger, node.weights_digest)).values():
        for place in other.places:
            stays = place.gone is None and place.uri not in going
            if stays and _is_unchanged(place.uri, other.format, place.fingerprint):
                return True
    return False


def _remove(ledger: Ledger, one: _Product, registry: RegistryVersions, *, dry_run: bool) -> PrunedCheckpoint:
    """Carry one removal out; what fails is told and does not stop the others."""
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
    except (UsageError, TargetInUseError) as error:  # an alias was put on it, or a job began, a moment ago
        return _row(one, "keep", error.what)
    except WherryError as error:
        return _row(one, "failed", error.what)
    return _row(one, "removed", reason)


def _require_unregistered(ledger: Ledger, node: LineageNode) -> None:
    """Refuse what was registered since the registry was asked: a claim is in the ledger before the version is made."""
    from wherry.ledger.nodes import nodes

    if nodes(ledger, {node.checkpoint_digest})[node.checkpoint_digest].registrations != node.registrations:
        raise TargetInUseError("it was registered a moment ago", cure="prune again", retryable=True)


def _row(one: _Product, action: Any, reason: str) -> PrunedCheckpoint:
    return PrunedCheckpoint(
        one.done.target_uri, one.note.route, one.done.target_digest, one.node.nbytes, action, reason
    )


def _staging(routes: Iterable[Route], *, dry_run: bool) -> list[CleanReport]:
    """Stale staging areas below the fixed part of the targets' places."""
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
    """A checkpoint that a route made, as its rules see it.

    Attributes:
        uri: where it lies.
        run: of its source.
        format: its own.
        step: of its source, where known.
        time: when it was made; UTC, ISO 8601.
        score: the metric of its source, where known.
    """

    uri: str
    run: str
    format: str
    step: int | None
    time: str
    score: float | None = None


def superfluous(
    rules: Retention, made: Iterable[RetentionEntry], now: datetime | None = None
) -> dict[str, str | None]:
    """URI → why a rule keeps it, or None where no rule does.

    Args:
        rules: of the route.
        made: what the route made and is still there.
        now: the present moment, for `keep_days`.
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
    newest = sorted(group, key=lambda one: (-1 if one.step is None else one.step, one.time), reverse=True)
    if rules.keep_days is not None:
        since = now - timedelta(days=rules.keep_days)
        young = (one for one in group if datetime.fromisoformat(one.time) >= since)
        reasons |= {one.uri: f"made within {rules.keep_days:g} days" for one in young}
    if rules.keep_best is not None:
        reasons |= _best(rules, newest)
    if rules.keep_last is not None:
        reasons |= {one.uri: f"one of the newest {rules.keep_last}" for one in newest[: rules.keep_last]}
    return reasons


def _best(rules: Retention, newest: list[RetentionEntry]) -> dict[str, str]:
    scored = [(one.score, one) for one in newest if one.score is not None]
    ranked = sorted(scored, key=lambda pair: pair[0], reverse=rules.highest)
    best = {
        one.uri: f"one of the best {rules.keep_best} by {rules.metric}, {value:g}"
        for value, one in ranked[: rules.keep_best]
    }
    unknown = {one.uri: f"its {rules.metric} is not known" for one in newest if one.score is None}
    return {**best, **unknown}


@dataclass(frozen=True, slots=True)
class RegistryVersions:
    """The versions of the configured registry, by checkpoint digest; empty where there is no registry."""

    uri: str
    versions: Mapping[str, list[Any]] = field(default_factory=dict[str, "list[Any]"])

    def holds(self, node: LineageNode) -> str:
        """Why the registry keeps a checkpoint; empty where it does not."""
        for row in node.registrations:
            if row.state == "pending":
                return f"a registration as {row.name} is under way"
            if row.registry != self.uri:
                return (
                    f"it is registered as {row.name} in {row.registry}, which is not the configured registry"
                )
        for one in self.versions.get(node.checkpoint_digest, []):
            if one.aliases:
                return f"{one.name} version {one.version} bears the alias {', '.join(sorted(one.aliases))}"
        return ""

    @contextmanager
    def marked_deleted(self, node: LineageNode, uri: str, *, by: str, reason: str) -> Generator[None]:
        """Say on every version of a checkpoint that its bytes are gone, where they lie nowhere else.

        It is taken back where the block fails, or where one of the versions cannot be marked.

        Raises:
            UsageError: an alias was put on one meanwhile.
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
            _unmark(marked, stores, error)
            raise


def _unmark(marked: Iterable[Any], stores: Mapping[str, str], error: BaseException) -> None:
    for one in marked:
        try:
            service("mlflow").unmark_deleted(one.name, one.version, **stores)
        except WherryError as failure:  # the first error is the one to raise; this one is added to it
            error.add_note(f"{one.name} version {one.version} is still marked as deleted: {failure}")


def ask(nodes: Iterable[LineageNode]) -> RegistryVersions:
    """The registry as it is now.

    Raises:
        StorageError: it cannot be reached.
        MissingExtraError: mlflow is not installed.
    """
    uri = mlflow_registry_uri()
    if not any(node.registrations for node in nodes) and not _is_there(uri):
        return RegistryVersions(without_secrets(uri))
    versions: dict[str, list[Any]] = {}
    for one in service("mlflow").registered(mlflow_tracking_uri(), uri):
        versions.setdefault(one.tags[DIGEST_TAG], []).append(one)
    return RegistryVersions(without_secrets(uri), versions)


def _is_there(uri: str) -> bool:
    """Whether there is a registry at all: somebody stated one, or the embedded store has been made."""
    file = sqlite_file(uri)
    if file is not None:
        return file.is_file()
    variables = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
    stated = any(os.environ.get(name) for name in variables)
    return stated or any(configured(f"mlflow.{name}") for name in ("tracking_uri", "registry_uri"))
