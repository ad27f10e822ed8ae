"""What the command line prints: text, JSON, rows, tables, and progress as a bar or as lines.

Names in it cannot move the cursor, forge a line or reverse its order. What a command waits for before its first result
is one line on a terminal: the model registry of a model URI.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import click

from wherry.core.units import plural, show_seconds, show_size
from wherry.credentials import redact
from wherry.errors import NotRecordedError, json_escaped, printable
from wherry.version import __version__

if TYPE_CHECKING:
    from wherry.core.progress import OnProgress, Progress

_RESOLVER = "wherry.ledger.resolve"  # logs each registry that it asks
_SILENT = {"--json", "--quiet"}


def say(text: object, *, err: bool = False) -> None:
    """Print one line of text."""
    click.echo(printable(redact(str(text))), err=err)


def say_lines(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text of several lines, in which the names are printable already."""
    click.echo(printable(redact(text), lines=True), err=err, nl=nl)


def show_waits(words: Sequence[str]) -> None:
    """Print on the standard error what looking up a model URI waits for; only where a progress bar would be shown."""
    named = any(word.startswith("models:/") for word in words)
    if not named or _SILENT & set(words) or not sys.stderr.isatty():
        return
    log = logging.getLogger(_RESOLVER)
    log.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    log.addHandler(handler)


def explain(context: click.Context, _option: click.Parameter, value: bool) -> None:
    """Print the log of wherry on the standard error while a command runs, and what it works with."""
    if not value:
        return
    from wherry.config.file import config_file
    from wherry.config.settings import ledger_url, mlflow_registry_uri
    from wherry.store.home import without_secrets

    log, handler = logging.getLogger("wherry"), logging.StreamHandler()
    before = log.level
    handler.setFormatter(OneLine())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    context.call_on_close(lambda: (log.removeHandler(handler), log.setLevel(before)))
    log.info("wherry %s, configuration %s", __version__, config_file() or "none")
    stores = without_secrets(ledger_url()), without_secrets(mlflow_registry_uri())
    log.info("ledger %s, model registry %s", *stores)


class OneLine(logging.Formatter):
    """Prints a log record of a library on one line, without its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The message alone."""
        return printable(redact(" ".join(record.getMessage().split())))


_MOST_ROWS = 2_000  # of a table that rich lays out
_PIPE = 400  # columns of an output that is no terminal
_EDGES, _GAP = 2, 3  # columns that rich puts around a table, and between two of its columns
LINE_SECONDS = 10.0  # between two lines of progress
_LEAST_PATH = 24  # columns of a path for which other columns of the table are dropped


def print_json(data: Any, *, indent: int | None = 2) -> None:
    """Print one JSON document on standard output; what a terminal obeys is escaped, which every reader undoes.

    Args:
        data: the document.
        indent: None for one line, which programs that log lines read.
    """
    import json

    click.echo(json_escaped(json.dumps(data, indent=indent, ensure_ascii=False)))


def print_rows(rows: Iterable[tuple[str, Any]]) -> None:
    """Print name and value, one row per line; rows without a value are left out."""
    for name, value in rows:
        if value not in (None, ""):
            say(f"{name + ':':<16}{value}")


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, cut: str = "", drop: Sequence[str] = ()
) -> None:
    """Print a table; on a pipe it is as wide as its contents, so that nothing is truncated.

    Args:
        columns: their headings.
        rows: their cells.
        cut: the column of paths. On a terminal that is too narrow they lose their middle, where rows stay different.
        drop: columns that are left out before that, in this order.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = [tuple(printable(redact(cell)) for cell in row) for row in rows]
    console = Console(
        width=None if sys.stdout.isatty() else _PIPE, markup=False, highlight=False, emoji=False
    )
    if cut and console.width < _PIPE:
        columns, shown = _fit(columns, shown, console.width, cut, drop)
    if len(shown) > _MOST_ROWS:
        # In aligned lines, which are not wrapped: rich takes 0.5 ms for each row.
        widths = [max(map(len, cells)) for cells in zip(columns, *shown, strict=True)]
        for row in (columns, ["─" * width for width in widths], *shown):
            click.echo(
                "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            )
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=cut not in ("", name), overflow="fold")
    for row in shown:
        table.add_row(*row)
    console.print(table)


def _fit(
    columns: Sequence[str], rows: Sequence[tuple[str, ...]], width: int, cut: str, drop: Sequence[str]
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Columns and rows that fit into a width: some columns dropped, then paths cut to the room that is left.

    Rows that would look alike keep their whole path, which goes on in the next line.
    """
    from rich.cells import cell_len

    path = columns.index(cut)
    widths = [max(map(cell_len, cells)) for cells in zip(columns, *rows, strict=True)]
    kept = [at for at in range(len(columns)) if at == path or any(row[at] for row in rows)]

    def room() -> int:
        return width - _EDGES - sum(widths[at] + _GAP for at in kept if at != path)

    for name in drop:
        at = columns.index(name)
        if at in kept and room() < min(widths[path], _LEAST_PATH):
            kept.remove(at)
    whole = [tuple(row[at] for at in kept) for row in rows]
    place = kept.index(path)
    short = [(*row[:place], _cut(row[place], room()), *row[place + 1 :]) for row in whole]
    alike = Counter(short)
    fitted = [one if alike[one] == 1 else row for one, row in zip(short, whole, strict=True)]
    return [columns[at] for at in kept], fitted


def _cut(path: str, width: int) -> str:
    """A path without its middle where it is wider; more stays of its end, which differs most."""
    from rich.cells import cell_len

    start, end = width // 3, len(path) - (width - width // 3 - 1)
    shown = path
    while cell_len(shown) > width and end < len(path):
        shown = f"{path[:start]}…{path[end:]}"
        end += 1
    return shown


@contextmanager
def bar(*, quiet: bool) -> Generator[OnProgress | None]:
    """Progress with bytes per second and time left: a bar on a terminal, elsewhere a line every so often."""
    if quiet:
        yield None
        return
    if not sys.stderr.isatty():
        yield _progress_lines()
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
            shown.update(tasks[now.stage], completed=now.done, current=_current(now))

        yield report


def _current(now: Progress) -> str:
    """The current item of a progress: the tensor, or the number of finished units."""
    if not now.units:
        return printable(now.current)
    workers = plural(now.units.workers, "worker")
    return f"{now.units.done} of {plural(now.units.total, 'unit')}, {workers}"


def _progress_lines() -> OnProgress:
    """Print progress as plain lines, for logs: none of a short step, and then one every `LINE_SECONDS`."""
    last = time.monotonic()

    def report(now: Progress) -> None:
        nonlocal last
        moment = time.monotonic()
        if moment - last < LINE_SECONDS:
            return
        last = moment
        left = "" if now.eta is None else f", {show_seconds(now.eta)} left"
        share = f" ({now.done / now.total:.0%})" if now.total else ""
        with suppress(OSError):  # a log that cannot be written must not end the work
            say(
                f"{now.stage}: {show_size(now.done)} of {show_size(now.total)}{share}, "
                f"{show_size(now.rate)}/s{left}; {_current(now)}",
                err=True,
            )

    return report


@contextmanager
def show_before_error(show: Callable[..., None], *, json_: bool) -> Generator[None]:
    """If work is done but cannot be recorded, show its result before the error.

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
