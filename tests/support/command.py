"""The command line as users start it: a process of its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from wherry.cli import main


def command(
    *words: str | bytes | Path, env: dict[str, str] | None = None, **how: str
) -> subprocess.CompletedProcess[str]:
    """Run `wherry`; what it prints is read as UTF-8."""
    line = [
        sys.executable,
        "-m",
        "wherry.cli",
        *(word if isinstance(word, bytes) else str(word) for word in words),
    ]
    return subprocess.run(
        line, env={**os.environ, **(env or {})}, capture_output=True, check=False, timeout=120,
        encoding="utf-8", errors="surrogateescape", **how,
    )  # fmt: skip


def typed(line: str, home: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of a command that runs in this process, and what it prints; HOME stands for a folder in both."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line.replace("HOME", str(home))))
    printed = capfd.readouterr()
    return int(ended.value.code or 0), (printed.out + printed.err).replace(str(home), "HOME")


def small(path: Path) -> Path:
    """A safetensors file of two tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(save({"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.int32)}))
    return path


def cure_of(text: str) -> str:
    """The command that a cure says to run."""
    return text.rpartition("run `")[2].partition("`")[0]
