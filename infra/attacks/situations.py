"""Situations that no single file makes: names of runs, URIs of events, files that change, other users, signatures.

The checkpoints themselves are sound. What is hostile is what they are called, where an event says they are, who owns
them, what they turn into while they are read, or which signature is next to them. `VERBS` are the commands that meet
this, with lineage, policies and routes. A target that contains bytes of the folder next to the case, which no route
and no command names, counts as executed (`server`).
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from infra.attacks import heads, prepare
from infra.attacks.case import OUTSIDE, SECRET, TOUCH, Case

VERBS = (
    *("detect", "discover", "inspect digest", "verify digest", "audit digest", "convert recorded", "promote policy"),
    *("routes explain", "nightly plan", "nightly", "nightly quoted", "lineage show", "signature", "verify signature"),
    *("clean", "prune", "fetch"),
)  # fmt: skip
EVENT_VERBS = (
    "routes explain",
    "nightly",
)  # what the export flow asks; other commands go where their user says
_FILE, _SIGNATURE = "model.safetensors", "wherry.sig"
_LONG = "x" * 240
# Names of runs, which a route puts into the path of its target.
NAMES = {
    "quoted": "x%2f..%2f..%2f..%2fvictim",
    "quoted-deep": "x%2f..%2f..%2f..%2f..%2f..%2fvictim",
    "quoted-dots": "%2e%2e",
    "twice-quoted": "%252e%252e%252fvictim",
    "zero": "a%00b",
    "backslash": "..\\..\\victim",
    "dots": "...",
    "dot-end": "a.",
    "run": "{run}",
    "step": "{step}",
    "field": "{run.__class__}",
    "index": "{0}",
    "brace": "{",
    "percent": "%s%n%x",
    "option": "-rf",
    "long-option": "--config=x",
    "home": "~",
    "star": "*",
    "question": "a?b=c",
    "fragment": "a#b",
    "at": "a@b",
    "colon": "s3:bucket",
    "shell": f"$({TOUCH})",
    "ticks": f"`{TOUCH}`",
    "semicolon": f"a; {TOUCH}",
    "quote": f"a'; {TOUCH}; '",
    "double": 'a" b',
    "newline": "a\nb: forged",
    "escape": "\x1b]0;title\x07",
    "c1": "\x9b31m",
    "return": "a\rb",
    "right-to-left": "\u202egnp",
    "tag": "a\U000e0041",
    "variation": "a\ufe0f",
    "markup": "[red]MARKUP[/red]",
    "space": " ",
    "tab": "\t",
    "long": _LONG,
    "wide": "\U0001f600" * 60,
    "surrogate": os.fsdecode(b"\xff\xfe"),
    "staging": ".wherry",
    "lease": ".wherry-lease",
    "sidecar": "a.wherry.json",
    "json": '{"a": 1}',
    "sql": "a' OR '1'='1",
    "csv": "=1+1",
    "date": "2026-99-99",
    "number": "1e999",
    "negative": "-1",
    "none": "None",
    "uri": "file:",
    "digest": "sha256:0",
}
# Where an event says that a checkpoint is; {folder} is the root of the routes, {elsewhere} a folder next to it.
EVENTS = (
    "{elsewhere}",
    "{elsewhere}/run",
    "{folder}/../elsewhere/run",
    "{folder}/link",
    "{folder}/link/run",
    "file://{elsewhere}/run",
    "file:///etc",
    "/etc/passwd",
    "/proc/self/environ",
    "/dev/zero",
    "{folder}/%2e%2e/elsewhere",
    "{folder}//../elsewhere/run",
    "http://127.0.0.1:9/x",
    "http://169.254.169.254/latest",
    "http://[::1]:9/x",
    "http://0x7f.1:9/",
    "https://2130706433:9/",
    "http://metadata.google.internal/",
    "gs://bucket/x",
    "s3://bucket/x",
    "az://bucket/x",
    "hf://a/b",
    "ftp://127.0.0.1/x",
    "mlflow://x/1",
    "models:/attacked/1",
    "wherry://sha256/0",
    "wherry://model/../x",
    "live://x",
    "memory://x",
    "data:,x",
    "",
    " ",
    ".",
    "..",
    "~",
    "-",
    "--help",
    "a\nb: forged",
    "\x1b]0;title\x07",
    _LONG * 40,
    "x://y",
    "://",
    "file:",
    "file://x/y",
    "{folder}\u202e",
    "{folder}/run@1",
    "{folder}/run#a",
    "{folder}/run?x=1",
    "{folder}/" + "../" * 400 + "elsewhere/run",
)
_MODES = (0o000, 0o200, 0o444, 0o666, 0o777, 0o2777, 0o4755)
_OTHER_USER = 65_534
_SWAP_SECONDS = 0.002


def cases(place: Path) -> Iterator[Case]:
    """Every situation but events.

    Args:
        place: the sound checkpoints of `prepare`.
    """
    for name, text in NAMES.items():
        yield Case(f"run-name/{name}", partial(_run, text), TOUCH in text)
    for name, swap in _SWAPS.items():
        yield Case(f"race/{name}", partial(_race, swap))
    for mode in _MODES:
        yield Case(f"other-user/{mode:o}", partial(_owned, place / prepare.WRITTEN, mode, False))
        yield Case(f"other-user/{mode:o}-config", partial(_owned, place / prepare.WRITTEN, mode, True))
    for name, data in _signatures(place):
        yield Case(f"signature-bytes/{name}", partial(_signed, place / prepare.WRITTEN, data))


def events() -> Iterator[Case]:
    """Every URI that an event could state."""
    for number, uri in enumerate(EVENTS):
        yield Case(f"event/{number}", partial(_event, uri))


def _sound(folder: Path, text: bytes = b"") -> Path:
    """A sound checkpoint, a file in a new folder."""
    folder.mkdir(parents=True)
    (folder / _FILE).write_bytes(heads.SOUND[: len(heads.SOUND) - len(text)] + text)
    return folder


def _outside(folder: Path) -> Path:
    """A folder next to the hostile one, with a run whose bytes no target may contain."""
    place = folder.parent / OUTSIDE
    _sound(place / "run", SECRET)
    return place


def _run(name: str, folder: Path) -> Path:
    """A run of this name, and a run of a usual one."""
    _sound(folder / "run")
    return _sound(folder / name)


def _event(uri: str, folder: Path) -> str:
    outside = _outside(folder)
    _sound(folder / "run")
    (folder / "link").symlink_to(outside)
    return uri.replace("{folder}", str(folder)).replace("{elsewhere}", str(outside))


# ---- Files that change while they are read


def _exchanged(
    run: Path, outside: Path, aside: Path, place: str, put: Callable[[Path, Path], object] | None
) -> None:
    """The folder or its file becomes something else, or nothing, and is there again."""
    file = run / place
    file.rename(aside)
    if put:
        put(file, outside / "run" / place)
    time.sleep(_SWAP_SECONDS)
    if put:
        file.unlink()
    aside.rename(file)


def _content(run: Path, _outside: Path, aside: Path) -> None:
    """The file is replaced by another sound one."""
    data = (run / _FILE).read_bytes()
    aside.write_bytes(data[:-8] + os.urandom(8))
    aside.rename(run / _FILE)


def _length(run: Path, _outside: Path, aside: Path) -> None:
    """The file is cut, and whole again."""
    data = (run / _FILE).read_bytes()
    os.truncate(run / _FILE, random.randrange(len(data)))
    time.sleep(_SWAP_SECONDS)
    aside.write_bytes(data)
    aside.rename(run / _FILE)


_SWAPS = {
    "folder-link": partial(_exchanged, place="", put=Path.symlink_to),
    "file-link": partial(_exchanged, place=_FILE, put=Path.symlink_to),
    "device": partial(
        _exchanged, place=_FILE, put=lambda file, _other: os.mkfifo(file)
    ),  # which nobody writes
    "presence": partial(_exchanged, place="", put=None),
    "content": _content,
    "length": _length,
}


def _race(swap: Callable[[Path, Path, Path], None], folder: Path) -> Path:
    """A run that another process changes all the time, until the group of this process is killed."""
    run, outside, aside = _sound(folder / "run"), _outside(folder), folder.parent / "aside"
    if os.fork() == 0:
        os.closerange(3, 1024)  # not to hold open what the attack waits for
        try:
            while folder.parent.exists():
                with suppress(OSError):
                    swap(run, outside, aside)
                time.sleep(_SWAP_SECONDS)
        finally:
            os._exit(0)
    return run


# ---- Other users, signatures


def _owned(written: Path, mode: int, config: bool, folder: Path) -> Path:
    """A signed checkpoint of another user (where this one may give it away), with odd modes, and its wherry.toml."""
    run = folder / "run"
    shutil.copytree(written, run)
    if config:
        text = 'ledger = "sqlite:////tmp/not-of-this-user.db"\n[notify]\nwebhook = "http://127.0.0.1:9/x"\n'
        (folder / "wherry.toml").write_text(text)
    for path in (*folder.rglob("*"), folder):
        if os.geteuid() == 0:
            os.lchown(path, _OTHER_USER, _OTHER_USER)
        if path.is_file():
            path.chmod(mode)
    return run


def _signatures(place: Path) -> Iterator[tuple[str, bytes]]:
    """Bytes in the place of a signature: by chance, of other kinds, and the true one with one byte changed."""
    chance = random.Random(0)
    for size in (0, 1, 7, 64, 4096, 1 << 20, 1 << 23):
        yield f"random-{size}", chance.randbytes(size)
    yield "zeros", bytes(1 << 20)
    yield "quotes", b'"' * (1 << 20)
    yield "open", b"[" * (1 << 20)
    yield "text", b'{"payload": "' + b"x" * (1 << 20) + b'"}'
    yield "controls", b'{"signatures": [{"keyid": "\\u001b]0;title\\u0007", "sig": "a\\nb: forged"}]}'
    true = (place / prepare.WRITTEN / _SIGNATURE).read_bytes()
    for at in range(0, len(true), max(1, len(true) // 60)):
        yield f"flipped-{at}", true[:at] + bytes([true[at] ^ 1 << chance.randrange(8)]) + true[at + 1 :]


def _signed(written: Path, data: bytes, folder: Path) -> Path:
    """A signed checkpoint with these bytes as its signature."""
    shutil.copytree(written, folder / "run")
    (folder / "run" / _SIGNATURE).write_bytes(data)
    return folder / "run"
