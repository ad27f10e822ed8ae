"""child_start: the first lines that a child process of wherry executes; see `wherry.runtime.child`.

    python -P child_start.py ROOT PARENT MODULE WORD...

The file is started by its path, before anything of wherry can be imported. It asks the kernel to kill this process
when the parent PARENT dies, puts ROOT, the folder that the parent imported wherry from, at the front of the import
path (nothing where ROOT is empty), and runs MODULE as `python -m` would.
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
    _die_with(int(parent))
    if root:
        sys.path.insert(0, root)
    sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies; end at once where the parent is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    main()
