"""The text that the command line prints: names in it cannot move the cursor, forge a line or reverse its order.

What a command waits for before its first result is one line on a terminal: the model registry of a model URI.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import click

from wherry.credentials import redact
from wherry.errors import printable
from wherry.version import __version__

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
    from wherry.storage.home import without_secrets

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
