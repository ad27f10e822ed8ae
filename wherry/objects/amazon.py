"""amazon: the ObjectStore of s3://, with the client of aiobotocore that s3fs opens.

An upload is a multipart upload, whose completion takes `If-None-Match: *`. Each part carries its CRC-32C, which the
store compares with the bytes that it received, and the completion carries that of the whole object. A client that is
configured to send checksums only where S3 requires them (`request_checksum_calculation = when_required`, for stores of
others that know none) sends none.
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from wherry.errors import StorageError, UnsupportedError
from wherry.installation import package_command
from wherry.objects.body import Body, views_of
from wherry.objects.checksums import (
    by_algorithm,
    checksum_of,
    from_base64,
    is_same,
    joined_checksum,
    to_base64,
)
from wherry.objects.removals import remove_each
from wherry.objects.uploads import AnonymousUpload, Part, PartLimits, StoredObject, Upload
from wherry.remote.amazon_requests import presign, refusal
from wherry.remote.errors import altered_error
from wherry.remote.failures import FORBIDDEN
from wherry.remote.filesystems import call_async
from wherry.remote.transfers import exchange
from wherry.runtime import threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from wherry.objects.body import Content
    from wherry.remote.transfers import BodyRequest
    from wherry.storage.fsspec_store import FsspecStore

_RUN = "wherry-run"  # key of the metadata
_REPEATED = 64 << 10  # bytes of a body that can be sent twice
_COPIED = 128 << 20  # bytes of a part that the store copies, at least
_REMOVALS = 1000  # objects that one request removes, at most
_COPIES = 8  # parts that it copies at the same time
_UNKNOWN = datetime.min.replace(tzinfo=UTC)  # when a part was sent, in a list that does not tell
# Method of the client → what it is told of a checksum.
_CHECKSUMS: Mapping[str, Callable[[str], dict[str, str]]] = {
    "create_multipart_upload": lambda _none: {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"},
    "put_object": lambda text: {"ChecksumAlgorithm": "CRC32C", "ChecksumCRC32C": to_base64(text)},
    "upload_part": lambda text: {"ChecksumAlgorithm": "CRC32C", "ChecksumCRC32C": to_base64(text)},
    "complete_multipart_upload": lambda text: (
        {"ChecksumCRC32C": to_base64(text), "ChecksumType": "FULL_OBJECT"} if text else {}
    ),
}


class AmazonObjects:
    """Objects of S3, or of a store with its interface.

    Attributes:
        part_limits: of S3.
    """

    part_limits = PartLimits()
    aborts_apart = True

    def __init__(self, store: FsspecStore) -> None:
        self._store = store

    def head(self, path: str) -> StoredObject | None:
        """See ObjectStore."""
        try:
            answer = self._call(path, "head_object", ChecksumMode="ENABLED")
        except FileNotFoundError:
            self._store.require_bucket(path)
            return None
        except StorageError as error:
            if error.kind == FORBIDDEN:
                self._store.probe(path)
            raise
        return _describe(answer, answer["ContentLength"], answer.get("Metadata", {}).get(_RUN, ""))

    def put_object(self, path: str, data: Content, run: str, *, replaces: str = "") -> StoredObject:
        """See ObjectStore. Two states with the same bytes have the same ETag: let what is replaced differ."""
        views = views_of(data)
        checksum, nbytes = checksum_of(views), sum(map(len, views))
        condition = {"IfMatch": replaces} if replaces else {"IfNoneMatch": "*"}
        sent = {"data": views, "checksum": checksum, "Metadata": {_RUN: run}, **condition}
        try:
            return _describe(self._call(path, "put_object", nbytes, **sent), nbytes, run)
        except (FileExistsError, FileNotFoundError) as error:
            if (found := self._ours(path, run, nbytes, checksum)) is None:
                raise FileExistsError(path) from error
            return found

    def remove_object(self, path: str, mark: str) -> bool:
        """See ObjectStore. The state is compared here too, because not every store compares it.

        A client repeats a removal whose answer is lost, and S3 then answers that the state is another one.
        """
        sent = 0

        async def remove(fs: Any) -> bool:
            nonlocal sent
            if (await _client_call(fs, path, "head_object"))["ETag"] != mark:
                return False
            sent += 1
            await _client_call(fs, path, "delete_object", IfMatch=mark)
            return True

        try:
            return self._store.request(path, remove)
        except (FileExistsError, FileNotFoundError):
            return sent > 0 and self.head(path) is None

    def remove_many(self, marks: Mapping[str, str]) -> None:
        """See ObjectStore. Stores of others do not all know the request; there each object is removed by itself."""
        paths = list(marks)
        for first in range(0, len(paths), _REMOVALS):
            some = paths[first : first + _REMOVALS]
            try:
                self._remove_together(some)
            except (StorageError, UnsupportedError) as error:
                if error.retryable:
                    raise
                remove_each(self, {path: marks[path] for path in some})

    def _remove_together(self, paths: Sequence[str]) -> None:
        rows = [{"Key": self._store.fs.split_path(path)[1]} for path in paths]
        answer = self._call(paths[0], "delete_objects", Delete={"Objects": rows, "Quiet": True})
        if failed := answer.get("Errors"):
            raise StorageError(
                f"the store removed {len(paths) - len(failed)} of {len(paths)} objects: {failed[0].get('Message', '')}",
                uri=f"s3://{paths[0]}",
                cure="grant these credentials s3:DeleteObject",
            )

    def begin(self, path: str, run: str) -> Upload:
        """See ObjectStore. If the answer is lost, an upload without parts remains, which `uploads` finds."""
        answer = self._call(path, "create_multipart_upload", Metadata={_RUN: run})
        return Upload(path, answer["UploadId"], run)

    def put_part(self, upload: Upload, number: int, data: Sequence[memoryview]) -> Part:
        """See ObjectStore."""
        checksum, nbytes = checksum_of(data), sum(one.nbytes for one in data)
        where = _part_arguments(upload, number)

        def once(seconds: float) -> Part:
            mark, reported = self._sent_plainly(upload.path, data, checksum, where, seconds) or call_async(
                self._store.fs,
                lambda: _part_by_client(self._store.fs, upload.path, data, checksum, where),
                seconds,
            )
            if reported not in ("", checksum):
                raise altered_error(f"s3://{upload.path}", checksum, reported)
            return Part(number, nbytes, mark, reported)

        return self._store.transfer(upload.path, once, nbytes)

    def _sent_plainly(
        self, path: str, data: Sequence[memoryview], checksum: str, where: Mapping[str, Any], seconds: float
    ) -> tuple[str, str] | None:
        """ETag and checksum of a part, sent by this thread; None if only the client can send it."""
        fs = self._store.fs
        request = call_async(fs, lambda: _part_request(fs, path, to_base64(checksum), where), seconds)
        if request is None:
            return None
        answer = exchange(request, seconds, views=data)
        if answer.is_success:
            return answer.headers["etag"], from_base64(answer.headers.get("x-amz-checksum-crc32c"))
        if (error := refusal(answer, path.partition("/")[0], "UploadPart")) is not None:
            raise error
        return None

    def copy_part(self, upload: Upload, number: int, source: str, start: int, stop: int, mark: str) -> Part:
        """See ObjectStore."""
        bucket, key, _version = self._store.fs.split_path(source)
        what = {
            "CopySource": {"Bucket": bucket, "Key": key},
            "CopySourceRange": f"bytes={start}-{stop - 1}",
            "CopySourceIfMatch": mark,
        }
        try:
            answer = self._call(
                upload.path, "upload_part_copy", stop - start, **what, **_part_arguments(upload, number)
            )
        except FileExistsError as error:
            raise FileNotFoundError(f"{source} in the state {mark}") from error
        found = answer["CopyPartResult"]
        return Part(number, stop - start, found["ETag"], from_base64(found.get("ChecksumCRC32C")))

    def copy_object(self, source: str, mark: str, path: str, run: str) -> StoredObject:
        """See ObjectStore. It is an upload of parts that the store copies."""
        found = self.head(source)
        if found is None or found.mark != mark:
            raise FileNotFoundError(f"{source} in the state {mark}")
        if not found.nbytes:
            return self.put_object(path, b"", run)
        upload = self.begin(path, run)
        try:
            return self.assemble(upload, self._copied_parts(upload, source, found.nbytes, mark))
        except Exception:
            with suppress(StorageError):
                self.abort(upload)
            raise

    def _copied_parts(self, upload: Upload, source: str, nbytes: int, mark: str) -> list[Part]:
        size = max(_COPIED, -(-nbytes // self.part_limits.most))

        def copy(number: int) -> Part:
            start = number * size
            return self.copy_part(upload, number, source, start, min(start + size, nbytes), mark)

        with threads.executor(_COPIES, "wherry-copies", numbers=False) as pool:
            return list(pool.map(copy, range(-(-nbytes // size))))

    def parts(self, upload: Upload) -> list[Part]:
        """See ObjectStore. SeaweedFS lists what a part replaced too, in any order."""
        rows: list[Mapping[str, Any]] = []
        after: dict[str, Any] = {}
        while True:
            page = self._call(upload.path, "list_parts", UploadId=upload.key, **after)
            rows += page.get("Parts", ())
            if not page.get("IsTruncated"):
                return _latest_parts(rows)
            after = {"PartNumberMarker": page["NextPartNumberMarker"]}

    def assemble(self, upload: Upload, parts: Sequence[Part], *, create_only: bool = True) -> StoredObject:
        """See ObjectStore."""
        nbytes, checksum = sum(part.nbytes for part in parts), joined_checksum(parts)
        rows = [{"PartNumber": part.number + 1, "ETag": part.mark} for part in parts]
        condition = {"IfNoneMatch": "*"} if create_only else {}
        what = {"UploadId": upload.key, "MultipartUpload": {"Parts": rows}, **condition}
        try:
            answer = self._call(upload.path, "complete_multipart_upload", nbytes, checksum=checksum, **what)
        except (FileExistsError, FileNotFoundError):
            if (found := self._ours(upload.path, upload.run, nbytes, checksum)) is None:
                raise
            self.abort(upload)
            return found
        return _describe(answer, nbytes, upload.run)

    def abort(self, upload: Upload) -> None:
        """See ObjectStore."""
        with suppress(FileNotFoundError):
            self._call(upload.path, "abort_multipart_upload", UploadId=upload.key)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """See ObjectStore. S3 does not tell the metadata of an upload, so their run is empty."""
        bucket, key, _version = self._store.fs.split_path(prefix)
        after: dict[str, Any] = {}
        while True:
            page = self._call(prefix, "list_multipart_uploads", Prefix=key, **after)
            for row in page.get("Uploads", ()):
                begun = row["Initiated"].timestamp() if "Initiated" in row else time.time()
                yield AnonymousUpload(f"{bucket}/{row['Key']}", row["UploadId"], "", begun)
            if not page.get("IsTruncated"):
                return
            after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _call(self, path: str, method: str, nbytes: int = 0, **sent: Any) -> Any:
        return self._store.request(path, lambda fs: _client_call(fs, path, method, **sent), nbytes)

    def _ours(self, path: str, run: str, nbytes: int, checksum: str) -> StoredObject | None:
        """The object at a path, if it is the one that a call sent whose answer was lost."""
        found = self.head(path)
        return found if found is not None and is_same(found, run, nbytes, checksum) else None


async def _client_call(
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
    if method in _CHECKSUMS and _sends_checksums(client):
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


async def _part_request(fs: Any, path: str, checksum: str, where: Mapping[str, Any]) -> BodyRequest | None:
    """The request that puts a part; None if only the client can send it."""
    await fs.set_session()
    if not _sends_checksums(await fs.get_s3(path.partition("/")[0])):
        return None
    headers = {"x-amz-sdk-checksum-algorithm": "CRC32C", "x-amz-checksum-crc32c": checksum}
    stated = {**where, "ChecksumAlgorithm": "CRC32C", "ChecksumCRC32C": checksum}
    return await presign(fs, path, "upload_part", headers, **stated)


async def _part_by_client(
    fs: Any, path: str, data: Sequence[memoryview], checksum: str, where: Mapping[str, Any]
) -> tuple[str, str]:
    """ETag and checksum of a part that the client has sent."""
    answer = await _client_call(fs, path, "upload_part", data=data, checksum=checksum, **where)
    return answer["ETag"], from_base64(answer.get("ChecksumCRC32C"))


def _sends_checksums(client: Any) -> bool:
    return client.meta.config.request_checksum_calculation != "when_required"


def _part_arguments(upload: Upload, number: int) -> dict[str, Any]:
    return {"UploadId": upload.key, "PartNumber": number + 1}


def _body(data: Sequence[memoryview]) -> Body | bytes:
    """A small body as bytes: aiohttp follows a redirect with nothing else, and the error then names the region."""
    return b"".join(data) if sum(map(len, data)) <= _REPEATED else Body(data)


def _latest_parts(rows: Sequence[Mapping[str, Any]]) -> list[Part]:
    """The state of each part that was sent last, by number; none where the time does not tell which one it is."""
    latest: dict[int, tuple[datetime, set[Part]]] = {}
    for row in rows:
        part, moment = _parse_part(row), row.get("LastModified", _UNKNOWN)
        before, states = latest.get(part.number, (moment, set[Part]()))
        if moment >= before:
            latest[part.number] = moment, {part, *(states if moment == before else ())}
    return [
        part for _number, (_moment, states) in sorted(latest.items()) if len(states) == 1 for part in states
    ]


def _parse_part(row: Mapping[str, Any]) -> Part:
    return Part(row["PartNumber"] - 1, row["Size"], row["ETag"], from_base64(row.get("ChecksumCRC32C")))


def _describe(answer: Mapping[str, Any], nbytes: int, run: str) -> StoredObject:
    whole = answer.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
    checksum = from_base64(answer.get("ChecksumCRC32C")) if whole else ""
    return StoredObject(nbytes, answer["ETag"], run, by_algorithm(checksum))
