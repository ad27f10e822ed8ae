"""A program: each file of a checkpoint is replaced by things that are no regular file, and every verb is run on it.

`python -m tests.support.special_files CHECKPOINT WORK every|kinds` prints one JSON row for each verb and replacement. A
verb that takes longer than a few seconds ends the program with the traces of all threads: that is what a hang looks
like.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import resource
import shutil
import socket
import sys
import time
from pathlib import Path

import wherry
from wherry.errors import WherryError
from wherry.store.local_store import locate

PATIENCE = 30
MARKER = b"what only this user may read"
SPARSE = 64 << 30


def fifo(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def folder(path: Path) -> None:
    path.mkdir()


def outside(path: Path) -> None:
    target = WORK / "secret"
    target.write_bytes(MARKER)
    path.symlink_to(target)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE)


def absent(_path: Path) -> None:
    """Nothing takes its place: what a verb says then is what it may say of a file that it does not need."""


REPLACEMENTS = (absent, fifo, zeros, unix_socket, folder, outside, sparse)


VERDICTS = {"ok": 0, "malicious": 6, "incomplete": 5, "corrupt": 5}


def detect() -> int:
    return VERDICTS.get(wherry.detect(CHECKPOINT).verdict, 4)


def read() -> None:
    with wherry.open(CHECKPOINT) as opened:
        for path in opened.manifest.tensors:
            opened.read_bytes(path)
        for companion in opened.manifest.companions:
            opened.reader.companion(companion.name).read_whole(1 << 30)


def verify() -> int:
    return wherry.verify(CHECKPOINT, level="present").exit_code


def convert() -> None:
    wherry.convert(CHECKPOINT, WORK / "to" / "out", to="torch-zip", lineage=False)


VERBS = (detect, read, verify, convert)


def outcome(verb) -> dict[str, object]:
    """Exit code of one verb, 0 for success, and what it left."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    before, kind = time.monotonic(), ""
    try:
        code = verb() or 0
    except WherryError as error:
        code, kind = error.exit_code, f"{type(error).__name__}: {error.what}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    left = WORK / "to"
    written = [path for path in left.rglob("*") if path.is_file()] if left.exists() else []
    row = {
        "code": code,
        "error": kind,
        "seconds": time.monotonic() - before,
        "left": bool(code) and left.exists(),
        "leaked": any(MARKER in path.read_bytes() for path in written),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }
    shutil.rmtree(left, ignore_errors=True)
    return row


def files_of(place: Path, every: str) -> list[Path]:
    """All files, or the first of each name, numbers apart, at each depth."""
    found = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    if every == "every":
        return found
    first: dict[str, Path] = {}
    for path in found:
        name = re.sub(r"[0-9a-f]{32}|\d+(\.\d+)*", "#", path.name)
        first.setdefault(f"{len(path.relative_to(place).parts)} {name}", path)
    return list(first.values())


def tell(file: str, kind: str) -> None:
    print(f"{file} {kind}", file=sys.stderr, flush=True)
    for verb in VERBS:
        row = {"file": file, "kind": kind, "verb": verb.__name__, **outcome(verb)}
        print(json.dumps(row), flush=True)


def main(every: str) -> None:
    kept = WORK / "kept"
    base = CHECKPOINT if CHECKPOINT.is_dir() else CHECKPOINT.parent
    tell("", "whole")
    for file in files_of(CHECKPOINT, every):
        name = file.relative_to(base).as_posix()
        for replace in REPLACEMENTS:
            file.rename(kept)
            try:
                replace(file)
                tell(name, replace.__name__)
            finally:
                shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink(
                    missing_ok=True
                )
                kept.rename(file)


if __name__ == "__main__":
    CHECKPOINT, WORK = Path(sys.argv[1]), Path(sys.argv[2])
    assert locate(CHECKPOINT).exists()
    main(sys.argv[3])
