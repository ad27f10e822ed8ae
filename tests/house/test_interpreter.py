"""What a command changes of its interpreter, and that what the user has set of it stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import gc, json, os, sys
from wherry.runtime.interpreter import tune
tune()
import numpy
print(json.dumps([gc.get_threshold()[0], sys.getswitchinterval(), os.environ["OPENBLAS_NUM_THREADS"],
                  len(os.listdir("/proc/self/task"))]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux shows them")
@pytest.mark.parametrize("given", [None, "2"])
def test_a_command_starts_no_threads_that_wait_for_matrices(given):
    env = {name: text for name, text in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    env |= {"OPENBLAS_NUM_THREADS": given} if given else {}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, check=True, capture_output=True, text=True
    )
    threshold, interval, blas, threads = json.loads(done.stdout)
    assert (threshold, round(interval, 6), blas) == (10_000, 0.001, given or "1")
    assert threads == 1 or given
