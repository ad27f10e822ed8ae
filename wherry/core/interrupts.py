"""interrupts: Ctrl-C and SIGTERM end a command at any moment with 130, and after a commit with the truth.

1. While the program is imported they end the process at once. Nothing has begun, and an exception in the middle of the
   import of a C library would become another error.
2. Then they raise KeyboardInterrupt in the main thread, which unwinds what is open. Whatever a library makes of that
   exception, `were_raised` tells that the command was interrupted.
3. From a commit on the first of them is only noted: what follows is the record of the work, and exit code 0 is right.
   `go_on` raises what was noted before further work begins. The second is raised at once; if the target was committed,
   it is done but not recorded: 12.
4. When the exit code is known, they end the process with it.

The handlers are those of the command line. A program that calls the library keeps its own.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import FrameType

    Handler = Callable[[int, FrameType | None], object]

INTERRUPTED = 130  # the exit code
WHAT = "interrupted before completion"
CURE = "run the same command again; it resumes where it was interrupted"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _State:
    """What was interrupted.

    Attributes:
        installed: whether the handlers are those of this module.
        held: what is committed at present, or was; until then signals are raised.
        noted: whether one came meanwhile.
        raised: whether one was raised.
        committed: the targets that were committed.
    """

    def __init__(self) -> None:
        self.installed = False
        self.held = ""
        self.noted = False
        self.raised = False
        self.committed: list[str] = []


_state = _State()


def end_at_once() -> None:
    """Let the signals end the process while it is imported."""
    _install(lambda _number, _frame: _leave(INTERRUPTED, f"error: {WHAT}\ncure: {CURE}\n"))


def interrupt() -> None:
    """Let the signals interrupt the command."""
    _state.installed = True
    _install(_interrupt)


def end_with(code: int) -> None:
    """Let the signals end the process with its exit code, which is known."""
    if not _state.installed:
        return
    _install(lambda _number, _frame: _leave(code, ""))


def were_raised() -> bool:
    """Whether a signal has interrupted the command."""
    return _state.raised


def committed_targets() -> list[str]:
    """The targets that were committed before the signal that was raised."""
    return _state.committed


@contextmanager
def committing(uri: str) -> Generator[None]:
    """Around a commit in the main thread: until `go_on` the first signal is only noted.

    Args:
        uri: the target.
    """
    if not _state.installed or threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.held = uri
    try:
        yield
    except BaseException:
        _state.held = ""
        raise
    _state.committed.append(uri)


def go_on() -> None:
    """Raise what was noted: further work begins, which can be interrupted.

    Raises:
        KeyboardInterrupt: a signal came.
    """
    if _state.held and threading.current_thread() is threading.main_thread():
        _state.held = ""
        if _state.noted:
            _interrupt(signal.SIGINT, None)


def _interrupt(_number: int, _frame: object) -> None:
    if _state.held and not _state.noted:
        _state.noted = True
        _say(f"{_state.held} is being committed and recorded; interrupt again to end without that\n")
        return
    _state.raised = True
    raise KeyboardInterrupt


def _install(handler: Handler) -> None:
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` and shells ask for
            signal.signal(number, handler)


def _say(text: str) -> None:
    try:
        os.write(2, text.encode())
    except OSError:
        return


def _leave(code: int, text: str) -> NoReturn:
    _say(text)
    os._exit(code)
