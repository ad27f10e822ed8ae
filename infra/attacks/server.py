"""The fork server: wherry is imported once, and every case is examined in a fork, under an audit hook and limits.

A fork makes its case, runs the verbs one after the other and reports each as it ends. If it reports nothing for as
long as a verb may take, or ends, then the verb that was running is to blame, and the next fork goes on after it.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks import servers, terminal, verbs
from attacks.case import LEDGER, MARKER, OUTSIDE, SECRET, Case, Run
from attacks.watch import REPORT, Watch

WALL_SECONDS = 90.0  # for one verb: many times what it may take, for the machine may be busy
_PROCESSOR_SECONDS = 60
UNMADE = 77  # exit code of a fork that could not make its case
_EXPIRY_SECONDS = 1.0  # of a lease that nobody renews, instead of 30
_ADDRESS_SPACE = 12 << 30
_TRACEBACK = "Traceback (most recent call last)"
_BUG = "this is a bug in wherry"
_WORDY = re.compile(r"^(error|warning|note): .{3000}", re.MULTILINE)  # its path and its cure included


class UnmadeError(Exception):
    """A case could not be made: a fault of the attack, not of wherry."""


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
        """Run verbs over a case; one row for each, and one more for a payload that left its mark."""
        home = Path(tempfile.mkdtemp(dir=self.scratch))
        try:
            left = list(names)
            while left:
                for run in self._run_forks(case, home, tuple(left), seconds):
                    yield run
                    left.pop(0)
        finally:
            remove(home)

    def _run_forks(self, case: Case, home: Path, names: Sequence[str], seconds: float) -> Iterator[Run]:
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
                yield Run(**{**row, "executed": tuple(row["executed"])})
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if done < len(names):
            hung = code in (-signal.SIGKILL, -signal.SIGXCPU)
            if code == UNMADE:
                raise UnmadeError(case.name)
            yield Run(
                case.name,
                names[done],
                124 if hung else min(code, -1),
                said=f"ended with {code}, without a report",
            )

    def _be(self, case: Case, home: Path, names: Sequence[str], writing: int) -> None:
        """Be the fork: never returns."""
        try:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            with os.fdopen(writing, "w") as pipe:
                self._report(case, home, names, pipe)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(3)
        os._exit(0)

    def _surround(self, home: Path) -> None:
        """Folders of the case's own; its home is a copy of one that has been used, which saves time."""
        (home / "tmp").mkdir(parents=True, exist_ok=True)
        if not (home / "home").exists():
            shutil.copytree(self.home, home / "home")
            self._move_registry(home / "home")
        os.environ |= {"WHERRY_HOME": str(home / "home"), "TMPDIR": str(home / "tmp"), "HOME": str(home / "home"),
                       "XDG_CACHE_HOME": str(home / "home"), "WHERRY_CHILD_TIMEOUT": "60s",
                       "WHERRY_SETTLE_SECONDS": "0",
                       "WHERRY_CHILD_SANDBOX": "off",  # which would keep payloads that run from showing it
                       **terminal.VARIABLES}  # fmt: skip
        tempfile.tempdir = str(home / "tmp")
        from wherry.target import lease_watch

        lease_watch.EXPIRY_SECONDS = _EXPIRY_SECONDS

    def _move_registry(self, home: Path) -> None:
        """Let the registry of a copied home keep its artifacts there: MLflow records their folder as a whole path."""
        with contextlib.closing(sqlite3.connect(home / "mlflow.db")) as store, store:
            store.execute(
                "UPDATE experiments SET artifact_location = replace(artifact_location, ?, ?)",
                (str(self.home), str(home)),
            )

    def _report(self, case: Case, home: Path, names: Sequence[str], pipe: Any) -> None:
        folder = home / "case"
        self._surround(home)
        try:
            path = _make_case(case, folder)
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(UNMADE)
        _stand(folder)
        if self.port:
            servers.resolve_here(self.port)
            os.environ["WHERRY_STORAGE_TIMEOUT"] = servers.TIMEOUT
        places = {"path": path, "folder": str(folder), "out": str(home / "out"), "good": str(self.good),
                  "keys": str(self.keys), "policy": str(_policy(home, self.keys)),
                  "routes": str(_routes(home, folder)), "quoted": str(_routes(home, folder, "file://"))}  # fmt: skip
        watch = Watch((str(home),), str(folder), self.port)
        watch.install()
        if self.native:
            from wherry.runtime import child

            child.run = watch.unwatched(self.native)
        _limit()
        for verb in names:
            found = _run(case.name, verb, verbs.line(verb, places), watch, folder)
            pipe.write(json.dumps(found.to_json()) + "\n")
            pipe.flush()


def _policy(home: Path, keys: Path) -> Path:
    """A policy with every gate."""
    file = home / "policy.toml"
    file.write_text(f"""[policy]
level = "digest"
recorded = ["digest", "roundtrip"]
max_error = 0.0
max_age_days = 3
signature = "{keys}/public.pem"
""")
    return file


def _routes(home: Path, folder: Path, scheme: str = "") -> Path:
    """A routes file whose only route leads from the hostile folder to another one."""
    file = home / f"routes{len(scheme)}.toml"
    file.write_text(f"""[routes.attacked]
root = "{folder}"
min_age = 0
max_bytes = "1GiB"
[[routes.attacked.targets]]
format = "torch-zip"
uri = "{scheme}{home}/night/{{run}}-{{step}}.pt"
[routes.attacked.retention]
keep_last = 1
""")
    return file


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


def _limit() -> None:
    for what, most in ((resource.RLIMIT_AS, _ADDRESS_SPACE), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, resource.getrlimit(what)[1]))


def _run(case: str, verb: str, words: list[str], watch: Watch, folder: Path) -> Run:
    from wherry.cli import main

    shown = terminal.on_terminal(case)
    said, failed = (terminal.Terminal(), terminal.Terminal()) if shown else (io.StringIO(), io.StringIO())
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + _PROCESSOR_SECONDS, resource.RLIM_INFINITY))
    watch.seen.clear()
    reset_peak()
    before, began, start = memory("VmRSS"), time.process_time(), time.monotonic()
    trace = ""
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(failed):
        watch.on = True
        try:
            code = main(terminal.words_for(words, terminal=shown)) or 0
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
    lines = [row for row in text.splitlines() if row.strip()]
    return Run(
        case, verb, 99 if _tells_of_a_bug(text) else int(code), round(above, 1), round(spent, 3),
        round(time.monotonic() - start, 2),
        (lines[0] if lines else "")[:300], tuple(seen), terminal.obeys(text),
    )  # fmt: skip


def _leaks(home: Path) -> list[str]:
    """The targets of routes that have bytes from outside their roots; removed, so that each counts once."""
    found = []
    for file in (home / "night").rglob("*") if (home / OUTSIDE).exists() else ():
        if file.is_file() and SECRET in file.read_bytes():
            found.append(f"leaked into {file.name}")
            file.unlink()
    return found


def _tells_of_a_bug(text: str) -> bool:
    """Whether a run met one: also where it went on, as a walk or a finished conversion does; or said far too much."""
    return _TRACEBACK in text or _BUG in text or _WORDY.search(text) is not None


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
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def memory(field: str) -> int:
    """A field of this process's status, in kB."""
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(field)).split()[1])


def remove(folder: Path) -> None:
    """Remove a tree, however deep, and whatever its modes."""
    for command in (
        ["rm", "-rf"],
        ["chmod", "-R", "u+rwx"],
        ["rm", "-rf"],
    ):  # rmtree ends at a depth of 1,000
        if folder.exists():
            subprocess.run([*command, "--", str(folder)], check=False, stderr=subprocess.DEVNULL)


def warm(server: Server, cases: Sequence[Case]) -> None:
    """Import what the verbs import, so that it counts in no run: found in a fork, which may start threads."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        home = Path(tempfile.mkdtemp(dir=server.scratch))
        for number, case in enumerate(cases):
            with open(os.devnull, "w") as nothing:
                names = [name for name in verbs.VERBS if name not in ("verify native", "verify logits")]
                server._report(case, home / str(number), names, nothing)
        with os.fdopen(writing, "w") as pipe:
            json.dump(sorted(sys.modules), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        names = json.loads(pipe.read() or "[]")
    os.waitpid(child, 0)
    for name in names:  # not _asyncio before asyncio, whose tasks would not be found
        if name.partition(".")[0] not in ("jax", "jaxlib", "torch", "attacks", "_asyncio", "__main__"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    platform.processor()  # starts a program, once; MLflow asks for it
    from wherry.formats.registry import formats

    list(formats().values())  # their modules, and the metadata of every installed package
    gc.freeze()
