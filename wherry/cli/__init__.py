"""The command line: the same functions and option names as the library, with `--json` and documented exit codes.

A command is imported only when it runs, and imports its function then, so that `wherry --help` is fast and `wherry
convert` never imports prefect or mlflow. `say`, `format_list` and `results` print: names in what they print cannot
forge anything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import click

from wherry.cli.errors import (
    DEBUG,
    DEBUG_ENV,
    complete_cure,
    document,
    flush_output,
    interrupt_error,
    is_debugging,
    silence,
    to_wherry_error,
)
from wherry.cli.help import HELP_OPTIONS, Commands, Sections, place_options
from wherry.cli.say import explain, say_lines, show_waits
from wherry.core import interrupts
from wherry.core.interpreter import tune, use_utf8
from wherry.errors import WherryError
from wherry.version import __version__

EXIT_CODES = """\b
Exit codes: 0 success · 1 `doctor` found a fault · 2 usage error · 3 not found
4 not a checkpoint, unsupported or ambiguous · 5 incomplete or corrupt
6 hostile · 7 not representable in the target, or unmatched
8 target exists or is in use
9 mismatch: intact data differs from what was expected · 10 storage error
11 missing extra · 12 done, but not recorded or not registered
70 internal error: a bug in wherry · 130 interrupted"""


def limit_storage(context: click.Context, _option: click.Parameter, value: str | None) -> None:
    """Set `storage_timeout` for this command and its child processes.

    Raises:
        UsageError: it is not a positive duration.
    """
    if value is None:
        return
    from wherry.store.waits import TIMEOUT_VARIABLE, parse_timeout

    parse_timeout(value)
    before = os.environ.get(TIMEOUT_VARIABLE)
    os.environ[TIMEOUT_VARIABLE] = value
    context.call_on_close(lambda: _set_variable(TIMEOUT_VARIABLE, before))


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@click.group(
    cls=Sections,
    commands=Commands(),
    epilog=EXIT_CODES,
    context_settings={"help_option_names": HELP_OPTIONS, "max_content_width": 100},
)
@click.version_option(__version__, "-V", "--version", prog_name="wherry")
@click.option(
    DEBUG, is_flag=True, expose_value=False, help=f"Show the traceback of an error, as {DEBUG_ENV}=1 does."
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=explain,
    help="Report which configuration, ledger and registry are used, and what the command waits for.",
)
@click.option(
    "--storage-timeout",
    metavar="DURATION",
    expose_value=False,
    callback=limit_storage,
    help="Time without progress after which a request to a remote store fails, for example 5m.",
)
def cli() -> None:
    """Convert model checkpoints between training systems and prove that nothing was lost."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; every error becomes a message and an exit code, without a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments is None:  # called as the entry point of the process
            interrupts.interrupt()
            use_utf8()
        words = place_options(words, cli)
        code = _end(words, alone=arguments is None)
    except KeyboardInterrupt:  # outside of a command
        _fail(interrupt_error(), words)
    sys.exit(code)


def _end(words: list[str], *, alone: bool) -> int:
    """The exit code of a command, or its end by an error."""
    debug = is_debugging(words)
    if alone and not debug:
        silence()
    tune()
    show_waits(words)
    try:
        code = _run(words)
    except Exception as error:  # noqa: BLE001  the last place where a bug can become a message
        if debug:
            import traceback

            say_lines(traceback.format_exc().rstrip(), err=True)
        _fail(to_wherry_error(error, words), words)
    if interrupts.were_raised():  # something has swallowed it
        raise KeyboardInterrupt
    interrupts.end_with(code)
    return code


def _run(words: list[str]) -> int:
    try:
        code = cli.main(words, prog_name="wherry", standalone_mode=False)
    except SystemExit as ended:  # a verdict that is no success
        code = int(ended.code or 0)
    except click.exceptions.NoArgsIsHelpError as shown:
        click.echo(shown.format_message())
        code = 0
    unwritten = flush_output()
    if unwritten is not None:
        raise unwritten
    return code or 0


def _fail(error: WherryError, words: Sequence[str]) -> NoReturn:
    interrupts.end_with(error.exit_code)
    error.stage = error.stage or next((word for word in words if word in cli.commands), None)
    complete_cure(error, words, cli)
    notes: list[str] = getattr(error, "__notes__", [])
    if "--json" in words:
        import json

        with suppress(OSError):  # the reader has closed the pipe
            click.echo(json.dumps(document(error)))
    with suppress(OSError):
        say_lines("\n".join([f"error: {error.for_shell()}", *(f"note: {note}" for note in notes)]), err=True)
    flush_output()
    interrupts.leave(error.exit_code)
