"""tables: JSON, rows, tables and the progress bar."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from wherry.console.say import say
from wherry.core.units import plural
from wherry.credentials import redact
from wherry.errors import NotRecordedError, json_escaped, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from wherry.core.progress import OnProgress, Progress


_MOST_ROWS = 2_000  # of a table that rich lays out


def print_json(data: Any) -> None:
    """Print one JSON document on standard output; what a terminal obeys is escaped, which every reader undoes."""
    click.echo(json_escaped(json.dumps(data, indent=2, ensure_ascii=False)))


def print_rows(rows: Iterable[tuple[str, Any]]) -> None:
    """Print name and value, one row per line; rows without a value are left out."""
    for name, value in rows:
        if value not in (None, ""):
            say(f"{name + ':':<16}{value}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; on a pipe it is as wide as its contents, so that nothing is truncated."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = [tuple(printable(redact(cell)) for cell in row) for row in rows]
    if len(shown) > _MOST_ROWS:
        _print_long(columns, shown)
        return
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in shown:
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 400
    Console(width=width, markup=False, highlight=False, emoji=False).print(table)


def _print_long(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The same in aligned lines, which are not wrapped: rich takes 0.5 ms for each row."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, ["─" * width for width in widths], *rows):
        click.echo("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@contextmanager
def bar(*, quiet: bool) -> Generator[OnProgress | None]:
    """A progress bar with bytes per second and time left, on a terminal only."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn(
            "{task.fields[current]}", markup=False
        ),  # a name may be `[link=…]` or `[/x]`
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, rich_progress.TaskID] = {}

        def report(now: Progress) -> None:
            if now.stage not in tasks:
                tasks[now.stage] = shown.add_task(now.stage, total=now.total, current="")
            current = printable(now.current)
            if now.units:
                workers = plural(now.units.workers, "worker")
                current = f"{now.units.done} of {plural(now.units.total, 'unit')}, {workers}"
            shown.update(tasks[now.stage], completed=now.done, current=current)

        yield report


@contextmanager
def show_before_error(show: Callable[..., None], *, json_: bool) -> Generator[None]:
    """For work that may be done but not recorded: show the result before the error.

    Args:
        show: prints the result of the work.
        json_: print nothing, since the error's document has the result.
    """
    try:
        yield
    except NotRecordedError as error:
        if not json_:
            with suppress(OSError):  # output that cannot be written must not hide the error
                show(error.result, json_=False)
        raise
