"""azure: az://, block blobs of Azure, with the client of azure-storage-blob that adlfs opens.

The account and its credentials are those that adlfs finds: `AZURE_STORAGE_CONNECTION_STRING`, or
`AZURE_STORAGE_ACCOUNT_NAME` with a key, a token or the login of `az login`. The client of Azure attempts each request
four times within half a minute; here it attempts once, and `wherry.store.waits` repeats.

The parts of an upload are uncommitted blocks of the blob that they become; `Put Block List` makes it of them on the
condition that no blob is there. The service compares the MD5 of each block with the bytes that it receives; of a blob
that is made of blocks it computes no checksum.

The blocks of all uploads to a blob lie together at its name, and the service tells of each only its name and its size.
So the name says the rest, in fields of fixed width, because all blocks of a blob must have names of the same length:

    12  key of the upload, hex
     5  number of the part; `begin` for the block with which the upload began
    11  milliseconds since 1970, hex: of two blocks for one part, the later one counts
    32  MD5 of the bytes, hex, which the service has compared with what it received; of the first block, the run

Nothing removes blocks but a blob that is put at their name. So an upload that is aborted becomes an empty blob, which
is removed at once; with it go the blocks of other uploads to that name. Where a blob exists, it is not touched: the
service itself removes such blocks a week after the last one was sent.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from uuid import uuid4

from wherry.core.lazy_dataclass import dataclass
from wherry.errors import StorageError, UsageError
from wherry.store.addresses import guard
from wherry.store.content import MD5, Body, by_algorithm, checksum_of, is_same
from wherry.store.failures import AZURE, altered_error
from wherry.store.remote_store import ObjectStore, RangedStore
from wherry.store.store import Part, PartLimits, StoredObject, Upload
from wherry.store.transfers import CONNECT_SECONDS, BufferFill
from wherry.store.waits import waiting

_BEGIN = "begin"
_PADDING = "."
_FIELDS = re.compile(r"([0-9a-f]{12})(\d{5}|begin)([0-9a-f]{11})(.{32})")
_RUN_ID = re.compile(r"[\w-]{1,32}", re.ASCII)  # that fits into the name of a block
_ACCOUNTS = ("account_name", "connection_string")  # options of adlfs, one of which names the account
_RUN = "wherry_run"  # key of the metadata, which must be an identifier
_PENDING, _DONE = "pending", "success"  # states of a copy
_LOOK_SECONDS = 0.5  # between two looks at a copy


@dataclass(frozen=True, slots=True)
class BlockName:
    """The facts in the name of a block.

    Attributes:
        text: the name.
        key: of the upload.
        number: of the part; None for the block with which the upload began.
        milliseconds: when it was sent.
        rest: MD5 of its bytes; of the first block the run, empty if its id does not fit.
    """

    text: str
    key: str
    number: int | None
    milliseconds: int
    rest: str


def first_block(key: str, run: str) -> str:
    """The name of the block with which an upload begins."""
    said = run if _RUN_ID.fullmatch(run) else ""
    return f"{key}{_BEGIN}{0:011x}{said:{_PADDING}<32}"


def part_block(key: str, number: int, md5: str) -> str:
    """The name of the block of a part that is sent now."""
    return f"{key}{number:05d}{time.time_ns() // 10**6:011x}{md5}"


def parse_block_name(name: str) -> BlockName | None:
    """The facts that a block's name states; None for a block of another program."""
    found = _FIELDS.fullmatch(name)
    if found is None:
        return None
    key, number, milliseconds, rest = found.groups()
    count = None if number == _BEGIN else int(number)
    return BlockName(name, key, count, int(milliseconds, 16), rest.rstrip(_PADDING))


def parts_of(blocks: Iterable[tuple[BlockName, int]]) -> list[Part]:
    """The parts of an upload, by number.

    Args:
        blocks: its blocks with their sizes in bytes.
    """
    found: dict[int, Part] = {}
    for name, nbytes in sorted(blocks, key=lambda block: block[0].milliseconds):
        if name.number is not None:
            found[name.number] = Part(name.number, nbytes, name.text, f"md5:{name.rest}")
    return [found[number] for number in sorted(found)]


class NoCredentialsError(Exception):
    """No account is named, and so no credentials are either."""


@cache
def _kind(timeout: float) -> Any:
    """The class of adlfs with one attempt for each request; fsspec keeps one file system for each class."""
    from adlfs import AzureBlobFileSystem
    from azure.core.pipeline.transport import AioHttpTransport
    from azure.storage.blob.aio import BlobServiceClient

    options: dict[str, Any] = {
        "retry_total": 0,
        "connection_timeout": min(CONNECT_SECONDS, timeout),
        "read_timeout": timeout,
    }

    class CheckedTransport(AioHttpTransport):
        async def open(self) -> None:
            await super().open()
            session: Any = self.session
            if "_resolve_host" not in vars(session.connector):
                guard(session, configured=True)

    class OneAttempt(AzureBlobFileSystem):
        def do_connect(self) -> None:
            super().do_connect()
            opened: Any = self.service_client
            self.service_client = BlobServiceClient(
                opened.url, credential=opened.credential, transport=CheckedTransport(**options), **options
            )

    return OneAttempt


def _has_account() -> bool:
    """Whether the environment, or the user's configuration of fsspec, names an account."""
    from fsspec.config import conf

    stated = {name for protocol in AZURE for name in conf.get(protocol, {})}
    return any(os.environ.get(f"AZURE_STORAGE_{name.upper()}") or name in stated for name in _ACCOUNTS)


class AzureStore(RangedStore, ObjectStore):
    """Block blobs of Azure."""

    part_limits = PartLimits(1, 4000 << 20, 50_000)  # of blocks
    aborts_apart = False
    algorithm = MD5

    def begin(self, path: str, run: str) -> Upload:
        """See Store."""
        upload = Upload(path, uuid4().hex[:12], run)
        name = first_block(upload.key, run)
        self.request(path, lambda fs: _blob(fs, path).stage_block(name, b"\0"))
        return upload

    def put_part(self, upload: Upload, number: int, data: Sequence[memoryview]) -> Part:
        """See Store. That the upload no longer exists is noticed when it is assembled."""
        nbytes, checksum = sum(one.nbytes for one in data), checksum_of(data, MD5)
        if not nbytes:  # there are no empty blocks
            return Part(number, 0, "", checksum)
        md5 = checksum.partition(":")[2]
        name = part_block(upload.key, number, md5)
        how = {"length": nbytes, "transactional_content_md5": bytearray.fromhex(md5)}

        async def send(fs: Any) -> Part:
            answer = await _blob(fs, upload.path).stage_block(name, Body(data), **how)
            reported = _reported_md5(answer.get("content_md5"))
            if reported not in ("", checksum):
                raise altered_error(f"{self.protocol}://{upload.path}", checksum, reported)
            return Part(number, nbytes, name, reported)

        return self.request(upload.path, send, nbytes)

    def parts(self, upload: Upload) -> list[Part]:
        """See Store."""
        blocks = [block for block in self._blocks(upload.path) if block[0].key == upload.key]
        if not blocks:
            raise FileNotFoundError(f"no upload {upload.key} of {upload.path}")
        return parts_of(blocks)

    def abort(self, upload: Upload) -> None:
        """See Store. Nothing is removed where a blob exists; the service removes its blocks after a week.

        If this process ends here, the empty blob carries the id of the upload's run: the removal of that run's
        leftovers finds it.
        """
        try:
            self.parts(upload)
            emptied = self.assemble(replace(upload, run=upload.run or uuid4().hex), [])
        except (FileExistsError, FileNotFoundError):
            return
        self.remove_object(upload.path, emptied.mark)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """See Store. All blobs with the prefix are listed; those of blobs that exist are not found."""

        async def empty(fs: Any) -> list[str]:
            container, _, name = prefix.partition("/")
            found = fs.service_client.get_container_client(container).list_blobs(
                name_starts_with=name, include=["uncommittedblobs"]
            )
            return [f"{container}/{one.name}" async for one in found if not one.size]

        for path in self.request(prefix, empty):
            try:
                blocks = self._blocks(path)
            except FileNotFoundError:
                continue  # it was removed meanwhile
            runs = {name.key: name.rest if name.number is None else "" for name, _nbytes in reversed(blocks)}
            yield from (Upload(path, key, run) for key, run in runs.items())

    def _open(self, timeout: float) -> Any:
        kind = _kind(timeout)
        if not _has_account():
            raise NoCredentialsError("no storage account is named")
        try:
            return kind()
        except ValueError as error:
            raise UsageError(
                "the connection string or the key of the Azure account is malformed",
                cure="set AZURE_STORAGE_CONNECTION_STRING as the page Access keys of the account shows it",
            ) from error

    async def _list_one(self, bucket: str) -> None:
        found = self.fs.service_client.get_container_client(bucket).list_blobs(results_per_page=1)
        async for _one in found:
            return

    def _rows(self, path: str, full: str) -> list[dict[str, Any]]:
        """The children of a folder, as `ls` of fsspec tells them; adlfs lists all folders whose names begin alike."""
        container, _, name = full.strip("/").partition("/")

        async def listed(fs: Any) -> list[dict[str, Any]]:
            client = fs.service_client.get_container_client(container)
            how = {"name_starts_with": f"{name}/" if name else "", "include": ["metadata"], "delimiter": "/"}
            return await fs._details([one async for one in client.walk_blobs(**how)])  # noqa: SLF001  the rows of `ls`

        rows = self.request(path, listed)
        if name and not rows:
            raise FileNotFoundError(path)
        # Where folders are blobs too, a folder is listed twice.
        rows.sort(key=lambda row: row["type"] == "directory")
        return list({row["name"]: row for row in rows}.values())

    async def _receive(self, path: str, start: int, into: BufferFill, mark: str) -> None:
        how = _in_state(mark) if mark else {}
        answer = await _blob(self.fs, path).download_blob(
            offset=start, length=into.size, max_concurrency=1, **how
        )
        async for block in answer.chunks():
            into.add(block)

    def _put(
        self, path: str, data: Sequence[memoryview], checksum: str, run: str, replaces: str
    ) -> StoredObject:
        del checksum  # its client computes another
        whole = b"".join(data)  # its client takes no pieces
        how = {"metadata": {_RUN: run}, "overwrite": True, "validate_content": True, **_in_state(replaces)}

        async def send(fs: Any) -> StoredObject:
            answer = await _blob(fs, path).upload_blob(whole, **how)
            checksums = by_algorithm(_reported_md5(answer.get("content_md5")))
            return StoredObject(len(whole), _quote(answer["etag"]), run, checksums)

        return self.request(path, send, len(whole))

    async def _look(self, fs: Any, path: str) -> StoredObject:
        return _describe(await _blob(fs, path).get_blob_properties())

    async def _delete(self, fs: Any, path: str, mark: str) -> None:
        await _blob(fs, path).delete_blob(**_in_state(mark))

    def _assemble(self, upload: Upload, parts: Sequence[Part]) -> StoredObject:
        """If blocks are missing, a blob is looked for: one that appears removes all blocks at its name."""
        path, nbytes = upload.path, sum(part.nbytes for part in parts)

        async def join(fs: Any) -> StoredObject:
            from azure.storage.blob import BlobBlock

            blocks = [BlobBlock(part.mark) for part in parts if part.nbytes]
            how = {"metadata": {_RUN: upload.run}, **_in_state("")}
            answer = await _blob(fs, path).commit_block_list(blocks, **how)
            return StoredObject(nbytes, _quote(answer["etag"]), upload.run)

        try:
            if not nbytes:
                self.parts(upload)  # a list without blocks is always accepted
            return self.request(path, join)
        except (FileExistsError, FileNotFoundError) as error:
            if self.head(path) is not None:
                raise FileExistsError(path) from error
            raise FileNotFoundError(f"no upload {upload.key} of {path}") from error

    def _copy(
        self, source: str, found: StoredObject, path: str, run: str, guard: Callable[[], None]
    ) -> StoredObject:
        """A copy that the service has not finished when it answers is waited for."""
        origin = {f"source_{name}": value for name, value in _in_state(found.mark).items()}
        how = {"metadata": {_RUN: run}, **origin, **_in_state("")}

        async def copy(fs: Any) -> None:
            await _blob(fs, path).start_copy_from_url(_blob(fs, source).url, **how)

        guard()
        try:
            self.request(path, copy)
        except FileExistsError as error:
            if (there := self.head(path)) is None:
                raise FileNotFoundError(f"{source} in the state {found.mark}") from error
            if not is_same(there, run, found.nbytes, ""):
                raise
        with waiting(f"{self.protocol}://{path}", what="the store to copy the object"):
            return self._await_copy(path)

    def _await_copy(self, path: str) -> StoredObject:
        """The object that a copy makes, once it is whole.

        Raises:
            StorageError: the copy failed, or makes no progress; nothing is left of it.
        """
        seen, since = "", time.monotonic()
        while True:
            found = self._properties(path)
            if found.copy.status in (None, _DONE):
                return _describe(found)
            if found.copy.progress != seen:
                seen, since = found.copy.progress, time.monotonic()
            slow = time.monotonic() - since > self.policy.timeout
            if found.copy.status != _PENDING or slow:
                break
            time.sleep(_LOOK_SECONDS)
        if found.copy.status == _PENDING:
            self.request(path, lambda fs: _blob(fs, path).abort_copy(found.copy.id))
        if left := self.head(path):
            self.remove_object(path, left.mark)
        what = f"the store has not copied the object: {found.copy.status_description or found.copy.status}"
        uri = f"{self.protocol}://{path}"
        raise StorageError(what, uri=uri, cure="run it again later", retryable=True)

    def _properties(self, path: str) -> Any:
        return self.request(path, lambda fs: _blob(fs, path).get_blob_properties())

    def _blocks(self, path: str) -> list[tuple[BlockName, int]]:
        """Our blocks at a name that are not part of a blob, with their sizes in bytes.

        Raises:
            FileNotFoundError: there is neither a blob nor a block.
        """
        _committed, found = self.request(path, lambda fs: _blob(fs, path).get_block_list("uncommitted"))
        names = [(parse_block_name(block.id), block.size) for block in found]
        return [(name, nbytes) for name, nbytes in names if name is not None]


def _blob(fs: Any, path: str) -> Any:
    """The client of a blob, which shares the connections of the file system."""
    container, _, name = path.partition("/")
    return fs.service_client.get_blob_client(container, name)


def _in_state(mark: str) -> dict[str, Any]:
    """The condition that a blob is in a state; that there is none, if it is empty."""
    from azure.core import MatchConditions

    if not mark:
        return {"match_condition": MatchConditions.IfMissing}
    return {"etag": mark, "match_condition": MatchConditions.IfNotModified}


def _describe(found: Any) -> StoredObject:
    """An object as the service describes it; a blob of blocks has no MD5, unless its author has stated one."""
    metadata = {key.lower(): value for key, value in (found.metadata or {}).items()}
    checksums = by_algorithm(_reported_md5(found.content_settings.content_md5))
    return StoredObject(found.size, _quote(found.etag), metadata.get(_RUN, ""), checksums)


def _quote(etag: str) -> str:
    """An ETag in quotes, as in entries of adlfs; the service states it with them or without."""
    return f'"{etag.strip(chr(34))}"'


def _reported_md5(md5: bytes | None) -> str:
    """An MD5 as text; empty if the service reports none."""
    return f"{MD5}:{bytes(md5).hex()}" if md5 else ""
