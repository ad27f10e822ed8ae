"""`infra/bench --against DIR`: runs the rows round by round, in this checkout and in the other by turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import machine
from benchmarks.checkouts import report
from benchmarks.checkouts.inputs import family_of, make_input, options_of
from benchmarks.checkouts.rows import SOURCE, Row, rows

if TYPE_CHECKING:
    from benchmarks.checkouts.rows import Container

_HERE = Path(__file__).resolve()
OURS = _HERE.parents[3]


class Child:
    """A warm process with the wherry of one checkout."""

    def __init__(self, checkout: Path, home: Path) -> None:
        """Start it.

        Args:
            checkout: the folder that has the package `wherry`.
            home: its WHERRY_HOME.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WHERRY_")}
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE.with_name("child.py")), str(checkout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**kept, "WHERRY_HOME": str(home)},
            cwd=home.parent,
        )

    def ask(self, row: Row, source: Path, target: Path) -> dict[str, Any]:
        """Do a row; see `child.answer`."""
        request = {
            "operation": row.operation,
            "source": str(source),
            "target": str(target),
            "to": row.target.format,
            "options": options_of(row.source, row.target),
            "family": family_of(row.target),
            "repeats": row.repeats,
        }
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        if pipe_in is None or pipe_out is None:
            raise RuntimeError("the child has no pipes")
        pipe_in.write(json.dumps(request) + "\n")
        pipe_in.flush()
        return json.loads(pipe_out.readline())

    def end(self) -> None:
        """End it; it ends when its input does."""
        self._process.communicate(timeout=60)


def bench(other: Path, scratch: Path, tensors: int, rounds: int, words: str, results: Path) -> int:
    """Run the rows and write the results; 1 if a row is slower than allowed, or was not measured.

    Args:
        other: folder of the other checkout.
        scratch: folder for checkpoints and targets.
        tensors: of a large checkpoint.
        rounds: number of rounds.
        words: only rows whose name contains them.
        results: folder for the results.
    """
    chosen = [row for row in rows(tensors) if words in row.name]
    with ExitStack() as stack:
        children = [Child(checkout, scratch / name) for checkout, name in ((OURS, "ours"), (other, "other"))]
        for child in children:
            stack.callback(child.end)
        sources = {row: _make_source(row, scratch) for row in chosen}
        times = _measure_rows(children, sources, scratch, rounds)
    found = {
        "machine": machine.describe(scratch),
        "ours": commit_of(OURS),
        "other": commit_of(other),
        "rounds": rounds,
        "rows": times,
    }
    return report.write(results, found)


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, as a date and the beginning of its hash; `unknown` without git."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _measure_rows(
    children: Sequence[Child], sources: dict[Row, Path], scratch: Path, rounds: int
) -> list[dict[str, Any]]:
    found: dict[Row, tuple[list[float], list[float]]] = {row: ([], []) for row in sources}
    failed: dict[Row, str] = {}
    for number in range(rounds + 1):  # the first one imports what is needed, and is not counted
        for row, source in sources.items():
            if row in failed:
                continue
            for which in ((0, 1), (1, 0))[number % 2]:
                answer = children[which].ask(row, source, scratch / "made" / f"{which}" / row.target.file)
                if "error" in answer:
                    failed[row] = f"{('this checkout', 'the other')[which]}: {answer['error']}"
                elif number:
                    found[row][which].extend(answer["seconds"])
        print(f"· round {number} of {rounds}", flush=True)
    return [_summarise(row, *found[row], failed.get(row, "")) for row in sources]


def _summarise(row: Row, ours: list[float], other: list[float], failed: str) -> dict[str, Any]:
    facts = {
        "row": row.name,
        "operation": row.operation,
        "container": row.container.name,
        "tensors": row.tensors,
    }
    if failed:
        return {**facts, "failed": failed}
    return {**facts, "ours_s": min(ours), "other_s": min(other), "ratio": min(ours) / min(other)}


def _make_source(row: Row, scratch: Path) -> Path:
    folder = scratch / "sources"

    def convert(source: Path, target: Path, container: Container) -> None:
        options = [f"{name}={value}" for name, value in options_of(SOURCE, container).items()]
        words = [word for option in options for word in ("--set", option)]
        family = family_of(container)
        words += ["--family", family] if family else []
        command = [sys.executable, "-m", "wherry.cli", "convert", str(source), str(target)]
        command += ["--to", container.format, *words, "--no-lineage", "--verify", "none"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=OURS)

    return make_input(row.source, row.tensors, folder, convert)
