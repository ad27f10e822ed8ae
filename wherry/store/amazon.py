"""amazon: s3://, with the client of aiobotocore that s3fs opens.

An upload is a multipart upload, whose completion takes `If-None-Match: *`. Each part carries its CRC-32C, which the
store compares with the bytes that it received, and the completion carries that of the whole object. A client that is
configured to send checksums only where S3 requires them (`request_checksum_calculation = when_required`, for stores of
others that know none) sends none.

A request is made by the client, or signed by it and carried by others: a presigned URL states the bucket, the key and
the arguments of a call as the client of the user would send them. It does not cover the body: the checksum of what is
sent is a header that it covers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlsplit

from wherry.errors import StorageError, UnsupportedError
from wherry.installation import package_command
from wherry.store.addresses import checking_resolver
from wherry.store.content import Body, by_algorithm, checksum_of, from_base64, joined_checksum, to_base64
from wherry.store.failures import FORBIDDEN, altered_error, is_plain_failure, status_of
from wherry.store.remote_store import (
    ObjectStore,
    RangedStore,
    call_async,
    for_each,
    page_row,
    range_header,
    require_range,
    stated_options,
)
from wherry.store.store import AnonymousUpload, Entry, Part, StoredObject, Upload
from wherry.store.transfers import (
    CONNECT_SECONDS,
    CONNECTIONS,
    BodyRequest,
    BufferFill,
    HttpAnswer,
    is_plain,
)

_RUN = "wherry-run"  # key of the metadata
_COPIED = 128 << 20  # bytes of a part that the store copies, at least
_REMOVALS = 1000  # objects that one request removes, at most
_COPIES = 8  # parts that it copies at the same time
_PAGE = 1000  # objects of one page of a listing
_BLOCK = 256 << 10  # bytes that are read at a time
_PRECONDITION_FAILED = 412  # HTTP
_UNKNOWN = datetime.min.replace(tzinfo=UTC)  # when a part was sent, in a list that does not tell
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


class AmazonStore(RangedStore, ObjectStore):
    """Objects of S3, or of a store with its interface."""

    names_uploads = False

    def _open(self, timeout: float) -> Any:
        from s3fs import S3FileSystem

        config = {
            "signature_version": "s3v4",  # of presigned URLs too, which have an older one by default
            "connect_timeout": min(CONNECT_SECONDS, timeout),
            "read_timeout": timeout,
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "max_pool_connections": CONNECTIONS,
            "connector_args": {"resolver": checking_resolver()},
        }
        fs: Any = S3FileSystem(**stated_options("s3", config_kwargs=config, use_listings_cache=False))
        fs.retries = 1
        return fs

    def page(self, path: str, start: str) -> tuple[list[tuple[str, Entry]], bool]:
        """See Store."""
        bucket, prefix, _version = self.fs.split_path(path)
        how: dict[str, Any] = {
            "Prefix": f"{prefix}/" if prefix else "",
            "StartAfter": start.partition("/")[2],
            "MaxKeys": _PAGE,
        }
        answer = self.call(path, "call_s3", "list_objects_v2", Bucket=bucket, **how)
        rows = answer.get("Contents", [])
        found = [page_row(f"{bucket}/{row['Key']}", row["Size"], row["ETag"]) for row in rows]
        return found, bool(answer.get("IsTruncated"))

    def head(self, path: str) -> StoredObject | None:
        """See Store."""
        try:
            return super().head(path)
        except StorageError as error:
            if error.kind == FORBIDDEN:
                self.probe(path)
            raise

    def remove_many(self, marks: Mapping[str, str]) -> None:
        """See Store. Stores of others do not all know the request; there each object is removed by itself."""
        paths = list(marks)
        for first in range(0, len(paths), _REMOVALS):
            some = paths[first : first + _REMOVALS]
            try:
                self._remove_together(some)
            except (StorageError, UnsupportedError) as error:
                if error.retryable:
                    raise
                super().remove_many({path: marks[path] for path in some})

    def begin(self, path: str, run: str) -> Upload:
        """See Store. If the answer is lost, an upload without parts remains, of which nobody has the id.

        Its run finds it in the list of uploads when it has committed the target, or removed it; or the next run does.
        """
        answer = self._call(path, "create_multipart_upload", Metadata={_RUN: run})
        return Upload(path, answer["UploadId"], run)

    def put_part(self, upload: Upload, number: int, data: Sequence[memoryview]) -> Part:
        """See Store."""
        checksum, nbytes = checksum_of(data), sum(one.nbytes for one in data)
        where = _part_arguments(upload, number)

        async def send_by_client() -> tuple[str, str]:
            how = {"checksum": checksum, **where}
            answer = await call_client(self.fs, upload.path, "upload_part", data=data, **how)
            return answer["ETag"], from_base64(answer.get("ChecksumCRC32C"))

        def once(seconds: float) -> Part:
            sent = self._sent_plainly(upload.path, data, checksum, where, seconds)
            mark, reported = sent or call_async(self.fs, send_by_client, seconds)
            if reported not in ("", checksum):
                raise altered_error(f"s3://{upload.path}", checksum, reported)
            return Part(number, nbytes, mark, reported)

        return self.transfer(upload.path, once, nbytes)

    def parts(self, upload: Upload) -> list[Part]:
        """See Store. SeaweedFS lists what a part replaced too, in any order."""
        pages = self._pages(upload.path, "list_parts", ("PartNumberMarker",), UploadId=upload.key)
        return _latest_parts([row for page in pages for row in page.get("Parts", ())])

    def abort(self, upload: Upload) -> None:
        """See Store."""
        with suppress(FileNotFoundError):
            self._call(upload.path, "abort_multipart_upload", UploadId=upload.key)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """See Store. S3 does not tell the metadata of an upload, so their run is empty."""
        bucket, key, _version = self.fs.split_path(prefix)
        for page in self._pages(
            prefix, "list_multipart_uploads", ("KeyMarker", "UploadIdMarker"), Prefix=key
        ):
            for row in page.get("Uploads", ()):
                begun = row["Initiated"].timestamp() if "Initiated" in row else time.time()
                yield AnonymousUpload(f"{bucket}/{row['Key']}", row["UploadId"], "", begun)

    async def _list_one(self, bucket: str) -> None:
        await self.fs._call_s3("list_objects_v2", Bucket=bucket, MaxKeys=1)  # noqa: SLF001  fsspec's own way

    async def _range_request(self, path: str, start: int, nbytes: int, mark: str) -> BodyRequest | None:
        headers = {"Range": range_header(start, nbytes)} | ({"If-Match": mark} if mark else {})
        return await presign(self.fs, path, "get_object", headers, **self.fs.req_kw)

    def _refusal(self, request: BodyRequest, answer: HttpAnswer, path: str) -> Exception | None:
        return refusal(answer, path, "GetObject" if request.method == "GET" else "UploadPart")

    async def _receive(self, path: str, start: int, into: BufferFill, mark: str) -> None:
        bucket, key, version = self.fs.split_path(path)
        how = {"Range": range_header(start, into.size), **self.fs.req_kw}
        how |= ({"IfMatch": mark} if mark else {}) | ({"VersionId": version} if version else {})
        try:
            answer = await self.fs._call_s3("get_object", Bucket=bucket, Key=key, **how)  # noqa: SLF001  the same
        except OSError as error:
            if error.__cause__ is not None and status_of(error.__cause__) == _PRECONDITION_FAILED:
                raise FileNotFoundError(path) from error
            raise
        response = answer["ResponseMetadata"]
        require_range(response["HTTPStatusCode"], response["HTTPHeaders"], start)
        async with answer["Body"] as body:
            while block := await body.read(_BLOCK):
                into.add(block)

    def _put(
        self, path: str, data: Sequence[memoryview], checksum: str, run: str, replaces: str
    ) -> StoredObject:
        condition = {"IfMatch": replaces} if replaces else {"IfNoneMatch": "*"}
        nbytes = sum(map(len, data))
        sent = {"data": data, "checksum": checksum, "Metadata": {_RUN: run}, **condition}
        return _describe(self._call(path, "put_object", nbytes, **sent), nbytes, run)

    async def _look(self, fs: Any, path: str) -> StoredObject:
        answer = await call_client(fs, path, "head_object", ChecksumMode="ENABLED")
        return _describe(answer, answer["ContentLength"], answer.get("Metadata", {}).get(_RUN, ""))

    async def _delete(self, fs: Any, path: str, mark: str) -> None:
        await call_client(fs, path, "delete_object", IfMatch=mark)

    def _remove_together(self, paths: Sequence[str]) -> None:
        rows = [{"Key": self.fs.split_path(path)[1]} for path in paths]
        answer = self._call(paths[0], "delete_objects", Delete={"Objects": rows, "Quiet": True})
        if failed := answer.get("Errors"):
            raise StorageError(
                f"the store removed {len(paths) - len(failed)} of {len(paths)} objects: {failed[0].get('Message', '')}",
                uri=f"s3://{paths[0]}",
                cure="grant these credentials s3:DeleteObject",
            )

    def _copy(
        self, source: str, found: StoredObject, path: str, run: str, guard: Callable[[], None]
    ) -> StoredObject:
        """An upload of parts that the store copies."""
        bucket, key, _version = self.fs.split_path(source)
        size = max(_COPIED, -(-found.nbytes // self.part_limits.most))
        upload = self.begin(path, run)

        def copy(number: int) -> Part:
            start, stop = number * size, min((number + 1) * size, found.nbytes)
            what = {"CopySourceRange": f"bytes={start}-{stop - 1}", "CopySourceIfMatch": found.mark}
            what |= {"CopySource": {"Bucket": bucket, "Key": key}, **_part_arguments(upload, number)}
            try:
                made = self._call(path, "upload_part_copy", stop - start, **what)["CopyPartResult"]
            except FileExistsError as error:
                raise FileNotFoundError(f"{source} in the state {found.mark}") from error
            return Part(number, stop - start, made["ETag"], from_base64(made.get("ChecksumCRC32C")))

        try:
            parts = for_each(copy, range(-(-found.nbytes // size)), at_once=_COPIES)
            guard()
            return self.assemble(upload, parts)
        except Exception:
            with suppress(StorageError):
                self.abort(upload)
            raise

    def _assemble(self, upload: Upload, parts: Sequence[Part]) -> StoredObject:
        nbytes, checksum = sum(part.nbytes for part in parts), joined_checksum(parts)
        rows = [{"PartNumber": part.number + 1, "ETag": part.mark} for part in parts]
        what = {"UploadId": upload.key, "MultipartUpload": {"Parts": rows}, "IfNoneMatch": "*"}
        answer = self._call(upload.path, "complete_multipart_upload", nbytes, checksum=checksum, **what)
        return _describe(answer, nbytes, upload.run)

    def _sent_plainly(
        self, path: str, data: Sequence[memoryview], checksum: str, where: Mapping[str, Any], seconds: float
    ) -> tuple[str, str] | None:
        """ETag and checksum of a part, sent by this thread; None if only the client can send it."""
        request = call_async(self.fs, lambda: self._part_request(path, to_base64(checksum), where), seconds)
        answer = self._exchanged(path, request, seconds, views=data)
        if answer is None:
            return None
        return answer.headers["etag"], from_base64(answer.headers.get("x-amz-checksum-crc32c"))

    async def _part_request(self, path: str, checksum: str, where: Mapping[str, Any]) -> BodyRequest | None:
        """The request that puts a part; None if only the client can send it."""
        await self.fs.set_session()
        if not sends_checksums(await self.fs.get_s3(path.partition("/")[0])):
            return None
        headers = {"x-amz-sdk-checksum-algorithm": "CRC32C", "x-amz-checksum-crc32c": checksum}
        stated = {**where, "ChecksumAlgorithm": "CRC32C", "ChecksumCRC32C": checksum}
        return await presign(self.fs, path, "upload_part", headers, **stated)

    def _pages(
        self, path: str, method: str, markers: Sequence[str], **what: Any
    ) -> Iterator[Mapping[str, Any]]:
        """The pages of a listing, of which each says in its markers where the next one begins."""
        after: dict[str, Any] = {}
        more = True
        while more:
            page = self._call(path, method, **what, **after)
            yield page
            if more := bool(page.get("IsTruncated")):
                after = {marker: page[f"Next{marker}"] for marker in markers}

    def _call(self, path: str, method: str, nbytes: int = 0, **sent: Any) -> Any:
        return self.request(path, partial(call_client, path=path, method=method, **sent), nbytes)


def _part_arguments(upload: Upload, number: int) -> dict[str, Any]:
    return {"UploadId": upload.key, "PartNumber": number + 1}


def _latest_parts(rows: Sequence[Mapping[str, Any]]) -> list[Part]:
    """The latest state of each part, by number; without the parts whose times do not show which state is the latest."""
    latest: dict[int, tuple[datetime, set[Part]]] = {}
    for row in rows:
        checksum, moment = from_base64(row.get("ChecksumCRC32C")), row.get("LastModified", _UNKNOWN)
        part = Part(row["PartNumber"] - 1, row["Size"], row["ETag"], checksum)
        before, states = latest.get(part.number, (moment, set[Part]()))
        if moment >= before:
            latest[part.number] = moment, {part, *(states if moment == before else ())}
    return [
        part for _number, (_moment, states) in sorted(latest.items()) if len(states) == 1 for part in states
    ]


def _describe(answer: Mapping[str, Any], nbytes: int, run: str) -> StoredObject:
    whole = answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
    checksum = from_base64(answer.get("ChecksumCRC32C")) if whole else ""
    return StoredObject(nbytes, answer["ETag"], run, by_algorithm(checksum))


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
