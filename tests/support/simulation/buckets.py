"""Stores of objects of a simulation: S3, Google Cloud Storage and Azure, as far as wherry's clients of them ask.

Each request is a step of the schedule; its effect is one step that nobody sees in between, and lists show at once
what was put. A store has the rules of its kind: conditions, ETags that are digests of the bytes (S3) or generations
(Google), uploads in parts, parts that are objects (Google), blocks that have no owner (Azure). The clients are the
product's own: they attempt a request again whose answer is lost.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from unittest.mock import patch

from google_crc32c import value as crc32c

from tests.support.simulation.schedule import current
from wherry.errors import StorageError
from wherry.store.amazon import AmazonStore
from wherry.store.azure import AzureStore
from wherry.store.google import GoogleStore
from wherry.store.store import Entry, PartLimits, protocol_of

SMALLEST = 4  # bytes of a part that is not the last
PART = 8  # bytes of a part as the product cuts them here
_ATTEMPTS = 3
_PAUSE = 0.7
_PAGE = 3
_CLOCK = 1.8e9


@dataclass
class Blob:
    """An object.

    Attributes:
        data: its bytes.
        run: of its metadata.
        mark: its state.
        modified: when it was put.
        whole: whether it was put by one request, so that some stores know its checksum.
    """

    data: bytes
    run: str
    mark: str
    modified: float
    whole: bool = True


@dataclass
class Begun:
    """An upload of S3; `maker` is the process that has begun it, None if its run no longer had the target then."""

    path: str
    run: str
    begun: float
    maker: object
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)


@dataclass
class Bucket:
    """All that a store holds.

    Attributes:
        kind: `s3`, `gs` or `az`.
        blobs: path → object; a path begins with the bucket.
        uploads: id → upload (S3).
        blocks: path → uncommitted blocks, by name (Azure).
        known: the paths of all objects that have ever been there.
    """

    simulation: object
    kind: str
    blobs: dict[str, Blob] = field(default_factory=dict)
    uploads: dict[str, Begun] = field(default_factory=dict)
    blocks: dict[str, dict[str, bytes]] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    _states: int = 1000

    def call(self, name, path, effect, *arguments, changes=True):
        return self.simulation.call(name, path, effect, arguments, changes=changes)

    def state(self, data):
        """The mark of a new state."""
        self._states += 1
        if self.kind == "s3":
            return f'"{hashlib.md5(data).hexdigest()}"'
        return str(self._states) if self.kind == "gs" else f'"0x{self._states:X}"'

    def set(self, path, data, run, *, whole=True, mark=""):
        """Create or replace an object."""
        made = Blob(data, run, mark or self.state(data), _CLOCK + self.simulation.now, whole)
        self.blobs[path] = made
        self.known.add(path)
        self.blocks.pop(path, None)
        return made

    def get(self, path):
        """An object; FileNotFoundError if there is none."""
        if path not in self.blobs:
            raise FileNotFoundError(path)
        return self.blobs[path]

    def require(self, path, mark):
        """FileExistsError unless the object is in a state; empty for none."""
        found = self.blobs.get(path)
        if (found.mark if found else "") != mark:
            raise FileExistsError(path)

    def below(self, prefix):
        """The paths with a prefix, sorted."""
        return sorted(path for path in self.blobs if path.startswith(prefix))


def _complete(coroutine):
    """Run a coroutine that never waits for a loop."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("it waits for a loop")


class _SimulatedStore:
    """A store of the product, over a bucket of the simulation."""

    def __init__(self, bucket):
        self.protocol, self.bucket = bucket.kind, bucket
        self.capabilities = protocol_of(bucket.kind).capabilities
        self.policy = SimpleNamespace(timeout=60.0)
        self.fs = {"s3": AmazonService, "gs": GoogleService, "az": AzureService}[bucket.kind](bucket)

    def request(self, path, function, nbytes=0):
        return self._attempted(lambda: _complete(function(self.fs)))

    def transfer(self, path, once, nbytes=0, *, ranged=True):
        return self._attempted(lambda: once(60.0))

    def _attempted(self, once):
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return once()
            except StorageError as error:
                if not error.retryable or attempt == _ATTEMPTS:
                    raise
                current().simulation.sleep(attempt * _PAUSE)
        return None

    def _ask(self, name, path, effect):
        return self._attempted(lambda: self.bucket.call(name, path, effect, changes=False))

    def modified(self, path):
        return self._ask(
            "modified", path, lambda: datetime.fromtimestamp(self.bucket.get(path).modified, UTC)
        )

    def stat(self, path):
        return self._ask("stat", path, lambda: self._entry_at(path))

    def _entry_at(self, path):
        name = path.rpartition("/")[2]
        if (found := self.bucket.blobs.get(path)) is not None:
            return Entry(name, len(found.data), is_dir=False, mark=found.mark)
        return Entry(name, 0, is_dir=True) if self.bucket.below(f"{path}/") else None

    def entries(self, path):
        return self._ask("entries", path, lambda: self._children(path))

    def _children(self, path):
        inside, found = f"{path.rstrip('/')}/", {}
        for below in self.bucket.below(inside):
            name, slash, _rest = below[len(inside) :].partition("/")
            entry = self._entry_at(inside + name) if not slash else Entry(name, 0, is_dir=True)
            found.setdefault(name, entry)
        if not found:
            raise FileNotFoundError(path)
        return [found[name] for name in sorted(found)]

    def page(self, path, start):
        return self._ask("page", path, lambda: self._page_of(f"{path.rstrip('/')}/", start))

    def _page_of(self, inside, start):
        paths = [
            one
            for one in self.bucket.below(inside)
            if one > start or (one == start and self.protocol == "gs")
        ]
        return [(one, self._entry_at(one)) for one in paths[:_PAGE]], len(paths) > _PAGE

    def read(self, path, start, stop):
        return self._ask("read", path, lambda: self.bucket.get(path).data[start:stop])

    def readinto(self, path, start, buffer, mark=""):
        data = self.read(path, start, start + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def put(self, path, data, *, create_only=False):
        raise AssertionError("everything is put by its run")

    def require_bucket(self, path):
        pass

    def probe(self, path):
        pass


class _SimulatedAmazon(_SimulatedStore, AmazonStore):
    pass


class _SimulatedGoogle(_SimulatedStore, GoogleStore):
    pass


class _SimulatedAzure(_SimulatedStore, AzureStore):
    pass


def simulated_store(bucket):
    """The store of a bucket."""
    return {"s3": _SimulatedAmazon, "gs": _SimulatedGoogle, "az": _SimulatedAzure}[bucket.kind](bucket)


def _checksum(data):
    return b64encode(crc32c(bytes(data)).to_bytes(4, "big")).decode()


def _bytes(body):
    return bytes(body) if isinstance(body, bytes) else body.read()


class AmazonService:
    """What the client of S3 does."""

    def __init__(self, bucket):
        self._bucket = bucket
        self.meta = SimpleNamespace(config=SimpleNamespace(request_checksum_calculation="when_supported"))

    async def set_session(self):
        pass

    async def get_s3(self, _bucket):
        return self

    def split_path(self, path):
        bucket, _, key = path.partition("/")
        return bucket, key, None

    def _get_s3_method_kwargs(self, _function, **stated):
        return stated

    def _call(self, name, stated, effect, *arguments, changes=True):
        path = f"{stated['Bucket']}/{stated['Key']}"
        return self._bucket.call(name, path, effect, path, *arguments, changes=changes)

    async def head_object(self, **stated):
        return self._call("head", stated, self._head, changes=False)

    def _head(self, path):
        found = self._bucket.get(path)
        return {
            "ContentLength": len(found.data),
            "ETag": found.mark,
            "Metadata": {"wherry-run": found.run},
            "ChecksumCRC32C": _checksum(found.data),
            "ChecksumType": "FULL_OBJECT",
        }

    async def put_object(self, **stated):
        data, run = _bytes(stated["Body"]), stated["Metadata"]["wherry-run"]
        return self._call("put", stated, self._put, data, run, stated.get("IfMatch", ""))

    def _put(self, path, data, run, mark):
        if mark and path not in self._bucket.blobs:
            raise FileNotFoundError(path)
        self._bucket.require(path, mark)
        return {"ETag": self._bucket.set(path, data, run).mark, "ChecksumCRC32C": _checksum(data)}

    async def delete_object(self, **stated):
        self._call("delete", stated, self._delete, stated["IfMatch"])

    def _delete(self, path, mark):
        self._bucket.require(path, mark)
        del self._bucket.blobs[path]

    async def delete_objects(self, **stated):
        paths = [f"{stated['Bucket']}/{row['Key']}" for row in stated["Delete"]["Objects"]]
        return self._bucket.call("delete-many", " ".join(paths), self._delete_many, paths)

    def _delete_many(self, paths):
        for path in paths:
            self._bucket.blobs.pop(path, None)
        return {}

    async def create_multipart_upload(self, **stated):
        return self._call("begin", stated, self._begin, stated["Metadata"]["wherry-run"])

    def _begin(self, path, run):
        key = f"upload-{len(self._bucket.uploads)}-{self._bucket.simulation.random.randrange(1 << 20)}"
        thread, now = current(), _CLOCK + self._bucket.simulation.now
        held = any(one.run == run for name, one in self._bucket.blobs.items() if name.endswith(".lease"))
        self._bucket.uploads[key] = Begun(path, run, now, thread.process if thread and held else None)
        return {"UploadId": key}

    async def upload_part(self, **stated):
        data = _bytes(stated["Body"])
        return self._call("part", stated, self._part, stated["UploadId"], stated["PartNumber"], data)

    def _part(self, _path, key, number, data):
        upload = self._upload(key)
        mark = f'"{hashlib.md5(data).hexdigest()}"'
        upload.parts[number] = (mark, data)
        return {"ETag": mark, "ChecksumCRC32C": _checksum(data)}

    def _upload(self, key):
        if key not in self._bucket.uploads:
            raise FileNotFoundError(key)
        return self._bucket.uploads[key]

    async def upload_part_copy(self, **stated):
        origin, mark = stated["CopySource"], stated["CopySourceIfMatch"]
        start, stop = stated["CopySourceRange"].removeprefix("bytes=").split("-")

        def copy(path):
            found = self._bucket.get(f"{origin['Bucket']}/{origin['Key']}")
            if found.mark != mark:
                raise FileExistsError(path)
            data = found.data[int(start) : int(stop) + 1]
            return {"CopyPartResult": self._part(path, stated["UploadId"], stated["PartNumber"], data)}

        return self._call("part-copy", stated, copy)

    async def list_parts(self, **stated):
        return self._call("parts", stated, self._parts, stated["UploadId"], changes=False)

    def _parts(self, _path, key):
        rows = sorted(self._upload(key).parts.items())
        return {
            "Parts": [
                {"PartNumber": number, "Size": len(data), "ETag": mark, "ChecksumCRC32C": _checksum(data)}
                for number, (mark, data) in rows
            ]
        }

    async def complete_multipart_upload(self, **stated):
        rows, condition = stated["MultipartUpload"]["Parts"], stated.get("IfNoneMatch", "")
        return self._call("assemble", stated, self._assemble, stated["UploadId"], rows, condition)

    def _assemble(self, path, key, rows, condition):
        upload = self._upload(key)
        parts = [upload.parts.get(row["PartNumber"], ("", b"")) for row in rows]
        if [mark for mark, _data in parts] != [row["ETag"] for row in rows]:
            raise FileNotFoundError("InvalidPart")
        if any(len(data) < SMALLEST for _mark, data in parts[:-1]):
            raise StorageError("EntityTooSmall", cure="send larger parts")
        if condition:
            self._bucket.require(path, "")
        data = b"".join(data for _mark, data in parts)
        mark = f'"{hashlib.md5(data).hexdigest()}-{len(parts)}"'
        self._bucket.set(path, data, upload.run, mark=mark)
        del self._bucket.uploads[key]
        return {"ETag": mark, "ChecksumCRC32C": _checksum(data), "ChecksumType": "FULL_OBJECT"}

    async def abort_multipart_upload(self, **stated):
        self._call("abort", stated, self._abort, stated["UploadId"])

    def _abort(self, _path, key):
        self._upload(key)
        del self._bucket.uploads[key]

    async def list_multipart_uploads(self, **stated):
        prefix = f"{stated['Bucket']}/{stated['Prefix']}"
        return self._bucket.call("uploads", prefix, self._list_uploads, prefix, changes=False)

    def _list_uploads(self, prefix):
        rows = sorted(self._bucket.uploads.items(), key=lambda row: (row[1].path, row[0]))
        return {
            "Uploads": [
                {
                    "Key": one.path.partition("/")[2],
                    "UploadId": key,
                    "Initiated": datetime.fromtimestamp(one.begun, UTC),
                }
                for key, one in rows
                if one.path.startswith(prefix)
            ]
        }


class GoogleService:
    """What gcsfs does with the JSON interface."""

    _location = "https://store"

    def __init__(self, bucket):
        self._bucket = bucket

    async def _call(self, method, path, *names, json_out=False, json=None, data=None, headers=None, **how):
        place = "/".join(names)
        if "upload/" in path:
            return self._bucket.call("put", *self._insertion(names[0], data, headers, how))
        if path.endswith("/compose"):
            return self._bucket.call("compose", place, self._compose, names[0], place, json, how)
        if method == "DELETE":
            return self._bucket.call("delete", place, self._delete, place, how.get("ifGenerationMatch"))
        if len(names) == 1:
            prefix = f"{place}/{how['prefix']}"
            return self._bucket.call(
                "list", prefix, self._list, prefix, how.get("pageToken", ""), changes=False
            )
        return self._bucket.call(
            "head", place, lambda: self._row(place, self._bucket.get(place)), changes=False
        )

    def _row(self, path, found):
        bucket, _, name = path.partition("/")
        return {
            "bucket": bucket, "name": name, "size": str(len(found.data)), "generation": found.mark,
            "crc32c": _checksum(found.data), "metadata": {"wherry-run": found.run},
        }  # fmt: skip

    def _insertion(self, bucket, body, headers, how):
        boundary = headers["Content-Type"].partition('boundary="')[2].rstrip('"')
        _, head, rest = _bytes(body).split(f"--{boundary}".encode(), 2)
        row = json.loads(head.partition(b"\r\n\r\n")[2])
        data = rest.partition(b"\r\n\r\n")[2].removesuffix(f"\r\n--{boundary}--".encode())
        path = f"{bucket}/{row['name']}"
        return path, self._insert, path, data, row["metadata"]["wherry-run"], how["ifGenerationMatch"]

    def _insert(self, path, data, run, generation):
        self._bucket.require(path, "" if generation == "0" else generation)
        return self._row(path, self._bucket.set(path, data, run))

    def _compose(self, bucket, path, stated, how):
        parts = []
        for row in stated["sourceObjects"]:
            found = self._bucket.get(f"{bucket}/{row['name']}")
            if found.mark != row["objectPreconditions"]["ifGenerationMatch"]:
                raise FileExistsError(row["name"])
            parts.append(found.data)
        if "ifGenerationMatch" in how:
            self._bucket.require(path, "")
        run = stated["destination"]["metadata"]["wherry-run"]
        return self._row(path, self._bucket.set(path, b"".join(parts), run, whole=False))

    def _delete(self, path, generation):
        found = self._bucket.get(path)
        if generation is not None and found.mark != generation:
            raise FileExistsError(path)
        del self._bucket.blobs[path]

    def _list(self, prefix, after):
        paths = [path for path in self._bucket.below(prefix) if path > after]
        token = {"nextPageToken": paths[_PAGE - 1]} if len(paths) > _PAGE else {}
        return {"items": [self._row(path, self._bucket.blobs[path]) for path in paths[:_PAGE]], **token}


class AzureService:
    """What the client of Azure does."""

    def __init__(self, bucket):
        self._bucket = bucket
        self.service_client = self

    def get_blob_client(self, container, name):
        return BlobClient(self._bucket, f"{container}/{name}")

    def get_container_client(self, container):
        return SimpleNamespace(
            list_blobs=lambda name_starts_with, include: self._list(container, name_starts_with)
        )

    async def _list(self, container, prefix):
        start = f"{container}/{prefix}"
        rows = self._bucket.call("list", start, self._rows, start, changes=False)
        for path, size in rows:
            yield SimpleNamespace(name=path.partition("/")[2], size=size)

    def _rows(self, start):
        sizes = {path: 0 for path in self._bucket.blocks if path.startswith(start)}
        return sorted(
            (sizes | {path: len(self._bucket.blobs[path].data) for path in self._bucket.below(start)}).items()
        )


class BlobClient:
    """The client of one blob."""

    def __init__(self, bucket, path):
        self._bucket, self._path, self.url = bucket, path, path

    def _call(self, name, effect, *arguments, changes=True):
        return self._bucket.call(name, self._path, effect, *arguments, changes=changes)

    def _meet(self, how):
        if "match_condition" in how:
            self._bucket.require(self._path, how.get("etag", ""))

    async def upload_blob(self, data, metadata, **how):
        return self._call("put", self._put, bytes(data), metadata["wherry_run"], how)

    def _put(self, data, run, how):
        self._meet(how)
        return {
            "etag": self._bucket.set(self._path, data, run).mark,
            "content_md5": hashlib.md5(data).digest(),
        }

    async def get_blob_properties(self):
        return self._call("head", self._properties, changes=False)

    def _properties(self):
        found = self._bucket.get(self._path)
        md5 = hashlib.md5(found.data).digest() if found.whole else None
        return SimpleNamespace(
            size=len(found.data), etag=found.mark, metadata={"wherry_run": found.run},
            content_settings=SimpleNamespace(content_md5=md5), copy=SimpleNamespace(status=None),
        )  # fmt: skip

    async def delete_blob(self, **how):
        self._call("delete", self._delete, how)

    def _delete(self, how):
        self._bucket.get(self._path)
        self._meet(how)
        del self._bucket.blobs[self._path]

    async def stage_block(self, name, data, **_how):
        return self._call("part", self._stage, name, _bytes(data))

    def _stage(self, name, data):
        self._bucket.blocks.setdefault(self._path, {})[name] = data
        return {"content_md5": hashlib.md5(data).digest()}

    async def get_block_list(self, _which):
        return self._call("parts", self._blocks, changes=False)

    def _blocks(self):
        if self._path not in self._bucket.blobs and self._path not in self._bucket.blocks:
            raise FileNotFoundError(self._path)
        blocks = self._bucket.blocks.get(self._path, {})
        return [], [SimpleNamespace(id=name, size=len(data)) for name, data in blocks.items()]

    async def commit_block_list(self, blocks, metadata, **how):
        return self._call(
            "assemble", self._commit, [block.id for block in blocks], metadata["wherry_run"], how
        )

    def _commit(self, names, run, how):
        self._meet(how)
        blocks = self._bucket.blocks.get(self._path, {})
        if any(name not in blocks for name in names):
            raise FileNotFoundError("InvalidBlockList")
        data = b"".join(blocks[name] for name in names)
        return {"etag": self._bucket.set(self._path, data, run, whole=False).mark}

    async def start_copy_from_url(self, url, metadata, source_etag, **how):
        how.pop("source_match_condition")
        self._call("copy", self._copy, url, source_etag, metadata["wherry_run"], how)

    def _copy(self, source, mark, run, how):
        found = self._bucket.get(source)
        if found.mark != mark:
            raise FileExistsError(source)
        self._meet(how)
        self._bucket.set(self._path, found.data, run, whole=found.whole)


@contextmanager
def simulated_buckets():
    """Let the clients of the product ask the stores of simulations, with parts of a few bytes."""

    def call(_fs, make, _seconds):
        return _complete(make())

    with ExitStack() as stack:
        replace = stack.enter_context
        for module in ("amazon", "google"):
            replace(patch(f"wherry.store.{module}.call_async", call))
        replace(patch("wherry.store.amazon.AmazonStore._sent_plainly", lambda *_: None))
        replace(patch("wherry.store.google.GoogleStore._sent_plainly", lambda *_: None))
        for module, name in (("amazon", "AmazonStore"), ("google", "GoogleStore"), ("azure", "AzureStore")):
            smallest = SMALLEST if module == "amazon" else 1
            replace(patch(f"wherry.store.{module}.{name}.part_limits", PartLimits(smallest, 1 << 20, 100)))
        for module in ("uploaded_file", "upload_run"):
            replace(patch(f"wherry.target.{module}.PART_BYTES", PART))
        yield
