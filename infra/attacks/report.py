"""The results of an attack as a table, as JSON and as Markdown."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attacks.case import FAULTS, SCANNED_SECONDS, Run
from attacks.parsers import Fuzzed
from attacks.scanners import Scanner
from attacks.verbs import LOOKING

_ROOT = Path(__file__).resolve().parents[2]
_MOST = 200  # faults that are kept in full


@dataclass(slots=True)
class Results:
    """What an attack came to.

    Attributes:
        machine, commit: where and of what.
        commits: part → the commit of which it is.
        cases: phase → cases.
        tried: phase and verb → runs.
        wrong: phase and verb → name of a fault → runs.
        slow: phase → runs of verbs that only look which took more processor time than they may.
        codes: exit code → runs.
        seconds: phase and verb → processor time of its runs.
        waited: phase and verb → their time in all.
        peak: most memory of a run, in MB above its start.
        faults: the first runs with a fault.
        parsers: runs of single parsers.
        scanners: what other tools say of the files with pickles.
    """

    machine: str
    commit: str
    commits: dict[str, str] = field(default_factory=dict)
    cases: dict[str, int] = field(default_factory=dict)
    tried: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    slow: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    seconds: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    waited: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    peak: float = 0.0
    found: list[Run] = field(default_factory=list)
    parsers: list[Fuzzed] = field(default_factory=list)
    scanners: list[Scanner] = field(default_factory=list)

    @classmethod
    def begun(cls, parts: Sequence[str] = ()) -> Results:
        """Empty results of this machine and commit, which will carry out some parts."""
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=_ROOT, capture_output=True, text=True, check=False
        )
        machine = (
            f"{platform.machine()}, {os.cpu_count()} processors, {platform.system()} {platform.release()}, "
            f"Python {platform.python_version()}"
        )
        commit = said.stdout.strip() or "unknown"
        return cls(machine, commit, dict.fromkeys(parts, commit))

    def add(self, phase: str, run: Run) -> None:
        """Count a run."""
        key = phase, run.verb
        self.tried[key] += 1
        self.codes[run.code] += 1
        self.seconds[key] += run.seconds
        self.waited[key] += run.waited
        self.peak = max(self.peak, run.megabytes)
        self.slow[phase] += run.verb in LOOKING and run.seconds > SCANNED_SECONDS
        wrong = self.wrong.setdefault(key, Counter())
        wrong.update(run.faults)
        if run.faults and len(self.found) < _MOST:
            self.found.append(run)

    def join(self, other: dict[str, Any]) -> None:
        """Add the results of another run, as JSON. Runs of the same part must be of the same commit.

        Raises:
            ValueError: the other run has a part of another commit.
        """
        for part in _parts(other):
            commit = other.get("commits", {}).get(part, other["commit"])
            if self.commits.setdefault(part, commit) != commit:
                raise ValueError(f"{part} of {commit} cannot be joined to those of {self.commits[part]}")
        for row in other["verbs"]:
            key = row["phase"], row["verb"]
            self.tried[key] += row["tried"]
            self.seconds[key] += row["seconds"]
            self.waited[key] += row["waited"]
            self.wrong.setdefault(key, Counter()).update({name: row[name] for name in FAULTS})
        for phase, count in other["cases"].items():
            self.cases[phase] = self.cases.get(phase, 0) + count
        self.slow.update(other["slow"])
        self.codes.update({int(code): count for code, count in other["codes"].items()})
        self.peak = max(self.peak, other["peak_megabytes"])
        self.found += [Run(**{**row, "executed": tuple(row["executed"])}) for row in other["found"]]
        self.parsers += [Fuzzed(**row) for row in other["parsers"]]
        self.scanners += [Scanner(**row) for row in other["scanners"]]

    @property
    def parts(self) -> list[str]:
        """The parts of the attack that have results."""
        fuzzed = {"parsers": self.parsers, "scanners": self.scanners}
        return [*self.cases, *(part for part, rows in fuzzed.items() if rows)]

    @property
    def faults(self) -> int:
        """Number of faults."""
        return sum(sum(row.values()) for row in self.wrong.values()) + sum(row.faults for row in self.parsers)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        verbs = [
            {
                "phase": phase,
                "verb": verb,
                "tried": count,
                "seconds": round(self.seconds[phase, verb], 1),
                "waited": round(self.waited[phase, verb], 1),
                **{name: self.wrong[phase, verb][name] for name in FAULTS},
            }
            for (phase, verb), count in self.tried.items()
        ]
        return {
            "machine": self.machine,
            "commit": self.commit,
            "commits": {part: self.commits.get(part, self.commit) for part in self.parts},
            "cases": self.cases,
            "runs": sum(self.tried.values()),
            "faults": self.faults,
            "slow": dict(self.slow),
            "peak_megabytes": self.peak,
            "codes": {str(code): count for code, count in sorted(self.codes.items())},
            "verbs": verbs,
            "found": [run.to_json() for run in self.found],
            "parsers": [row.to_json() for row in self.parsers],
            "scanners": [row.to_json() for row in self.scanners],
        }


def _parts(results: dict[str, Any]) -> list[str]:
    """The parts that results, as JSON, are of."""
    return [*results["cases"], *(part for part in ("parsers", "scanners") if results[part])]


def _commits(found: Results) -> str:
    """The commit, or each part's commit if there are several."""
    by_commit: dict[str, list[str]] = {}
    for part, commit in found.to_json()["commits"].items():
        by_commit.setdefault(commit, []).append(part)
    if len(by_commit) < 2:
        return f"Commit {next(iter(by_commit), found.commit)}"
    return "Commits " + ", ".join(f"{commit} ({', '.join(parts)})" for commit, parts in by_commit.items())


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for row in rows:
        yield "| " + " | ".join(f"{one:,}" if isinstance(one, int) else str(one) for one in row) + " |"
    yield ""


def markdown(found: Results) -> str:
    """The results as a page."""
    return "\n".join(_page(found))


def _page(found: Results) -> Iterator[str]:
    yield "# What hostile files do to wherry"
    yield ""
    yield "Written by `infra/attack`; docs/security.md explains the columns."
    yield f"{_commits(found)}, {found.machine}."
    yield ""
    yield "## Verbs"
    yield ""
    yield from _table(
        ("part", "cases", "runs", *FAULTS, f"over {SCANNED_SECONDS:.0f} s"), list(_phases(found))
    )
    yield (
        f"Most memory of a run above its start: {found.peak:.0f} MB. Exit codes: "
        + ", ".join(f"{code} ({count:,})" for code, count in sorted(found.codes.items()))
        + "."
    )
    yield ""
    yield from _table(
        ("part", "verb", "tried", *FAULTS),
        [
            (phase, f"`{verb}`", count, *(found.wrong[phase, verb][name] for name in FAULTS))
            for (phase, verb), count in found.tried.items()
        ],
    )
    if found.parsers:
        yield "## Single parsers"
        yield ""
        heads = ("parser", "guided by", "runs", "refused", "executed", "hung", "over memory", "outside")
        yield from _table(heads, [row.row() for row in found.parsers])
    if found.scanners:
        yield "## Scanners of pickles, over the same files"
        yield ""
        heads = (
            "tool",
            "version",
            "files that would run code",
            "refused or flagged",
            "passed",
            "failed or no answer",
        )
        yield from _table(heads, [row.row() for row in found.scanners])
    if found.found:
        yield "## Found"
        yield ""
        for run in found.found:
            yield (
                f"- `{run.case}`, `{run.verb}`: {', '.join(run.faults)}; exit code {run.code}, {run.megabytes:.0f} MB; "
                f"{'; '.join(run.executed) or run.said!r}"
            )
        yield ""


def _phases(found: Results) -> Iterator[tuple[object, ...]]:
    for phase, cases in found.cases.items():
        rows = [key for key in found.tried if key[0] == phase]
        runs = sum(found.tried[key] for key in rows)
        yield (
            phase,
            cases,
            runs,
            *(sum(found.wrong[key][name] for key in rows) for name in FAULTS),
            found.slow[phase],
        )


def text(found: Results) -> str:
    """The results for a terminal: the page without its marks of code."""
    return markdown(found).replace("`", "")
