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


REUSE = """
import resource, sys
from wherry.runtime.interpreter import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for _turn in range(8):
    blocks = [b"x" * (8 << 20) for _block in range(4)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="only glibc has mallopt"
)
def test_freed_blocks_are_used_again_without_new_pages():
    def faults(word: str) -> int:
        done = subprocess.run([sys.executable, "-c", REUSE, word], check=True, capture_output=True, text=True)
        return int(done.stdout)

    pages = (8 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults("not kept") - faults("kept") > 8 * pages
