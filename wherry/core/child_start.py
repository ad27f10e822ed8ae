"""child_start: the entry point of a child process; see `wherry.core.child`.

    python -P child_start.py ROOT PARENT MODULE WORD...

The file is run by its path, before wherry can be imported. It asks the kernel to kill this process when the process
PARENT dies, puts ROOT, the folder that the parent imported wherry from, at the front of the import path (unless ROOT is
empty), and runs MODULE like `python -m`.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the module that the command line names."""
    root, parent, module, *words = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # the parent is already dead
            os._exit(1)
    if root:
        sys.path.insert(0, root)
    sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
