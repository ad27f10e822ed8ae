"""amazon_requests: requests that the client of S3 has signed, for bodies that `wherry.remote.transfers` carries.

A presigned URL states the bucket, the key and the arguments of a call as the client of the user would send them. It
does not cover the body: the checksum of what is sent is a header that it covers.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from wherry.remote.failures import is_plain_failure
from wherry.remote.transfers import BodyRequest, is_plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.remote.transfers import HttpAnswer

_SECONDS = 3600  # that a signature is valid
_METHODS = {"get_object": "GET", "upload_part": "PUT"}  # method of the client → method of HTTP
_left: set[str] = set()  # buckets whose requests the client sends itself: it knows more than a signature


async def presign(
    fs: Any, path: str, method: str, headers: Mapping[str, str], **stated: Any
) -> BodyRequest | None:
    """A signed request; None if the client must send it.

    Args:
        fs: the file system of s3fs.
        path: of the object.
        method: of the client.
        headers: that the request has, and the signature may cover.
        stated: further arguments of the method.
    """
    bucket, key, version = fs.split_path(path)
    if bucket in _left:
        return None
    await fs.set_session()
    client = await fs.get_s3(bucket)
    stated |= {"VersionId": version} if version else {}
    known = fs._get_s3_method_kwargs(getattr(client, method), **stated)  # noqa: SLF001  adds the options of the user
    url = await client.generate_presigned_url(
        method, Params={"Bucket": bucket, "Key": key, **known}, ExpiresIn=_SECONDS
    )
    query = parse_qs(urlsplit(url).query)
    covered = set(query.get("X-Amz-SignedHeaders", [""])[0].split(";"))
    trusted = _certificates(fs)
    if covered - {"host", *headers} or not is_plain(url) or trusted is None:
        _left.add(bucket)
        return None
    return BodyRequest(_METHODS[method], url, headers, trusted)


def refusal(answer: HttpAnswer, bucket: str, method: str) -> Exception | None:
    """The exception that the client would raise for an answer; None if the client must try it itself.

    A bucket in another region, or a store that does not take this kind of signature, gets its requests from the client
    from then on: it follows redirects and knows the reasons.
    """
    from botocore.exceptions import ClientError
    from botocore.parsers import create_parser

    row = {"status_code": answer.status, "headers": answer.headers, "body": answer.body}
    error = ClientError(create_parser("rest-xml").parse(row, None), method)
    if is_plain_failure(error):
        return error
    _left.add(bucket)
    return None


def _certificates(fs: Any) -> str | None:
    """The file with the certificates that botocore trusts; None if it is told to trust in another way."""
    from botocore.httpsession import get_cert_path

    stated = fs.client_kwargs.get("verify")
    bundle = fs.session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE", "")
    path = get_cert_path(verify=(bundle or True) if stated is None else stated)
    return path if path and os.path.isfile(path) else None  # noqa: PTH113  short, on a local disk
