"""interrupts: Ctrl-C and SIGTERM end a command at any moment with 130, and after a commit with the truth.

1. While the program is imported they end the process at once. Nothing has begun, and an exception in the middle of the
   import of a C library would become another error.
2. Then they raise KeyboardInterrupt in the main thread, which unwinds what is open. Whatever a library makes of that
   exception (a bare `except:`, a callback in C), `were_raised` tells that the command was interrupted. The C code of an
   extension module that is being imported imports Python modules itself, and makes an ImportError of what they raise:
   there the exception waits until the extension is imported, and only a second signal does not.
3. From a commit on the first of them is only noted: what follows is the record of the work, and exit code 0 is right.
   `go_on` raises what was noted before further work begins. The second is raised at once; if the target was committed,
   it is done but not recorded: 12.
4. When the exit code is known, they end the process with it.

The handlers are those of the command line. A program that calls the library keeps its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from types import FrameType
from typing import Any, NoReturn

Handler = Callable[[int, FrameType | None], object]

INTERRUPTED = 130  # the exit code
# The words of InterruptedRunError, whose module is not imported yet.
_TEXT = "error: interrupted before completion\ncure: run the same command again; it resumes where it was interrupted\n"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOADING = {ExtensionFileLoader.create_module.__code__, ExtensionFileLoader.exec_module.__code__}


class _State:
    """What was interrupted.

    Attributes:
        installed: whether the handlers are those of this module.
        held: what is committed at present, or was; until then signals are raised.
        noted: whether one came meanwhile.
        raised: whether one was raised.
        committed: the targets that were committed, and are not recorded yet.
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
    _install(lambda _number, _frame: _leave(INTERRUPTED, _TEXT))


def interrupt() -> None:
    """Let the signals interrupt the command."""
    _state.installed = True
    _install(_interrupt)


def end_with(code: int) -> None:
    """Let the signals end the process with its exit code, which is known."""
    if not _state.installed:
        return
    _install(lambda _number, _frame: _leave(code, ""))


def leave(code: int) -> NoReturn:
    """End the command with its exit code, when everything is written and flushed.

    An interrupted command leaves nothing to Python's own end, in which hooks of libraries run: at one of 40 steps of
    `register` it ended by the signal instead of the code.
    """
    if _state.installed and _state.raised:
        os._exit(code)
    sys.exit(code)


def were_raised() -> bool:
    """Whether a signal has interrupted the command."""
    return _state.raised


def committed_targets() -> list[str]:
    """The targets that were committed before the signal that was raised, and were not recorded."""
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
    """Raise a signal that was noted, before further work begins, which can be interrupted.

    Raises:
        KeyboardInterrupt: a signal was noted.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _state.held = ""
    if _state.noted:  # also in a commit that has failed since
        _state.noted = False
        _interrupt(signal.SIGINT, None)


def settle(uris: Collection[str]) -> None:
    """Note that committed targets are recorded, or withdrawn: they are no longer done without a record."""
    _state.committed = [uri for uri in _state.committed if uri not in uris]


def _interrupt(_number: int, frame: FrameType | None) -> None:
    if _state.held and not _state.noted:
        _state.noted = True
        _say(f"{_state.held} is being committed and recorded; interrupt again to end without that\n")
        return
    waiting = None if _state.raised else _importer_of_extension(frame)
    _state.raised = True
    if waiting is None:
        raise KeyboardInterrupt
    waiting.f_trace = _raise_next
    sys.settrace(_trace_nothing)  # without a function for calls, Python reports no line of any frame


def _importer_of_extension(frame: FrameType | None) -> FrameType | None:
    """The outermost frame that waits for an extension module to be loaded; None if none is being loaded."""
    found = None
    while frame is not None:
        if frame.f_code in _LOADING:
            found = frame
        frame = frame.f_back
    while found is not None and found.f_code.co_filename.startswith("<frozen importlib"):
        found = found.f_back
    return found


def _trace_nothing(_frame: FrameType, _event: str, _value: Any) -> None:
    return None


def _raise_next(_frame: FrameType, _event: str, _value: Any) -> NoReturn:
    """Called in the importing frame, at its next line or when it returns."""
    sys.settrace(None)
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
