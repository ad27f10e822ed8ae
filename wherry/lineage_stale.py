"""stale: which converted checkpoints are not what converting again would give.

Only metadata is read. A source is compared by the fingerprint of its files; the conversion is planned again, as its
route states it or else as it was recorded, and the digests of the two plans are compared: a plan names the structure
of the source, the target format, every option and every rule. Where neither can be known, the version of wherry is.
What was made of something stale is stale too. Reasons are data, each result has the command that converts again.
"""

from __future__ import annotations

import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

from wherry import __version__
from wherry.errors import NotFoundError, WherryError
from wherry.store import is_live

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.config_schema import Route, TargetRule
    from wherry.ledger_conversions import ConvertedTarget
    from wherry.ledger_nodes import Node

SCHEMA = 1
_WORKERS = 8  # sources looked at at a time; it is waiting for storage, not computing
# What a reason can be.
SOURCE_GONE, SOURCE_CHANGED, SOURCE_UNREADABLE = "source-gone", "source-changed", "source-unreadable"
PLAN_CHANGED, ROUTE_CHANGED, OLDER_WHERRY = "plan-changed", "route-changed", "older-wherry"
UPSTREAM = "upstream-stale"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is stale: one of the kinds above, and the details in words."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class Stale:
    """A converted checkpoint that is stale.

    Attributes:
        uri: where it lies.
        checkpoint_digest: which it is.
        format: of it.
        source_uri: what it was made of.
        reasons: why.
        cure: the command that converts again; it needs a free target, so what lies there is moved away first. None
            where no source is known to be there.
    """

    uri: str
    checkpoint_digest: str
    format: str
    source_uri: str
    reasons: tuple[Reason, ...]
    cure: str | None

    def to_json(self) -> dict[str, Any]:
        """One row of `lineage stale --json`."""
        return asdict(self)


def stale(about: str | os.PathLike[str] | None = None, *, config: str | None = None) -> list[Stale]:
    """What converting again would give differently.

    Args:
        about: only this checkpoint and what was derived from it (a URI, a digest or a model URI); all by default.
        config: the routes file; `WHERRY_CONFIG`, `wherry.toml` here or in the home by default.

    Returns:
        The stale ones, in the order in which they were converted.

    Raises:
        NotFoundError, AmbiguousError, StorageError: as `lineage.show`.
        UsageError: the routes file is not one.
    """
    rows, nodes = _rows(about)
    routes = _routes(config)
    with ThreadPoolExecutor(_WORKERS) as pool:
        looked = list(pool.map(_look, rows, repeat(routes), repeat(nodes)))
    return [one for one in _with_upstream(rows, looked) if one.reasons]


def _rows(about: str | os.PathLike[str] | None) -> tuple[list[ConvertedTarget], Mapping[str, Node]]:
    """The conversions that are current, one for each place, and the nodes of their sources."""
    from wherry.ledger import open_ledger
    from wherry.ledger_conversions import last_conversions
    from wherry.ledger_nodes import nodes

    chosen = None if about is None else _below(about)
    with open_ledger() as ledger:
        every = last_conversions(ledger).values()
        kept = (row for row in every if row.gone is None and not is_live(row.source_uri))
        rows = [row for row in kept if chosen is None or row.target_digest in chosen]
        rows.sort(key=lambda row: row.statement)
        return rows, nodes(ledger, {row.source_digest for row in rows})


def _below(about: str | os.PathLike[str]) -> set[str]:
    from wherry.lineage_answers import impact

    found = impact(about)
    return set(found.nodes)


def _routes(config: str | None) -> tuple[Route, ...]:
    from wherry.config import load_config

    return load_config(config).routes


def _look(row: ConvertedTarget, routes: Sequence[Route], nodes: Mapping[str, Node]) -> Stale:
    """One conversion against what is there now."""
    from wherry.checkpoint import open_checkpoint
    from wherry.existing import present_fingerprint

    source = nodes[row.source_digest]
    covering = _rule(row, routes)
    reasons: list[Reason] = []
    at: str | None = row.source_uri
    try:
        with open_checkpoint(row.source_uri, format=source.format) as checkpoint:
            if present_fingerprint(checkpoint) != row.source_fingerprint:
                reasons.append(
                    Reason(SOURCE_CHANGED, f"the files at {row.source_uri} changed since {row.time}")
                )
        reasons += _by_plan(row, source.format, covering)
    except NotFoundError:
        at = next((place.uri for place in source.places if _is_there(place.uri, row.source_uri)), None)
        elsewhere = f"; the same checkpoint lies at {at}" if at else ""
        reasons.append(Reason(SOURCE_GONE, f"nothing is at {row.source_uri} any more{elsewhere}"))
    except WherryError as error:
        reasons.append(Reason(SOURCE_UNREADABLE, error.what))
    cure = None if at is None else _command(row, at, covering)
    return Stale(row.target_uri, row.target_digest, row.format, row.source_uri, tuple(reasons), cure)


def _is_there(uri: str, but: str) -> bool:
    from wherry.store import locate

    try:
        return uri != but and locate(uri).exists()
    except WherryError:
        return False  # a place that cannot be asked does not help


def _rule(row: ConvertedTarget, routes: Sequence[Route]) -> tuple[Route, TargetRule] | None:
    """The route that covers a source, and what it states for this format; the most specific root decides."""
    from wherry.registry import find_format
    from wherry.store import locate

    best: tuple[int, Route, TargetRule] | None = None
    for route in routes:
        root = locate(route.root).uri.rstrip("/")
        if not f"{row.source_uri}/".startswith(f"{root}/"):
            continue
        for rule in route.targets:
            if find_format(rule.format).name == row.format and (best is None or len(root) > best[0]):
                best = (len(root), route, rule)
    return best[1:] if best else None


def _by_plan(
    row: ConvertedTarget, source_format: str, covering: tuple[Route, TargetRule] | None
) -> Iterator[Reason]:
    """Whether the plan would be another one now."""
    if covering is not None:
        route, rule = covering
        now = _planned(row, source_format, _as_routed(route, rule))
        if isinstance(now, WherryError):
            yield Reason(ROUTE_CHANGED, f"route {route.name} cannot be carried out now: {now.what}")
        elif now != row.plan_digest:
            yield Reason(ROUTE_CHANGED, f"route {route.name} states another conversion than was carried out")
        return
    plans = [_planned(row, source_format, asked) for asked in _as_recorded(row)]
    if row.plan_digest in plans:
        return
    if _is_plain(row) and not isinstance(plans[0], WherryError):
        yield Reason(PLAN_CHANGED, f"the same request gives another plan than on {row.time}")
    elif row.software and row.software != __version__:
        yield Reason(OLDER_WHERRY, f"wherry {row.software} made it, this is {__version__}")


def _as_routed(route: Route, rule: TargetRule) -> dict[str, Any]:
    return {"options": rule.settings, "only": rule.only, "ignore": route.ignore, "wish": rule.wish}


def _as_recorded(row: ConvertedTarget) -> Iterator[dict[str, Any]]:
    """A receipt says the options and not whether parameters alone were asked for, so both are tried."""
    options = {name: value for name, value in row.options.items() if value is not None}
    yield {"options": options}
    yield {"options": options, "only": "params"}


def _is_plain(row: ConvertedTarget) -> bool:
    """Whether the recorded options are all that was asked for: no layout, no rule, nothing left behind."""
    from wherry.sidecar import read_sidecar
    from wherry.store import locate

    try:
        sidecar = read_sidecar(locate(row.target_uri))
    except WherryError:
        return False  # what cannot be read proves nothing; the audit reports it
    if sidecar is None or sidecar.receipt is None:
        return False
    return not {"layout", "scan"} & set(sidecar.manifest.origin) and not sidecar.receipt.warnings


def _planned(row: ConvertedTarget, source_format: str, asked: Mapping[str, Any]) -> str | WherryError:
    """Digest of the plan that would be made now, or why none can be made so."""
    from wherry.plan import plan

    try:
        return plan(row.source_uri, row.target_uri, to=row.format, format=source_format, **asked).digest
    except WherryError as error:
        return error


def _command(row: ConvertedTarget, source: str, covering: tuple[Route, TargetRule] | None) -> str:
    """The command line that converts again."""
    words = ["wherry", "convert", source, row.target_uri, "--to", row.format]
    if covering is None:
        for name, value in sorted(_chosen_options(row).items()):
            words += ["--set", f"{name}={_spelled(value)}"]
        return shlex.join(words)
    route, rule = covering
    for name, value in sorted(rule.settings.items()):
        words += ["--set", f"{name}={_spelled(value)}"]
    for name in ("only", "family", "family_file", "config", "dtype", "assets"):
        value = getattr(rule, name)
        words += [f"--{name.replace('_', '-')}", value] if value else []
    return shlex.join([*words, *(["--ignore", ",".join(route.ignore)] if route.ignore else [])])


def _chosen_options(row: ConvertedTarget) -> dict[str, Any]:
    """Recorded options that are not what the format does anyway."""
    from wherry.registry import find_format

    defaults = {name: option.default for name, option in find_format(row.format).options.items()}
    return {name: value for name, value in row.options.items() if value != defaults.get(name)}


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _with_upstream(rows: Sequence[ConvertedTarget], looked: Sequence[Stale]) -> Iterator[Stale]:
    """What was made of something stale is stale too; rows come in the order in which they were made."""
    worn: dict[str, str] = {}
    for row, one in zip(rows, looked, strict=True):
        above = worn.get(row.source_uri)
        full = (*one.reasons, Reason(UPSTREAM, f"{above} is stale")) if above else one.reasons
        if any(reason.kind not in (SOURCE_GONE, OLDER_WHERRY) for reason in full):
            worn[row.target_uri] = row.target_uri
        yield replace(one, reasons=full)
