"""range_reads: reads a range of an object straight into a buffer, in the state that is named, if one is.

The libraries hold an answer in small blocks, and then all of it once more. Here each block goes to its place as it
comes, so that a range takes no memory but that of the buffer.

Google Cloud Storage takes the generation with a read; S3 and Azure take the ETag as a condition, which s3fs and
adlfs do not offer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from wherry.remote import azure, http_reads
from wherry.remote.amazon_requests import presign, refusal
from wherry.remote.failures import status_of
from wherry.remote.filesystems import call_async, require_success
from wherry.remote.google_requests import body_request, refused_by_google, sends_plainly
from wherry.remote.http_reads import require_range
from wherry.remote.transfers import exchange

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from wherry.remote.buffer_fill import BufferFill
    from wherry.remote.transfers import BodyRequest, HttpAnswer

_PRECONDITION_FAILED = 412  # HTTP
_BLOCK = 256 << 10  # bytes, as many as a socket of asyncio gives at a time


def fill(fs: Any, protocol: str, path: str, start: int, into: BufferFill, mark: str, seconds: float) -> None:
    """Fill a buffer with bytes of an object in one state, in one attempt.

    Args:
        fs: the file system.
        protocol: of the store.
        path: of the object.
        start: offset of the first byte.
        into: the buffer.
        mark: of the state; empty for any.
        seconds: that it may take.

    Raises:
        TimeoutError: it took longer.
        Exception: as `wherry.remote.errors` translates it, FileNotFoundError or FileExistsError if nothing is in that
            state, EOFError beyond the end.
    """
    ask = _REQUESTS.get(protocol)
    request = None if ask is None else call_async(fs, lambda: ask(fs, path, start, into, mark), seconds)
    if request is not None:
        answer = exchange(request, seconds, into=into)
        if answer.is_success:
            require_range(answer.status, answer.headers, start)
            return
        if (error := _REFUSALS[protocol](answer, path)) is not None:
            raise error
    call_async(fs, lambda: FILLS[protocol](fs, path, start, into, mark), seconds)


async def _request_google(fs: Any, path: str, start: int, into: BufferFill, mark: str) -> BodyRequest | None:
    if not sends_plainly(fs):
        return None
    return body_request(fs, "GET", fs.url(path, generation=mark or None), {"Range": _range(start, into)}, {})


async def _request_amazon(fs: Any, path: str, start: int, into: BufferFill, mark: str) -> BodyRequest | None:
    headers = {"Range": _range(start, into)} | ({"If-Match": mark} if mark else {})
    return await presign(fs, path, "get_object", headers, **fs.req_kw)


async def _fill_google(fs: Any, path: str, start: int, into: BufferFill, mark: str) -> None:
    """With the session of gcsfs, but not its `_cat_file`, which takes an answer as a whole."""
    from gcsfs.core import GCSFileSystem

    generation = mark or None
    if type(fs) is not GCSFileSystem:  # that of zonal buckets, which reads by gRPC
        stop = start + into.size
        into.add(await fs._cat_file(path, start=start, end=stop, generation=generation))  # noqa: SLF001
        return
    gcs = cast("Any", fs)
    await gcs._set_session()  # noqa: SLF001  as every request of gcsfs begins
    how = {
        "params": gcs._get_params({}),  # noqa: SLF001
        "headers": gcs._get_headers({"Range": _range(start, into)}),  # noqa: SLF001
        "timeout": gcs.requests_timeout,
        "middlewares": (),  # that of the session reads all of an answer
    }
    async with gcs.session.get(gcs.url(path, generation=generation), **how) as answer:
        await require_success(answer)
        answer.raise_for_status()
        require_range(answer.status, answer.headers, start)
        while block := await answer.content.read(_BLOCK):
            into.add(block)


async def _fill_amazon(fs: Any, path: str, start: int, into: BufferFill, mark: str) -> None:
    bucket, key, version = fs.split_path(path)
    how = {"Range": _range(start, into), **fs.req_kw}
    how |= ({"IfMatch": mark} if mark else {}) | ({"VersionId": version} if version else {})
    try:
        answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, **how)  # noqa: SLF001  fsspec's own way
    except OSError as error:
        if error.__cause__ is not None and status_of(error.__cause__) == _PRECONDITION_FAILED:
            raise FileNotFoundError(path) from error
        raise
    told = answer["ResponseMetadata"]
    require_range(told["HTTPStatusCode"], told["HTTPHeaders"], start)
    async with answer["Body"] as body:
        while block := await body.read(_BLOCK):
            into.add(block)


async def _fill_azure(fs: Any, path: str, start: int, into: BufferFill, mark: str) -> None:
    async for block in azure.blocks_of(fs, path, start, start + into.size, mark):
        into.add(block)


def _range(start: int, into: BufferFill) -> str:
    return f"bytes={start}-{start + into.size - 1}"


# protocol → fills a buffer through the library; see `fill`.
FILLS: dict[str, Callable[..., Any]] = {
    "gs": _fill_google,
    "gcs": _fill_google,
    "s3": _fill_amazon,
    **dict.fromkeys(azure.PROTOCOLS, _fill_azure),
    **dict.fromkeys(http_reads.PROTOCOLS, http_reads.fill_http),
}
# protocol → the request whose answer goes straight into the buffer; None if only the library can send it.
_REQUESTS: dict[str, Callable[..., Awaitable[BodyRequest | None]]] = {
    "gs": _request_google,
    "gcs": _request_google,
    "s3": _request_amazon,
}
_REFUSALS: dict[str, Callable[[HttpAnswer, str], Exception | None]] = {
    "gs": lambda answer, _path: refused_by_google(answer),
    "gcs": lambda answer, _path: refused_by_google(answer),
    "s3": lambda answer, path: refusal(answer, path.partition("/")[0], "GetObject"),
}
