"""A hostile file or folder, and what a run of a verb over it came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attacks.watch import MARKER

__all__ = ["MARKER", "Case", "Run"]
OUTSIDE, SECRET = (
    "outside",
    b"SECRET-OF-OUTSIDE",
)  # a folder next to the case, and its bytes, which no target may contain
LEDGER = "ledger.db"  # a case with this file is examined with it as its ledger
SCANNED_SECONDS = 5.0  # of processor time, before a hostile file is refused by the verbs that only look
MOST_MEGABYTES = 300.0  # above the start


@dataclass(frozen=True, slots=True)
class Case:
    """One hostile file or folder.

    Attributes:
        name: unique; the kind, a slash, and what is wrong with it.
        make: writes it into an empty folder, and returns the path to examine, or the URL of a server that lies.
        evil: whether a loader that believes it would run code or call a function.
    """

    name: str
    make: Callable[[Path], Path | str]
    evil: bool = False

    @property
    def kind(self) -> str:
        """The container or record."""
        return self.name.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Run:
    """What one verb did with one case.

    Attributes:
        case: name of the case.
        verb: name of the verb.
        code: exit code; negative for a signal, 124 for no end within the limits.
        megabytes: peak memory above the start.
        seconds: processor time.
        waited: seconds in all.
        said: first line of its text.
        executed: what the audit hook reported, at most three.
        obeyed: whether its text has characters that a terminal obeys.
    """

    case: str
    verb: str
    code: int
    megabytes: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0
    said: str = ""
    executed: tuple[str, ...] = ()
    obeyed: bool = False

    def to_json(self) -> dict[str, Any]:
        """As a row of a file."""
        return asdict(self)

    @property
    def faults(self) -> tuple[str, ...]:
        """Names of the columns of the table in which this run counts."""
        found = {
            "executed": bool(self.executed),
            "hung": self.code == 124,
            "over memory": self.megabytes > MOST_MEGABYTES,
            "outside": self.code not in EXPECTED,
            "terminal": self.obeyed,
        }
        return tuple(name for name, wrong in found.items() if wrong)


FAULTS = ("executed", "hung", "over memory", "outside", "terminal")
EXPECTED = frozenset((*range(13), 124))  # exit codes of the error tree; 70 is a bug, a signal a crash


def require_unique(found: list[Case]) -> list[Case]:
    """The cases, if no name is used twice.

    Raises:
        ValueError: one is.
    """
    names = [case.name for case in found]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    if twice:
        raise ValueError(f"cases with the same name: {sorted(twice)[:3]}")
    return found
