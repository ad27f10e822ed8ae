"""The text that the command line prints: names in it cannot move the cursor, forge a line or reverse its order."""

from __future__ import annotations

import click

from wherry.errors import printable, redact


def say(text: object, *, err: bool = False) -> None:
    """Print one line of text."""
    click.echo(printable(redact(str(text))), err=err)


def say_lines(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text of several lines, in which the names are printable already."""
    click.echo(printable(redact(text), lines=True), err=err, nl=nl)
