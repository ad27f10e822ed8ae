"""retention: which of the checkpoints that a route made its rules keep; pure, nothing is looked up or removed.

Rules count within one run and one target format. What any rule keeps is kept: the newest steps, the best by a metric,
what is younger than so many days. Without rules everything is kept. A checkpoint whose metric is not known is kept
where the best are counted, because it might be one of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wherry.config.schema import Retention


@dataclass(frozen=True, slots=True)
class Kept:
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


def superfluous(rules: Retention, made: Iterable[Kept], now: datetime | None = None) -> dict[str, str | None]:
    """URI → why a rule keeps it, or None where no rule does.

    Args:
        rules: of the route.
        made: what the route made and is still there.
        now: the present moment, for `keep_days`.
    """
    moment = now or datetime.now(UTC)
    groups: dict[tuple[str, str], list[Kept]] = defaultdict(list)
    for one in made:
        groups[one.run, one.format].append(one)
    kept: dict[str, str | None] = {}
    for group in groups.values():
        kept |= _of_group(rules, group, moment)
    return kept


def _of_group(rules: Retention, group: list[Kept], now: datetime) -> Mapping[str, str | None]:
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


def _best(rules: Retention, newest: list[Kept]) -> dict[str, str]:
    scored = [(one.score, one) for one in newest if one.score is not None]
    ranked = sorted(scored, key=lambda pair: pair[0], reverse=rules.highest)
    best = {
        one.uri: f"one of the best {rules.keep_best} by {rules.metric}, {value:g}"
        for value, one in ranked[: rules.keep_best]
    }
    unknown = {one.uri: f"its {rules.metric} is not known" for one in newest if one.score is None}
    return {**best, **unknown}
