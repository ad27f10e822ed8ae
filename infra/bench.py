"""Runs the rows of `benchmarks/rows.py` round by round; `infra/bench` starts it in the bench environment."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import machine, report
from benchmarks.inputs import LAYERS
from benchmarks.measure import RowFailedError, measure
from benchmarks.rows import FIRST_INPUT, INPUTS, ROWS, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.measure import Cost

INFRA = Path(__file__).resolve().parent
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_ABOUT = f"""\
Measures wherry beside a copy-and-hash of the same bytes and the peers' own load-all-then-save.

It makes a synthetic bfloat16 checkpoint in the shapes of a Llama with {LAYERS} layers, runs every row in a process
of its own, and writes the medians to infra/bench-results.md and .json. Exit code 1 means that wherry needed
{report.LIMIT / 1e6:.0f} MB of memory or more in a row.
"""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="infra/bench", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", type=parse_size, default="2GB", help="bytes of the checkpoint (default: 2GB)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each row runs (default: 5)")
    parser.add_argument(
        "--rows", default="", metavar="WORDS", help="only rows whose name or group contains this"
    )
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="where the data lies (default: .bench/ here)"
    )
    parser.add_argument(
        "--results", type=Path, default=INFRA, metavar="DIR", help="where the results are written"
    )
    parser.add_argument("--keep", action="store_true", help="do not delete the inputs at the end")
    parser.add_argument("--fresh", action="store_true", help="make the virtual environment anew")
    return parser.parse_args(words)


def parse_size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B?)", text.upper())
    if not found or found[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"not a size: {text}")
    return int(float(found[1]) * _UNITS[found[2]])


def main() -> int:
    asked = arguments()
    rows = [row for row in ROWS if asked.rows in row.name or asked.rows in row.group]
    if not rows or asked.rounds < 1:
        print("no row is selected, or no round is asked for", file=sys.stderr)
        return 2
    above = asked.scratch or INFRA.parent / ".bench"
    for folder in (above, asked.results):
        folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="bench-", dir=above.resolve()))
    with ExitStack() as stack:
        if not asked.keep:
            stack.callback(shutil.rmtree, scratch)
        return bench(rows, scratch, asked)


def bench(rows: Sequence[Row], scratch: Path, asked: argparse.Namespace) -> int:
    described = machine.describe(scratch)
    inputs = make_inputs({row.source for row in rows}, scratch, asked.size)
    costs: dict[str, list[Cost]] = {row.name: [] for row in rows}
    failed: dict[str, str] = {}
    for number in range(asked.rounds):
        for row in (row for row in rows if row.name not in failed):
            try:
                cost = run_row(row, inputs[row.source], scratch)
            except RowFailedError as error:
                failed[row.name] = str(error)
                say(f"{row.name}: FAILED")
                continue
            costs[row.name].append(cost)
            say(f"round {number + 1}: {row.name}: {cost.wall:.2f} s, peak {cost.peak / 1e6:.0f} MB")
    done = [row for row in rows if row.name not in failed]
    summary = summarise(done, costs, {name: size_of(path) for name, path in inputs.items()})
    print("\n" + report.write(asked.results, described, summary))
    problems = [*report.over_limit(summary), *(f"{name}: {why}" for name, why in failed.items())]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def make_inputs(wanted: set[str], scratch: Path, size: int) -> dict[str, Path]:
    """Make the inputs that are wanted, and those that they are made from."""
    inputs = {FIRST_INPUT: scratch / "inputs" / FIRST_INPUT}
    say(f"making the input {FIRST_INPUT}")
    run_quietly(("{python}", "-m", "benchmarks.inputs", "{target}", str(size)), scratch, inputs[FIRST_INPUT])
    for name, made in INPUTS.items():
        if name in wanted:
            say(f"making the input {name}")
            inputs[name] = scratch / "inputs" / name
            run_quietly(made.command, inputs[made.source], inputs[name])
    return inputs


def run_quietly(command: Sequence[str], source: Path, target: Path) -> None:
    import subprocess

    words = fill(command, source, target)
    done = subprocess.run(
        words, check=False, env=environment(target.parent), cwd=INFRA, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"an input could not be made: {' '.join(words)}\n{done.stdout}\n{done.stderr}")


def run_row(row: Row, source: Path, scratch: Path) -> Cost:
    """Run one row once: source in the page cache before, no dirty pages of others, target gone after."""
    folder = scratch / "out"
    folder.mkdir()
    try:
        warm(source)
        os.sync()
        return measure(fill(row.command, source, folder / row.target), environment(scratch), INFRA)
    finally:
        shutil.rmtree(folder)
        os.sync()


def fill(command: Sequence[str], source: Path, target: Path) -> list[str]:
    return [word.format(python=sys.executable, source=source, target=target) for word in command]


def environment(scratch: Path) -> dict[str, str]:
    """The caller's environment without its own wherry settings, and with jax on the processor."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WHERRY_")}
    return {**kept, "WHERRY_HOME": str(scratch / "home"), "JAX_PLATFORMS": "cpu"}


def warm(source: Path) -> None:
    buffer = bytearray(8 << 20)
    for path in (entry for entry in source.rglob("*") if entry.is_file()):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def summarise(
    rows: Sequence[Row], costs: dict[str, list[Cost]], sizes: dict[str, int]
) -> list[dict[str, object]]:
    import statistics

    floors = {
        row.group: statistics.median(cost.wall for cost in costs[row.name]) for row in rows if row.floor
    }
    return [report.summarise(row, costs[row.name], sizes[row.source], floors.get(row.group)) for row in rows]


def say(message: str) -> None:
    print(f"· {message}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
