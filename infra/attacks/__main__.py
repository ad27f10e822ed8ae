"""Makes hostile files for every container and record, runs every verb over them, and prints what came of it.

Each case is examined in a fork of a process that has imported wherry, under an audit hook and limits. The hook notes
what runs, connects, or is written elsewhere; a run counts as hung after 60 s of processor time or 90 s in all, as over
memory above 300 MB more than at its start, and as outside the error tree if it ends with a traceback, a signal or an
exit code that no error has. Results are written to infra/attack-results.md and .json,
and their sums to README.md. Exit code 1: something was found.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from infra.attacks import (
    archives,
    arrays,
    bombs,
    bundles,
    checkpoints,
    controls,
    heads,
    ledgers,
    mutate,
    parsers,
    pickles,
    prepare,
    records,
    report,
    scanners,
    server,
    servers,
    situations,
    texts,
    verbs,
)  # fmt: skip
from infra.attacks.case import Case, Sound, choose_evenly, require_unique

INFRA = Path(__file__).resolve().parents[1]
PHASES = ("files", "bombs", "servers", "situations", "mutations", "parsers", "scanners")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="infra/attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--only", choices=PHASES, action="append", help="run only this part; may be repeated")
    option("--cases", type=int, help="number of hostile files, evenly of each kind (default: all)")
    option("--verbs", default="", metavar="NAMES",
           help="run only these verbs over the files, separated by commas")  # fmt: skip
    option("--join", type=Path, action="append", default=[], metavar="FILE",
           help="add the results (JSON) of another run, for example of other parts; may be repeated")  # fmt: skip
    option("--mutations", type=int, default=10_000, help="mutations that go through verbs (default: 10000)")
    option("--runs", type=int, default=200_000, help="runs of single parsers in all (default: 200000)")
    option("--minutes", type=float, default=0, help="go on with new mutations and runs for so long")
    option("--seed", type=int, default=0, help="of mutations and runs")
    option("--jobs", type=int, default=2, help="processes (default: 2)")
    option("--match", default="", metavar="WORDS", help="only files whose name contains WORDS")
    option(
        "--systems", default="", metavar="NAMES", help="only these systems' checkpoints, separated by commas"
    )
    option(
        "--sound", type=Path, metavar="DIR", help="sound checkpoints of an earlier run, or where to keep them"
    )
    option("--results", type=Path, default=INFRA, metavar="DIR", help="folder for the results")
    option("--scratch", type=Path, metavar="DIR", help="folder for the files (default: in memory)")
    option("--json", action="store_true", help="print JSON instead of the table")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Attack, and write the results."""
    options = arguments(words)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "PREFECT_API_URL"):
        os.environ.pop(name, None)  # no server of the user is used
    base = options.scratch or ("/dev/shm" if Path("/dev/shm").is_dir() else None)
    if options.scratch:
        options.scratch.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="wherry-attack-", dir=base))
    try:
        found = run_attack(options, scratch)
    finally:
        server.remove(scratch)
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "attack-results.json").write_text(json.dumps(found.to_json(), indent=1) + "\n")
    (options.results / "attack-results.md").write_text(report.markdown(found))
    if options.results == INFRA:
        report.put_into_readme(INFRA.parent / "README.md", found.to_json())
    print(json.dumps(found.to_json()) if options.json else report.text(found))
    return 1 if found.faults else 0


def run_attack(options: argparse.Namespace, scratch: Path) -> report.Results:
    """Run the parts that the options name."""
    place = options.sound or scratch / "from"
    phases = options.only or PHASES
    found = report.Results.begun(phases)
    for earlier in options.join:
        found.join(json.loads(earlier.read_text()))
    crew = prepared(place, scratch, options.systems)
    with servers.running() if "servers" in phases else nullcontext(0) as port:
        for phase, cases, names in once(options, phases, place, port):
            run(
                found,
                phase,
                cases,
                names,
                replace(crew, port=port if phase == "servers" else 0),
                options.jobs,
            )
    until, seed = time.monotonic() + 60 * options.minutes, options.seed
    while True:
        if "mutations" in phases:
            changed = list(mutate.cases(place, options.mutations, seed))
            run(found, "mutations", changed, verbs.CHANGED, crew, options.jobs)
        if "parsers" in phases:
            say("single parsers")
            found.parsers.extend(parsers.attack_parsers(place, scratch, options.runs, seed, options.jobs))
        seed += 1
        if time.monotonic() > until:
            break
    if "scanners" in phases:
        commit = report.commit_of_checkout()
        found.scanners.extend(scanners.compare_scanners(scratch, list(pickles.cases()), commit))
    return found


def prepared(place: Path, scratch: Path, systems: str) -> server.Server:
    """A fork server that is warm and has noticed the controls, with sound checkpoints in a place."""
    if not place.exists():
        command = [sys.executable, "-m", "infra.attacks.prepare", str(place)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*command, *filter(None, systems.split(","))], check=True, **quiet)
    say("sound checkpoints are made")
    crew = server.Server(scratch, place / prepare.GOOD, place / prepare.HOME, place / prepare.KEYS)
    good, written = place / prepare.GOOD, place / prepare.WRITTEN
    own = [Sound("good", good.parent, good), Sound("written", written, written)]
    server.warm(crew, [one.as_it_is for one in (*own, *prepare.sound(place))])
    controls.require_noticed(crew)
    say("the fork server is warm, and notices what it must")
    return crew


def once(
    options: argparse.Namespace, phases: Sequence[str], place: Path, port: int
) -> Iterator[tuple[str, list[Case], Sequence[str]]]:
    """The parts whose cases are the same ones each time, with their verbs."""
    chosen = [name for name in options.verbs.split(",") if name]

    def some(cases: Iterable[Case], count: int | None = None) -> list[Case]:
        matching = [case for case in require_unique([*cases]) if options.match in case.name]
        return choose_evenly(matching, count, options.seed)

    if "files" in phases:
        yield "files", some(hostile_files(place), options.cases), chosen or list(verbs.VERBS)
    if "bombs" in phases:
        yield "bombs", some(bombs.cases()), list(verbs.LOOKING)
    if "situations" in phases:
        yield "situations", some(situations.cases(place), options.cases), chosen or situations.VERBS
        yield "situations", some(situations.events(), options.cases), situations.EVENT_VERBS
    if "servers" in phases:
        yield "servers", some(servers.cases(port)), servers.VERBS


def run(
    found: report.Results,
    phase: str,
    cases: Sequence[Case],
    names: Sequence[str],
    crew: server.Server,
    jobs: int,
) -> None:
    """Add a phase to the results, and say how long it took."""
    began = time.monotonic()
    for one in server.examine_cases(crew, cases, names, jobs):
        found.add(phase, one)
    found.cases[phase] += len(cases)
    say(f"{phase}: {len(cases)} cases, {time.monotonic() - began:.0f} s")


def say(message: str) -> None:
    """Say how far it is."""
    print(f"· {time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def hostile_files(place: Path) -> Iterator[Case]:
    """Every case of every maker."""
    for maker in (pickles, archives, heads, arrays, texts, ledgers, bundles):
        yield from maker.cases()
    for maker in (checkpoints, records):
        yield from maker.cases(place)


if __name__ == "__main__":
    raise SystemExit(main())
