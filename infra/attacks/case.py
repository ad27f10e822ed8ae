"""A hostile file or folder, how files are written and checkpoints changed, and what a run of a verb came to."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.attacks.watch import MARKER

TOUCH, OPEN = f"touch {MARKER}", f"open('{MARKER}', 'w')"  # what payloads do: a command, and Python
OUTSIDE, SECRET = "outside", b"SECRET-OF-OUTSIDE"  # a folder next to the case; no target may have its bytes
LEDGER = "ledger.db"  # a case with this file is examined with it as its ledger
SCANNED_SECONDS = 5.0  # of processor time, before a hostile file is refused by the verbs that only look
MOST_MEGABYTES = 300.0  # above the start
Make = Callable[[Path], "Path | str"]
Change = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One hostile file or folder.

    Attributes:
        name: unique; the kind, a slash, and what is wrong with it.
        make: writes it into an empty folder, and returns the path to examine, or the URL of a server that lies.
        evil: whether a loader that believes it would run code or call a function.
    """

    name: str
    make: Make
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

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Run:
        """The inverse of `to_json`."""
        return cls(**{**row, "executed": tuple(row["executed"])})

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


# ---- Files


def as_json(document: Any) -> bytes:
    """JSON, also of names that are no text."""
    return json.dumps(document).encode("utf-8", "surrogatepass")


def write_files(files: Mapping[str, bytes], path: str = "") -> Callable[[Path], Path]:
    """Writes files, by their names, and folders above them; returns one of them, or the folder of all."""

    def make(folder: Path) -> Path:
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return folder / path

    return make


def write_file(name: str, data: bytes) -> Callable[[Path], Path]:
    """Writes one file."""
    return write_files({name: data}, name)


# ---- Sound checkpoints, of which one thing is changed


@dataclass(frozen=True, slots=True)
class Sound:
    """A checkpoint as its library writes it.

    Attributes:
        name: of its maker.
        home: the folder that is copied, with what lies around the checkpoint.
        path: the checkpoint in it, a file or a folder.
    """

    name: str
    home: Path
    path: Path

    @property
    def files(self) -> list[Path]:
        """Its regular files."""
        if self.path.is_file():
            return [self.path]
        return sorted(file for file in self.path.rglob("*") if file.is_file())

    def label(self, file: Path) -> Path | str:
        """How a file is named in the name of a case."""
        return file.name if file == self.path else file.relative_to(self.path)

    @property
    def as_it_is(self) -> Case:
        """A case in which nothing is wrong."""
        return Case(f"sound/{self.name}", self.changed(lambda _copy: None))

    def changed(self, change: Change, file: Path | None = None) -> Callable[[Path], Path]:
        """Copies the checkpoint with what lies around it, and changes the copy, or a file in or next to it."""

        def make(folder: Path) -> Path:
            target = folder / "checkpoint"
            shutil.copytree(self.home, target, symlinks=True)
            change(target / (file or self.path).relative_to(self.home))
            return target / self.path.relative_to(self.home)

        return make

    def replaced(self, file: Path, data: bytes) -> Callable[[Path], Path]:
        """The copy with other bytes in one file."""
        return self.changed(lambda found: found.write_bytes(data), file)


def document(file: Path) -> Any:
    """The JSON of a file; None if it has none or is large."""
    if file.stat().st_size > 1 << 20 or file.suffix in (".safetensors", ".pt", ".npz", ".distcp"):
        return None
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict | list) else None


def choose_evenly(cases: Iterable[Case], count: int | None, seed: int) -> list[Case]:
    """At most so many cases, chosen evenly from the kinds as long as each has some left."""
    left = list(cases)
    random.Random(seed).shuffle(left)
    if count is None or count >= len(left):
        return left
    kinds: dict[str, list[Case]] = {}
    for case in left:
        kinds.setdefault(case.kind, []).append(case)
    found: list[Case] = []
    while len(found) < count:
        for rows in kinds.values():
            if rows and len(found) < count:
                found.append(rows.pop())
    return found


def named(prefix: str, rows: Iterable[tuple[str, Make]], *, evil: bool = False) -> Iterator[Case]:
    """A case of each row."""
    for name, make in rows:
        yield Case(f"{prefix}/{name}", make, evil)
