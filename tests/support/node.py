"""Packages of npm for tests: `infra/environment.py` installs them into the environment, where npm is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


def node_file(title: str, *parts: str) -> Path:
    """A file of a package, in the environment or in NODE_PATH; a reason to skip if it is not there.

    Args:
        title: the package's name for people.
        parts: the package's name, and the path within it.
    """
    named = os.environ.get("NODE_PATH", "").split(os.pathsep)
    for folder in (Path(sys.prefix) / "node_modules", *map(Path, filter(None, named))):
        if folder.joinpath(*parts).is_file():
            return folder.joinpath(*parts)
    pytest.skip(f"npm has not installed {title}, which infra/environment.py does where npm is")
