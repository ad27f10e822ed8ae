"""failures: the kinds of failure of remote stores, as data, and the errors of wherry that stand for them.

A kind has the words, the cure, and whether a retry can help. A library (s3fs, gcsfs, huggingface_hub and their HTTP
clients) reports a failure by the code of the service (S3, Azure), by an HTTP status, or by the class of an exception,
often as the cause of another exception. Classes are known by name, so that no library needs to be installed. `kind_of`
asks in that order: the codes are the most specific. Unrecognised exceptions are left unchanged.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from textwrap import shorten
from typing import Any

from wherry.core.lazy_dataclass import dataclass
from wherry.credentials import redact
from wherry.errors import NotFoundError, StorageError, UnsupportedError, UsageError, WherryError

ABSENT, NO_BUCKET, FORBIDDEN, UNREACHABLE = "absent", "no-bucket", "forbidden", "unreachable"
TIMEOUT, NO_CREDENTIALS, EXPIRED, THROTTLED = "timeout", "no-credentials", "expired", "throttled"
SERVER, QUOTA, REFUSED, REGION, CLOCK = "server", "quota", "refused", "region", "clock"
BROKEN, OFFLINE = "broken", "offline"
EXISTS, INVALID, BEYOND = "exists", "invalid", "beyond"

AZURE = ("az", "abfs", "abfss")  # protocols
_GOOGLE = "run: gcloud auth application-default login"
_AZURE = "set AZURE_STORAGE_CONNECTION_STRING; or set AZURE_STORAGE_ACCOUNT_NAME and run: az login"
_LOG_IN = {
    **dict.fromkeys(AZURE, _AZURE),
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run: aws configure",
    "gs": _GOOGLE,
    "gcs": _GOOGLE,
    "hf": "set HF_TOKEN, or run: hf auth login",
}
_GRANT_GOOGLE = f"grant this account roles/storage.objectUser on the bucket, or use another one; {_GOOGLE}"
_GRANT_AZURE = (
    "grant this login the role Storage Blob Data Contributor on the container, or use another: az login"
)
_GRANT = {
    **dict.fromkeys(AZURE, _GRANT_AZURE),
    "s3": "grant these credentials s3:ListBucket, s3:GetObject and s3:PutObject, or use others: aws configure",
    "gs": _GRANT_GOOGLE,
    "gcs": _GRANT_GOOGLE,
    "hf": "request access to the repository on its page, or use another token: hf auth login",
}
_OTHER_LOGIN = "log in to {protocol}:// as its library requires"
# Codes of errors of Azure.
_AZURE_CODES = {
    "AccountIsDisabled": FORBIDDEN, "AuthorizationFailure": FORBIDDEN, "AuthorizationPermissionMismatch": FORBIDDEN,
    "AuthorizationProtocolMismatch": FORBIDDEN, "AuthorizationResourceTypeMismatch": FORBIDDEN,
    "AuthorizationServiceMismatch": FORBIDDEN, "AuthorizationSourceIPMismatch": FORBIDDEN,
    "BlobImmutableDueToPolicy": FORBIDDEN, "InsufficientAccountPermissions": FORBIDDEN,
    "KeyBasedAuthenticationNotPermitted": FORBIDDEN,
    "AuthenticationFailed": REFUSED, "InvalidAuthenticationInfo": REFUSED,
    "BlobAlreadyExists": EXISTS, "ConditionNotMet": EXISTS, "SourceConditionNotMet": EXISTS,
    "TargetConditionNotMet": EXISTS,
    "BlobNotFound": ABSENT, "CannotVerifyCopySource": ABSENT, "InvalidBlockList": ABSENT,
    "ContainerBeingDeleted": NO_BUCKET, "ContainerDisabled": NO_BUCKET, "ContainerNotFound": NO_BUCKET,
    "Crc64Mismatch": BROKEN, "Md5Mismatch": BROKEN,
    "InvalidBlobOrBlock": INVALID, "InvalidBlobType": INVALID, "InvalidHeaderValue": INVALID, "InvalidInput": INVALID,
    "InvalidMd5": INVALID, "InvalidResourceName": INVALID, "RequestBodyTooLarge": INVALID,
    "UnsupportedHeader": INVALID,
    "NoAuthenticationInformation": NO_CREDENTIALS, "PublicAccessNotPermitted": NO_CREDENTIALS,
    "OperationTimedOut": SERVER, "PendingCopyOperation": SERVER,
    "ServerBusy": THROTTLED,
}  # fmt: skip
# Codes of errors of S3; those that are only a status are of answers without a body.
_CODES = {
    **_AZURE_CODES,
    "AccessDenied": FORBIDDEN, "AllAccessDisabled": FORBIDDEN, "AccountProblem": FORBIDDEN,
    "AuthorizationHeaderMalformed": REGION, "PermanentRedirect": REGION, "TemporaryRedirect": REGION,
    "IllegalLocationConstraintException": REGION, "301": REGION, "307": REGION,
    "BadDigest": BROKEN, "IncompleteBody": BROKEN, "XAmzContentSHA256Mismatch": BROKEN,
    "XAmzContentChecksumMismatch": BROKEN,
    "EntityTooLarge": INVALID, "EntityTooSmall": INVALID, "InvalidArgument": INVALID, "InvalidPart": INVALID,
    "InvalidPartOrder": INVALID, "InvalidRange": BEYOND, "InvalidRequest": INVALID, "NotImplemented": INVALID,
    "PreconditionFailed": EXISTS,
    "ConditionalRequestConflict": SERVER, "InternalError": SERVER, "OperationAborted": SERVER,
    "ServiceUnavailable": SERVER,
    "ExpiredToken": EXPIRED, "TokenRefreshRequired": EXPIRED,
    "InvalidAccessKeyId": REFUSED, "InvalidToken": REFUSED, "SignatureDoesNotMatch": REFUSED,
    "NoSuchBucket": NO_BUCKET,
    "QuotaExceeded": QUOTA,
    "RequestLimitExceeded": THROTTLED, "SlowDown": THROTTLED, "Throttling": THROTTLED,
    "ThrottlingException": THROTTLED, "TooManyRequests": THROTTLED,
    "RequestTimeout": TIMEOUT,
    "RequestTimeTooSkewed": CLOCK,
}  # fmt: skip
_STATUSES = {
    301: REGION, 307: REGION, 401: NO_CREDENTIALS, 403: FORBIDDEN, 404: ABSENT, 408: TIMEOUT, 412: EXISTS,
    416: BEYOND, 429: THROTTLED, 500: SERVER, 502: SERVER, 503: SERVER, 504: SERVER,
}  # fmt: skip
# The first of the classes of an exception that has a row decides.
_CLASSES = {
    **dict.fromkeys((
        "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "NoAuthTokenError",
        "ProfileNotFound", "LocalTokenNotFoundError", "DefaultCredentialsError", "ClientAuthenticationError",
    ), NO_CREDENTIALS),
    **dict.fromkeys(("RefreshError", "TokenRetrievalError", "SSOError"), EXPIRED),
    **dict.fromkeys(("PermissionError", "GatedRepoError"), FORBIDDEN),
    **dict.fromkeys(("OfflineModeIsEnabled", "LocalEntryNotFoundError"), OFFLINE),
    **dict.fromkeys((
        "RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError", "RemoteEntryNotFoundError",
    ), ABSENT),
    "BucketNotFoundError": NO_BUCKET,
    **dict.fromkeys((
        "ClientConnectorError", "ClientProxyConnectionError", "ConnectError", "ConnectTimeout", "ConnectTimeoutError",
        "ConnectionError", "ConnectionTimeoutError", "EndpointConnectionError", "NewConnectionError", "ProxyError",
        "ProxyConnectionError", "TransportError", "gaierror",
    ), UNREACHABLE),
    **dict.fromkeys((
        "BrokenPipeError", "ChecksumError", "ChunkedEncodingError", "ClientOSError", "ClientPayloadError",
        "ConnectionClosedError", "ConnectionResetError", "HTTPClientError", "IncompleteRead", "IncompleteReadError",
        "ReadError",
        "RemoteProtocolError", "ResponseParserError", "ResponseStreamingError", "ServerDisconnectedError",
        "WriteError",
    ), BROKEN),
    **dict.fromkeys((
        "PoolTimeout", "ReadTimeout", "ReadTimeoutError", "ServerTimeoutError", "ServiceResponseTimeoutError",
        "SocketTimeoutError", "Timeout",
        "TimeoutError", "TimeoutException", "WriteTimeout",
    ), TIMEOUT),
}  # fmt: skip
# What the text of an answer says beyond its status: (statuses, pattern, kind). gcsfs raises a plain OSError for 403.
_TEXTS = (
    ((401, 403), re.compile("Anonymous caller"), NO_CREDENTIALS),
    ((401,), re.compile("(?i)invalid.credentials|expired|invalid_grant"), EXPIRED),
    ((403,), re.compile("(?i)rate.?limit|per (?:minute|second)"), THROTTLED),
    ((403,), re.compile("(?i)quota"), QUOTA),
    ((400,), re.compile("doesn't match calculated"), BROKEN),  # the checksum of an object
)
_FORBIDDEN_BY_GCSFS = "Forbidden: "
_DEEPEST = 8  # exceptions of a chain that are looked at
_PACKAGES = frozenset({
    "aiobotocore", "aiohttp", "adlfs", "azure", "botocore", "fsspec", "gcsfs", "google", "httpcore", "httpx", "httpx2",
    "huggingface_hub", "requests", "s3fs", "urllib3",
})  # fmt: skip
# Kinds that callers decide about, as Python names them.
_PLAIN: Mapping[str, type[Exception]] = {
    ABSENT: FileNotFoundError,
    EXISTS: FileExistsError,
    BEYOND: EOFError,
}
_LONGEST_TEXT = 400  # characters of what a library says


@dataclass(frozen=True, slots=True)
class FailureKind:
    """One kind of failure.

    Attributes:
        words: what went wrong; `{protocol}` is filled in.
        cure: what to do; `{protocol}` and `{region}` are filled in.
        cures: protocol → a cure of its own.
        retryable: whether the same call can succeed later without any change.
    """

    words: str
    cure: str
    cures: Mapping[str, str] = field(default_factory=dict[str, str])
    retryable: bool = False

    def cure_for(self, protocol: str, region: str = "") -> str:
        """The cure for a store."""
        text = self.cures.get(protocol, self.cure)
        return text.format(
            protocol=protocol, region=f"={region}" if region else " to the region of the bucket"
        )


FAILURES: dict[str, FailureKind] = {
    NO_CREDENTIALS: FailureKind("no credentials for {protocol}://", _OTHER_LOGIN, _LOG_IN),
    EXPIRED: FailureKind("the credentials for {protocol}:// have expired", _OTHER_LOGIN, _LOG_IN),
    REFUSED: FailureKind("{protocol}:// does not accept the credentials", _OTHER_LOGIN, _LOG_IN),
    FORBIDDEN: FailureKind("access denied", _OTHER_LOGIN, _GRANT),
    CLOCK: FailureKind(
        "the clock of this machine differs from that of the store", "set the clock of this machine"
    ),
    REGION: FailureKind("the bucket is in another region", "set AWS_REGION{region}"),
    QUOTA: FailureKind(
        "the quota of the store is exhausted", "raise the quota, or run it again when it is renewed"
    ),
    THROTTLED: FailureKind(
        "the store receives too many requests",
        "run it again later, or lower the limit of this store in [concurrency] of wherry.toml",
        retryable=True,
    ),
    SERVER: FailureKind("the store reports an internal error", "run it again later", retryable=True),
    BROKEN: FailureKind("the connection was cut", "run it again", retryable=True),
    UNREACHABLE: FailureKind(
        "the store is unreachable", "check the network, the name of the host and the endpoint", retryable=True
    ),
    TIMEOUT: FailureKind(
        "the store did not answer in time",
        "run it again; if the store is only slow, raise storage_timeout (WHERRY_STORAGE_TIMEOUT)",
        retryable=True,
    ),
    INVALID: FailureKind(
        "the store does not accept the request",
        "check that the store supports what the message names, and update its package",
    ),
    OFFLINE: FailureKind("{protocol}:// is offline", "unset HF_HUB_OFFLINE"),
}


def kind_of(error: BaseException) -> str:
    """The kind of a failure; empty if it is unknown, or a bug that was met while a failure was handled."""
    if type(error).__module__ == "builtins" and not isinstance(error, OSError):
        return ""
    chain = list(_chain(error))
    codes = (_CODES.get(_code(one), "") for one in chain)
    statuses = (_by_status(one) for one in chain)
    names = (cls.__name__ for one in chain for cls in type(one).__mro__)
    classes = (_CLASSES[name] for name in names if name in _CLASSES)
    return next((kind for found in (codes, statuses, classes) for kind in found if kind), "")


def is_plain_failure(error: BaseException) -> bool:
    """Whether the status of an answer says enough about the file, its state, or a later success of the request."""
    kind = kind_of(error)
    return kind in (ABSENT, EXISTS, BEYOND) or (kind in FAILURES and FAILURES[kind].retryable)


def retry_after_of(error: BaseException) -> float | None:
    """Seconds to wait before the next request, as the answer of the store states them; None if it states none."""
    texts = (_header(one, "retry-after") for one in _chain(error))
    return next((seconds for text in texts if (seconds := _seconds(text)) is not None), None)


def _seconds(text: str) -> float | None:
    """Seconds of a Retry-After, which is a number of them or a date; None if it is neither."""
    if text.isdecimal():
        return float(text)
    from email.utils import parsedate_to_datetime

    try:
        return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
    except (ValueError, OverflowError):
        return None


def region_of(error: BaseException) -> str:
    """The region of the bucket, where an answer of S3 names it; empty otherwise."""
    return next((text for one in _chain(error) if (text := _header(one, "x-amz-bucket-region"))), "")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and what caused it, or was handled when it was raised."""
    found: BaseException | None = error
    for _ in range(_DEEPEST):
        if found is None:
            return
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _response(error: BaseException) -> Any:
    return getattr(error, "response", None)


def _code(error: BaseException) -> str:
    found = _response(error)
    if isinstance(found, dict):
        return str(found.get("Error", {}).get("Code", ""))
    code: Any = getattr(error, "error_code", "")  # of Azure
    return str(getattr(code, "value", code))


def _header(error: BaseException, name: str) -> str:
    found = _response(error)
    if isinstance(found, dict):
        headers: Any = found.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    else:
        headers = getattr(found, "headers", None) or getattr(error, "headers", None) or {}
    return str(headers.get(name) or headers.get(name.title()) or "")


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an exception carries; None if it has none."""
    found: Any = _response(error)
    if isinstance(found, dict):
        value: Any = found.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        places = ((found, "status_code"), (error, "status"), (error, "code"))
        value = next((getattr(one, name) for one, name in places if hasattr(one, name)), None)
    if value is None and type(error) is OSError and str(error).startswith(_FORBIDDEN_BY_GCSFS):
        return 403
    text = str(value)
    return int(text) if re.fullmatch(r"[0-9]{3}", text) else None


def _by_status(error: BaseException) -> str:
    status = status_of(error)
    if status is None:
        return ""
    text = str(error)
    said = (kind for statuses, words, kind in _TEXTS if status in statuses and words.search(text))
    return next(said, _STATUSES.get(status, ""))


@contextmanager
def library_errors(protocol: str, path: str) -> Generator[None]:
    """Around a call of a storage library.

    Raises:
        FileNotFoundError: the library reported a missing file with an exception of its own.
        FileExistsError: the same for an object that exists, or is not in the state that was required.
        EOFError: a range begins at the end of an object, or after it.
        WherryError: see `translate_error`.
    """
    handled = sys.exception()
    try:
        yield
    except Exception as error:
        from wherry.store.addresses import refusal_in  # local runs do not pay for it

        _separate(error, handled)
        found = refusal_in(error) or translate_error(error, protocol, path)
        if found is None or found is error:
            raise
        raise found from error


def translate_error(error: Exception, protocol: str, path: str) -> Exception | None:
    """The error that stands for an exception of a library; None for an ordinary OSError or an unknown exception."""
    if isinstance(error, WherryError):
        return None
    kind = kind_of(error)
    plain = _PLAIN.get(kind)
    if plain is not None and not isinstance(error, plain):
        return plain(f"{protocol}://{path}")
    if kind == NO_BUCKET:
        return bucket_not_found(protocol, path)
    if kind in FAILURES:
        return _failure(error, kind, protocol, path)
    return _other(error, protocol, path)


def timed_out(uri: str) -> StorageError:
    """The error for a store that did not answer in time."""
    protocol, _, path = uri.partition("://")
    return _failure(TimeoutError(), TIMEOUT, protocol, path)


def altered_error(uri: str, expected: str, got: str) -> StorageError:
    """The error for bytes whose checksum, as the store computed it, differs from ours; sending them again can help."""
    what = f"the store received altered bytes: expected {expected}, got {got}"
    error = StorageError(
        what,
        uri=uri,
        cure="run it again; if it happens often, check this machine's memory and network",
        retryable=True,
    )
    error.kind = BROKEN
    return error


def bucket_not_found(protocol: str, path: str) -> NotFoundError:
    """The error for a path in a bucket that does not exist."""
    bucket = f"{protocol}://{path.partition('/')[0]}"
    return NotFoundError(
        "bucket not found", uri=bucket, cure="check the name of the bucket, or create it: wherry creates none"
    )


def _separate(error: BaseException, handled: BaseException | None) -> None:
    """Take an exception that was handled before a call out of the chain of what the call raised: it is no cause."""
    found: BaseException | None = error
    while found is not None and handled is not None:
        if found.__context__ is handled:
            found.__context__ = None
        found = found.__context__


def _failure(error: Exception, kind: str, protocol: str, path: str) -> StorageError:
    failure = FAILURES[kind]
    text = one_line(error)
    what = failure.words.format(protocol=protocol) + (f": {text}" if text else "")
    cure = failure.cure_for(protocol, region_of(error))
    found = StorageError(what, uri=f"{protocol}://{path}", cure=cure, retryable=failure.retryable)
    found.kind, found.retry_after = kind, retry_after_of(error)
    return found


def _other(error: Exception, protocol: str, path: str) -> WherryError | None:
    uri, text = f"{protocol}://{path}", one_line(error) or type(error).__name__
    if isinstance(error, ValueError):
        return UsageError(
            f"invalid path for {protocol}://: {text}",
            uri=uri,
            cure="write the path as the storage library expects it",
        )
    if isinstance(error, NotImplementedError):
        return UnsupportedError(
            f"{protocol}:// does not support this operation", uri=uri, cure="use another store"
        )
    packages = {cls.__module__.partition(".")[0] for cls in type(error).__mro__}
    if not isinstance(error, OSError) and packages & _PACKAGES:
        cure = "check that the storage is reachable"
        return StorageError(f"storage failed: {text}", uri=uri, cure=cure, retryable=True)
    return None


def one_line(error: Exception) -> str:
    """The text of an exception in one line, without secrets; the beginning of a long one."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return shorten(redact(text), _LONGEST_TEXT, placeholder=" …")
