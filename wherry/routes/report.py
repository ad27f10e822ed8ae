"""The report of a night as a page: counts, what waits, what failed with the cure, what was made, what was passed over.

Names come from whoever wrote the checkpoints, so they must break neither a table nor the page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core.units import show_size

if TYPE_CHECKING:
    from wherry.routes.night import Outcome, Report

_SHOWN = 40  # rows of one kind; a broken root of thousands must not flood the page


def markdown(report: Report) -> str:
    """The report as the one artifact of a night."""
    lines = ["# Nightly conversion", ""]
    lines += [f"- **{name}**: {number}" for name, number in report.counts.items()] or ["Nothing was to do."]
    lines += [f"- route {name} was skipped: another night works on it" for name in report.skipped]
    lines += ["", "| route | waiting | size | hours | tonight |", "|---|---|---|---|---|"]
    for plan in report.plans:
        size = show_size(plan.todo.nbytes)
        lines.append(
            f"| {plan.route.name} | {plan.todo.count} | {size} | {plan.hours:.1f} | {len(plan.works)} |"
        )
    lines += [f"\n**{plan.route.name}**: {plan.estimate}" for plan in report.plans if plan.estimate]
    failed = [(str(error["uri"]), str(error["what"]), str(error["cure"] or "")) for error in report.failures]
    lines += _table("Failed", ("where", "what", "cure"), failed)
    bare = [(str(error["uri"]), str(error["what"]), str(error["cure"] or "")) for error in report.unrecorded]
    lines += _table("Converted, but not recorded", ("where", "what", "cure"), bare)
    done = [(one.source, ", ".join(one.targets)) for one in report.outcomes if one.came == "converted"]
    lines += _table("Converted", ("source", "targets"), done)
    rows = [
        (one.why, one.uri, one.reason)
        for plan in report.plans
        for one in plan.todo.passed
        if one.why != "done"
    ]
    rows += [
        (one.came, one.source, str((one.error or {}).get("what"))) for one in report.outcomes if _odd(one)
    ]
    return "\n".join([*lines, *_table("Passed over", ("why", "where", "reason"), rows)]) + "\n"


def _table(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    lines = ["", f"## {title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(_cell(text) for text in row)} |" for row in rows[:_SHOWN]]
    return [*lines, *([f"\nand {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else [])]


def _cell(text: str) -> str:
    """A text that breaks neither the table nor the page: names come from whoever wrote the checkpoints."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")


def _odd(outcome: Outcome) -> bool:
    return outcome.came in ("vanished", "in use")
