"""What a flow run's process does first in the matrix of servers: it stops at the moment that a file names.

`install` puts this module as `sitecustomize` into a folder of the worker's PYTHONPATH, so that each process of a run
imports it. A file `WANTED/RUN` names a function as `module:name`, or `start`; the process that calls it makes
`REACHED/RUN`, and goes on when the first file is gone.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from pathlib import Path

FOLDER, RUN = "MATRIX_HELD", "PREFECT__FLOW_RUN_ID"
START = "start"
_POLL_SECONDS = 0.05


def install(folder):
    """Make the folder; returns the variables that a worker needs."""
    folder = Path(folder)
    for name in ("wanted", "reached", "path"):
        (folder / name).mkdir(parents=True)
    (folder / "path" / "sitecustomize.py").write_text(Path(__file__).read_text())
    paths = [str(folder / "path"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def _hold():
    folder, run = Path(os.environ[FOLDER]), os.environ[RUN]
    if (folder / "wanted" / run).exists():
        (folder / "reached" / run).write_text(str(os.getpid()))
    while (folder / "wanted" / run).exists():
        time.sleep(_POLL_SECONDS)


def _holding(function):
    def call(*positional, **named):
        _hold()
        return function(*positional, **named)

    call.__dict__.update(getattr(function, "__dict__", {}))
    call.__name__ = getattr(function, "__name__", "call")
    call.__doc__ = function.__doc__
    return call


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the others do, and replaces a function of it."""

    def __init__(self, module, name):
        self._module, self._name = module, name

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            setattr(module, self._name, _holding(getattr(module, self._name)))

        loader.exec_module = exec_module
        return spec


def _begin():
    wanted = Path(os.environ[FOLDER]) / "wanted" / os.environ[RUN]
    if not wanted.exists():
        return
    place = wanted.read_text()
    if place == START:
        _hold()
    else:
        sys.meta_path.insert(0, _Finder(*place.split(":")))


if __name__ == "sitecustomize" and os.environ.get(FOLDER) and os.environ.get(RUN):
    _begin()
