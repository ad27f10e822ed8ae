"""import_locks: the locks of modules that other threads import while this process forks.

Python locks a module while a thread imports it. A child of a fork has the lock but not the thread, so it would wait for
ever for a module that was being imported, also for the first import of wherry itself. It imports those modules anew
instead. `wherry.core.forks` lets a fork wait for imports of other threads first, but not without end.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from typing import Any


def imports_elsewhere() -> list[str]:
    """The modules that other threads than this one import."""
    rows = [(name, getattr(reference(), "owner", None)) for name, reference in tuple(_module_locks().items())]
    return [name for name, owner in rows if owner not in (None, threading.get_ident())]


def _module_locks() -> dict[str, Any]:
    return getattr(getattr(importlib, "_bootstrap", None), "_module_locks", {})


def _free_imports() -> None:
    """In a forked child, let modules be imported anew that threads of the parent were importing."""
    for name in imports_elsewhere():
        del _module_locks()[name]
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if getattr(spec, "_initializing", False):
            del sys.modules[name]


os.register_at_fork(after_in_child=_free_imports)
