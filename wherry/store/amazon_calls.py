"""amazon_calls: single requests to S3, by the client of aiobotocore, or signed by it and carried by others.

A presigned URL states the bucket, the key and the arguments of a call as the client of the user would send them. It
does not cover the body: the checksum of what is sent is a header that it covers.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from wherry.errors import UnsupportedError
from wherry.installation import package_command
from wherry.remote.failures import is_plain_failure
from wherry.remote.transfers import BodyRequest, is_plain
from wherry.store.body import Body
from wherry.store.checksums import to_base64

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from wherry.remote.transfers import HttpAnswer

_SECONDS = 3600  # that a signature is valid
_METHODS = {"get_object": "GET", "upload_part": "PUT"}  # method of the client → method of HTTP
_REPEATED = 64 << 10  # bytes of a body that can be sent twice
# Method of the client → its arguments for a checksum.
_CHECKSUMS: Mapping[str, Callable[[str], dict[str, str]]] = {
    "create_multipart_upload": lambda _none: {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"},
    "put_object": lambda text: {"ChecksumAlgorithm": "CRC32C", "ChecksumCRC32C": to_base64(text)},
    "upload_part": lambda text: {"ChecksumAlgorithm": "CRC32C", "ChecksumCRC32C": to_base64(text)},
    "complete_multipart_upload": lambda text: (
        {"ChecksumCRC32C": to_base64(text), "ChecksumType": "FULL_OBJECT"} if text else {}
    ),
}

_left: set[str] = set()  # buckets whose requests the client sends itself: it knows more than a signature


async def call_client(
    fs: Any,
    path: str,
    method: str,
    *,
    data: Sequence[memoryview] | None = None,
    checksum: str = "",
    **stated: Any,
) -> Any:
    """Call the client once.

    Args:
        fs: the file system, whose options apply.
        path: of the object; the bucket only where a prefix or a removal of several is stated.
        method: of the client.
        data: the body.
        checksum: of the body, or of the object that is completed.
        stated: further arguments of the method.

    Raises:
        UnsupportedError: the installed client does not know one of them.
    """
    await fs.set_session()
    bucket, key, _version = fs.split_path(path)
    client = await fs.get_s3(bucket)
    if method in _CHECKSUMS and sends_checksums(client):
        stated |= _CHECKSUMS[method](checksum)
    stated |= {"Bucket": bucket} if {"Prefix", "Delete"} & stated.keys() else {"Bucket": bucket, "Key": key}
    stated |= {} if data is None else {"Body": _body(data)}
    function = getattr(client, method)
    known = fs._get_s3_method_kwargs(function, **stated)  # noqa: SLF001  adds the options of the user
    if missing := sorted(stated.keys() - known.keys()):
        raise UnsupportedError(
            f"the installed botocore does not support {', '.join(missing)} of {method}",
            uri=f"s3://{path}",
            cure=f"run `{package_command('s3fs', 'aiobotocore', upgrade=True)}`",
        )
    return await function(**known)


def sends_checksums(client: Any) -> bool:
    """Whether a client sends checksums where S3 does not require them."""
    return client.meta.config.request_checksum_calculation != "when_required"


def _body(data: Sequence[memoryview]) -> Body | bytes:
    """A small body as bytes: aiohttp follows a redirect with nothing else, and the error then names the region."""
    return b"".join(data) if sum(map(len, data)) <= _REPEATED else Body(data)


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


def refusal(answer: HttpAnswer, path: str, method: str) -> Exception | None:
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
    _left.add(path.partition("/")[0])
    return None


def _certificates(fs: Any) -> str | None:
    """The file with the certificates that botocore trusts; None if it uses no such file."""
    from botocore.httpsession import get_cert_path

    stated = fs.client_kwargs.get("verify")
    bundle = fs.session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE", "")
    path = get_cert_path(verify=(bundle or True) if stated is None else stated)
    return path if path and os.path.isfile(path) else None  # noqa: PTH113  short, on a local disk
