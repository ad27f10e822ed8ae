"""Makes hostile files for every container and record, runs every verb over them, and prints what came of it.

Each case is examined in a fork of a process that has imported wherry, under an audit hook and limits. The hook notes
what runs, connects, or is written elsewhere; a run counts as hung after 60 s of processor time or 90 s in all, as over
memory above 300 MB more than at its start, and as outside the error tree if it ends with a traceback, a signal or an
exit code that no error has. Results are written to infra/attack-results.md and .json,
and their sums to README.md. Exit code 1: something was found.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from attacks import (
    ambiguous,
    archives,
    arrays,
    bombs,
    bundles,
    controls,
    counts,
    digits,
    folders,
    heads,
    jobs,
    ledgers,
    mutate,
    parsers,
    pickles,
    prepare,
    readme,
    records,
    report,
    scanners,
    server,
    servers,
    situations,
    texts,
    verbs,
)
from attacks.case import Case, require_unique
from attacks.crew import examine_cases

INFRA = Path(__file__).resolve().parents[1]
PHASES = ("files", "bombs", "servers", "situations", "mutations", "parsers", "scanners")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        prog="infra/attack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PHASES, action="append", help="run only this part; may be repeated")
    parser.add_argument(
        "--cases", type=int, help="number of hostile files, evenly of each kind (default: all)"
    )
    parser.add_argument(
        "--verbs",
        default="",
        metavar="NAMES",
        help="run only these verbs over the files, separated by commas",
    )
    parser.add_argument(
        "--join", type=Path, action="append", default=[], metavar="FILE",
        help="add the results (JSON) of another run, for example of other parts; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--mutations", type=int, default=10_000, help="mutations that go through verbs (default: 10000)"
    )
    parser.add_argument(
        "--runs", type=int, default=200_000, help="runs of single parsers in all (default: 200000)"
    )
    parser.add_argument(
        "--minutes", type=float, default=0, help="go on with new mutations and runs for so long"
    )
    parser.add_argument("--seed", type=int, default=0, help="of mutations and runs")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--match", default="", metavar="WORDS", help="only files whose name contains WORDS")
    parser.add_argument(
        "--systems", default="", metavar="NAMES", help="only these systems' checkpoints, separated by commas"
    )
    parser.add_argument(
        "--sound", type=Path, metavar="DIR", help="sound checkpoints of an earlier run, or where to keep them"
    )
    parser.add_argument("--results", type=Path, default=INFRA, metavar="DIR", help="folder for the results")
    parser.add_argument(
        "--scratch", type=Path, metavar="DIR", help="folder for the files (default: in memory)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Attack, and write the results."""
    options = arguments(words)
    for name in (
        "MLFLOW_TRACKING_URI",
        "MLFLOW_REGISTRY_URI",
        "PREFECT_API_URL",
    ):  # no server of the user is used
        os.environ.pop(name, None)
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
        readme.put(INFRA.parent / "README.md", found.to_json())
    print(json.dumps(found.to_json()) if options.json else report.text(found))
    return 1 if found.faults else 0


def run_attack(options: argparse.Namespace, scratch: Path) -> report.Results:
    """Run the parts that the options name."""
    place = options.sound or scratch / "from"
    systems = [name for name in options.systems.split(",") if name]
    command = [sys.executable, "-m", "attacks.prepare", str(place), *systems]
    if not place.exists():
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    phases = options.only or PHASES
    found = report.Results.begun(phases)
    for earlier in options.join:
        found.join(json.loads(earlier.read_text()))
    say("sound checkpoints are made")
    crew = Crew(options, scratch, place)
    crew.require_noticed()
    say("the fork server is warm, and notices what it must")
    run_once(options, found, crew, place)
    until = time.monotonic() + 60 * options.minutes
    seed = options.seed
    while True:
        if "mutations" in phases:
            crew.run(
                found, "mutations", list(mutate.cases(place, options.mutations, seed)), list(verbs.CHANGED)
            )
        if "parsers" in phases:
            say("single parsers")
            found.parsers.extend(parsers.attack_parsers(place, scratch, options.runs, seed, options.jobs))
        seed += 1
        if time.monotonic() > until:
            break
    if "scanners" in phases:
        found.scanners.extend(scanners.compare_scanners(scratch, list(pickles.cases())))
    return found


def run_once(options: argparse.Namespace, found: report.Results, crew: Crew, place: Path) -> None:
    """The parts whose cases are the same ones each time."""
    phases = options.only or PHASES
    if "files" in phases:
        names = [name for name in options.verbs.split(",") if name] or list(verbs.VERBS)
        crew.run(found, "files", choose_cases(hostile_files(place), options), names)
    if "bombs" in phases:
        crew.run(found, "bombs", matching(bombs.cases(), options), list(verbs.LOOKING))
    if "situations" in phases:
        names = [name for name in options.verbs.split(",") if name] or list(situations.VERBS)
        crew.run(
            found, "situations", choose_cases(require_unique([*situations.cases(place)]), options), names
        )
        crew.run(
            found, "situations", choose_cases([*situations.events()], options), list(situations.EVENT_VERBS)
        )
    if "servers" in phases:
        with servers.running() as port:
            crew.serving(port).run(
                found, "servers", matching(servers.cases(port), options), list(servers.VERBS)
            )


def matching(cases: Iterable[Case], options: argparse.Namespace) -> list[Case]:
    """The cases whose names contain the words of `--match`."""
    return [case for case in cases if options.match in case.name]


class Crew:
    """Runs cases in as many processes as `--jobs` states."""

    def __init__(self, options: argparse.Namespace, scratch: Path, place: Path) -> None:
        self._jobs, self._scratch = options.jobs, scratch
        self._server = server.Server(
            scratch, place / prepare.GOOD, place / prepare.HOME, place / prepare.KEYS
        )
        server.warm(
            self._server,
            [
                Case(
                    "sound/good",
                    folders.copy_and_change(place / "good", place / prepare.GOOD, lambda _copy: None),
                ),
                Case(
                    "sound/written",
                    folders.copy_and_change(
                        place / prepare.WRITTEN, place / prepare.WRITTEN, lambda _copy: None
                    ),
                ),
                *(
                    Case(f"sound/{name}", folders.copy_and_change(home, path, lambda _copy: None))
                    for name, home, path in prepare.sound(place)
                ),
            ],
        )

    def serving(self, port: int) -> Crew:
        """This crew, whose children may connect to a server that lies."""
        found = copy.copy(self)
        found._server = replace(self._server, port=port)
        return found

    def require_noticed(self) -> None:
        """See `controls`."""
        controls.require_noticed(self._server)

    def run(self, found: report.Results, phase: str, cases: list[Case], names: list[str]) -> None:
        """Add a phase to the results, and tell how long it took."""
        began = time.monotonic()
        for run in examine_cases(self._server, cases, names, self._jobs, self._scratch):
            found.add(phase, run)
        found.cases[phase] = found.cases.get(phase, 0) + len(cases)
        say(f"{phase}: {len(cases)} cases, {time.monotonic() - began:.0f} s")


def say(message: str) -> None:
    """Tell how far it is."""
    print(f"· {time.strftime('%H:%M:%S')} {message}", file=sys.stderr, flush=True)


def hostile_files(place: Path) -> list[Case]:
    """Every case of every maker."""
    return require_unique(
        [
            *pickles.cases(),
            *archives.cases(),
            *heads.cases(),
            *arrays.cases(),
            *ambiguous.cases(place),
            *folders.cases(place),
            *counts.cases(place),
            *digits.cases(place),
            *texts.cases(),
            *ledgers.cases(),
            *bundles.cases(),
            *records.cases(place),
            *jobs.cases(place),
        ]
    )


def choose_cases(cases: list[Case], options: argparse.Namespace) -> list[Case]:
    """The matching cases, at most `--cases` of them, chosen evenly from the kinds as long as each has some left."""
    left = matching(cases, options)
    random.Random(options.seed).shuffle(left)
    if options.cases is None or options.cases >= len(left):
        return left
    kinds: dict[str, list[Case]] = {}
    for case in left:
        kinds.setdefault(case.kind, []).append(case)
    found: list[Case] = []
    while len(found) < options.cases:
        for rows in kinds.values():
            if rows and len(found) < options.cases:
                found.append(rows.pop())
    return found


if __name__ == "__main__":
    raise SystemExit(main())
