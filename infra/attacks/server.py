"""The fork server: wherry is imported once, and every case is examined in a fork, under an audit hook and limits.

A fork makes its case, runs the verbs one after the other and reports each as it ends. If it reports nothing for as
long as a verb may take, or ends, then the verb that was running is to blame, and the next fork goes on after it.
Every second case runs on a terminal, with its colours and its progress bar; the others on a pipe.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import platform
import re
import resource
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.attacks import servers, verbs
from infra.attacks.case import LEDGER, MARKER, OUTSIDE, SECRET, Case, Run
from infra.attacks.watch import REPORT, Watch

WALL_SECONDS = 90.0  # for one verb: many times what it may take, for the machine may be busy
_PROCESSOR_SECONDS = 60
UNMADE = 77  # exit code of a fork that could not make its case
_EXPIRY_SECONDS = 1.0  # of a lease that nobody renews, instead of 30
_ADDRESS_SPACE = 12 << 30
_TRACEBACK = "Traceback (most recent call last)"
_BUG = "this is a bug in wherry"
_WORDY = re.compile(r"^(error|warning|note): .{3000}", re.MULTILINE)  # its path and its cure included
# Colours, erased lines, moves up and the hidden cursor of the progress bar; no name of the attack has one of these.
_OWN = re.compile("\x1b\\[\\?25h\r|\r(?=\x1b\\[)|\x1b\\[[0-9;]*[mKA]|\x1b\\[\\?25[lh]")
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_FORGED = re.compile(r"^\s*b: forged", re.MULTILINE)  # the second line of a name
_MARKUP = re.compile(r"(?<!\])MARKUP")  # a name whose markup was obeyed


class UnmadeError(Exception):
    """A case could not be made: a fault of the attack, not of wherry."""


# ---- A terminal


class Terminal(io.StringIO):
    """Text that is taken for a terminal."""

    def isatty(self) -> bool:
        """It is."""
        return True


def on_terminal(case: str) -> bool:
    """Whether a case of this name runs on a terminal."""
    return bool(zlib.crc32(case.encode("utf-8", "surrogatepass")) % 2)


def obeys(text: str) -> bool:
    """Whether a terminal would obey something in the text that is not the program's own, or show a forged line."""
    plain = _OWN.sub("", text)
    return any(pattern.search(plain) for pattern in (_OBEYED, _FORGED, _MARKUP))


# ---- One fork for each case


@dataclass(frozen=True, slots=True)
class Server:
    """What all forks share.

    Attributes:
        scratch: a folder of this run alone.
        good: a sound checkpoint that some verbs need besides.
        home: a home of wherry that has been used.
        keys: a folder with `private.pem` and `public.pem`.
        native: runs the child of the native level; None to start one each time.
        port: of the server that lies (`attacks.servers`), in the part where it runs.
    """

    scratch: Path
    good: Path
    home: Path
    keys: Path
    native: Callable[..., Any] | None = None
    port: int = 0

    def examine(self, case: Case, names: Sequence[str], *, seconds: float = WALL_SECONDS) -> Iterator[Run]:
        """Run verbs over a case; one row for each."""
        home = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            left = list(names)
            while left:
                for run in self._run_fork(case, home, tuple(left), seconds):
                    yield run
                    left.pop(0)
        finally:
            remove(home)

    def _run_fork(self, case: Case, home: Path, names: Sequence[str], seconds: float) -> Iterator[Run]:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            self._be(case, home, names, writing)
        os.close(writing)
        done = 0
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            for row in _rows(pipe, seconds):
                done += 1
                yield Run.of(row)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == UNMADE:
            raise UnmadeError(case.name)
        if done < len(names):
            hung = code in (-signal.SIGKILL, -signal.SIGXCPU)
            said = f"ended with {code}, without a report"
            yield Run(case.name, names[done], 124 if hung else min(code, -1), said=said)

    def _be(self, case: Case, home: Path, names: Sequence[str], writing: int) -> None:
        """Be the fork: never returns."""
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            with os.fdopen(writing, "w") as pipe:
                self.report(case, home, names, pipe)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(3)
        os._exit(0)

    def report(self, case: Case, home: Path, names: Sequence[str], pipe: Any) -> None:
        """Make the case, and write what each verb did with it; this process is not used for anything else."""
        folder = home / "case"
        self._surround(home)
        try:
            path = _make_case(case, folder)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(UNMADE)
        _stand(folder)
        if self.port:
            servers.connect_here(self.port)
            os.environ["WHERRY_STORAGE_TIMEOUT"] = servers.TIMEOUT
        places = {"path": path, "folder": str(folder), "out": str(home / "out"), "good": str(self.good),
                  "keys": str(self.keys), **_write_settings(home, folder, self.keys)}  # fmt: skip
        watch = Watch((str(home),), str(folder), self.port)
        watch.install()
        if self.native:
            from wherry.core import child

            child.run = watch.unwatched(self.native)
        for what, most in ((resource.RLIMIT_AS, _ADDRESS_SPACE), (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(what, (most, resource.getrlimit(what)[1]))
        for verb in names:
            found = _run(case.name, verb, verbs.line(verb, places), watch, folder)
            pipe.write(json.dumps(found.to_json()) + "\n")
            pipe.flush()

    def _surround(self, home: Path) -> None:
        """Folders of the case's own; its home is a copy of one that has been used, which saves time."""
        (home / "tmp").mkdir(parents=True, exist_ok=True)
        own = home / "home"
        if not own.exists():
            shutil.copytree(self.home, own)
            if (own / "mlflow.db").exists():  # which records the folder of its artifacts as a whole path
                with contextlib.closing(sqlite3.connect(own / "mlflow.db")) as store, store:
                    move = "UPDATE experiments SET artifact_location = replace(artifact_location, ?, ?)"
                    store.execute(move, (str(self.home), str(own)))
        os.environ |= {
            "WHERRY_HOME": str(own),
            "TMPDIR": str(home / "tmp"),
            "HOME": str(own),
            "XDG_CACHE_HOME": str(own),
            "WHERRY_CHILD_TIMEOUT": "60s",
            "WHERRY_SETTLE_SECONDS": "0",
            "WHERRY_CHILD_SANDBOX": "off",  # which would keep payloads that run from showing it
            "TERM": "xterm-256color",
            "COLUMNS": "4000",
        }  # fmt: skip  no line of a path is folded
        tempfile.tempdir = str(home / "tmp")
        from wherry.target import lease

        lease.EXPIRY_SECONDS = _EXPIRY_SECONDS


def _write_settings(home: Path, folder: Path, keys: Path) -> dict[str, str]:
    """A policy with every gate, and two routes files whose only route leads from the hostile folder to another one."""
    route = f"""[routes.attacked]
root = "{folder}"
min_age = 0
max_bytes = "1GiB"
[[routes.attacked.targets]]
format = "torch-zip"
uri = "§{home}/night/{{run}}-{{step}}.pt"
[routes.attacked.retention]
keep_last = 1
"""
    texts = {
        "policy": f'[policy]\nlevel = "digest"\nrecorded = ["digest", "roundtrip"]\nmax_error = 0.0\nmax_age_days = 3\n'
        f'signature = "{keys}/public.pem"\n',
        "routes": route.replace("§", ""),
        "quoted": route.replace("§", "file://"),
    }
    for name, text in texts.items():
        (home / f"{name}.toml").write_text(text)
    return {name: str(home / f"{name}.toml") for name in texts}


def _make_case(case: Case, folder: Path) -> str:
    """The path or the URL of the case; made by the first fork alone."""
    note = folder.parent / "path"
    if not note.exists():
        folder.mkdir(parents=True)
        note.write_bytes(os.fsencode(case.make(folder)))
    return os.fsdecode(note.read_bytes())


def _stand(folder: Path) -> None:
    """Stand in the hostile folder, which is the worst place, with its ledger if it has one."""
    os.chdir(folder)
    os.environ.pop("WHERRY_LEDGER", None)
    if (folder / LEDGER).exists():
        os.environ["WHERRY_LEDGER"] = f"sqlite:///{folder / LEDGER}"


def _run(case: str, verb: str, words: list[str], watch: Watch, folder: Path) -> Run:
    from wherry.cli import main

    shown = on_terminal(case)
    if shown:  # with its progress bar
        words = [word for word in words if word != "--quiet"]
    said, failed = (Terminal(), Terminal()) if shown else (io.StringIO(), io.StringIO())
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + _PROCESSOR_SECONDS, resource.RLIM_INFINITY))
    watch.seen.clear()
    reset_peak()
    before, began, start = memory("VmRSS"), time.process_time(), time.monotonic()
    trace = ""
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(failed):
        watch.on = True
        try:
            code = main(words) or 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException as error:  # noqa: BLE001
            code, trace = 99, f"{_TRACEBACK} {type(error).__name__}: {error}"
        watch.on = False
    spent, above = time.process_time() - began, (memory("VmHWM") - before) / 1024
    seen = list(watch.seen)
    for mark in (folder / MARKER, folder.parent / "tmp" / REPORT):
        if mark.exists():
            seen.append(f"{mark.name}: {mark.read_text()[:200]}")
            mark.unlink()
    seen += _leaks(folder.parent)
    text = trace + failed.getvalue() + said.getvalue()
    # A bug counts also where a run went on, as a walk or a finished conversion does; and a text that is far too long.
    buggy = _TRACEBACK in text or _BUG in text or _WORDY.search(text) is not None
    lines = [row for row in text.splitlines() if row.strip()]
    return Run(
        case, verb, 99 if buggy else int(code), round(above, 1), round(spent, 3), round(time.monotonic() - start, 2),
        (lines[0] if lines else "")[:300], tuple(seen), obeys(text),
    )  # fmt: skip


def _leaks(home: Path) -> list[str]:
    """The targets of routes that have bytes from outside their roots; removed, so that each counts once."""
    found = []
    for file in (home / "night").rglob("*") if (home / OUTSIDE).exists() else ():
        if file.is_file() and SECRET in file.read_bytes():
            found.append(f"leaked into {file.name}")
            file.unlink()
    return found


def _rows(pipe: Any, seconds: float) -> Iterator[dict[str, Any]]:
    """Rows until the end, or until none comes for so long."""
    held = b""
    while select.select([pipe], [], [], seconds)[0]:
        data = pipe.read(1 << 16)
        if not data:
            return
        *rows, held = (held + data).split(b"\n")
        yield from map(json.loads, rows)


def reset_peak() -> None:
    """Let the peak of memory begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def memory(field: str) -> int:
    """A field of this process's status, in kB."""
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(field)).split()[1])


def remove(folder: Path) -> None:
    """Remove a tree, however deep, and whatever its modes; rmtree ends at a depth of 1,000."""
    for command in (["rm", "-rf"], ["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        if folder.exists():
            subprocess.run([*command, "--", str(folder)], check=False, stderr=subprocess.DEVNULL)


def warm(server: Server, cases: Sequence[Case]) -> None:
    """Import what the verbs import, so that it counts in no run: found in a fork, which may start threads."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        home = Path(tempfile.mkdtemp(dir=server.scratch))
        names = [name for name in verbs.VERBS if name not in ("verify native", "verify logits")]
        for number, case in enumerate(cases):
            with open(os.devnull, "w") as nothing:
                server.report(case, home / str(number), names, nothing)
        with os.fdopen(writing, "w") as pipe:
            json.dump(sorted(sys.modules), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        names = json.loads(pipe.read() or "[]")
    os.waitpid(child, 0)
    for name in names:  # not _asyncio before asyncio, whose tasks would not be found
        if name.partition(".")[0] not in ("jax", "jaxlib", "torch", "infra", "_asyncio", "__main__"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    platform.processor()  # starts a program, once; MLflow asks for it
    from wherry.formats.registry import formats

    list(formats().values())  # their modules, and the metadata of every installed package
    gc.freeze()


# ---- Several processes side by side, each with its part of the cases


def examine_cases(server: Server, cases: Sequence[Case], names: Sequence[str], jobs: int) -> Iterator[Run]:
    """Run verbs over cases in so many processes; rows as they come.

    Raises:
        RuntimeError: a process ended before its cases did.
    """
    files = [Path(tempfile.mkstemp(dir=server.scratch, suffix=".rows")[1]) for _ in range(jobs)]
    left = {_start_process(server, cases[number::jobs], names, file) for number, file in enumerate(files)}
    try:
        with contextlib.ExitStack() as stack:
            readers = [stack.enter_context(file.open()) for file in files]
            held, ended = [""] * len(files), False
            while not ended:
                ended = not left
                for number, reader in enumerate(readers):
                    *rows, held[number] = (held[number] + reader.read()).split("\n")
                    yield from map(Run.of, map(json.loads, rows))
                left -= {child for child in left if _has_ended(child)}
                time.sleep(0 if ended else 0.2)
    finally:
        for child in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _start_process(server: Server, cases: Sequence[Case], names: Sequence[str], file: Path) -> int:
    child = os.fork()
    if child:
        return child
    os.setsid()
    try:
        with _loading(server, names) as ready, file.open("w") as rows:
            for case in cases:
                with contextlib.suppress(UnmadeError):  # its trace is printed, and the table lacks its runs
                    for run in ready.examine(case, names):
                        rows.write(json.dumps(run.to_json()) + "\n")
                rows.flush()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@contextlib.contextmanager
def _loading(server: Server, names: Sequence[str]) -> Iterator[Server]:
    """The server, with loaders of its own if the names include the native level.

    They are children that are forked from processes which have imported the libraries, and are watched. What a child
    imports, inherits and may use is tested with real ones in tests/core and tests/prove; here the question is what the
    libraries do with thousands of files.
    """
    if "verify native" not in names:
        yield server
        return
    from tests.support.warm_native import LIBRARIES, WarmLoaders
    from wherry.core import child

    def run(*values: Any, **named: Any) -> child.ChildResult:
        try:
            return loaders.run(*values, **named)
        except subprocess.TimeoutExpired as error:
            raise child.NoAnswerError("the child took too long") from error

    loaders = WarmLoaders(tempfile.mkdtemp(dir=server.scratch))
    loaders.libraries = {kind: (*rows, "infra.attacks.watched") for kind, rows in LIBRARIES.items()}
    for kind in ("jax", "torch"):  # started before the first fork, which inherits it
        # A fork cannot wait for the process of its parent, and would take it for ended.
        loaders[kind]._process.poll = lambda: None  # type: ignore[method-assign]
    try:
        yield replace(server, native=run)
    finally:
        for one in loaders.values():
            one.close()


def _has_ended(child: int) -> bool:
    found, status = os.waitpid(child, os.WNOHANG)
    if found and os.waitstatus_to_exitcode(status):
        print(f"a process of the attack ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)
        raise RuntimeError("a process of the attack ended before its cases did")
    return bool(found)
