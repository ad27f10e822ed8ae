"""The interpreter, set for a command that is short and whose threads move bytes."""

from __future__ import annotations

import atexit
import gc
import os
import sys

_THRESHOLD = 10_000
_SWITCH_SECONDS = 0.001


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
