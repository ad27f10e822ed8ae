"""The commands `audit` and `metrics`, and what they print."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wherry.cli.options import as_json, memory, quiet
from wherry.cli.say import bar, print_json, print_rows, say, say_lines
from wherry.cli.units import on_readers, unit_size
from wherry.errors import UsageError

if TYPE_CHECKING:
    from wherry.prove.check import CheckReport
    from wherry.prove.report import AuditReport

_ALTERED = 9  # exit code of intact data that differs from what was expected
_SHOWN = 50  # findings on a terminal


@click.command()
@click.argument("roots", nargs=-1, metavar="[ROOT]...")
@click.option("--registered", is_flag=True, help="Audit only the checkpoints that model versions point at.")
@click.option(
    "--level",
    type=click.Choice(["present", "digest"]),
    default="present",
    show_default=True,
    help="Read only metadata, or every byte.",
)
@click.option(
    "--sample", metavar="N|P%", help="Read only this many checkpoints, those with the oldest proof first."
)
@click.option(
    "--deep",
    is_flag=True,
    help="Also read objects whose generation or ETag has not changed since they were verified.",
)
@click.option(
    "--native-sample",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Restore this many checkpoints with the target system's own library.",
)
@click.option("--as-of", metavar="DATE", help="Audit against the ledger as of this date.")
@click.option(
    "--bundle", metavar="FILE", help="Write the evidence to this file, or to a new file in this folder."
)
@click.option("--markdown", "markdown_", metavar="FILE", help="Write the report to this file as Markdown.")
@click.option("--anchor", metavar="HASH|FILE", help="Anchor, stored elsewhere, that the ledger must contain.")
@click.option("--tracking-uri", help="MLflow tracking store; embedded SQLite by default.")
@click.option("--registry-uri", help="MLflow registry; the tracking store by default.")
@click.option(
    "--key",
    metavar="PUBLIC",
    help="Public key (PEM) to verify signatures with; [audit] of wherry.toml by default.",
)
@click.option("--no-record", is_flag=True, help="Do not record the audit in the ledger.")
@click.option("--check", metavar="BUNDLE", help="Instead, check evidence that --bundle wrote, offline.")
@on_readers
@unit_size
@memory
@quiet
@as_json
def audit(
    roots: Sequence[str],
    registered: bool,
    markdown_: str | None,
    no_record: bool,
    check: str | None,
    quiet: bool,
    json_: bool,
    **arguments: Any,
) -> None:
    """Compare the ledger with the storage and the model registry.

    Checks that the checkpoints in the ledger exist and match what was recorded. With ROOT, checks only those below each
    ROOT, and also lists checkpoints that were never converted and files that belong to no checkpoint.
    """  # fmt: skip
    from wherry.prove.audit import audit as look
    from wherry.prove.bundle import check_bundle
    from wherry.prove.markdown import markdown

    if check is not None:
        _show_checked(check_bundle(check, arguments["anchor"]), json_=json_)
    if registered and roots:
        raise UsageError("--registered cannot be combined with ROOT", cure="leave out one of them")
    scope = list(roots) or ("registered" if registered else "all")
    with bar(quiet=quiet or json_) as progress:
        report = look(
            scope,
            record=False if no_record else None,
            progress=progress,
            **arguments,
        )
    if markdown_ is not None:
        Path(markdown_).expanduser().write_text(markdown(report))
    _show(report, json_=json_)
    sys.exit(report.exit_code)


@click.command()
@click.argument("roots", nargs=-1, metavar="[ROOT]...")
@click.option(
    "--out",
    metavar="FILE",
    help="Write the metrics to this file in one step, for a node exporter's textfile collector.",
)
@as_json
def metrics(roots: Sequence[str], out: str | None, json_: bool) -> None:
    """Print metrics for Prometheus.

    The metrics are counts of conversions and failures, bytes, and the age of the oldest unconverted checkpoint below
    each ROOT; without ROOT, below the roots of the routes in wherry.toml.
    """
    from wherry.nightly.metrics import measure, text, write

    found = measure(list(roots) or None)
    if out is not None:
        write(found, out)
    elif json_:
        print_json([{"name": one.name, "labels": dict(one.labels), "value": one.value} for one in found])
    else:
        say_lines(text(found), nl=False)


def _show(report: AuditReport, *, json_: bool) -> None:
    from wherry.prove.report import summary

    if json_:
        print_json(report.to_json())
        return
    print_rows(summary(report))
    for one in report.findings[:_SHOWN]:
        tensor = f" {one.path}" if one.path else ""
        say(f"{one.severity}: {one.kind}: {one.uri or ''}{tensor}: {one.what}")
        if one.severity != "note":
            print_rows([("  cure", one.cure), ("  models", ", ".join(one.models))])
        for child in one.affected:
            models = f" ({', '.join(child.models)})" if child.models else ""
            say(
                f"  derived from it: {child.format} {', '.join(child.uris) or child.checkpoint_digest}{models}"
            )
    if len(report.findings) > _SHOWN:
        say(f"and {len(report.findings) - _SHOWN} more; see --json or --markdown")


def _show_checked(checked: CheckReport, *, json_: bool) -> None:
    from wherry.prove.check import PROOF

    if json_:
        print_json(checked.to_json())
    else:
        data = checked.to_json()
        print_rows((name, value) for name, value in data.items() if name not in ("schema", "problems"))
        for problem in checked.problems:
            say(f"problem: {problem}")
        if checked.ok:
            say(PROOF)
    sys.exit(0 if checked.ok else _ALTERED)
