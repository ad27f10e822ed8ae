"""child: start child processes that files in a checkpoint or working folder cannot influence.

`run` starts a module in a child process of this interpreter and waits for it; `child_process` runs one in parallel with
the caller. The child process

- imports nothing from the working folder: it starts with `-P`, in an empty private folder that is removed afterwards,
  and imports wherry from the same folder as this process;
- gets the environment variables of an allow-list and those that the caller passes: no PYTHONPATH, no LD_PRELOAD, no
  token, password or credential (`own_variables` passes these to a command of ours, which needs them);
- has a time limit, a limit on the resident memory of itself and its descendants, and a limit on its output;
- does not outlive the wait: an error, Ctrl-C or SIGTERM kills its process group, and the kernel kills it when this
  process dies.

This is the only module of wherry that starts processes (besides `wherry.testing.children`, which uses `command`).
"""

from __future__ import annotations

import os
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from wherry.core.lazy_dataclass import dataclass
from wherry.core.services import service
from wherry.core.units import duration, parse_size, show_seconds, show_size
from wherry.errors import WherryError, storage_error

_TIMEOUT, _MEMORY = "WHERRY_CHILD_TIMEOUT", "WHERRY_CHILD_MEMORY"
_START = Path(__file__).absolute().with_name("child_start.py")
_INTERVAL = 0.1  # seconds between two checks of the child
_MOST_OUTPUT = 256 << 20  # maximum bytes of output of a child
_TAIL = 1 << 16  # bytes of the standard error that are kept
_PASSED = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONUTF8"}
)
_PASSED_PREFIXES = (
    *("LC_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "JAX_", "XLA_", "TPU_", "LIBTPU_", "PJRT_"),
    *("OMP_", "MKL_", "OPENBLAS_"),
)

_OBEYED = ("PYTHON", "LD_")  # by Python and the linker
_FILES = ("WHERRY_CONFIG", "WHERRY_HOME")


class NoAnswerError(WherryError):
    """A child process failed to start, exceeded a limit, or was killed."""

    exit_code = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a child process.

    Attributes:
        seconds: wall time.
        memory: bytes of resident memory, including its descendants.
    """

    seconds: float
    memory: int


@dataclass(frozen=True, slots=True)
class ChildResult:
    """How a child process ended.

    Attributes:
        code: exit status; negative for the signal that ended it.
        output: its standard output.
        errors: the end of its standard error.
    """

    code: int
    output: str
    errors: str


def limits(*, seconds: float, memory: int) -> Limits:
    """The limits that the user set, else the defaults of the caller.

    Args:
        seconds: default of `WHERRY_CHILD_TIMEOUT` (setting `child.timeout`).
        memory: default of `WHERRY_CHILD_MEMORY` (setting `child.memory`).

    Raises:
        UsageError: a limit is not a valid duration or size.
    """
    configured = service("settings").configured_value
    timeout = os.environ.get(_TIMEOUT) or configured("child.timeout")
    most = os.environ.get(_MEMORY) or configured("child.memory")
    return Limits(duration(timeout) if timeout else seconds, parse_size(most) if most else memory)


class Child:
    """A child process; see `child_process`."""

    def __init__(
        self, process: subprocess.Popen[bytes], output: IO[bytes], errors: IO[bytes], purpose: str
    ) -> None:
        self.pid, self._process, self._purpose = process.pid, process, purpose
        self._output, self._errors = output, errors
        self._code: int | None = None

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._code is not None or _has_ended(self._process)

    def wait(self, limits: Limits) -> None:
        """Wait until the process ends.

        Raises:
            NoAnswerError: it exceeds a limit.
        """
        deadline = time.monotonic() + limits.seconds
        while not _has_ended(self._process):
            if time.monotonic() > deadline:
                raise NoAnswerError(
                    f"{self._purpose} timed out after {show_seconds(limits.seconds)} and was stopped",
                    cure=f"raise the limit: export {_TIMEOUT}={max(2 * limits.seconds, 1):.0f}s", retryable=True,
                )  # fmt: skip
            if resident_memory(self._process.pid) > limits.memory:
                raise NoAnswerError(
                    f"{self._purpose} exceeded its memory limit of {show_size(limits.memory)} and was stopped",
                    cure=f"raise the limit: export {_MEMORY}={2 * limits.memory}",
                )
            if any(os.fstat(file.fileno()).st_size > _MOST_OUTPUT for file in (self._output, self._errors)):
                raise NoAnswerError(
                    f"{self._purpose} exceeded the output limit of {show_size(_MOST_OUTPUT)} and was stopped",
                    cure="use another checkpoint; an intact one does not make its library print this much",
                )
            time.sleep(_INTERVAL)

    def ask_to_end(self) -> None:
        """Send SIGTERM to the process and its descendants."""
        if not self.has_ended():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and its descendants; without effect once `result` has returned."""
        if self._code is None:
            _kill(self._process)

    def result(self, grace: float = 0.0) -> ChildResult:
        """How the process ended.

        Args:
            grace: seconds after which it is killed, with its descendants, if it has not ended.
        """
        if self._code is None:
            deadline = time.monotonic() + grace
            while not self.has_ended() and time.monotonic() < deadline:
                time.sleep(_INTERVAL)
            _kill(self._process)  # the rest of its process group
            self._code = self._process.wait()
        return ChildResult(self._code, _text(self._output), _text(self._errors, _TAIL))


def run(
    module: str,
    words: Sequence[str] = (),
    *,
    purpose: str,
    limits: Limits,
    text: str = "",
    variables: Mapping[str, str] | None = None,
) -> ChildResult:
    """Run a module in a child process and wait until it ends.

    Args:
        module: the module, as for `python -m`.
        words: its arguments.
        purpose: the subject of error messages.
        limits: time and memory.
        text: its standard input.
        variables: environment variables besides those of the allow-list.

    Raises:
        NoAnswerError: the child failed to start, or exceeded a limit and was killed.
    """
    with (
        _interrupted_by_sigterm(),
        child_process(module, words, purpose=purpose, text=text, variables=variables) as child,
    ):
        child.wait(limits)
        return child.result()


@contextmanager
def child_process(
    module: str,
    words: Sequence[str] = (),
    *,
    purpose: str,
    text: str = "",
    variables: Mapping[str, str] | None = None,
) -> Generator[Child]:
    """Have a module run in a child process while the block runs; at its end the child is killed if it has not ended.

    Args:
        module, words, purpose, text, variables: as for `run`.

    Raises:
        NoAnswerError: the child failed to start.
    """
    with ExitStack() as stack:
        with _could_not_start(purpose):
            folder = stack.enter_context(service("janitor").temporary_folder("wherry-child-"))
            stdin, stdout, stderr = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
            stdin.write(text.encode())
            stdin.seek(0)
        child = None
        try:
            with _could_not_start(purpose), _holding_interrupts():
                process = subprocess.Popen(  # noqa: S603  this interpreter and a module that the caller names
                    command(module, words), cwd=folder, env=environment(variables or {}),
                    stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True,
                )  # fmt: skip
                child = Child(process, stdout, stderr, purpose)
            yield child
        finally:
            if child is not None:
                with _holding_interrupts():
                    child.kill()
                child.result()


@contextmanager
def _could_not_start(purpose: str) -> Generator[None]:
    """Convert the errors of starting a child: its temporary files and the process itself."""
    try:
        yield
    except OSError as error:
        failure = storage_error(error, None)
        raise NoAnswerError(
            f"{purpose} failed to start: {failure.what}",
            cure="set TMPDIR to a writable folder with free space", retryable=failure.retryable,
        ) from error  # fmt: skip


def command(module: str, words: Sequence[str] = ()) -> list[str]:
    """The command line that runs a module in a child process, without importing from the working folder."""
    root = str(_START.parents[2])  # the folder that wherry was imported from
    paths = sysconfig.get_paths()
    installed = {paths["purelib"], paths["platlib"], site.getusersitepackages(), *site.getsitepackages()}
    shown = "" if root in installed else root  # the child finds an installed wherry anyway
    return [sys.executable, "-P", str(_START), shown, str(os.getpid()), module, *words]


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child: the set variables of the allow-list, and those that the caller passes."""
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED or name.startswith(_PASSED_PREFIXES)
    }
    return {**passed, **variables}


def own_variables() -> dict[str, str]:
    """The environment of this process for a child that runs a command of ours, which needs credentials and settings.

    What Python or the linker obeys is left out; paths that are relative to the working folder are made absolute.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OBEYED)}
    return {
        **kept,
        **{name: str(Path(kept[name]).expanduser().absolute()) for name in _FILES if kept.get(name)},
    }


def resident_memory(pid: int) -> int:
    """Bytes of resident memory of a process and its descendants; 0 for a process that has ended."""
    place = Path(f"/proc/{pid}")
    try:
        pages = int((place / "statm").read_text().split()[1])
        children = [int(word) for file in place.glob("task/*/children") for word in file.read_text().split()]
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(map(resident_memory, children))


@contextmanager
def _interrupted_by_sigterm() -> Generator[None]:
    """Make SIGTERM interrupt the wait like Ctrl-C, instead of ending this process without cleanup."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


@contextmanager
def _holding_interrupts() -> Generator[None]:
    """Hold Ctrl-C and SIGTERM back until the block ends, if Python handles them; no other thread is interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    held = {int(number): handler for number, handler in handlers.items() if callable(handler)}
    over = False

    def hold(number: int, frame: FrameType | None) -> None:
        if over:  # another signal has ended the block before this handler was replaced
            held[number](number, frame)
        else:
            came.append((number, frame))

    try:
        for number in held:
            signal.signal(number, hold)
        yield
    finally:
        over = True
        for number, handler in held.items():
            signal.signal(number, handler)
        for number, frame in came:
            held[number](number, frame)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process has ended; it is not reaped, so that its process group id cannot be reused meanwhile.

    Where this process ignores SIGCHLD, the kernel reaps it: the process has ended when it no longer exists.
    """
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of a process that was not reaped, so that its number is not reused."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _text(file: IO[bytes], most: int = _MOST_OUTPUT) -> str:
    file.seek(max(0, os.fstat(file.fileno()).st_size - most))
    return file.read().decode("utf-8", "replace")
