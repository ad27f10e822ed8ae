"""Runs of single parsers, in a process for each: guided by coverage with atheris where it installs, else by chance.

    python -m attacks.parsers NAME FOLDER RUNS SEED GUIDED

Inputs are mutations of sound files (see `mutate`). A parser may refuse what it gets by an error of wherry, or by the
errors that its callers expect of it; anything else counts, as do 10 s of processor time and 300 MB above the start.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attacks import mutate
from attacks.case import MOST_MEGABYTES
from attacks.parser_table import ALLOWED, LONGEST, PARSERS, seeds
from attacks.server import memory, reset_peak
from attacks.watch import Watch

_ROOT = Path(__file__).resolve().parents[2]
ATHERIS = _ROOT / ".cache" / "atheris"
_SECONDS, _ADDRESS_SPACE = 10, 4 << 30
_EVERY = 200  # runs between two writes of the counts
_INSTRUMENTED = ("wherry",)


@dataclass(slots=True)
class Fuzzed:
    """What the runs of one parser came to.

    Attributes:
        parser, guided: its name, and what chose the inputs.
        runs, refused: how many, and how many inputs were refused.
        executed, hung, over_memory, outside: faults.
        said: the first faults, with the input.
        seconds: in all.
    """

    parser: str
    guided: str
    runs: int = 0
    refused: int = 0
    executed: int = 0
    hung: int = 0
    over_memory: int = 0
    outside: int = 0
    said: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def faults(self) -> int:
        """Number of faults."""
        return self.executed + self.hung + self.over_memory + self.outside

    def row(self) -> tuple[object, ...]:
        """For the table."""
        return (
            f"`{self.parser}`",
            self.guided,
            self.runs,
            self.refused,
            self.executed,
            self.hung,
            self.over_memory,
            self.outside,
        )

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


class HungError(BaseException):
    """A run took more processor time than it may."""


class Runner:
    """Runs one parser, and counts what comes of it."""

    def __init__(self, name: str, folder: Path, watch: Watch, counts: Fuzzed) -> None:
        self._parse, self._folder, self._watch, self.counts = PARSERS[name][0], folder, watch, counts
        self._began = time.monotonic()
        reset_peak()
        self._start = memory("VmRSS")

    def __call__(self, data: bytes) -> None:
        """One run."""
        from wherry.errors import WherryError

        counts = self.counts
        counts.runs += 1
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)
        self._watch.on = True
        try:
            self._parse(data, self._folder)
        except HungError:
            counts.hung += 1
            self._say("hung", data)
        except WherryError as error:
            counts.refused += 1
            if error.exit_code == 70:
                counts.outside += 1
                self._say(str(error), data)
        except ALLOWED.get(counts.parser, ()):
            counts.refused += 1
        except Exception as error:  # noqa: BLE001
            counts.outside += 1
            self._say(f"{type(error).__name__}: {error}", data)
        finally:
            self._watch.on = False
            signal.setitimer(signal.ITIMER_PROF, 0)
        if self._watch.seen:
            counts.executed += 1
            self._say("; ".join(self._watch.seen), data)
            self._watch.seen.clear()
        if counts.runs % _EVERY == 0:
            self.finish()

    def finish(self) -> None:
        """Write the counts, and look at the peak of memory."""
        if (memory("VmHWM") - self._start) / 1024 > MOST_MEGABYTES:
            self.counts.over_memory += 1
            self._say(f"{(memory('VmHWM') - self._start) / 1024:.0f} MB", b"")
            reset_peak()
        self.counts.seconds = round(time.monotonic() - self._began, 1)
        draft = self._folder / "counts.draft"
        draft.write_text(json.dumps(self.counts.to_json()))
        draft.rename(self._folder / "counts.json")

    def _say(self, text: str, data: bytes) -> None:
        if len(self.counts.said) < 5:
            self.counts.said.append(f"{text[:300]} of {data[:400].hex()}")


def inputs(sound: list[bytes], seed: int) -> Iterator[bytes]:
    """Mutations without end."""
    generator = random.Random(seed)
    while True:
        yield mutate.mutate(generator.choice(sound), generator)[:LONGEST]


def run_by_chance(runner: Runner, sound: list[bytes], runs: int, seed: int) -> None:
    """So many runs with inputs by chance."""
    for _number, data in zip(range(runs), inputs(sound, seed), strict=False):
        runner(data)
    runner.finish()


def run_guided(runner: Runner, sound: list[bytes], runs: int, seed: int) -> None:
    """So many runs with inputs that atheris keeps where they reach new code; does not return."""
    import atheris  # type: ignore[import-not-found]

    corpus = runner._folder / "corpus"
    corpus.mkdir()
    for number, data in enumerate(sound):
        (corpus / str(number)).write_bytes(data)

    def mutator(data: bytes, most: int, number: int) -> bytes:
        generator = random.Random(number)
        found = mutate.mutate(data, generator) if generator.random() < 0.6 else atheris.Mutate(data, most)
        return found[:most]

    def one(data: bytes) -> None:
        runner(data)
        if runner.counts.runs >= runs:
            runner.finish()
            os._exit(0)

    options = [
        f"-seed={seed + 1}",
        f"-max_len={LONGEST}",
        "-rss_limit_mb=0",
        "-timeout=600",
        "-verbosity=0",
        "-detect_leaks=0",
    ]
    atheris.Setup(["attack", *options, str(corpus)], one, custom_mutator=mutator)
    atheris.Fuzz()


def main(name: str, place: str, folder: str, runs: str, seed: str, guided: str) -> None:
    """One parser, in this process."""

    def stop(_number: int, _frame: object) -> None:
        raise HungError

    if guided == "atheris":
        import atheris  # type: ignore[import-not-found]

        with atheris.instrument_imports(include=_INSTRUMENTED):
            _first_run(name)
    else:
        _first_run(name)
    home = Path(folder)
    os.environ |= {"WHERRY_HOME": folder, "TMPDIR": folder, "HOME": folder}
    os.chdir(home)
    sound = seeds(Path(place), PARSERS[name][1])
    watch = Watch((folder,), folder)
    watch.install()
    signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    runner = Runner(name, home, watch, Fuzzed(name, "coverage" if guided == "atheris" else "chance"))
    (run_guided if guided == "atheris" else run_by_chance)(runner, sound, int(runs), int(seed))


def _first_run(name: str) -> None:
    """Imports what the parser needs."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder, suppress(Exception):
        PARSERS[name][0](b"{}", Path(folder))


def is_installed() -> bool:
    """Whether atheris can be used; it is installed into a folder of its own, once."""
    if not ATHERIS.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(ATHERIS), "atheris"]
        subprocess.run(command, check=False, capture_output=True)
    return (ATHERIS / "atheris").is_dir()


def attack_parsers(place: Path, scratch: Path, runs: int, seed: int, jobs: int) -> list[Fuzzed]:
    """All parsers, evenly, in so many processes at a time."""
    guided = "atheris" if is_installed() else "chance"
    each = -(-runs // len(PARSERS))

    def one(name: str) -> Fuzzed:
        folder = scratch / f"parser-{seed}-{name.replace(' ', '-')}"
        folder.mkdir()
        python = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ATHERIS)])
        command = [
            sys.executable,
            "-m",
            "attacks.parsers",
            name,
            str(place),
            str(folder),
            str(each),
            str(seed),
            guided,
        ]
        with (folder / "log").open("w") as log:
            done = subprocess.run(
                command, check=False, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": python}
            )
        counts = folder / "counts.json"
        found = Fuzzed(**json.loads(counts.read_text())) if counts.exists() else Fuzzed(name, guided)
        if done.returncode:  # a signal, or an error that ended the interpreter
            found.outside += 1
            found.said.append(f"ended with {done.returncode}: {(folder / 'log').read_text()[-500:]}")
        return found

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, PARSERS))


if __name__ == "__main__":
    main(*sys.argv[1:])
