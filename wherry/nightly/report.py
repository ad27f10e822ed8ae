"""The report of a night: the work of each route, the outcome of each checkpoint, and a Markdown page.

The page shows counts, waiting work, failures with cures, new targets, and omissions. Names come from checkpoints and
are escaped, so that they break neither a table nor the page.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from wherry.config.schema import Route
from wherry.core.lazy_dataclass import dataclass
from wherry.core.units import plural, show_size
from wherry.errors import WherryError, printable
from wherry.nightly.survey import DAMAGED, Omission

if TYPE_CHECKING:
    from wherry.nightly.reconcile import Todo, Work

MOST_ROWS = 40  # rows of one table; thousands of failures must not flood the page
Came = Literal["converted", "not recorded", "failed", "vanished", "in use"]


@dataclass(frozen=True, slots=True)
class NightPlan:
    """The plan of one route for this night.

    Attributes:
        route: the route.
        todo: its work.
        hours: estimated hours for all of it.
        estimate: why nothing is converted this night; None where it is.
        error: why the root could not be read; None where it could.
    """

    route: Route
    todo: Todo
    hours: float
    estimate: str | None = None
    error: WherryError | None = None

    @property
    def works(self) -> tuple[Work, ...]:
        """The works of this night."""
        return () if self.estimate else self.todo.works

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which a dry run prints."""
        return {
            "route": self.route.name, "count": self.todo.count, "bytes": self.todo.nbytes,
            "hours": round(self.hours, 3), "tonight": len(self.works), "estimate": self.estimate,
            "error": self.error.to_json() if self.error else None,
            "works": [work.to_json() for work in self.todo.works],
            "passed": [one.to_json() for one in self.todo.passed],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkOutcome:
    """The outcome of one work.

    Attributes:
        route: name of the route.
        source: URI of the checkpoint.
        came: the outcome.
        targets: URIs of the new targets.
        nbytes: bytes written.
        error: the error, if any.
    """

    route: str
    source: str
    came: Came
    targets: tuple[str, ...] = ()
    nbytes: int = 0
    error: WherryError | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return {
            "route": self.route, "source": self.source, "came": self.came, "targets": list(self.targets),
            "bytes": self.nbytes, "error": self.error.to_json() if self.error else None,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class NightReport:
    """The result of a night.

    Attributes:
        plans: for each route.
        outcomes: for each work.
        skipped: routes that another night works on.
    """

    plans: tuple[NightPlan, ...]
    outcomes: tuple[WorkOutcome, ...] = ()
    skipped: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        """Compute the counts once."""
        counts = Counter[str](outcome.came for outcome in self.outcomes)
        counts.update(one.why for plan in self.plans for one in plan.todo.passed)
        counts["failed"] += sum(plan.error is not None for plan in self.plans)
        object.__setattr__(
            self, "counts", {name: number for name, number in sorted(counts.items()) if number}
        )

    @property
    def failures(self) -> list[tuple[str | None, WherryError]]:
        """Errors with their URIs, in order: of this night, then of what it passed over because it cannot be converted.

        A conversion that failed on an earlier night, or is blocked, is a failure of every night until its cause is
        removed.
        """
        found = [(plan.error.uri, plan.error) for plan in self.plans if plan.error is not None]
        omitted = [one for plan in self.plans for one in plan.todo.passed]
        standing = [(one.error.uri or one.uri, one.error) for one in omitted if one.error is not None]
        return [*found, *self._errors("failed"), *standing]

    @property
    def unrecorded(self) -> list[tuple[str | None, WherryError]]:
        """Errors of checkpoints that were converted, but not recorded or not registered, with their URIs."""
        return self._errors("not recorded")

    def _errors(self, came: Came) -> list[tuple[str | None, WherryError]]:
        rows = [(one.source, one.error) for one in self.outcomes if one.came == came]
        return [(error.uri or source, error) for source, error in rows if error is not None]

    @property
    def damaged(self) -> list[Omission]:
        """The checkpoints that a route would convert if they were whole."""
        return [one for plan in self.plans for one in plan.todo.passed if one.why == DAMAGED]

    @property
    def excluded(self) -> list[Omission]:
        """The checkpoints that `runs` or `formats` leave out of every route that finds them; each once."""
        omitted = [one for plan in self.plans for one in plan.todo.passed]
        considered = {one.uri for one in omitted if not one.excluded}
        considered |= {
            work.source.found.uri for plan in self.plans for work in (*plan.todo.works, *plan.todo.waiting)
        }
        found = {one.uri: one for one in omitted if one.excluded and one.uri not in considered}
        return list(found.values())

    @property
    def left_to_another(self) -> bool:
        """Whether this night did nothing because another one is running."""
        return bool(self.skipped) and not self.plans

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which the flow returns."""
        return {
            "schema": 1, "counts": dict(self.counts), "skipped": list(self.skipped),
            "plans": [plan.to_json() for plan in self.plans],
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
        }  # fmt: skip


def failure(report: NightReport) -> WherryError | None:
    """The error of the whole night, of the class of the first error; None where all is done and recorded.

    Failures take precedence over missing records.
    """
    found, word = report.failures, "failed"
    if not found:
        found, word = report.unrecorded, "not recorded"
    if not found:
        return None
    (uri, first), tried = found[0], len(report.outcomes)
    what = f"{len(found)} of {max(tried, len(found))} {word}; the first: {first.what}"
    return type(first)(what, uri=uri, path=first.path, cure=first.cure, stage=first.stage)


def warning(report: NightReport) -> str | None:
    """The warning of a night without a failure: counts, and the first damaged checkpoint; None where all is well."""
    if not report.damaged:
        return None
    first, named = report.damaged[0], {"converted": 0, **report.counts}
    counts = ", ".join(f"{named[name]} {name}" for name in ("converted", DAMAGED))
    return f"{counts}: {first.uri}: {first.reason}"


@dataclass(frozen=True, slots=True)
class NightTable:
    """A table of a report: title, names of the columns, and the rows."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def summary(report: NightReport) -> list[str]:
    """The summary of a night: a line for each outcome, and for each route that was not converted."""
    lines = [f"{name}: {number}" for name, number in report.counts.items()]
    if not lines:  # it had nothing to do, or it only planned
        works = sum(len(plan.works) for plan in report.plans)
        lines = [f"{plural(works, 'checkpoint')} would be converted" if works else "There was nothing to do."]
    lines += [f"route {name} was skipped: another nightly run is converting it" for name in report.skipped]
    lines += [f"{plan.route.name}: {plan.estimate}" for plan in report.plans if plan.estimate]
    if report.excluded:
        first = report.excluded[0]
        count = plural(len(report.excluded), "checkpoint")
        lines.append(f"{count} excluded by `runs` or `formats` of every route: {first.uri}: {first.reason}")
    return lines


def tables(report: NightReport) -> list[NightTable]:
    """The tables of a report that have rows: waiting work, failures with cures, new targets, and omissions."""
    error = ("where", "what", "cure")
    done = [(one.source, ", ".join(one.targets)) for one in report.outcomes if one.came == "converted"]
    works = [] if report.outcomes else [work for plan in report.plans for work in plan.works]
    planned = [(work.source.found.uri, ", ".join(one.place for one in work.targets)) for work in works]
    routes = [
        (
            plan.route.name, str(plan.todo.count), show_size(plan.todo.nbytes), f"{plan.hours:.1f}",
            str(len(plan.works)),
        )
        for plan in report.plans
    ]  # fmt: skip
    omitted = [
        (one.why, one.uri, one.reason)
        for plan in report.plans
        for one in plan.todo.passed
        if one.why != "done" and one.error is None
    ]
    omitted += [
        (one.came, one.source, str(one.error and one.error.what))
        for one in report.outcomes
        if one.came in ("vanished", "in use")
    ]
    found = [
        NightTable("Routes", ("route", "waiting", "size", "hours", "tonight"), tuple(routes)),
        NightTable("Failed", error, _error_rows(report.failures)),
        NightTable("Converted, but not recorded", error, _error_rows(report.unrecorded)),
        NightTable("Converted", ("source", "targets"), tuple(done)),
        NightTable("Would be converted", ("source", "targets"), tuple(planned)),
        NightTable("Left out", ("why", "where", "reason"), tuple(omitted)),
    ]
    return [table for table in found if table.rows]


def markdown(report: NightReport) -> str:
    """The report as Markdown."""
    lines = ["# Nightly conversion", "", *(f"- {_emphasise(line)}" for line in summary(report))]
    for table in tables(report):
        lines += _markdown_table(table)
    return "\n".join(lines) + "\n"


def _emphasise(line: str) -> str:
    name, colon, rest = line.partition(": ")
    return f"**{_cell(name)}**: {_cell(rest)}" if colon else line


def _error_rows(errors: list[tuple[str | None, WherryError]]) -> tuple[tuple[str, ...], ...]:
    return tuple((str(uri), error.what, error.cure or "") for uri, error in errors)


def _markdown_table(table: NightTable) -> list[str]:
    lines = ["", f"## {table.title}", "", f"| {' | '.join(table.head)} |", f"|{'---|' * len(table.head)}"]
    lines += [f"| {' | '.join(_cell(text) for text in row)} |" for row in table.rows[:MOST_ROWS]]
    left = len(table.rows) - MOST_ROWS
    return [*lines, *([f"\nand {left} more"] if left > 0 else [])]


def _cell(text: str) -> str:
    """Escape a text for a table cell; names come from checkpoints."""
    shown = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([|`!\[\]])", r"\\\1", shown)  # no column, code, image or link of its own
