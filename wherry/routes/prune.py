"""prune: remove what the routes made and their retention no longer keeps; a dry run unless it is told otherwise.

Only what a route itself had made, by the ledger's own notes, is ever removed: never a source, never what somebody
else put there. Kept whatever the rules say: a version that bears an alias, or that is registered where nobody can be
asked; the only copy, which is one whose source is gone or has changed and that lies nowhere else; what a running job
reads or writes. A removal is: out of reach, tombstone in the registry, tombstone in the ledger, deleted. All candidates
are judged before the first one goes, so that two copies are never each the other's reason to go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from wherry.errors import TargetInUseError, UsageError, WherryError
from wherry.formats.checkpoint import open_checkpoint, present_fingerprint
from wherry.routes.prune_registry import Registry, ask
from wherry.routes.removal import removing, strangers
from wherry.routes.retention import Kept, superfluous
from wherry.staging.clean import Cleaned, clean
from wherry.staging.in_use import used
from wherry.storage.home import user_name
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from datetime import datetime

    from wherry.config.schema import Route
    from wherry.ledger.nodes import Node
    from wherry.ledger.record import Ledger
    from wherry.ledger.replay import ConversionRecord, ProductNote


@dataclass(frozen=True, slots=True)
class Pruned:
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
class Pruning:
    """Outcome of `prune`: the checkpoints and the staging areas that killed conversions left."""

    checkpoints: tuple[Pruned, ...]
    staging: tuple[Cleaned, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of what was removed, or would be."""
        return sum(one.nbytes for one in self.checkpoints if one.action in ("remove", "removed"))


@dataclass(frozen=True, slots=True)
class _Product:
    """A target that a route had made and that is still there: the note, the conversion and the checkpoint."""

    note: ProductNote
    done: ConversionRecord
    node: Node


def prune(routes: Iterable[Route], *, dry_run: bool = True, now: datetime | None = None) -> Pruning:
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
    return Pruning(tuple(rows), tuple(_staging(chosen, dry_run=dry_run)))


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


def _seen(one: _Product) -> Kept:
    note, done = one.note, one.done
    return Kept(done.target_uri, note.run, done.format, note.step, done.time, note.score)


def _judged(
    ledger: Ledger, made: list[_Product], registry: Registry, ruled: Mapping[str, str | None]
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


def _protected(ledger: Ledger, one: _Product, registry: Registry, going: set[str], read: set[str]) -> str:
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


def _place_mark(node: Node, uri: str) -> str | None:
    return next((place.fingerprint for place in node.places if place.uri == uri), None)


def _is_unchanged(uri: str, format: str | None, mark: str | None) -> bool:
    """Whether a checkpoint lies there whose files are those that the ledger knows."""
    try:
        with open_checkpoint(uri, format=format) as opened:
            local = locate(uri).store.capabilities.local
            return mark is not None and present_fingerprint(opened, marks=local or format is None) == mark
    except WherryError:
        return False  # gone or damaged: no copy to rely on, whichever it is


def _lies_elsewhere(ledger: Ledger, node: Node, going: set[str]) -> bool:
    """Whether the same weights lie whole at another place that stays."""
    from wherry.ledger.nodes import digests_starting, nodes

    for other in nodes(ledger, digests_starting(ledger, node.weights_digest)).values():
        for place in other.places:
            stays = place.gone is None and place.uri not in going
            if stays and _is_unchanged(place.uri, other.format, place.fingerprint):
                return True
    return False


def _remove(ledger: Ledger, one: _Product, registry: Registry, *, dry_run: bool) -> Pruned:
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


def _require_unregistered(ledger: Ledger, node: Node) -> None:
    """Refuse what was registered since the registry was asked: a claim is in the ledger before the version is made."""
    from wherry.ledger.nodes import nodes

    if nodes(ledger, {node.checkpoint_digest})[node.checkpoint_digest].registrations != node.registrations:
        raise TargetInUseError("it was registered a moment ago", cure="prune again", retryable=True)


def _row(one: _Product, action: Any, reason: str) -> Pruned:
    return Pruned(
        one.done.target_uri, one.note.route, one.done.target_digest, one.node.nbytes, action, reason
    )


def _staging(routes: Iterable[Route], *, dry_run: bool) -> list[Cleaned]:
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
