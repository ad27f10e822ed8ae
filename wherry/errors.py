"""Every way in which wherry says no, as one tree.

    WherryError                       what went wrong, where, and the cure
    ├─ UsageError (ValueError)            2  the request itself makes no sense
    ├─ NotFoundError (LookupError)        3  nothing is at that URI, or no such tensor
    ├─ NotACheckpointError                4  something is there, but no format claims it
    ├─ UnsupportedError                   4  recognised, but not read or written by this version
    ├─ AmbiguousError                     4  several answers are equally good
    ├─ DamagedError (ValueError)          5
    │  ├─ IncompleteError                 5  parts are missing, or it was never committed
    │  └─ CorruptError                    5  the bytes contradict themselves
    ├─ HostileError                       6  data that tries to reach outside, or to run
    ├─ UnrepresentableError               7  the target cannot hold it, or something is unmatched
    ├─ TargetExistsError                  8  the target exists
    ├─ TargetInUseError                   8  another run is writing the target
    ├─ MismatchError                      9  intact data differs from what was expected
    ├─ StorageError (OSError)            10  the storage failed; `retryable` says whether a retry can help
    ├─ MissingExtraError (ImportError)   11  a package of an extra is not installed
    ├─ NotRecordedError                  12  the work is done, but the ledger or the registry does not have it
    ├─ InternalError                     70  a bug in wherry
    └─ InterruptedRunError              130  stopped by the user; resumable

The exit codes are those of DESIGN. A verdict of `detect` is the class of the error that opening raised.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping


class WherryError(Exception):
    """Base of the tree.

    Attributes:
        what: one sentence that says what went wrong.
        uri: the checkpoint, folder or file that is concerned.
        path: the printed key path of the tensor that is concerned.
        cure: one line that says what to do.
        stage: the verb that was running (`detect`, `convert`, …).
        retryable: whether the same call can succeed later without any change.
        committed: of a conversion to several targets, what is committed all the same: number of the target → receipt.
    """

    exit_code: ClassVar[int] = 1
    verdict: ClassVar[str] = "unsupported"
    committed: Mapping[int, Any] = MappingProxyType({})

    def __init__(
        self,
        what: str,
        *,
        uri: str | None = None,
        path: str | None = None,
        cure: str | None = None,
        stage: str | None = None,
        retryable: bool = False,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.uri = uri
        self.path = path
        self.cure = cure
        self.stage = stage
        self.retryable = retryable

    def __str__(self) -> str:
        where = [part for part in (self.uri, self.path and f"tensor {self.path}") if part]
        lines = [self.what + (f" ({', '.join(where)})" if where else "")]
        if self.cure:
            lines.append(f"cure: {self.cure}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """The error as the `--json` output and the flows' artifacts carry it."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "uri": self.uri,
            "path": self.path,
            "cure": self.cure,
            "stage": self.stage,
            "retryable": self.retryable,
            "exit_code": self.exit_code,
        }


class UsageError(WherryError, ValueError):
    """The request itself makes no sense: an unknown option, a bad size, a contradiction."""

    exit_code = 2


class NotFoundError(WherryError, LookupError):
    """Nothing is there: no such file, folder, step, item, tensor or ledger entry."""

    exit_code = 3


class NotACheckpointError(WherryError):
    """Something is there, but no format claims it."""

    exit_code = 4
    verdict = "not-a-checkpoint"


class UnsupportedError(WherryError):
    """The format is known, but this version of wherry does not read (or write) this form of it."""

    exit_code = 4
    verdict = "unsupported"


class AmbiguousError(WherryError):
    """Several answers are equally good; the cure names the option that decides."""

    exit_code = 4
    verdict = "unsupported"


class DamagedError(WherryError, ValueError):
    """The checkpoint is not whole."""

    exit_code = 5
    verdict = "corrupt"


class IncompleteError(DamagedError):
    """Parts are missing, or the checkpoint was never committed."""

    verdict = "incomplete"


class CorruptError(DamagedError):
    """The bytes contradict themselves."""

    verdict = "corrupt"


class HostileError(WherryError):
    """The data tries to reach outside its folder, to run code or to exhaust the machine."""

    exit_code = 6
    verdict = "malicious"


class UnrepresentableError(WherryError):
    """The target cannot hold something of the source, or something is unmatched."""

    exit_code = 7


class TargetExistsError(WherryError):
    """The target exists and is not the result of this same conversion."""

    exit_code = 8


class TargetInUseError(WherryError):
    """Another run holds the target."""

    exit_code = 8


class MismatchError(WherryError):
    """Intact data differs from what was expected of it."""

    exit_code = 9


class StorageError(WherryError, OSError):
    """The storage failed (full, read-only, unreachable), or a child process gave no answer (time, memory, killed).

    The error says whether a retry can help.
    """

    exit_code = 10

    def __str__(self) -> str:
        """OSError has a `__str__` of its own; ours says where and what to do."""
        return WherryError.__str__(self)


class MissingExtraError(WherryError, ImportError):
    """A package that only an extra installs is needed."""

    exit_code = 11

    def __str__(self) -> str:
        """ImportError has a `__str__` of its own; ours says where and what to do."""
        return WherryError.__str__(self)


class NotRecordedError(WherryError):
    """The work is done and stays, but the ledger does not have it, or the registry. The cure records it.

    Attributes:
        result: what the call would have returned (the Receipt of `convert`, the GroupReceipt of `convert_all`, the
            Rewritten of `rewrite`, the FetchReport of `fetch`), with the reason in its `lineage`.
    """

    exit_code = 12
    result: Any = None


class InternalError(WherryError):
    """A bug in wherry: an exception that no code expected. `--debug` or `WHERRY_DEBUG=1` shows the traceback."""

    exit_code = 70


class InterruptedRunError(WherryError):
    """Stopped by Ctrl-C or SIGTERM; the same command goes on where it stopped, or `wherry clean` cleans up."""

    exit_code = 130


_MORE_MEMORY = "give it more, or state less with --memory"
# errno → (cure, can a retry help). restic's rule: a full or read-only disk is not retried.
_STORAGE_CURES: dict[int, tuple[str, bool]] = {
    errno.ENOSPC: ("free some space, or choose another target", False),
    errno.EDQUOT: ("free some quota, or choose another target", False),
    errno.EFBIG: ("raise the file-size limit of the process or the file system", False),
    errno.EROFS: ("choose a target on a writable file system", False),
    errno.EACCES: ("check the permissions of the folder", False),
    errno.EPERM: ("check the permissions of the folder", False),
    errno.ENAMETOOLONG: ("shorten the name, or remove the link that leads to it", False),
    errno.EIO: ("look at the system log; the device reported an error", True),
    errno.ETIMEDOUT: ("try again; the storage did not answer in time", True),
    errno.ECONNRESET: ("try again; the connection broke", True),
}


# What precedes a credential, in a group, and the credential. The password of a URL may hold the characters that end it
# elsewhere; a number before a slash is a port.
_NAMES = r"token(?!iz)|secret|password|passwd|signature|api[-_]?key|sig"
_CREDENTIALS = (
    r"(\w+://)(?:[^/\s@]+|[^\s/@:]+:(?!\d+[/?#])[^\s@]*)(?=@)",
    rf"(?i)((?:(?:{_NAMES})[\w-]*['\"]?\s*=|(?:{_NAMES})s?['\"]?\s*:)\s*['\"]?)[^\s&,;'\"]+",
    r"(?i)([?&](?:[\w-]*credential|policy|key-pair-id)=)[^\s&'\"]+",
    r"(?i)(\bauthorization['\"]?\s*[=:]\s*['\"]?(?:\w+\s+)?)[^\s,;'\"]+",
)


def redact(text: str) -> str:
    """The text without passwords, tokens and signatures."""
    for pattern in _CREDENTIALS:
        text = re.sub(pattern, r"\1***", text)  # compiled on first use: most commands never fail
    return text


def wherry_error(
    error: BaseException, *, uri: str | None = None, cure: str | None = None, memory: str = _MORE_MEMORY
) -> WherryError:
    """Any exception as an error of the tree: one of the tree stays, the rest is the storage, the memory or a bug.

    Args:
        error: the exception.
        uri: what is concerned.
        cure: what to do about a bug.
        memory: what to do where there is not enough memory.
    """
    if isinstance(error, WherryError):
        return error
    if isinstance(error, OSError):
        return storage_error(error, uri or _file_of(error))
    if isinstance(error, MemoryError):
        return StorageError("there is not enough memory", uri=uri, cure=memory)
    return internal_error(error, uri=uri, cure=cure)


def _file_of(error: OSError) -> str | None:
    return os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None


def storage_error(error: OSError, uri: str | None) -> StorageError:
    """Say what an `OSError` of the storage means for the user, with the cure and whether to retry."""
    if isinstance(error, StorageError):
        return error
    cure, retryable = _STORAGE_CURES.get(error.errno or 0, ("check that the storage is reachable", True))
    reason = redact(error.strerror or str(error)) or type(error).__name__
    return StorageError(f"storage failed: {reason}", uri=uri, cure=cure, retryable=retryable)


@contextmanager
def storage_errors(uri: str) -> Generator[None]:
    """Around calls of the operating system.

    Raises:
        StorageError: a call failed; an error of our own stays what it is.
    """
    try:
        yield
    except WherryError:
        raise
    except OSError as error:
        raise storage_error(error, uri) from error


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """The error for a package that an extra of wherry installs."""
    return MissingExtraError(f"{purpose} needs the package {package}", cure=f"pip install 'wherry[{extra}]'")


def internal_error(error: BaseException, *, uri: str | None = None, cure: str | None = None) -> InternalError:
    """The error for an exception that no code expected, in one line."""
    text = " ".join(f"{type(error).__name__}: {redact(str(error))}".split())
    return InternalError(f"this is a bug in wherry {__version__}: {text}", uri=uri, cure=cure)
