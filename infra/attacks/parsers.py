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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attacks import mutate, prepare
from attacks.case import MOST_MEGABYTES
from attacks.server import memory, reset_peak
from attacks.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_ROOT = Path(__file__).resolve().parents[2]
ATHERIS = _ROOT / ".cache" / "atheris"
_SECONDS, _ADDRESS_SPACE = 10, 4 << 30
_EVERY = 200  # runs between two writes of the counts
_LONGEST = 1 << 16  # bytes of an input
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


# ---- The parsers: each takes bytes and a folder of its own


def _file(name: str) -> Callable[[bytes, Path], Any]:
    def write_input(data: bytes, folder: Path) -> Any:
        from wherry.storage.stores import locate

        (folder / name).write_bytes(data)
        return locate(folder / name)

    return write_input


def _parse_file(name: str, module: str, function: str) -> Callable[[bytes, Path], object]:
    written = _file(name)

    def parse(data: bytes, folder: Path) -> object:
        found = getattr(__import__(module, fromlist=[function]), function)(written(data, folder))
        return list(found) if hasattr(found, "__next__") else found

    return parse


def _detect_file(name: str) -> Callable[[bytes, Path], object]:
    """`detect` of a folder with the input as one of its files; its verdict must be one of an error."""
    written = _file(name)

    def parse(data: bytes, folder: Path) -> object:
        import wherry

        place = written(data, folder)
        found = wherry.detect(place.path if name.startswith("any") else str(folder))
        if "bug in wherry" in (found.reason or ""):
            raise RuntimeError(found.reason)
        return found

    return parse


def _config(name: str) -> Callable[[bytes, Path], object]:
    def parse(data: bytes, _folder: Path) -> object:
        from wherry.families.config_files import parse_config

        return parse_config(name, data)

    return parse


def _json(data: bytes, _folder: Path) -> object:
    from wherry.text.json_document import parse_json

    return parse_json(data, "it", unique=True, constants=False)


def _json_rows(data: bytes, _folder: Path) -> object:
    from wherry.text.json_scan import scan_json

    pieces = (data[at : at + 100] for at in range(0, len(data), 100))
    return scan_json(
        pieces,
        "it",
        {"tree_metadata": {"*": lambda _key, value: value}, "weight_map": {"*": lambda _key, value: value}},
    )


def _toml(data: bytes, _folder: Path) -> object:
    from wherry.text.config_text import parse_toml

    return parse_toml(data, "it")


def _msgpack(data: bytes, _folder: Path) -> object:
    from wherry.integrations.containers.msgpack.index import index_bytes

    return index_bytes(data)


def _zarr(version: int) -> Callable[[bytes, Path], object]:
    def parse(data: bytes, _folder: Path) -> object:
        from wherry.integrations.containers.zarr.metadata import parse as parsed

        return parsed(data, version, "it")

    return parse


def _node(data: bytes, folder: Path) -> object:
    """The body of a node of OCDBT, sealed so that its checksum is right."""
    from attacks import arrays
    from wherry.integrations.containers.ocdbt.read import read_database
    from wherry.storage.stores import locate

    for name in ("item/d/0", "item/_METADATA", "item/manifest.ocdbt"):
        (folder / name).unlink(missing_ok=True)
    for name in ("item/d", "item"):
        with suppress(OSError):
            (folder / name).rmdir()
    item = arrays.database(data, height=data[0] if data else 0)(folder)
    return list(read_database(locate(item), lambda _reference: None))


def _sidecar(data: bytes, folder: Path) -> object:
    from wherry.storage.sidecar import read_sidecar
    from wherry.storage.stores import locate

    (folder / "m.npz").touch()
    (folder / "m.npz.wherry.json").write_bytes(data)
    return read_sidecar(locate(folder / "m.npz"))


def _journal(data: bytes, _folder: Path) -> object:
    """The text of lines that are signed with the right key."""
    from wherry.staging.journal import Line, _rows

    return _rows([Line(line, b"", len(line)) for line in data.splitlines() if line], {"plan": "x"})


def _lease(data: bytes, _folder: Path) -> object:
    from wherry.staging.lease_watch import owner_in

    return owner_in(data)


def _key_path(data: bytes, _folder: Path) -> object:
    from wherry.core.keypath import parse

    return parse(data.decode("utf-8", "surrogateescape"))


def _treedef(data: bytes, _folder: Path) -> object:
    from wherry.integrations.formats.paxml.treedef import leaf_names

    return leaf_names(data.decode("utf-8", "replace"))


def _pickles(data: bytes, folder: Path) -> object:
    from wherry.integrations.containers.pickle.survey import survey

    (folder / "m.pkl").write_bytes(data)
    return survey(folder / "m.pkl")


def _bundle(data: bytes, folder: Path) -> object:
    from wherry.auditor.check import check

    (folder / "evidence.zip").write_bytes(data)
    return check(str(folder / "evidence.zip"))


_CONTAINERS, _FORMATS = "wherry.integrations.containers", "wherry.integrations.formats"
# Name → parser, and patterns of the files whose bytes it starts from.
PARSERS: dict[str, tuple[Callable[[bytes, Path], object], tuple[str, ...]]] = {
    "json": (_json, ("**/*.json", "**/_METADATA")),
    "json rows": (_json_rows, ("**/*.index.json", "**/_METADATA")),
    "toml": (_toml, ("*.toml",)),
    "yaml config": (_config("config.yml"), ("*.yml",)),
    "gin config": (_config("config.gin"), ("*.gin",)),
    "json config": (_config("config.json"), ("**/config.json", "**/params.json")),
    "safetensors": (
        _parse_file("m.safetensors", f"{_CONTAINERS}.safetensors.header", "parse"),
        ("**/*.safetensors",),
    ),
    "gguf": (_parse_file("m.gguf", f"{_FORMATS}.gguf.header", "read_header"), ("*.gguf",)),
    "msgpack": (_msgpack, ("**/checkpoint_7", "**/checkpoint")),
    "zip": (_parse_file("m.zip", f"{_CONTAINERS}.zip.read", "read_directory"), ("**/*.pt", "**/*.npz")),
    "npz": (_parse_file("m.npz", f"{_CONTAINERS}.npz.reader", "read_contents"), ("**/*.npz",)),
    "torch zip": (
        _parse_file("m.pt", f"{_CONTAINERS}.torch.archive", "read_archive"),
        ("torch_zip/**/*.pt", "**/*.pth"),
    ),
    "torch legacy": (
        _parse_file("m.pt", f"{_CONTAINERS}.torch.legacy", "read_legacy"),
        ("torch_legacy/**/*.pt",),
    ),
    "pickles": (_pickles, ("**/*.pkl", "**/.metadata", "torch_legacy/**/*.pt")),
    "dcp metadata": (_detect_file(".metadata"), ("**/.metadata",)),
    "orbax metadata": (_detect_file("_METADATA"), ("**/_METADATA",)),
    "hf index": (_detect_file("model.safetensors.index.json"), ("**/*.index.json",)),
    "tensor bundle": (
        _parse_file("m.index", f"{_FORMATS}.tf_bundle.sstable", "read_table"),
        ("bundle/*.index",),
    ),
    "zarr 2": (_zarr(2), ("**/.zarray",)),
    "zarr 3": (_zarr(3), ("**/zarr.json", "*.zarr3")),
    "ocdbt node": (_node, ("*.node",)),
    "sidecar": (_sidecar, ("wherry.json",)),
    "journal": (_journal, ("*.journal",)),
    "lease": (_lease, ("*.lease",)),
    "key path": (_key_path, ("*.path",)),
    "treedef": (_treedef, ("*.treedef", "**/tree*")),
    "bundle": (_bundle, ("*.zip",)),
    "any file": (
        _detect_file("any"),
        ("**/*.pt", "**/*.npz", "**/*.safetensors", "**/*.pkl", "**/checkpoint*"),
    ),
}


# What callers expect of a parser besides errors of wherry.
ALLOWED: dict[str, tuple[type[Exception], ...]] = {"toml": (ValueError,), "key path": (ValueError,)}


def seeds(place: Path, patterns: Sequence[str]) -> list[bytes]:
    """Sound inputs: files of the sound checkpoints, of what wherry writes, and small ones by hand."""
    folders = [place / prepare.SOUND, place / prepare.WRITTEN, place / prepare.SEEDS]
    files = [
        file
        for folder in folders
        for pattern in patterns
        for file in sorted(folder.glob(pattern))
        if file.is_file()
    ]
    found = [file.read_bytes()[:_LONGEST] for file in files[:40] if file.stat().st_size <= 4 * _LONGEST]
    return found or [b""]


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
        yield mutate.mutate(generator.choice(sound), generator)[:_LONGEST]


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
        f"-max_len={_LONGEST}",
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
