"""google_requests: requests to Google Cloud Storage with the login of gcsfs, sent by `wherry.remote.transfers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from wherry.remote.failures import is_plain_failure
from wherry.remote.filesystems import AnswerError
from wherry.remote.transfers import BodyRequest, is_plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.remote.transfers import HttpAnswer

_NOT_FOUND = 404


def sends_plainly(fs: Any) -> bool:
    """Whether requests of a file system are ordinary HTTP: zonal buckets use gRPC, and some logins a certificate."""
    from gcsfs.core import GCSFileSystem

    if type(fs) is not GCSFileSystem:
        return False
    gcs: Any = fs
    own = getattr(gcs, "_use_client_cert", False) or "connector" in gcs.session_kwargs
    return not own and is_plain(gcs._location)  # noqa: SLF001  gcsfs has no public name for it


def body_request(
    fs: Any, method: str, url: str, headers: Mapping[str, str], params: Mapping[str, str]
) -> BodyRequest:
    """A request with the login and the parameters that gcsfs adds to each.

    Args:
        fs: the file system of gcsfs.
        method: of HTTP.
        url: quoted; it may have parameters.
        headers: of the request.
        params: further parameters.
    """
    query = urlencode(fs._get_params(dict(params)))  # noqa: SLF001
    joint = "" if not query else "&" if "?" in url else "?"
    return BodyRequest(method, f"{url}{joint}{query}", fs._get_headers(dict(headers)))  # noqa: SLF001


def refused_by_google(answer: HttpAnswer) -> Exception | None:
    """The exception for an answer; None if gcsfs must try it itself, which knows the reasons."""
    if answer.status == _NOT_FOUND:
        return FileNotFoundError(answer.status)
    error = AnswerError(answer.status, answer.headers, answer.body.decode(errors="replace"))
    return error if is_plain_failure(error) else None
