"""The interpreter, set for a command that is short and whose threads move bytes."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys

_THRESHOLD = 10_000
_SWITCH_SECONDS = 0.001
_UTF8 = "PYTHONUTF8"


def use_utf8() -> None:
    """Read and print names as UTF-8, whatever the locale says; where it says otherwise the interpreter starts anew.

    The name of a file is bytes. In UTF-8 mode they are the same text in every locale, so that ledger, manifests and
    digests have one name for one file. What is no text at all is printed escaped, and never an error.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get(_UTF8) != "1" and sys.executable:
        os.environ[_UTF8] = "1"  # for the children as well
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606  no shell
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def tune() -> None:
    """Spend less on garbage that is not there and on handing the interpreter from thread to thread.

    Imports make many objects and no garbage: looking for it is 5 % of a start, and 0.1 s at the end, when all of
    them would be walked once more. Threads that move bytes need the interpreter seldom, but then at once. numpy would
    start a thread for each core, which look for matrices to multiply for 0.07 s of processor time; there are none.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(_THRESHOLD)
    atexit.register(gc.freeze)
    sys.setswitchinterval(_SWITCH_SECONDS)
