"""How the command line reports errors: any exception as a WherryError, its JSON document, failures of the output."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

import click

from wherry.cli.say import OneLine
from wherry.core import interrupts
from wherry.cures import Argument, Command, Cure
from wherry.errors import (
    InterruptedRunError,
    NotRecordedError,
    StorageError,
    UsageError,
    WherryError,
    storage_error,
    wherry_error,
)

DEBUG = "--debug"
DEBUG_ENV = "WHERRY_DEBUG"
# Options of other programs by which they replace what exists → what to do with wherry, which never does.
_REPLACES = Cure(
    "nothing is overwritten: remove the target or choose another; `{}` accepts one that wherry wrote",
    Argument("if-exists", "skip"),
)
_HABITS: dict[str, str] = dict.fromkeys(
    ["--overwrite", "--force", "--clobber", "--replace", "--exist-ok"], _REPLACES
)
_PRINTERS = ("click", "rich")
_OUTPUT = "standard output"


def is_debugging(words: Sequence[str]) -> bool:
    """Whether tracebacks are requested, by `--debug` or WHERRY_DEBUG."""
    return DEBUG in words or os.environ.get(DEBUG_ENV, "0") not in ("", "0")


def to_wherry_error(error: Exception, words: Sequence[str]) -> WherryError:
    """Any exception as an error with a cure; after a signal, whatever a library made of it, the interrupt."""
    if interrupts.were_raised() and not isinstance(error, NotRecordedError):
        return interrupt_error()
    if isinstance(error, click.ClickException):
        return _of_click(error, words)
    if isinstance(error, click.Abort):  # click raises it for Ctrl-C, and for an unexpected EOFError
        cause = error.__cause__
        return to_wherry_error(cause, words) if isinstance(cause, EOFError) else interrupt_error()
    if isinstance(error, OSError) and not isinstance(error, WherryError) and _was_printing(error):
        flush_output()
        return storage_error(error, _OUTPUT)
    from wherry.store.home import without_secrets

    shown = [without_secrets(word) if "://" in word else word for word in words if word != DEBUG]
    return wherry_error(
        error, cure=f"report the traceback that this command prints: {shlex.join(['wherry', DEBUG, *shown])}"
    )


def _of_click(error: click.ClickException, words: Sequence[str]) -> UsageError:
    """An error of click in the form of ours: in lower case, without a full stop, with the help of its command."""
    text = error.format_message().removesuffix(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "wherry"
    verb = command.partition(" ")[2]
    cure = Cure("see {}", Command(verb, Argument("help")))
    if isinstance(error, click.NoSuchOption) and context is not None:
        from wherry.core.names import meant_names

        meant = meant_names(error.option_name, [name for one in context.command.params for name in one.opts])
        if meant:
            return UsageError(
                f"no such option {error.option_name!r}",
                cure=Cure("did you mean {}? See {}", " or ".join(meant), Command(verb, Argument("help"))),
            )
        if any("--if-exists" in option.opts for option in context.command.params):  # it has a target
            cure = _HABITS.get(error.option_name, cure)
    if (
        isinstance(error, click.NoSuchOption)
        and context is not None
        and isinstance(context.command, click.Group)
    ):
        cure = _cure_of_group(context, error, words) or cure
    return UsageError(text[:1].lower() + text[1:], cure=cure)


def _cure_of_group(context: click.Context, error: click.NoSuchOption, words: Sequence[str]) -> str | None:
    """What to do about an option before the command: most belong after it, if the command has it."""
    assert isinstance(context.command, click.Group)
    found = next((word for word in words if word in context.command.list_commands(context)), None)
    command = context.command.get_command(context, found) if found else None
    if found is None or command is None:
        return None
    name = f"{context.command_path} {found}"
    option = error.option_name
    if taken := next((one for one in command.params if option in one.opts), None):
        if option.startswith("--"):
            value = None if getattr(taken, "is_flag", False) else _value_after(option, words, before=found)
            return Cure("put it after the command: {}", Command(found, Argument(option[2:], value)))
        return f"put it after the command: `{name} {option}`"
    return None if error.possibilities else f"remove it: `{name}` has no option {option}"


def _value_after(option: str, words: Sequence[str], *, before: str) -> str | None:
    """The value of an option that stands before the command; None if it has none there."""
    for at, word in enumerate(words[: words.index(before)]):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option and words[at + 1] != before:
            return words[at + 1]
    return None


def _was_printing(error: OSError) -> bool:
    """Whether the error was raised in a library that prints."""
    import traceback

    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _PRINTERS


def interrupt_error() -> WherryError:
    """The error for Ctrl-C and SIGTERM."""
    error = InterruptedRunError("interrupted before completion")
    done = interrupts.committed_targets()
    if not done:
        return error
    from wherry.ledger.record import not_recorded

    return not_recorded(InterruptedRunError("the command was interrupted"), done)


def document(error: WherryError) -> dict[str, Any]:
    """The error as JSON; where the work is done, the JSON of its result with the error added."""
    if isinstance(error, NotRecordedError) and error.result is not None:
        return {**error.result.to_json(), "error": error.to_json()}
    return error.to_json()


_PLACES = ("source", "uri", "a")  # arguments that are the checkpoint that a command is about
_JOBS = ("job", "target")  # that are a job, or its target


def complete_cure(error: WherryError, words: Sequence[str], group: click.Group) -> None:
    """Put the checkpoint or job that was typed into the commands of a cure that name none.

    Args:
        error: what ended the command; its cure changes.
        words: the command line without the program.
        group: the commands.
    """
    at = next((number for number, word in enumerate(words) if word in group.commands), None)
    if at is None or not isinstance(error.cure, Cure):
        return
    command = group.commands[words[at]]
    with suppress(click.ClickException):
        typed = command.make_context(words[at], list(words[at + 1 :]), resilient_parsing=True).params
        place, job = (
            next((typed[name] for name in names if typed.get(name)), None) for names in (_PLACES, _JOBS)
        )
        if place is not None and error.uri is None:
            error.cure = error.cure.about(place)
        if job is not None:
            error.cure = error.cure.about(job=job)


def flush_output() -> StorageError | None:
    """Flush standard output; return the error if that fails, except when the reader closed the pipe, as `head` does."""
    stream: TextIO | None = sys.stdout  # None where it was closed before the start
    if stream is None:
        return None
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # the interpreter flushes again at exit
        return None if isinstance(error, BrokenPipeError) else storage_error(error, _OUTPUT)
    return None


def silence() -> None:
    """Suppress tracebacks that threads, finalizers and loggers print; relevant errors are raised to the caller."""
    threading.excepthook = lambda _arguments: None
    sys.unraisablehook = lambda _arguments: None
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(OneLine())
