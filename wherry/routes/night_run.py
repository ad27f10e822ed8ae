"""A night without Prefect: the same plan and the same report as the flow, on threads of this process.

Each checkpoint: convert, verify, register, note. Where a conversion to several targets fails each is tried alone.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from wherry.converter.convert import convert_all
from wherry.ledger.recording import registration_of, verification_of
from wherry.models.register import register
from wherry.routes.night import (
    ALONE,
    Outcome,
    Report,
    as_ours,
    came_of,
    holding,
    note_failed,
    note_made,
    notes_of,
    plan_night,
    settled,
)
from wherry.runtime import threads
from wherry.verifier.verified import comparison, verified

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wherry.config.config import Config
    from wherry.config.schema import Route
    from wherry.core.receipt import Receipt
    from wherry.routes.reconcile import Work
    from wherry.routes.routes import Wanted


def run_night(
    config: Config,
    routes: Iterable[Route],
    *,
    dry_run: bool = False,
    go: bool = False,
    retry_failed: bool = False,
) -> Report:
    """Convert what these routes ask for and the ledger does not have.

    Args:
        config: with the settings.
        routes: in order.
        dry_run: only plan.
        go: convert on a first night too.
        retry_failed: try again what failed for good with the same files.

    Raises:
        StorageError: the ledger cannot be read or written.
    """
    asked = tuple(routes)
    with ExitStack() as stack:
        free = [route for route in asked if dry_run or stack.enter_context(holding(route))]
        plans = plan_night(free, retry_failed=retry_failed, go=go)
        outcomes: list[Outcome] = []
        for plan in () if dry_run else plans:
            with threads.executor(plan.route.concurrency, "wherry-night") as pool:
                done = pool.map(partial(_work, config, plan.route), plan.works)
                outcomes += [one for rows in done for one in rows]
    return Report(plans, tuple(outcomes), tuple(route.name for route in asked if route not in free))


def _work(config: Config, route: Route, work: Work) -> list[Outcome]:
    try:
        return [_carry(config, route, work, work.targets)]
    except Exception as caught:  # noqa: BLE001  whatever it is, it stops this checkpoint alone
        error = as_ours(caught, work.source.found.uri)
        outcome = came_of(work, work.targets, error)
        if outcome.came not in ALONE or not work.targets[1:]:
            note_failed(work, work.targets, error)
            return [outcome]
    return settled(outcome, error, [_alone(config, route, work, one) for one in work.targets])


def _alone(config: Config, route: Route, work: Work, one: Wanted) -> Outcome:
    try:
        return _carry(config, route, work, (one,))
    except Exception as caught:  # noqa: BLE001  whatever it is, it stops this target alone
        error = as_ours(caught, work.source.found.uri)
        note_failed(work, (one,), error)
        return came_of(work, (one,), error)


def _carry(config: Config, route: Route, work: Work, targets: tuple[Wanted, ...]) -> Outcome:
    source = work.source.found
    request = route.request(
        route.source(source), [one.rule.at(one.uri) for one in targets], config.settings.memory
    )
    group = convert_all(request)
    for one, receipt in zip(targets, group.receipts, strict=True):
        _after(config, route, one, receipt, alias=route.alias if work.source.newest else None)
    note_made(notes_of(work, targets))
    written = sum(receipt.bytes_written for receipt in group.receipts if not receipt.already)
    return Outcome(work.route, source.uri, "converted", tuple(one.place for one in targets), written)


def _after(config: Config, route: Route, one: Wanted, receipt: Receipt, *, alias: str | None) -> None:
    """What follows the commit of one target."""
    uri = receipt.target.uri
    if route.verify != "none":
        with verification_of(uri):
            verified(
                uri, **comparison(route.verify, receipt.source.uri, one.rule.at(one.uri).layout.family_file)
            )
    if one.model is not None:
        settings: dict[str, Any] = config.settings.mlflow.model_dump()
        with registration_of(uri, one.model, alias=alias, tags=route.tags):
            register(uri, one.model, alias=alias, tags=route.tags, **settings)
