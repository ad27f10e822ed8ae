"""All errors of wherry, as one tree with exit codes.

    WherryError                       what went wrong, where, and the cure
    ├─ UsageError (ValueError)            2  the request is invalid
    ├─ NotFoundError (LookupError)        3  a file, folder, step, tensor or record does not exist
    ├─ NotACheckpointError                4  the path exists, but no format matches
    ├─ UnsupportedError                   4  recognised, but not supported by this version
    │  └─ CrowdedFolderError              4  a folder has too many entries to be listed
    ├─ AmbiguousError                     4  several results match
    ├─ DamagedError (ValueError)          5
    │  ├─ IncompleteError                 5  parts are missing, or it was not committed
    │  └─ CorruptError                    5  the contents are invalid or inconsistent
    ├─ HostileError                       6  data that tries to reach outside its folder, or to run code
    ├─ UnrepresentableError               7  the target format cannot represent something, or something is unmatched
    ├─ TargetExistsError                  8  the target already exists
    ├─ TargetInUseError                   8  another run is writing the target
    ├─ MismatchError                      9  intact data differs from what was expected
    ├─ StorageError (OSError)            10  the storage failed; `retryable` says whether a retry can help
    ├─ MissingExtraError (ImportError)   11  a package of an extra is not installed
    ├─ NotRecordedError                  12  the work is done, but not recorded in the ledger or the registry
    ├─ InternalError                     70  a bug in wherry
    └─ InterruptedRunError              130  stopped by the user; resumable

The verdict of `detect` is that of the error that opening the checkpoint raised.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, ClassVar

from wherry.credentials import redact
from wherry.cures import Argument, Blank, Command, Cure, in_python
from wherry.version import __version__

_SUGGESTIONS = 2  # names that are suggested
_SIMILAR = 0.6  # ratio of `difflib` above which two names are similar


class WherryError(Exception):
    """Base class of all errors of wherry.

    Attributes:
        what: one sentence that says what went wrong.
        uri: the checkpoint, folder or file in question.
        path: the printed key path of the tensor in question.
        cure: one line that says what to do, in the words of the command line; a `Cure` if it names options or commands.
            Without one, `usual_cure` is shown.
        stage: the verb that was running (`detect`, `convert`, …).
        retryable: whether the same call can succeed later without any change.
        committed: in a conversion to several targets, those that were committed: number of the target → receipt.
    """

    exit_code: ClassVar[int] = 1
    verdict: ClassVar[str] = "unsupported"
    usual_cure: ClassVar[str | None] = None
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
        super().__init__(what := _brief(what))
        self.what = what
        self.uri = uri
        self.path = path
        self.cure = cure
        self.stage = stage
        self.retryable = retryable

    def __str__(self) -> str:
        """What, where and the cure, in the words of Python: `only="params"`."""
        return self._shown(in_python)

    def for_shell(self) -> str:
        """What, where and the cure, in the words of the command line: `--only params`."""
        return self._shown(str)

    def _shown(self, words: Callable[[str], str]) -> str:
        places = (self.uri, self.path and f"tensor {self.path}")
        where = [_brief(part, MOST_PLACE) for part in places if part]
        lines = [self.what + (f" ({', '.join(where)})" if where else "")]
        if cure := self._about_itself():
            lines.append(f"cure: {words(cure)}")
        return "\n".join(printable(redact(line)) for line in lines)

    def _about_itself(self) -> str | None:
        """The cure, with the place of this error in it."""
        cure = self.cure or self.usual_cure
        return cure.about(self.uri) if isinstance(cure, Cure) else cure

    def to_json(self) -> dict[str, object]:
        """The error as JSON, for `--json` and the flows' artifacts."""
        cure = self._about_itself()
        return {
            "error": type(self).__name__,
            "what": redact(self.what),
            "uri": self.uri and redact(self.uri),
            "path": self.path,
            "cure": cure and str(redact(cure)),
            "stage": self.stage,
            "retryable": self.retryable,
            "exit_code": self.exit_code,
        }


class UsageError(WherryError, ValueError):
    """The request is invalid: an unknown option, an invalid value, or options that exclude each other."""

    exit_code = 2


class NotFoundError(WherryError, LookupError):
    """A file, folder, step, item, tensor, model version or ledger entry does not exist."""

    exit_code = 3
    usual_cure = Cure(
        "check the path and its spelling; {} lists the checkpoints below a folder",
        Command("discover", Blank("FOLDER")),
    )


class NotACheckpointError(WherryError):
    """The path exists, but no checkpoint format matches."""

    exit_code = 4
    verdict = "not-a-checkpoint"
    usual_cure = Cure(
        "{} lists the checkpoints below a folder; {} chooses a format",
        Command("discover", Blank("FOLDER")),
        Argument("format", Blank("FORMAT")),
    )


class UnsupportedError(WherryError):
    """The format is recognised, but this version of wherry does not support this variant of it."""

    exit_code = 4
    verdict = "unsupported"
    usual_cure = Cure(
        "load it with the software that wrote it, and save it in a form that {} lists", Command("formats")
    )


class CrowdedFolderError(UnsupportedError):
    """A folder has too many entries to be listed."""

    usual_cure = "pass a folder in it, or move the files that are not part of the checkpoint away"


class AmbiguousError(WherryError):
    """Several results match; the cure names the option that selects one."""

    exit_code = 4
    verdict = "unsupported"


class DamagedError(WherryError, ValueError):
    """The checkpoint is damaged."""

    exit_code = 5
    verdict = "corrupt"


class IncompleteError(DamagedError):
    """Parts are missing, or the checkpoint was not committed."""

    verdict = "incomplete"
    usual_cure = "copy the missing files again from where it was written, or use another step"


class CorruptError(DamagedError):
    """The contents are invalid or inconsistent, for example a checksum mismatch."""

    verdict = "corrupt"
    usual_cure = Cure(
        "copy it again from where it was written, or use another step; {} names each altered file",
        Command("audit", Blank("FOLDER")),
    )


class HostileError(WherryError):
    """The data tries to reach outside its folder, to run code, or to exhaust memory or disk."""

    exit_code = 6
    verdict = "malicious"
    usual_cure = "do not load it with other software either; get the checkpoint from a source that you trust"


class UnrepresentableError(WherryError):
    """The target format cannot represent something in the source, or something in the source is unmatched."""

    exit_code = 7
    usual_cure = Cure(
        "choose another target format, or leave it out with {} or {}", Argument("only"), Argument("ignore")
    )


class TargetExistsError(WherryError):
    """The target already exists and is not the result of this same conversion."""

    exit_code = 8


class TargetInUseError(WherryError):
    """Another run is writing the target."""

    exit_code = 8


class MismatchError(WherryError):
    """Intact data differs from what was expected."""

    exit_code = 9
    usual_cure = Cure(
        "compare the two with {}; if a source changed meanwhile, run the command again",
        Command("diff", Blank("A"), Blank("B")),
    )


class StorageError(WherryError, OSError):
    """The storage failed (full, read-only, unreachable), or a child process failed (timeout, memory limit, killed).

    `retryable` states whether a retry can help.

    Attributes:
        kind: the kind of failure of a remote store, of `wherry.store.failures`; empty elsewhere.
        retry_after: seconds to wait, as the answer of the store states them; None if it states none.
    """

    exit_code = 10
    kind: str = ""
    retry_after: float | None = None

    def __str__(self) -> str:
        """Replaces OSError's `__str__`, to add URI, key path and cure."""
        return WherryError.__str__(self)


class MissingExtraError(WherryError, ImportError):
    """A package of an extra is required, but not installed."""

    exit_code = 11

    def __str__(self) -> str:
        """Replaces ImportError's `__str__`, to add URI, key path and cure."""
        return WherryError.__str__(self)


class NotRecordedError(WherryError):
    """The work is done and kept, but not recorded in the ledger or the registry. The cure records it.

    Attributes:
        result: what the call would have returned (the Receipt of `convert`, the GroupReceipt of `convert_all`, the
            Rewritten of `rewrite`, the FetchReport of `fetch`), with the reason in its `lineage`.
    """

    exit_code = 12
    result: Any = None


class InternalError(WherryError):
    """A bug in wherry: an unexpected exception. `--debug` or `WHERRY_DEBUG=1` shows the traceback."""

    exit_code = 70


class InterruptedRunError(WherryError):
    """Stopped by Ctrl-C or SIGTERM. The same command resumes the work; `wherry clean` removes what is left."""

    exit_code = 130
    usual_cure = "run the same command again; it resumes where it was interrupted"


_MORE_MEMORY = Cure("give the process more memory, or lower the budget with {}", Argument("memory"))
# errno → (cure, can a retry help). restic's rule: a full or read-only disk is not retried.
_STORAGE_CURES: dict[int, tuple[str, bool]] = {
    errno.ENOSPC: ("free some space, or choose another target", False),
    errno.EDQUOT: ("free some quota, or choose another target", False),
    errno.EFBIG: ("raise the file-size limit of the process or the file system", False),
    errno.EROFS: ("choose a target on a writable file system", False),
    errno.EACCES: ("check the permissions of the folder", False),
    errno.EPERM: ("check the permissions of the folder", False),
    errno.ENOTDIR: ("check the path: a part of it is a file, not a folder", False),
    errno.ENAMETOOLONG: ("shorten the name, or remove the link that leads to it", False),
    errno.EIO: ("check the system log for errors of the device", True),
    errno.ETIMEDOUT: ("try again; the storage did not respond in time", True),
    errno.ECONNRESET: ("try again; the connection was reset", True),
}


MOST_TEXT = 300  # characters of one error; a file or a server can put any text into one
MOST_PLACE = 2000  # characters of a place, as it is shown; an event can state any
_MOST_SEARCHED = 4096  # characters that are searched for credentials, so that none is cut in two
_END = 100  # characters that stay of the end


def _brief(what: str, most: int = MOST_TEXT) -> str:
    """The text of an error, cut in its middle to this many characters; a text that is cut has no credentials."""
    if len(what) <= most:
        return what
    found = redact(what[:_MOST_SEARCHED])
    return found if len(found) <= most else f"{found[: most - _END - 3]} … {found[-_END:]}"


def describe_exception(error: BaseException) -> str:
    """Class and message of an exception; its repr would hold what it was given, which can be a whole file."""
    return f"{type(error).__name__}({str(error)[:MOST_TEXT]})"


# Characters of names that a terminal obeys or that change how the text around them is read: controls (C0, DEL, C1),
# separators of lines and paragraphs, and parts of surrogate pairs; and those that nobody sees, by which two names look
# the same: category Cf (marks of writing direction, joiners, tags), selectors of variations, and fillers.
_UNSEEN = (
    "\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    "\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001345f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_OBEYED = f"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff{_UNSEEN}]"


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text with escapes (`\x1b`) in the place of characters that a terminal obeys; for people, not for programs.

    Args:
        text: text with names from checkpoints, paths or servers.
        lines: whether the text has several lines: line ends and tabs stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return re.sub(
        _OBEYED,
        lambda found: (
            found[0]
            if lines and found[0] in "\n\t"
            else found[0].encode("unicode_escape", "surrogatepass").decode()
        ),
        text,
    )


def json_escaped(text: str) -> str:
    r"""JSON with `\u202e` in the place of such characters: the same document, for programs and terminals."""
    import json

    return re.sub(_OBEYED, lambda found: found[0] if found[0] == "\n" else json.dumps(found[0])[1:-1], text)


def wherry_error(
    error: BaseException, *, uri: str | None = None, cure: str | None = None, memory: str = _MORE_MEMORY
) -> WherryError:
    """Convert any exception to a WherryError: OSError and MemoryError to StorageError, any other to InternalError.

    Args:
        error: the exception; a WherryError is returned as it is.
        uri: the checkpoint, folder or file in question.
        cure: of an internal error.
        memory: cure of a MemoryError.
    """
    if isinstance(error, WherryError):
        return error
    if isinstance(error, OSError):
        file = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None
        return storage_error(error, uri or file)
    if isinstance(error, MemoryError):
        return StorageError("out of memory", uri=uri, cure=memory)
    return internal_error(error, uri=uri, cure=cure)


def storage_error(error: OSError, uri: str | None) -> StorageError:
    """Convert an `OSError` of the storage, with the cure and whether a retry can help."""
    if isinstance(error, StorageError):
        return error
    cure, retryable = _STORAGE_CURES.get(error.errno or 0, ("check that the storage is reachable", True))
    reason = redact(error.strerror or str(error)) or type(error).__name__
    return StorageError(f"storage failed: {reason}", uri=uri, cure=cure, retryable=retryable)


@contextmanager
def storage_errors(uri: str) -> Generator[None]:
    """Convert the `OSError` of calls in the context.

    Raises:
        StorageError: a call failed; a WherryError passes through.
    """
    try:
        yield
    except WherryError:
        raise
    except OSError as error:
        raise storage_error(error, uri) from error


def schema_error(what: str, found: object, required: int, uri: str, *, cure: str = "") -> CorruptError:
    """The error for a record of another schema.

    Args:
        what: the kind of record.
        found: its schema.
        required: the schema that this version reads.
        uri: where the record is.
        cure: what helps besides the wherry that wrote it.
    """
    return CorruptError(
        f"the {what} has schema {found!r:.40}, but this wherry requires {required}",
        uri=uri,
        cure=Cure("use the wherry that wrote it{}", Cure(", or {}", cure) if cure else ""),
    )


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """The error for a package that an extra of wherry installs."""
    from wherry.installation import extra_command  # reads files, which only this error needs

    return MissingExtraError(
        f"{purpose} needs the package {package}", cure=f"add the extra {extra}: `{extra_command(extra)}`"
    )


def internal_error(error: BaseException, *, uri: str | None = None, cure: str | None = None) -> InternalError:
    """The error for an unexpected exception, in one line."""
    text = " ".join(f"{type(error).__name__}: {redact(str(error))}".split())
    return InternalError(f"this is a bug in wherry {__version__}: {text}", uri=uri, cure=cure)


def choose(name: str, known: Iterable[str], meant: Sequence[str] = ()) -> str:
    """The cure for an unknown name: `did you mean orbax? Otherwise choose one of: dcp, …`.

    Args:
        name: what was given.
        known: all names.
        meant: names that it is known to stand for; by default, those of similar spelling.
    """
    names = list(dict.fromkeys(known))
    likely = list(meant) or similar(name, names)
    if not likely:
        return f"choose one of: {', '.join(names) or 'none'}"
    rest = [other for other in names if other not in likely]
    others = f" Otherwise choose one of: {', '.join(rest)}" if rest else ""
    return f"did you mean {' or '.join(likely)}?{others}"


def similar(name: str, known: Iterable[str]) -> list[str]:
    """Known names of similar spelling, the most similar one first; letters may differ in case."""
    from difflib import get_close_matches

    by_lower = {one.lower(): one for one in known}
    return [by_lower[one] for one in get_close_matches(name.lower(), by_lower, _SUGGESTIONS, _SIMILAR)]
