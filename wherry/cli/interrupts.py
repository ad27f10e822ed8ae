"""Ctrl-C during a command: whenever it comes, the command ends with 130 and one message.

Python's own handler raises KeyboardInterrupt between two instructions of the main thread, and three places lose it:

1. The C code of an extension module that is being imported imports Python modules itself, and makes an ImportError of
   what they raise (numpy also prints a traceback). There the exception waits until the extension is imported.
2. Bare `except:` clauses and callbacks of C libraries swallow it. Whatever the command returns, it was interrupted.
3. After the result is known, nothing catches it. There the process ends at once: nothing is left to undo.

A second Ctrl-C is raised wherever it comes, so that an import that hangs can be left.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib.machinery import ExtensionFileLoader
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from types import FrameType

INTERRUPTED = 130
_LOADING = {ExtensionFileLoader.create_module.__code__, ExtensionFileLoader.exec_module.__code__}
_received: list[int] = []


def catch_interrupts() -> None:
    """Handle SIGINT from now on; a process that ignores it, as a job in the background does, goes on to ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def was_interrupted() -> bool:
    """Whether SIGINT has come since `catch_interrupts`."""
    return bool(_received)


def leave_at_once() -> None:
    """Let SIGINT end the process from now on: its result is known, and only its output is left to be written."""
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, _leave)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    waiting = _importer_of_extension(frame) if len(_received) == 1 else None
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
