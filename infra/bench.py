"""Runs the rows of `benchmarks/cases.py` round by round; `infra/bench` starts it in the bench environment."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import machine, report
from benchmarks.cases import CASES, EXPERTS, NOMINAL, Pair, Probe, Run, input_named, runs_of
from benchmarks.files import drop_from_cache, read_all, size_of
from benchmarks.inputs import LAYERS, SHARD
from benchmarks.judge import Summary, judge, rates_of, summarise
from benchmarks.measure import RowFailedError, measure

if TYPE_CHECKING:
    from benchmarks.measure import Cost

INFRA = Path(__file__).resolve().parent
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_PART = 0.22  # size of a shard of the resharded checkpoint, as a fraction of the checkpoint
_ABOUT = f"""\
Compares wherry with the real tools for the same jobs, with a copy that hashes the same bytes, and with the bound that
follows from the rates of the machine.

It first measures these rates: hashes, codecs, copies, and the device under the scratch folder. Then it makes a
synthetic bfloat16 checkpoint in the shapes of a Llama with {LAYERS} layers, in the containers of each system by the
system's own library, runs every row in a separate process, and writes medians, ratios and whether they meet the
requirements to infra/bench-results.md, .json and .svg. Exit code 1 means that a requirement was not reached or could
not be measured. With the default size it needs 50 GB of disk, and about five minutes a round.
"""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="infra/bench", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--size", type=parse_size, help="size of the checkpoint (default: 2.2GB; with --scale: 4GB)")
    option("--rounds", type=int, default=5, help="number of runs of each row (default: 5)")
    option("--rows", default="", metavar="WORDS", help="run only rows whose name contains WORDS")
    option("--buckets", action="store_true", help="run the rows of buckets, on emulators, instead")
    option(
        "--gs-size",
        type=parse_size,
        default=parse_size("0.5GB"),
        metavar="SIZE",
        help="with --buckets: that of the rows of gs:// (default: 0.5GB), whose emulator keeps all objects in memory",
    )
    option(
        "--scale", action="store_true", help="run the rows of several workers, and the simulation, instead"
    )
    option(
        "--against",
        type=Path,
        metavar="DIR",
        help="compare processor times of detect, plan and convert with the wherry of another checkout, instead",
    )
    option("--tensors", type=int, default=20_000,
           help="with --against: tensors of a large checkpoint (default: 20000)")  # fmt: skip
    option("--rate", type=parse_size, metavar="SIZE",
           help="with --scale: bytes a second of a worker (default: 16MB)")  # fmt: skip
    option("--again", action="store_true",
           help="with --scale: only make simulation, report and docs anew from the results")  # fmt: skip
    option("--docs", action="store_true", help="with --scale: put the tables into docs and README")
    option(
        "--list", action="store_true", help="list the rows and exit; not of --buckets, --scale and --against"
    )
    option(
        "--scratch", type=Path, metavar="DIR", help="folder for the data (default: .bench/ in the checkout)"
    )
    option("--results", type=Path, default=INFRA, metavar="DIR", help="folder for the results")
    option("--keep", action="store_true", help="keep the inputs at the end")
    option("--fresh", action="store_true", help="delete and recreate the virtual environment")
    return parser.parse_args(words)


def parse_size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B?)", text.upper())
    if not found or found[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"invalid size: {text!r}; expected for example 2.2GB")
    return int(float(found[1]) * _UNITS[found[2]])


def main() -> int:
    options = arguments()
    other = ((options.scale, run_scale), (options.against, run_against), (options.buckets, run_buckets))
    run = next((run for wanted, run in other if wanted), None)
    if run is not None and options.list:
        print("error: --list does not list the rows of --buckets, --scale and --against", file=sys.stderr)
        return 2
    cases = [case for case in CASES if options.rows in case.name]
    if run is None and (not cases or options.rounds < 1):
        print("error: no rows match --rows, or --rounds is less than 1", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    above = options.scratch or INFRA.parent / ".bench"
    for folder in (above, options.results):
        folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="bench-", dir=above.resolve()))
    try:
        return run(scratch, options) if run else bench(cases, scratch, options)
    finally:
        if run or not options.keep:
            shutil.rmtree(scratch)


def run_buckets(scratch: Path, options: argparse.Namespace) -> int:
    """The rows of buckets."""
    from benchmarks.buckets import bench as bench_buckets

    sizes = {"s3": options.size or NOMINAL, "gs": options.gs_size}
    return bench_buckets(scratch, sizes, options.rounds, options.rows, options.results)


def run_against(scratch: Path, options: argparse.Namespace) -> int:
    """The rows of two checkouts."""
    from benchmarks.against import bench as bench_against

    other = options.against.resolve()
    if not (other / "wherry" / "__init__.py").is_file() or options.tensors < 1:
        print("error: --against has no package wherry, or --tensors is less than 1", file=sys.stderr)
        return 2
    return bench_against(other, scratch, options.tensors, options.rounds, options.rows, options.results)


def run_scale(scratch: Path, options: argparse.Namespace) -> int:
    """The rows of several workers."""
    from benchmarks.scale.bench import NOMINAL as SIZE
    from benchmarks.scale.bench import RATE
    from benchmarks.scale.bench import bench as bench_scale

    size, rate = options.size or SIZE, options.rate or RATE
    named = {"again": options.again, "docs": options.docs}
    return bench_scale(scratch, size, rate, options.results, options.rows, **named)


def bench(cases: Sequence[Pair | Probe], scratch: Path, options: argparse.Namespace) -> int:
    """The rows that compare conversions with their peers and with the machine."""
    options.size = options.size or NOMINAL
    described = machine.describe(scratch)
    say(f"{described['processor']}, {report.sha_words(described)}")
    described["rates"] = measure_rates(scratch, options.size)
    failed = not_yet(cases)
    runs = {run.name: run for case in cases if case.name not in failed for run in runs_of(case)}
    failed |= {run.name: f"{run.package} is not installed" for run in runs.values() if is_absent(run)}
    inputs = make_inputs(
        [run for run in runs.values() if run.name not in failed], scratch, options.size, failed
    )
    costs: dict[str, list[Cost]] = {name: [] for name in runs}
    for number in range(1, options.rounds + 1):
        for run in runs.values():
            if run.name not in failed:
                one_round(number, run, inputs.get(run.source), scratch, options.size, costs[run.name], failed)
    sizes = {name: size_of(path) for name, path in inputs.items()}
    found = {
        name: summarise(run, costs[name], sizes.get(run.source, 0))
        for name, run in runs.items()
        if name not in failed
    }
    return conclude(cases, described, found, failed, options.results)


def measure_rates(scratch: Path, size: int) -> dict[str, Any]:
    """What the machine does, measured in a process of its own that imports nothing of wherry."""
    say("measuring the rates of the machine")
    command = [sys.executable, "-m", "benchmarks.rates", str(scratch), str(size)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=INFRA)
    found = json.loads(done.stdout)
    for name, rate, _alone, implementation in report.rate_cells(found):
        say(f"{name}: {rate} GB/s ({implementation})")
    return found


def one_round(
    number: int,
    run: Run,
    source: Path | None,
    scratch: Path,
    size: int,
    costs: list[Cost],
    failed: dict[str, str],
) -> None:
    """Run one process once and record its cost, or its error."""
    try:
        cost = run_once(run, source, scratch, size)
    except RowFailedError as error:
        failed[run.name] = error.reason
        say(f"{run.name}: FAILED\n{error}")
        return
    costs.append(cost)
    value = "" if cost.value is None else f", value {cost.value:.3g}"
    say(f"round {number}: {run.name}: {cost.wall:.2f} s, peak {cost.peak / 1e6:.0f} MB{value}")


def conclude(
    cases: Sequence[Pair | Probe],
    described: dict[str, Any],
    found: dict[str, Summary],
    failed: dict[str, str],
    results: Path,
) -> int:
    """Write the results; return 1 if any requirement is not reached."""
    rates = rates_of(described["rates"])
    verdicts = [verdict for case in cases for verdict in judge(case, found, failed, rates)]
    print("\n" + report.write(results, described, verdicts, [*found.values()]))
    problems = report.problems(verdicts)
    for problem in problems:
        print(f"not reached: {problem}", file=sys.stderr)
    return 1 if problems else 0


def not_yet(cases: Sequence[Pair | Probe]) -> dict[str, str]:
    """The rows whose target format this wherry cannot write."""
    command = [sys.executable, "-m", "wherry.cli", "formats", "--json"]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=INFRA).stdout)
    written = {row["name"] for row in listed if row["written"]}
    return {
        case.name: f"unsupported target format {', '.join(sorted(missing))}"
        for case in cases
        if (missing := {*case.formats} - written)
    }


def is_absent(run: Run) -> bool:
    return machine.package_version(run.package) is None


def make_inputs(runs: Sequence[Run], scratch: Path, size: int, failed: dict[str, str]) -> dict[str, Path]:
    """Make the needed inputs, and the inputs that they are made from; a failed input fails its runs."""
    inputs: dict[str, Path] = {}
    for name in dict.fromkeys(run.source for run in runs if run.source):
        try:
            make_input(name, inputs, scratch, size)
        except RowFailedError as error:
            say(f"could not make the input {name}\n{error}")
            failed |= {run.name: f"missing input: {error.reason}" for run in runs if run.source == name}
    return inputs


def make_input(name: str, inputs: dict[str, Path], scratch: Path, size: int) -> None:
    if name in inputs:
        return
    made = input_named(name)
    if made.source:
        make_input(made.source, inputs, scratch, size)
    say(f"making the input {name}")
    target = scratch / "inputs" / re.sub(r"\W+", "-", name)
    source = inputs.get(made.source or "", target)
    words = fill(made.command, source, target, size, made.scale)
    measure(words, environment(scratch), INFRA, speaks=False)
    inputs[name] = target


def run_once(run: Run, source: Path | None, scratch: Path, size: int) -> Cost:
    """Run one process without dirty pages, its source in the page cache unless the run is cold; delete its target."""
    folder = scratch / "out"
    folder.mkdir()
    try:
        prepare(run, source)
        words = fill(run.command, source, folder / run.target, size, run.scale)
        cost = measure(words, environment(scratch), INFRA, speaks=run.speaks)
        return cost._replace(written=size_of(folder))
    finally:
        shutil.rmtree(folder)
        os.sync()


def prepare(run: Run, source: Path | None) -> None:
    """Bring the source into the page cache, or drop it from there, and leave no dirty pages."""
    if source and run.cold:
        drop_from_cache(source)
    elif source and not input_named(run.source).sparse:
        read_all(source)
    os.sync()


def fill(command: Sequence[str], source: Path | None, target: Path, size: int, scale: float) -> list[str]:
    size = int(size * scale)
    values = {
        "python": sys.executable, "bin": Path(sys.executable).parent, "source": source, "target": target,
        "size": size, "shard": int(SHARD * size), "part": int(_PART * size),
        "experts": max(int(EXPERTS * scale), 1),
    }  # fmt: skip
    return [word.format_map(values) for word in command]


def environment(scratch: Path) -> dict[str, str]:
    """The caller's environment without its wherry settings, with jax on the CPU and without the Hugging Face hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WHERRY_")}
    own = {"WHERRY_HOME": "home", "HF_HOME": "hub"}
    places = {name: str(scratch / folder) for name, folder in own.items()}
    return {**kept, **places, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}


def say(message: str) -> None:
    print(f"· {message}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
