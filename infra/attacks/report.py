"""The results of an attack as a table, as JSON, as Markdown, and as short tables of README."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infra.attacks.case import FAULTS, SCANNED_SECONDS, Run
from infra.attacks.parsers import Fuzzed
from infra.attacks.scanners import Scanner
from infra.attacks.verbs import LOOKING

ROOT = Path(__file__).resolve().parents[2]
_MOST = 200  # faults that are kept in full
START, END = "<!-- attack:start -->", "<!-- attack:end -->"  # in README
_PARTS = {
    "files": "hostile files",
    "bombs": "bombs",
    "servers": "web servers that lie",
    "situations": "names, events, races, other users, signatures",
    "mutations": "mutations of sound checkpoints",
    "parsers": "inputs of single parsers",
}
_SHORT = {
    "executed": "executed", "hung": "hung", "over memory": "over 300 MB", "outside": "ended as a bug",
}  # fmt: skip
_PARSERS = ("parser", "guided by", "runs", "refused", "executed", "hung", "over memory", "outside")
_SCANNERS = (
    "tool", "version", "files that would run code", "refused or flagged", "passed", "failed or no answer",
)  # fmt: skip


def commit_of_checkout() -> str:
    """The commit of this checkout, and whether something is changed."""
    command = ["git", "describe", "--always", "--dirty"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return said.stdout.strip() or "unknown"


@dataclass(slots=True)
class Results:
    """What an attack came to.

    Attributes:
        machine, commit: where and of what.
        commits: part → the commit of which it is.
        cases: phase → cases.
        counts: phase and verb → numbers by name: runs tried, processor seconds, seconds waited, and each fault.
        slow: phase → runs of verbs that only look which took more processor time than they may.
        codes: exit code → runs.
        peak: most memory of a run, in MB above its start.
        found: the first runs with a fault.
        parsers: runs of single parsers.
        scanners: what other tools say of the files with pickles.
    """

    machine: str
    commit: str
    commits: dict[str, str] = field(default_factory=dict)
    cases: Counter[str] = field(default_factory=Counter)
    counts: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    slow: Counter[str] = field(default_factory=Counter)
    codes: Counter[int] = field(default_factory=Counter)
    peak: float = 0.0
    found: list[Run] = field(default_factory=list)
    parsers: list[Fuzzed] = field(default_factory=list)
    scanners: list[Scanner] = field(default_factory=list)

    @classmethod
    def begun(cls, parts: Sequence[str] = ()) -> Results:
        """Empty results of this machine and commit, which will carry out some parts."""
        machine = (
            f"{platform.machine()}, {os.cpu_count()} processors, {platform.system()} {platform.release()}, "
            f"Python {platform.python_version()}"
        )
        commit = commit_of_checkout()
        return cls(machine, commit, dict.fromkeys(parts, commit))

    def add(self, phase: str, run: Run) -> None:
        """Count a run."""
        counts = {"tried": 1, "seconds": run.seconds, "waited": run.waited, **dict.fromkeys(run.faults, 1)}
        self.counts.setdefault((phase, run.verb), Counter()).update(counts)
        self.codes[run.code] += 1
        self.peak = max(self.peak, run.megabytes)
        self.slow[phase] += run.verb in LOOKING and run.seconds > SCANNED_SECONDS
        if run.faults and len(self.found) < _MOST:
            self.found.append(run)

    def join(self, other: Mapping[str, Any]) -> None:
        """Add the results of another run, as JSON. Runs of the same part must be of the same commit.

        Raises:
            ValueError: the other run has a part of another commit.
        """
        for part in [*other["cases"], *(part for part in ("parsers", "scanners") if other[part])]:
            commit = other.get("commits", {}).get(part, other["commit"])
            if self.commits.setdefault(part, commit) != commit:
                raise ValueError(f"{part} of {commit} cannot be joined to those of {self.commits[part]}")
        for row in other["verbs"]:
            counts = {name: value for name, value in row.items() if name not in ("phase", "verb")}
            self.counts.setdefault((row["phase"], row["verb"]), Counter()).update(counts)
        self.cases.update(other["cases"])
        self.slow.update(other["slow"])
        self.codes.update({int(code): count for code, count in other["codes"].items()})
        self.peak = max(self.peak, other["peak_megabytes"])
        self.found += map(Run.of, other["found"])
        self.parsers += [Fuzzed(**row) for row in other["parsers"]]
        self.scanners += [Scanner(**row) for row in other["scanners"]]

    @property
    def faults(self) -> int:
        """Number of faults."""
        runs = sum(row[name] for row in self.counts.values() for name in FAULTS)
        return runs + sum(row.faults for row in self.parsers)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        extra = {"parsers": self.parsers, "scanners": self.scanners}
        parts = [*self.cases, *(part for part, rows in extra.items() if rows)]
        verbs = [
            {
                "phase": phase, "verb": verb, "tried": row["tried"], "seconds": round(row["seconds"], 1),
                "waited": round(row["waited"], 1), **{name: row[name] for name in FAULTS},
            }
            for (phase, verb), row in self.counts.items()
        ]  # fmt: skip
        return {
            "machine": self.machine,
            "commit": self.commit,
            "commits": {part: self.commits.get(part, self.commit) for part in parts},
            "cases": dict(self.cases),
            "runs": sum(row["tried"] for row in self.counts.values()),
            "faults": self.faults,
            "slow": dict(self.slow),
            "peak_megabytes": self.peak,
            "codes": {str(code): count for code, count in sorted(self.codes.items())},
            "verbs": verbs,
            "found": [run.to_json() for run in self.found],
            **{part: [asdict(row) for row in rows] for part, rows in extra.items()},
        }


def _table(heads: Sequence[object], rows: Sequence[Sequence[object]], rule: str = "") -> Iterator[str]:
    """The lines of a table, its numbers with separators of thousands."""
    for number, row in enumerate((heads, *rows)):
        yield "| " + " | ".join(f"{one:,}" if isinstance(one, int) else str(one) for one in row) + " |"
        if not number:
            yield rule or "|" + "---|" * len(heads)


def markdown(found: Results) -> str:
    """The results as a page."""
    return "\n".join(_page(found))


def text(found: Results) -> str:
    """The results for a terminal: the page without its marks of code."""
    return markdown(found).replace("`", "")


def _page(found: Results) -> Iterator[str]:
    by_commit: dict[str, list[str]] = {}
    for part, commit in found.to_json()["commits"].items():
        by_commit.setdefault(commit, []).append(part)
    commits = f"Commit {next(iter(by_commit), found.commit)}"
    if len(by_commit) > 1:
        commits = "Commits " + ", ".join(f"{one} ({', '.join(parts)})" for one, parts in by_commit.items())
    yield from ("# What hostile files do to wherry", "")
    yield "Written by `infra/attack`; docs/security.md explains the columns."
    yield from (f"{commits}, {found.machine}.", "", "## Verbs", "")
    phases = []
    for phase, cases in found.cases.items():
        rows = [row for (of, _verb), row in found.counts.items() if of == phase]
        sums = [sum(row[name] for row in rows) for name in ("tried", *FAULTS)]
        phases.append((phase, cases, *sums, found.slow[phase]))
    yield from (*_table(("part", "cases", "runs", *FAULTS, f"over {SCANNED_SECONDS:.0f} s"), phases), "")
    codes = ", ".join(f"{code} ({count:,})" for code, count in sorted(found.codes.items()))
    yield from (f"Most memory of a run above its start: {found.peak:.0f} MB. Exit codes: {codes}.", "")
    verbs = [
        (phase, f"`{verb}`", row["tried"], *(row[name] for name in FAULTS))
        for (phase, verb), row in found.counts.items()
    ]
    yield from (*_table(("part", "verb", "tried", *FAULTS), verbs), "")
    if found.parsers:
        yield from ("## Single parsers", "", *_table(_PARSERS, [row.row() for row in found.parsers]), "")
    if found.scanners:
        rows = [tuple(asdict(row).values()) for row in found.scanners]
        yield from ("## Scanners of pickles, over the same files", "", *_table(_SCANNERS, rows), "")
    if found.found:
        yield from ("## Found", "")
        for run in found.found:
            said = "; ".join(run.executed) or repr(run.said)
            faults = f"{', '.join(run.faults)}; exit code {run.code}, {run.megabytes:.0f} MB"
            yield f"- `{run.case}`, `{run.verb}`: {faults}; {said}"
        yield ""


# ---- README


def readme_block(results: Mapping[str, Any]) -> str:
    """The tables of results as JSON, with the marks."""
    attacks: list[Sequence[object]] = []
    for part, words in _PARTS.items():
        runs = [row for row in results["verbs"] if row["phase"] == part]
        if runs:
            sums = [sum(row[name] for row in runs) for name in ("tried", *_SHORT)]
            attacks.append((words, results["cases"][part], *sums))
        elif part == "parsers" and results["parsers"]:
            names = ("runs", "runs", *(name.replace(" ", "_") for name in _SHORT))
            attacks.append((words, *(sum(row[name] for row in results["parsers"]) for name in names)))
    heads = ("attack", "cases", "runs", *_SHORT.values())
    tools = [
        (row["tool"] if row["tool"] == "wherry" else f"{row['tool']} {row['version']}",
         row["files"], row["flagged"], row["passed"], row["unanswered"]) for row in results["scanners"]
    ]  # fmt: skip
    scanned = ("pickles that would run code, given to", "files", "refused or flagged", "passed", "no answer")
    tables = [
        _table(head, rows, "| --- |" + " ---: |" * (len(head) - 1))
        for head, rows in ((heads, attacks), (scanned, tools))
    ]
    return "\n".join([START, "", *tables[0], "", *tables[1], "", END])


def put_into_readme(file: Path, results: Mapping[str, Any]) -> None:
    """Replace the tables in a file."""
    before, _, rest = file.read_text().partition(START)
    file.write_text(f"{before}{readme_block(results)}{rest.partition(END)[2]}")
