"""`infra/bench --against DIR`: is this wherry as fast as that of another checkout, for example an older commit?

Each container, small and large, is detected, planned, converted to safetensors, and written. Two warm processes
(`against_child.py`), each with the wherry of one checkout, do each row by turns on the same files, and the least of
their processor times are compared. The checkpoints have many small tensors, so that calls count and not bytes:
safetensors and GGUF are written here, byte by byte; the others are conversions of the first by the wherry of this
checkout, which tests hold against the libraries of their systems.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine

_HERE = Path(__file__).resolve()
OURS = _HERE.parents[2]
SMALL = 24  # tensors
NAME = "bench-against"
MOST = 1.05  # times the processor time of the other checkout
NOISE_S = 30e-6  # a difference that is smaller is not judged
_SHARD = "200KB"
_SIDE, _ITEM = 8, 4
_EACH = _SIDE * _SIDE * _ITEM
_KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "norm")
_ABOUT = """\
Processor time (user and kernel, all threads) of calls in two warm processes, one for each checkout, by turns on the
same files; the least of all rounds. *convert* reads the container and writes safetensors (safetensors: DCP), *write*
writes the container from safetensors; both with digests, read-back and a ledger entry. A ratio above {most} is **bold**
unless the difference is below {noise:.0f} µs.
"""


# ---- Rows


class Container(NamedTuple):
    """A container as the rows know it.

    Attributes:
        name: as the report prints it.
        format: the format of wherry.
        file: name of the file or folder.
        split: whether names become key paths.
        written: whether wherry writes it.
        most: tensors at most; a file for each tensor costs the file system more than wherry.
    """

    name: str
    format: str
    file: str
    split: bool = False
    written: bool = True
    most: int = 1 << 30


CONTAINERS = (
    Container("safetensors", "safetensors", "model.safetensors"),
    Container("Hugging Face shards", "huggingface", "model"),
    Container("torch zip", "torch-zip", "model.pt"),
    Container("DCP", "dcp", "step"),
    Container("Orbax", "orbax", "step", split=True),
    Container("Flax msgpack", "flax-msgpack", "model.msgpack", split=True),
    Container("T5X", "t5x-legacy", "checkpoint_1", split=True, most=5_000),
    Container("npz", "npz", "model.npz"),
    Container("GGUF", "gguf", "model.gguf", written=False),
)
SOURCE = CONTAINERS[0]


class Row(NamedTuple):
    """One row.

    Attributes:
        operation: `detect`, `plan`, `convert` (to safetensors; safetensors to DCP) or `write` (safetensors to it).
        container: what it is done with.
        tensors: how many there are.
    """

    operation: str
    container: Container
    tensors: int

    @property
    def name(self) -> str:
        """As `--rows` selects it and the table prints it."""
        return f"{self.operation} {self.container.name}, {self.tensors:,} tensors"

    @property
    def source(self) -> Container:
        """What is read."""
        return SOURCE if self.operation == "write" else self.container

    @property
    def target(self) -> Container:
        """What is written."""
        if self.operation == "write":
            return self.container
        return SOURCE if self.container != SOURCE else CONTAINERS[3]

    @property
    def repeats(self) -> int:
        """Calls a round: as many as take a few tenths of a second."""
        return 1 if self.tensors > SMALL else {"detect": 50, "plan": 20}.get(self.operation, 3)


def rows(tensors: int) -> Iterator[Row]:
    """All rows; a large checkpoint has so many tensors."""
    for count in (SMALL, tensors):
        for container in CONTAINERS:
            for operation in ("detect", "plan", "convert", "write"):
                if operation != "write" or (container.written and container != SOURCE):
                    yield Row(operation, container, min(count, container.most))


# ---- Their checkpoints


def make_input(container: Container, tensors: int, folder: Path) -> Path:
    """The checkpoint of a container with so many tensors, made once."""
    path = folder / f"{container.format}-{tensors}" / container.file
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    if container == SOURCE:
        _write_safetensors(path, tensors)
    elif container.format == "gguf":
        _write_gguf(path, tensors)
    else:
        options = [f"{name}={value}" for name, value in _options(SOURCE, container).items()]
        words = [word for option in options for word in ("--set", option)]
        words += ["--family", family] if (family := _family(container)) else []
        source = make_input(SOURCE, tensors, folder)
        command = [
            sys.executable, "-m", "wherry.cli", "convert", str(source), str(path), "--to", container.format,
        ]  # fmt: skip
        command += [*words, "--no-lineage", "--verify", "none"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=OURS)
    return path


def _options(source: Container, target: Container) -> dict[str, str]:
    """The options with which a container is written from another."""
    options = {} if source.split == target.split else {"split" if target.split else "join": "."}
    return options | ({"max_shard_size": _SHARD} if target.format == "huggingface" else {})


def _family(container: Container) -> str | None:
    """The family that is stated for a target: the names are those of no model of Hugging Face."""
    return "none" if container.format == "huggingface" else None


def _names(count: int) -> list[str]:
    """Names as those of a model; T5X wants them below `params`."""
    width = len(_KINDS)
    return [f"params.layers_{at // width}.{_KINDS[at % width]}.kernel" for at in range(count)]


def _values(count: int) -> bytes:
    return b"".join(struct.pack("<f", number) * (_SIDE * _SIDE) for number in range(count))


def _write_safetensors(path: Path, count: int) -> None:
    header = {
        name: {"dtype": "F32", "shape": [_SIDE, _SIDE], "data_offsets": [at * _EACH, (at + 1) * _EACH]}
        for at, name in enumerate(_names(count))
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + _values(count))


def _write_gguf(path: Path, count: int) -> None:
    """Version 3 of GGUF, after https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""
    string, alignment, key = 8, 32, b"general.architecture"
    head = b"GGUF" + struct.pack("<IQQ", 3, count, 1)
    head += struct.pack("<Q", len(key)) + key + struct.pack("<IQ", string, 5) + b"llama"
    for at, name in enumerate(name.encode() for name in _names(count)):
        head += struct.pack("<Q", len(name)) + name + struct.pack("<IQQIQ", 2, _SIDE, _SIDE, 0, at * _EACH)
    path.write_bytes(head + bytes(-len(head) % alignment) + _values(count))


# ---- Measuring


class Child:
    """A warm process with the wherry of one checkout."""

    def __init__(self, checkout: Path, home: Path) -> None:
        """Start it.

        Args:
            checkout: the folder that has the package `wherry`.
            home: its WHERRY_HOME.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WHERRY_")}
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE.with_name("against_child.py")), str(checkout)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**kept, "WHERRY_HOME": str(home)},
            cwd=home.parent,
        )  # fmt: skip

    def ask(self, row: Row, source: Path, target: Path) -> dict[str, Any]:
        """Do a row; see `against_child.answer`."""
        request = {
            "operation": row.operation, "source": str(source), "target": str(target), "to": row.target.format,
            "options": _options(row.source, row.target), "family": _family(row.target), "repeats": row.repeats,
        }  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        """End it; it ends when its input does."""
        self._process.communicate(timeout=60)


def bench(other: Path, scratch: Path, tensors: int, rounds: int, words: str, results: Path) -> int:
    """Run the rows and write the results; 1 if a row is slower than allowed, or was not measured.

    Args:
        other: folder of the other checkout.
        scratch: folder for checkpoints and targets.
        tensors: of a large checkpoint.
        rounds: number of rounds.
        words: only rows whose name contains them.
        results: folder for the results.
    """
    with ExitStack() as stack:
        children = [Child(checkout, scratch / name) for checkout, name in ((OURS, "ours"), (other, "other"))]
        for child in children:
            stack.callback(child.end)
        chosen = [row for row in rows(tensors) if words in row.name]
        sources = {row: make_input(row.source, row.tensors, scratch / "sources") for row in chosen}
        times: dict[Row, tuple[list[float], list[float]]] = {row: ([], []) for row in sources}
        failed: dict[Row, str] = {}
        for number in range(rounds + 1):  # the first one imports what is needed, and is not counted
            for row in (row for row in sources if row not in failed):
                for which in ((0, 1), (1, 0))[number % 2]:
                    target = scratch / "made" / f"{which}" / row.target.file
                    answer = children[which].ask(row, sources[row], target)
                    if "error" in answer:
                        failed[row] = f"{('this checkout', 'the other')[which]}: {answer['error']}"
                    elif number:
                        times[row][which].extend(answer["seconds"])
            print(f"· round {number} of {rounds}", flush=True)
    found = {
        "machine": machine.describe(scratch), "ours": commit_of(OURS), "other": commit_of(other), "rounds": rounds,
        "rows": [_summarise(row, *times[row], failed.get(row, "")) for row in sources],
    }  # fmt: skip
    return write(results, found)


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, as a date and the beginning of its hash; `unknown` without git."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _summarise(row: Row, ours: list[float], other: list[float], failed: str) -> dict[str, Any]:
    operation, container, tensors = row
    facts = {"row": row.name, "operation": operation, "container": container.name, "tensors": tensors}
    if failed:
        return {**facts, "failed": failed}
    return {**facts, "ours_s": min(ours), "other_s": min(other), "ratio": min(ours) / min(other)}


# ---- infra/bench-against.json and .md


def write(results: Path, found: Mapping[str, Any]) -> int:
    """Write the files, and print what is not reached; 1 if something is not."""
    (results / f"{NAME}.json").write_text(json.dumps(found, indent=1) + "\n")
    text = markdown(found)
    (results / f"{NAME}.md").write_text(text)
    print("\n" + text)
    missed = problems(found)
    for problem in missed:
        print(f"not reached: {problem}", file=sys.stderr)
    return int(bool(missed))


def problems(found: Mapping[str, Any]) -> list[str]:
    """The rows that are slower than allowed, and those that were not measured."""
    missed = [row for row in found["rows"] if "failed" in row or is_slower(row)]
    reasons = [row["failed"] if "failed" in row else f"{row['ratio']:.2f}× of {MOST:g}×" for row in missed]
    return [f"{row['row']}: {reason}" for row, reason in zip(missed, reasons, strict=True)]


def is_slower(row: Mapping[str, Any]) -> bool:
    """Whether this checkout is slower than allowed."""
    return row["ratio"] > MOST and row["ours_s"] - row["other_s"] > NOISE_S


def markdown(found: Mapping[str, Any]) -> str:
    """The page."""
    described = found["machine"]
    about = (
        f"This: {found['ours']}; the other: {found['other']}. {found['rounds']} rounds, {described['date']}, "
        f"{described['cores']} cores ({described['processor'].split(' with ')[0]}), Python {described['python']}, "
        f"load {described['load_before']}."
    )
    lines = [
        "# This checkout against another\n",
        "Written by `infra/bench --against DIR`; do not edit.\n",
        f"{about}\n",
        _ABOUT.format(most=MOST, noise=NOISE_S * 1e6),
        "| operation | container | tensors | other, ms | this, ms | ratio |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        *map(_line, found["rows"]),
        "",
    ]
    if missed := problems(found):
        lines += ["Not reached:", "", *(f"- {problem}" for problem in missed), ""]
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    begin = f"| {row['operation']} | {row['container']} | {row['tensors']:,} |"
    if "failed" in row:
        return f"{begin} | | not measured |"
    ratio = f"{row['ratio']:.2f}×"
    times = f"{row['other_s'] * 1e3:.2f} | {row['ours_s'] * 1e3:.2f}"
    return f"{begin} {times} | {f'**{ratio}**' if is_slower(row) else ratio} |"
