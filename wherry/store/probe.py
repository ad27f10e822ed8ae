"""Whether a server or database answers: the clients of some retry in silence for minutes.

What needs an answer waits for it as for a store: as long, and with the same line, "… has not answered for 12 s".

Any answer will do, even a refusal: what it means is for the client to find out. A database is only connected to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from wherry.errors import StorageError
from wherry.store.failures import UNREACHABLE
from wherry.store.waits import answer_policy, call_with_retries, waiting

if TYPE_CHECKING:
    from urllib.parse import SplitResult

ANSWER_SECONDS = 5.0
SILENT = "no response"  # begins the reason of a server that was waited for in vain
# Port of a database whose URI names none, by the dialect of the URI.
_PORTS = {"postgresql": 5432, "postgres": 5432, "mysql": 3306, "mssql": 1433}


_answered = set[str]()  # what has answered this process
# Words of the system and of PostgreSQL for a name that DNS does not know: the address is probably wrong.
_NO_HOST = (
    "Name or service not known", "nodename nor servname", "No address associated", "resolution", "resolve host",
    "translate host name",
)  # fmt: skip


def await_answer(uri: str, shown: str, what: str, cure: str) -> None:
    """Wait until a server or database answers, for twice the `storage_timeout` at most.

    Args:
        uri, shown: as for `silence_of`.
        what: its name in the error.
        cure: what to do about it.

    Raises:
        StorageError: it does not answer; a retry can help.
    """

    def attempt(_seconds: float) -> None:
        reason = silence_of(uri, shown)
        if reason is not None:
            error = StorageError(f"{what} does not answer: {reason}", uri=shown, cure=cure, retryable=True)
            error.kind = kind_of_silence(reason)
            raise error

    call_with_retries(attempt, shown, answer_policy(), known=shown in _answered)
    _answered.add(shown)


def kind_of_silence(reason: str) -> str:
    """The kind of the failure of a server that does not answer: UNREACHABLE if its name is unknown, else empty."""
    return UNREACHABLE if any(words in reason for words in _NO_HOST) else ""


def silence_of(uri: str, shown: str) -> str | None:
    """Why a server or database does not answer within 5 seconds; None if it does.

    Args:
        uri: the URL of a server, whose page `health` is requested, or of a database; others are not checked.
        shown: the same without secrets.
    """
    try:
        parts = urlsplit(uri)
        with waiting(shown):
            return _silence(uri, parts, parts.port)
    except ValueError:
        return None  # the client has an error for it


def _silence(uri: str, parts: SplitResult, port: int | None) -> str | None:
    if parts.scheme in ("http", "https"):
        return _silence_of_server(uri)
    port = port or _PORTS.get(parts.scheme.partition("+")[0])
    if not parts.hostname or not port:
        return None
    import socket

    try:
        with socket.create_connection((parts.hostname, port), ANSWER_SECONDS):
            return None
    except OSError as error:
        return reason_of(error)


def _silence_of_server(uri: str) -> str | None:
    import ssl
    import urllib.request
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError

    from wherry.store.addresses import AddressError, open_checked

    request = urllib.request.Request(f"{uri.rstrip('/')}/health")  # noqa: S310  only http and https get here
    try:
        with open_checked(request, ANSWER_SECONDS):
            return None
    except HTTPError as answer:
        answer.close()
        return None
    except AddressError:
        raise
    except (OSError, HTTPException) as error:
        refused = isinstance(error, URLError) and isinstance(error.reason, ssl.SSLError)
        return None if refused else reason_of(error)


def reason_of(error: Exception, seconds: float = 0) -> str:
    """Why a connection failed, in a few words.

    Args:
        error: the failure, of a socket or of `urllib`.
        seconds: how long the call waited; `ANSWER_SECONDS` by default.
    """
    from urllib.error import URLError

    cause: object = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, TimeoutError):
        return f"{SILENT} within {seconds or ANSWER_SECONDS:g} s"
    return (cause.strerror if isinstance(cause, OSError) else None) or str(cause) or type(cause).__name__
