"""Copies of the checkout in which faults are tried, so that the checkout itself is never written.

A copy has an environment of its own that finds wherry in it, so that child processes run the changed code too.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

import environment

PYTEST = ("-m", "pytest", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider")
_TIMES = itertools.count(
    int(time.time())
)  # a different time for each state of a file, since old bytecode would be used otherwise


class Copy:
    """A copy of the checkout that can be changed, and an environment that finds wherry in it."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.root, self.temporary = folder / "tree", folder / "tmp"
        self._python = folder / "venv" / "bin" / "python"
        for name in _files():
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(environment.ROOT / name, target, follow_symlinks=False)
        for library in (environment.ROOT / "wherry" / "kernels").glob("*.so"):
            shutil.copy2(library, self.root / library.relative_to(environment.ROOT))
        _overlay(python.parent.parent, folder / "venv", self.root)

    @contextmanager
    def changed(self, file: str, text: str) -> Generator[None]:
        """The copy with another text in one file."""
        path = self.root / file
        before = path.read_text()
        _write(path, text)
        try:
            yield
        finally:
            _write(path, before)

    def run(self, words: Iterable[str], limit: float) -> tuple[str, str]:
        """Run pytest.

        Args:
            words: its arguments: options and tests.
            limit: seconds after which it is killed.

        Returns:
            The outcome (`failed`, `passed`, `skipped` if no test ran, else the error), and its output.
        """
        self.temporary.mkdir()
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_"))
        }
        path = os.pathsep.join([str(self._python.parent), kept.get("PATH", "")])
        corpus = kept.get("WHERRY_CORPUS") or str(environment.ROOT.parent / "shared" / "corpus")
        process = subprocess.Popen(
            [str(self._python), *PYTEST, *words], cwd=self.root, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env={**kept, "PATH": path, "TMPDIR": str(self.temporary), "WHERRY_CORPUS": corpus},
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return "failed", f"timed out after {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _end_strays(self._python.parent.parent)
            shutil.rmtree(self.temporary, ignore_errors=True)
        return classify_outcome(process.returncode, said), said


def classify_outcome(code: int, said: str) -> str:
    """The outcome of a pytest run, from its exit code and output."""
    if code in (0, 5):
        return "passed" if re.search(r"\b[1-9]\d* passed\b", said) else "skipped"
    last = " ".join(said.split("\n")[-4:]).strip()
    return "failed" if code == 1 else f"pytest ended with exit code {code}: {last}"


def _end_strays(venv: Path) -> None:
    """End processes of this environment that a broken line has left running in other sessions."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if place.read_bytes().startswith(os.fsencode(f"{venv}/")):
                os.kill(int(place.parent.name), signal.SIGKILL)


def _write(file: Path, text: str) -> None:
    file.write_text(text)
    moment = next(_TIMES)
    os.utime(file, (moment, moment))


def _files() -> list[str]:
    """The files of the checkout that git tracks or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=environment.ROOT, check=True, capture_output=True, text=True).stdout
    found = [name for name in listed.split("\0") if name]
    return [name for name in found if os.path.lexists(environment.ROOT / name)]


def _overlay(base: Path, venv: Path, root: Path) -> None:
    """Make an environment of links to another's packages, in which wherry is found at `root`.

    PYTHONPATH does not suffice: processes started with `-P` or with few variables find wherry by the .pth file.
    """
    for packages in base.glob("lib/python3*/site-packages"):
        own = venv / packages.relative_to(base)
        own.mkdir(parents=True)
        for entry in packages.iterdir():
            (own / entry.name).symlink_to(entry)
        (own / "_wherry.pth").unlink(missing_ok=True)
        (own / "_wherry.pth").write_text(f"{root}\n")
    shutil.copy2(base / "pyvenv.cfg", venv)
    (venv / "bin").mkdir()
    for entry in (base / "bin").iterdir():
        head = b"" if entry.is_symlink() else entry.read_bytes()[:512]
        if head.startswith(b"#!") and os.fsencode(base) in head.partition(b"\n")[0]:
            script = venv / "bin" / entry.name
            script.write_bytes(entry.read_bytes().replace(os.fsencode(base), os.fsencode(venv), 1))
            script.chmod(0o755)
        else:
            (venv / "bin" / entry.name).symlink_to(entry.readlink() if entry.is_symlink() else entry)


@contextmanager
def workplace() -> Generator[Path]:
    """A folder for the copies; servers that tests start may run as another user, who must have access to it."""
    with tempfile.TemporaryDirectory(prefix="wherry-copies-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)
