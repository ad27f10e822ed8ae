"""Sound checkpoints of every system with one thing wrong: a lying document, a link, a device, a name, extra code."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attacks import lies, pickles, prepare
from attacks.case import MARKER, Case

Change = Callable[[Path, Path], None]  # of a checkpoint, and one of its files

_DOCUMENTS = 12  # lying documents for each file of JSON
_FILES = 4  # files of each checkpoint that are replaced
_CODE = f"import os\nos.system('touch {MARKER}')\nopen({MARKER!r}, 'w')\n"
_MODULES = (
    "torch",
    "jax",
    "numpy",
    "json",
    "sitecustomize",
    "safetensors",
    "tensorstore",
    "wherry",
    "modeling_evil",
    "ml_dtypes",
    "orbax",
    "msgpack",
    "zstandard",
    "blake3",
)


def copy_and_change(home: Path, path: Path, change: Callable[[Path], object]) -> Callable[[Path], Path]:
    """Copies a checkpoint with what lies around it, and changes the copy."""

    def make(folder: Path) -> Path:
        target = folder / "checkpoint"
        shutil.copytree(home, target, symlinks=True)
        found = target / path.relative_to(home)
        change(found)
        return found

    return make


def files_of(path: Path) -> list[Path]:
    """The regular files of a checkpoint."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


def _of(path: Path, file: Path, change: Callable[[Path], object]) -> Callable[[Path], object]:
    """A change of one file of the copy."""
    return lambda found: change(found if path == file else found / file.relative_to(path))


def document(file: Path) -> Any:
    """The JSON of a file; None if it has none or is large."""
    if file.stat().st_size > 1 << 20 or file.suffix in (".safetensors", ".pt", ".npz", ".distcp"):
        return None
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict | list) else None


def _documents(name: str, home: Path, path: Path) -> Iterator[Case]:
    for file in files_of(path):
        sound = document(file)
        inner = file.relative_to(path) if path != file else file.name
        for number, found in lies.documents(sound, _DOCUMENTS if sound else 0, f"{name}{inner}"):
            text = json.dumps(found).encode("utf-8", "surrogatepass")
            yield Case(
                f"{name}/{inner}-{number}",
                copy_and_change(home, path, _of(path, file, lambda at, text=text: at.write_bytes(text))),
            )


# ---- Things that are no regular files


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name[:90])
    os.chdir(here)


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0x2000, os.makedev(1, 5))  # /dev/zero
    except OSError:  # not root
        path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 30)  # one of 40 GiB is among the bombs


def _unreadable(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "fifo": _fifo,
    "socket": _socket,
    "device": _device,
    "zero": _link("/dev/zero"),
    "passwd": _link("/etc/passwd"),
    "memory": _link("/proc/self/mem"),
    "loop": _link("loop/../"),
    "itself": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
    "sparse": _sparse,
    "unreadable": _unreadable,
    "empty": Path.touch,
    "parent": _link(".."),
    "root": _link("/"),
    "descriptor": _link("/proc/self/fd/0"),
    "gone": _link("nowhere"),
}


def _special(name: str, home: Path, path: Path) -> Iterator[Case]:
    found = files_of(path)
    chosen = random.Random(name).sample(found, min(_FILES, len(found)))
    for file in chosen:
        inner = file.relative_to(path) if path != file else file.name
        for kind, put in SPECIAL.items():

            def change(at: Path, put: Callable[[Path], None] = put) -> None:
                at.unlink()
                put(at)

            yield Case(f"{name}/{inner}-{kind}", copy_and_change(home, path, _of(path, file, change)))


# ---- Names, and extra files


def _modules(at: Path) -> None:
    for module in _MODULES:
        (at / f"{module}.py").write_text(_CODE)
    for package in ("custom_generate", ".git/hooks", "wherry.sig"):
        (at / package).mkdir(parents=True)
        (at / package / "__init__.py").write_text(_CODE)


def _odd_names(at: Path) -> None:
    for number, word in enumerate(lies.NAMES):
        text = os.fsencode(word.replace("/", "∕").replace("\0", "")[:200].encode("utf-8", "replace"))
        if text not in (b"", b".", b".."):
            Path(os.fsdecode(os.fsencode(at) + b"/" + text[:240])).write_text(str(number))


def _extra_files(name: str, home: Path, path: Path) -> Iterator[Case]:
    if path.is_file():
        return

    def write_pickle(at: Path) -> None:
        data = pickles.forms("os", "system", f"touch {MARKER}")["p2"]
        for file in (
            "pytorch_model.bin",
            "optimizer.pt",
            "training_args.bin",
            "scheduler.pt",
            "rng_state.pth",
            "evil.pkl",
        ):
            (at / file).write_bytes(data)

    def many(at: Path) -> None:
        for number in range(3000):
            (at / f"file-{number}").touch()

    for kind, change in (
        ("modules", _modules),
        ("pickles", write_pickle),
        ("names", _odd_names),
        ("many", many),
    ):
        yield Case(
            f"{name}/beside-{kind}", copy_and_change(home, path, change), evil=kind in ("modules", "pickles")
        )


# ---- What is specific to a system


def _dcp(place: Path, home: Path, path: Path) -> Iterator[Case]:
    """The metadata of DCP: with fields that lie, and cut."""
    sound = (path / ".metadata").read_bytes()
    for file in sorted((place / prepare.DCP).iterdir()):
        yield Case(f"dcp/{file.name}", copy_and_change(home, path, _metadata(file.read_bytes())))
    for step in range(0, len(sound), max(1, len(sound) // 40)):
        yield Case(f"dcp/cut-{step}", copy_and_change(home, path, _metadata(sound[:step])))


def _metadata(data: bytes) -> Callable[[Path], object]:
    return lambda at: (at / ".metadata").write_bytes(data)


def _huggingface(home: Path, path: Path) -> Iterator[Case]:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return
    sound = json.loads(index.read_bytes())
    for number, name in enumerate(lies.NAMES):
        shards = {**sound, "weight_map": dict.fromkeys(sound["weight_map"], name)}
        tensors = {
            **sound,
            "weight_map": {**sound["weight_map"], name: next(iter(sound["weight_map"].values()))},
        }
        for kind, found in (("shard", shards), ("tensor", tensors)):
            text = json.dumps(found).encode("utf-8", "surrogatepass")
            yield Case(
                f"huggingface/index-{kind}-{number}",
                copy_and_change(home, path, lambda at, text=text: (at / index.name).write_bytes(text)),
            )


def cases(place: Path) -> Iterator[Case]:
    """Every sound checkpoint of a folder with one thing wrong."""
    for name, home, path in prepare.sound(place):
        yield from _documents(name, home, path)
        yield from _special(name, home, path)
        yield from _extra_files(name, home, path)
        if name == "dcp":
            yield from _dcp(place, home, path)
        if name == "huggingface":
            yield from _huggingface(home, path)
