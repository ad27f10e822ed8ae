"""Runs of single parsers, in a process for each: guided by coverage with atheris where it installs, else by chance.

    python -m infra.attacks.parsers NAME FOLDER RUNS SEED GUIDED

Inputs are mutations of sound files (see `mutate`). A parser takes bytes and a folder of its own. It may refuse what it
gets by an error of wherry, or by the errors that its callers expect of it; anything else counts, as do 10 s of
processor time and 300 MB above the start.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from infra.attacks import mutate, prepare
from infra.attacks.case import MOST_MEGABYTES
from infra.attacks.server import memory, reset_peak
from infra.attacks.watch import Watch

ATHERIS = Path(__file__).resolve().parents[2] / ".cache" / "atheris"
LONGEST = 1 << 16  # bytes of an input
_SECONDS, _ADDRESS_SPACE = 10, 4 << 30
_EVERY = 200  # runs between two writes of the counts
Parse = Callable[[bytes, Path], object]


# ---- The parsers


def _call(name: str, *values: Any, **named: Any) -> Any:
    """Call `module:function`, imported when it is first needed."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(f"wherry.{module}"), function)(*values, **named)


def _of_bytes(name: str, *values: Any, **named: Any) -> Parse:
    return lambda data, _folder: _call(name, data, *values, **named)


def _of_text(name: str, errors: str) -> Parse:
    return lambda data, _folder: _call(name, data.decode("utf-8", errors))


def _of_file(file: str, name: str, *, located: bool = True) -> Parse:
    """A parser of a file, which is given its location or its path."""

    def parse(data: bytes, folder: Path) -> object:
        (folder / file).write_bytes(data)
        found = _call(name, _call("store.local_store:locate", folder / file) if located else folder / file)
        return list(found) if hasattr(found, "__next__") else found

    return parse


def _detected(file: str, *, folder_too: bool = True) -> Parse:
    """`detect` of a folder with the input as one of its files; its verdict must be one of an error."""

    def parse(data: bytes, folder: Path) -> object:
        import wherry

        (folder / file).write_bytes(data)
        found = wherry.detect(folder if folder_too else folder / file)
        if "bug in wherry" in (found.reason or ""):
            raise RuntimeError(found.reason)
        return found

    return parse


def _config(file: str) -> Parse:
    return lambda data, _folder: _call("families.config_files:parse_config", file, data)


def _json_rows(data: bytes, _folder: Path) -> object:
    pieces = (data[at : at + 100] for at in range(0, len(data), 100))
    rows = {"*": lambda _key, value: value}
    return _call("core.json_document:scan_json", pieces, "it", {"tree_metadata": rows, "weight_map": rows})


def _node(data: bytes, folder: Path) -> object:
    """The body of a node of OCDBT, sealed so that its checksum is right."""
    from infra.attacks.bombs import ocdbt_item

    shutil.rmtree(folder / "item", ignore_errors=True)
    item = _call("store.local_store:locate", ocdbt_item(folder / "item", data, height=data[0] if data else 0))
    return list(_call("integrations.containers.ocdbt.read:read_database", item, lambda _reference: None))


def _sidecar(data: bytes, folder: Path) -> object:
    (folder / "m.npz").touch()
    (folder / "m.npz.wherry.json").write_bytes(data)
    return _call("store.sidecar:read_sidecar", _call("store.local_store:locate", folder / "m.npz"))


def _receipt(data: bytes, _folder: Path) -> object:
    return _call("core.receipt:from_json", _call("core.json_document:parse_json", data, "it"))


def _journal(data: bytes, _folder: Path) -> object:
    """The text of lines that are signed with the right key."""
    lines = [_call("target.signed_log:Line", line, b"", len(line)) for line in data.splitlines() if line]
    return _call("target.journal:past_in", lines, {"plan": "x"})


def _bundle(data: bytes, folder: Path) -> object:
    (folder / "evidence.zip").write_bytes(data)
    return _call("prove.check:check", str(folder / "evidence.zip"))


_CONTAINERS, _FORMATS = "integrations.containers", "integrations.formats"
# Name → parser, and patterns of the files whose bytes it starts from.
PARSERS: dict[str, tuple[Parse, tuple[str, ...]]] = {
    "json": (
        _of_bytes("core.json_document:parse_json", "it", unique=True, constants=False), ("**/*.json", "**/_METADATA"),
    ),
    "json rows": (_json_rows, ("**/*.index.json", "**/_METADATA")),
    "toml": (_of_bytes("core.config_text:parse_toml", "it"), ("*.toml",)),
    "yaml config": (_config("config.yml"), ("*.yml",)),
    "gin config": (_config("config.gin"), ("*.gin",)),
    "json config": (_config("config.json"), ("**/config.json", "**/params.json")),
    "safetensors": (_of_file("m.safetensors", f"{_CONTAINERS}.safetensors.header:parse"), ("**/*.safetensors",)),
    "gguf": (_of_file("m.gguf", f"{_FORMATS}.gguf.header:read_header"), ("*.gguf",)),
    "msgpack": (_of_bytes(f"{_CONTAINERS}.msgpack.index:index_bytes"), ("**/checkpoint_7", "**/checkpoint")),
    "zip": (_of_file("m.zip", f"{_CONTAINERS}.zip.read:read_directory"), ("**/*.pt", "**/*.npz")),
    "npz": (_of_file("m.npz", f"{_CONTAINERS}.npz.reader:read_contents"), ("**/*.npz",)),
    "torch zip": (_of_file("m.pt", f"{_CONTAINERS}.torch.archive:read_archive"), ("torch_zip/**/*.pt", "**/*.pth")),
    "torch legacy": (_of_file("m.pt", f"{_CONTAINERS}.torch.archive:read_legacy"), ("torch_legacy/**/*.pt",)),
    "pickles": (
        _of_file("m.pkl", f"{_CONTAINERS}.pickle.survey:survey", located=False),
        ("**/*.pkl", "**/.metadata", "torch_legacy/**/*.pt"),
    ),
    "dcp metadata": (_detected(".metadata"), ("**/.metadata",)),
    "orbax metadata": (_detected("_METADATA"), ("**/_METADATA",)),
    "hf index": (_detected("model.safetensors.index.json"), ("**/*.index.json",)),
    "tensor bundle": (_of_file("m.index", f"{_FORMATS}.tf_bundle:read_table"), ("bundle/*.index",)),
    "zarr 2": (_of_bytes(f"{_CONTAINERS}.zarr.metadata:parse", 2, "it"), ("**/.zarray",)),
    "zarr 3": (_of_bytes(f"{_CONTAINERS}.zarr.metadata:parse", 3, "it"), ("**/zarr.json", "*.zarr3")),
    "ocdbt node": (_node, ("*.node",)),
    "sidecar": (_sidecar, ("wherry.json",)),
    "receipt": (_receipt, ("*.receipt",)),
    "journal": (_journal, ("*.journal",)),
    "lease": (_of_bytes("target.lease:owner_in"), ("*.lease",)),
    "key path": (_of_text("core.keypath:parse", "surrogateescape"), ("*.path",)),
    "treedef": (_of_text(f"{_FORMATS}.paxml.flax:parse_structure", "replace"), ("*.treedef", "**/tree*")),
    "bundle": (_bundle, ("*.zip",)),
    "any file": (
        _detected("any", folder_too=False),
        ("**/*.pt", "**/*.npz", "**/*.safetensors", "**/*.pkl", "**/checkpoint*"),
    ),
}  # fmt: skip
# What callers expect of a parser besides errors of wherry.
ALLOWED: dict[str, tuple[type[Exception], ...]] = {"toml": (ValueError,), "key path": (ValueError,)}


def seeds(place: Path, name: str) -> list[bytes]:
    """Sound inputs: files of the sound checkpoints, of what wherry writes, and small ones by hand."""
    folders = [place / folder for folder in (prepare.SOUND, prepare.WRITTEN, prepare.SEEDS)]
    found = [
        file for folder in folders for pattern in PARSERS[name][1] for file in sorted(folder.glob(pattern))
    ]
    files = [file for file in found if file.is_file()][:40]
    return [file.read_bytes()[:LONGEST] for file in files if file.stat().st_size <= 4 * LONGEST] or [b""]


# ---- Their runs


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
        return f"`{self.parser}`", *list(asdict(self).values())[1:8]


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
        draft.write_text(json.dumps(asdict(self.counts)))
        draft.rename(self._folder / "counts.json")

    def _say(self, text: str, data: bytes) -> None:
        if len(self.counts.said) < 5:
            self.counts.said.append(f"{text[:300]} of {data[:400].hex()}")


def run_by_chance(runner: Runner, sound: list[bytes], runs: int, seed: int) -> None:
    """So many runs with mutations by chance."""
    generator = random.Random(seed)
    for _number in range(runs):
        runner(mutate.mutate(generator.choice(sound), generator)[:LONGEST])
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

    limits = ["-rss_limit_mb=0", "-timeout=600", "-verbosity=0", "-detect_leaks=0"]
    options = [f"-seed={seed + 1}", f"-max_len={LONGEST}", *limits]
    atheris.Setup(["attack", *options, str(corpus)], one, custom_mutator=mutator)
    atheris.Fuzz()


def main(name: str, place: str, folder: str, runs: str, seed: str, guided: str) -> None:
    """One parser, in this process."""

    def stop(_number: int, _frame: object) -> None:
        raise HungError

    if guided == "atheris":
        import atheris  # type: ignore[import-not-found]

        with atheris.instrument_imports(include=("wherry",)):
            _first_run(name)
    else:
        _first_run(name)
    home = Path(folder)
    os.environ |= {"WHERRY_HOME": folder, "TMPDIR": folder, "HOME": folder}
    os.chdir(home)
    sound = seeds(Path(place), name)
    watch = Watch((folder,), folder)
    watch.install()
    signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    runner = Runner(name, home, watch, Fuzzed(name, "coverage" if guided == "atheris" else "chance"))
    (run_guided if guided == "atheris" else run_by_chance)(runner, sound, int(runs), int(seed))


def _first_run(name: str) -> None:
    """Imports what the parser needs."""
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
    python = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ATHERIS)])
    each = str(-(-runs // len(PARSERS)))

    def one(name: str) -> Fuzzed:
        folder = scratch / f"parser-{seed}-{name.replace(' ', '-')}"
        folder.mkdir()
        words = ["-m", "infra.attacks.parsers", name, str(place), str(folder), each, str(seed), guided]
        with (folder / "log").open("w") as log:
            done = subprocess.run(
                [sys.executable, *words],
                check=False,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": python},
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
