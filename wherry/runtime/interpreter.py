"""Settings of the interpreter for short commands whose threads move bytes."""

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
    """Read and print file names as UTF-8; in any other locale, restart the interpreter in UTF-8 mode.

    A file name is bytes. In UTF-8 mode it decodes to the same text in every locale, so that ledger, manifests and
    digests have one name for one file. Undecodable bytes are printed escaped.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get(_UTF8) != "1" and sys.executable:
        os.environ[_UTF8] = "1"  # for the children as well
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606  no shell
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def tune() -> None:
    """Reduce the cost of garbage collection, of thread switches and of OpenBLAS threads.

    Imports create many objects and no garbage: collecting takes 5 % of the start-up, and 0.1 s at exit, when all
    objects would be visited once more. Threads that move bytes need the interpreter rarely, but then at once. numpy
    would start an OpenBLAS thread for each core, which costs 0.07 s of processor time without any use.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(_THRESHOLD)
    atexit.register(gc.freeze)
    sys.setswitchinterval(_SWITCH_SECONDS)
