"""What other tools say of the same pickles: picklescan, modelscan and fickling, each in an environment of its own.

A tool gets every file by its own API. Of an archive, fickling gets the pickles in it, since it reads no archives by
itself. A file that a tool skips or fails on counts as no answer: whoever asks cannot tell it from a sound one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infra.attacks.case import Case

_ROOT = Path(__file__).resolve().parents[2]
FLAGGED, PASSED, UNANSWERED = "flagged", "passed", "unanswered"

_HEAD = """
import json, signal, sys
def late(*_):
    raise TimeoutError
signal.signal(signal.SIGALRM, late)
def said(path):
%s
for line in sys.stdin:
    signal.alarm(20)
    try:
        found = said(json.loads(line))
    except BaseException as error:
        found = "unanswered"
    signal.alarm(0)
    sys.__stdout__.write("verdict " + found + chr(10))
"""
_PICKLESCAN = """
    from picklescan.scanner import scan_file_path
    found = scan_file_path(path)
    if found.issues_count:
        return "flagged"
    return "unanswered" if found.scan_err or not found.scanned_files else "passed"
"""
_MODELSCAN = """
    from modelscan.modelscan import ModelScan
    found = ModelScan().scan(path)
    if found["summary"]["total_issues"]:
        return "flagged"
    return "passed" if found["summary"]["scanned"]["total_scanned"] and not found["errors"] else "unanswered"
"""
_FICKLING = """
    import io, zipfile
    from fickling.fickle import StackedPickle
    from fickling.analysis import Severity, check_safety
    data = open(path, "rb").read()
    parts = [data]
    if zipfile.is_zipfile(path):
        archive = zipfile.ZipFile(path)
        parts = [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
    severities = [check_safety(one).severity for part in parts for one in StackedPickle.load(io.BytesIO(part))]
    return "unanswered" if not severities else "passed" if max(severities) <= Severity.LIKELY_SAFE else "flagged"
"""
_WHERRY = """
    import wherry
    return "passed" if wherry.detect(path).verdict == "ok" else "flagged"
"""
UNDECLARED = {"fickling": ("typing_extensions",)}  # packages that a tool imports without declaring them
TOOLS = {"picklescan": _PICKLESCAN, "modelscan": _MODELSCAN, "fickling": _FICKLING}


@dataclass(frozen=True, slots=True)
class Scanner:
    """What a tool says of the files that are made to run code.

    Attributes:
        tool, version: which; without a version it could not be installed.
        files: how many it was given.
        flagged, passed, unanswered: what it said of them.
    """

    tool: str
    version: str
    files: int
    flagged: int
    passed: int
    unanswered: int


def compare_scanners(scratch: Path, cases: Sequence[Case], commit: str) -> list[Scanner]:
    """What wherry, of this commit, and each tool say of the cases that are made to run code."""
    with tempfile.TemporaryDirectory(dir=scratch) as home:
        paths: list[str] = []
        for number, case in enumerate(case for case in cases if case.evil):
            folder = Path(home) / str(number)
            folder.mkdir()
            paths.extend(_files(Path(case.make(folder))))
        return [
            _ask_tool("wherry", sys.executable, commit, _WHERRY, paths),
            *(_of_tool(tool, program, paths) for tool, program in TOOLS.items()),
        ]


def _files(path: Path) -> list[str]:
    """The file with the pickle: that of a folder is the one that is not text."""
    if path.is_file():
        return [str(path)]
    names = (".metadata", "pytorch_model.bin", "consolidated.pth", "consolidated.00.pth")
    return [str(path / name) for name in names if (path / name).exists()]


def _of_tool(tool: str, program: str, paths: list[str]) -> Scanner:
    python = find_environment(tool)
    if python is None:
        return Scanner(tool, "not installed", 0, 0, 0, 0)
    code = f"import importlib.metadata as m; print(m.version({tool!r}))"
    version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
    return _ask_tool(tool, str(python), version, program, paths)


def find_environment(tool: str) -> Path | None:
    """The Python of an environment with a tool, made once; None if the tool cannot be installed."""
    home = _ROOT / f".venv-{tool}"
    python, done = home / "bin" / "python", home / "done"
    if not done.exists():
        commands = (
            [sys.executable, "-m", "venv", str(home)],
            [str(python), "-m", "pip", "install", "-q", tool, *UNDECLARED.get(tool, ())],
        )
        if any(subprocess.run(command, check=False, capture_output=True).returncode for command in commands):
            return None
        done.touch()
    return python


def _ask_tool(tool: str, python: str, version: str, program: str, paths: list[str]) -> Scanner:
    """The counts of the verdicts; after a file that ends the tool, a new process judges the rest."""
    verdicts: list[str] = []
    while len(verdicts) < len(paths):
        left = paths[len(verdicts) :]
        done = subprocess.run(
            [python, "-c", _HEAD % program],
            input="".join(json.dumps(path) + "\n" for path in left),
            capture_output=True, text=True, errors="replace", check=False, cwd=tempfile.gettempdir(),
            env={**os.environ, "PYTHONPATH": str(_ROOT) if tool == "wherry" else ""},
        )  # fmt: skip
        rows = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("verdict ")]
        verdicts += rows if len(rows) == len(left) else [*rows, UNANSWERED]
    counts = Counter(verdicts)
    return Scanner(tool, version, len(paths), counts[FLAGGED], counts[PASSED], counts[UNANSWERED])
