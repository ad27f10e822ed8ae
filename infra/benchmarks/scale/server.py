"""The double: a server with as much of the interface of S3 as wherry and its libraries use.

    python -m benchmarks.scale.server --size 4000000000 --rate 4000000 --workers 8     prints its port

Buckets are `source`, which is generated and read-only, and any other, of whose objects checksums are kept. Signatures
are not checked: an access key only says which worker asks. `GET /-/tally` answers what was counted.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import hashlib
import json
import math
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

import numpy as np
from google_crc32c import extend

from wherry.core.tensorspec import TensorSpec
from wherry.integrations.containers.safetensors import header
from wherry.integrations.formats.huggingface.weights import spread_tensors
from wherry.store.content import combine
from wherry.target import parts

SOURCE = "source/model"
BLOCK = 1_048_583  # bytes; a prime number
_PHASE = 7919  # bytes between the phases of two files
_ROWS = 32  # extents are multiples of it
KEPT_WHOLE = 8 << 20  # bytes of an object that is put in one request
KEPT_HEAD = 1 << 20  # bytes of an upload in parts
KEPT_ASIDE = 64 << 20  # bytes of an object that a run puts aside, and reads again itself
PAGE = 1000  # entries of a listing
_PIECE = 128 << 10  # bytes that pass a cap at a time
_BURST = 0.05  # seconds that a cap that was idle may make up for
_GATE_SECONDS = 120.0  # a worker that never comes holds up the others no longer


# ---- The source: a Hugging Face checkpoint of any size whose tensors are generated on read, from a seed


class Served(Protocol):
    """An object of which the bytes come from somewhere else."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...

    @property
    def etag(self) -> str:
        """Names its state."""
        ...

    def pieces(self, start: int, stop: int, most: int) -> Iterator[memoryview]:
        """The bytes of a range, as views of at most some bytes."""
        ...


@dataclass(frozen=True, slots=True)
class GeneratedFile:
    """A file that begins with a real header; behind it lies a block of random bytes, again and again.

    The length of the block is a prime number, so two leaves of 4 MiB of one file are never equal, and a leaf that
    lands in the wrong place has another hash. Serving costs no arithmetic: answers are views of the block.

    Attributes:
        head: its first bytes.
        nbytes: its size.
        phase: offset in the block of the first byte after the head; each file has another one.
        block: what is repeated.
    """

    head: bytes
    nbytes: int
    phase: int
    block: memoryview

    @property
    def etag(self) -> str:
        """Names its contents."""
        return _etag(self.head + repr((self.nbytes, self.phase)).encode())

    def pieces(self, start: int, stop: int, most: int) -> Iterator[memoryview]:
        """The bytes of a range, as views of at most some bytes."""
        while start < min(stop, len(self.head)):
            end = min(stop, len(self.head), start + most)
            yield memoryview(self.head)[start:end]
            start = end
        while start < stop:
            at = (start - len(self.head) + self.phase) % BLOCK
            end = min(stop, start + most, start + BLOCK - at)
            yield self.block[at : at + end - start]
            start = end


def checkpoint(size: int, layers: int = 64) -> dict[str, GeneratedFile]:
    """The files of a checkpoint of about a size, by name: layers of four matrices and a vector each, in 16 shards.

    Every layer has matrices of the same shape, so that units are alike.
    """
    side = _side(size, layers)
    specs: list[TensorSpec] = []
    for layer in range(layers):
        at = f"model.layers.{layer}"
        matrices = (f"{at}.{name}.weight" for name in ("q_proj", "k_proj", "up_proj", "down_proj"))
        specs += [TensorSpec((name,), (side, side), "bfloat16") for name in matrices]
        specs.append(TensorSpec((f"{at}.norm.weight",), (side,), "bfloat16"))
    plan = spread_tensors(specs, -(-size // 16), "model")
    block = memoryview(np.random.Generator(np.random.Philox(0)).bytes(BLOCK))
    found: dict[str, GeneratedFile] = {}
    for number, (name, group) in enumerate(plan.files.items()):
        head = header.build(header.in_order(group), {"format": "pt"})
        nbytes = len(head) + sum(map(header.stored_bytes, group))
        found[name] = GeneratedFile(head, nbytes, number * _PHASE % BLOCK, block)
    assert plan.index is not None, "there are several files"
    index, contents = plan.index
    config = json.dumps({"architectures": ["Generated"]}).encode()
    for name, text in ((index, contents()), ("config.json", config)):
        found[name] = GeneratedFile(text, len(text), 0, block)
    return found


def layer_bytes(size: int, layers: int) -> int:
    """Bytes of one layer of a checkpoint of about a size."""
    side = _side(size, layers)
    return 2 * (4 * side + 1) * side


def _side(size: int, layers: int) -> int:
    return max(_ROWS, round(math.sqrt(size / (2 * 4 * layers)) / _ROWS) * _ROWS)


@dataclass(frozen=True, slots=True)
class FolderFile:
    """A file of a folder that is served as a bucket: of sparse files plans read the metadata."""

    path: str
    nbytes: int
    etag: str

    def pieces(self, start: int, stop: int, most: int) -> Iterator[memoryview]:
        """The bytes of a range, as views of at most some bytes."""
        with open(self.path, "rb") as file:  # noqa: PTH123  there are thousands
            file.seek(start)
            while start < stop:
                piece = file.read(min(most, stop - start))
                yield memoryview(piece)
                start += len(piece)


def folder_files(folder: Path, bucket: str) -> dict[str, Served]:
    """Every file below a folder, by `bucket/key`."""
    found: dict[str, Served] = {}
    for above, _folders, names in os.walk(folder):
        for name in names:
            path = os.path.join(above, name)  # noqa: PTH118  there are thousands
            state = os.stat(path)  # noqa: PTH116
            key = os.path.relpath(path, folder).replace(os.sep, "/")
            etag = f'"{state.st_mtime_ns:x}-{state.st_size:x}"'
            found[f"{bucket}/{key}"] = FolderFile(path, state.st_size, etag)
    return found


# ---- What is kept of what is sent: size, CRC-32C and first bytes; small objects whole


@dataclass(slots=True)
class Kept:
    """The body of a request, as far as it has come; then a part or an object.

    Attributes:
        kept: how many of its first bytes are kept.
        nbytes, crc: of all of them.
        metadata: that the creator of an object has given it.
        marked: the ETag of an object of parts.
    """

    kept: int
    nbytes: int = 0
    crc: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    marked: str = ""
    _pieces: list[bytes] = field(default_factory=list[bytes])

    def add(self, piece: bytes) -> None:
        """Take the next bytes."""
        self.crc = extend(self.crc, piece)
        if self.nbytes < self.kept:
            self._pieces.append(piece[: self.kept - self.nbytes])
        self.nbytes += len(piece)

    @property
    def head(self) -> bytes:
        """The first bytes."""
        return b"".join(self._pieces)

    @property
    def checksum(self) -> str:
        """CRC-32C as S3 writes it."""
        return base64.b64encode(self.crc.to_bytes(4, "big")).decode()

    @property
    def etag(self) -> str:
        """Changes with the bytes."""
        return self.marked or _etag(repr([(self.crc, self.nbytes)]).encode())

    @classmethod
    def of_parts(cls, found: Sequence[Kept], metadata: Mapping[str, str]) -> Kept:
        """The object that parts become."""
        crc = 0
        for part in found:
            crc = combine(crc, part.crc, part.nbytes, "CRC-32C")
        etag = f'{_etag(repr([(part.crc, part.nbytes) for part in found]).encode())[:-1]}-{len(found)}"'
        nbytes = sum(part.nbytes for part in found)
        return cls(found[0].kept, nbytes, crc, metadata, etag, [found[0].head])


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


class RefusedError(Exception):
    """An answer of S3 that is an error: status, code."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class Objects:
    """All objects, by `bucket/key`, and the uploads that are not complete; one lock guards them all.

    Args:
        source: objects that are read-only.
    """

    def __init__(self, source: Mapping[str, Served]) -> None:
        self.source, self._kept, self._ids = source, dict[str, Kept](), count()
        self._uploads: dict[str, tuple[str, Mapping[str, str], dict[int, Kept]]] = {}  # key, metadata, parts
        self._lock = threading.RLock()

    def get(self, path: str) -> Served | Kept:
        """The object at a path.

        Raises:
            RefusedError: there is none.
        """
        with self._lock:
            found = self._kept.get(path) or self.source.get(path)
        if found is None:
            raise RefusedError(404, "NoSuchKey")
        return found

    def put(self, path: str, body: Kept, metadata: Mapping[str, str], headers: Mapping[str, str]) -> None:
        """Put an object in one request, under the conditions of its headers."""
        with self._lock:
            self._require(path, headers)
            body.metadata = metadata
            self._kept[path] = body

    def remove(self, path: str, headers: Mapping[str, str]) -> None:
        """Remove an object, if it is there."""
        with self._lock:
            if path in self._kept:
                self._require(path, headers)
                del self._kept[path]

    def begin(self, path: str, metadata: Mapping[str, str]) -> str:
        """Begin an upload in parts; its id."""
        with self._lock:
            name = f"upload-{next(self._ids)}"
            self._uploads[name] = (path, metadata, {})
        return name

    def add_part(self, upload: str, number: int, body: Kept) -> None:
        """Keep a part."""
        with self._lock:
            self._upload(upload)[2][number] = body

    def complete(self, upload: str, rows: Sequence[tuple[int, str]], headers: Mapping[str, str]) -> Kept:
        """Make the object of an upload from parts, each named by its number and ETag, under the headers' conditions."""
        with self._lock:
            key, metadata, there = self._upload(upload)
            self._require(key, headers)
            found = [there[number] for number, etag in rows if number in there and there[number].etag == etag]
            if not rows or len(found) < len(rows):
                raise RefusedError(400, "InvalidPart")
            made = self._kept[key] = Kept.of_parts(found, metadata)
            del self._uploads[upload]
        return made

    def abort(self, upload: str) -> None:
        """Forget an upload."""
        with self._lock:
            self._upload(upload)
            del self._uploads[upload]

    def parts_of(self, upload: str) -> list[tuple[int, Kept]]:
        """The parts of an upload, in order."""
        with self._lock:
            return sorted(self._upload(upload)[2].items(), key=lambda one: one[0])

    def uploads(self, prefix: str) -> list[tuple[str, str]]:
        """Path and id of each upload under a prefix."""
        with self._lock:
            return sorted((key, name) for name, (key, *_) in self._uploads.items() if key.startswith(prefix))

    def listed(self, prefix: str) -> list[tuple[str, Served | Kept]]:
        """Path and object under a prefix, in order."""
        with self._lock:
            every = {**self.source, **self._kept}
        return [(path, every[path]) for path in sorted(every) if path.startswith(prefix)]

    def _upload(self, upload: str) -> tuple[str, Mapping[str, str], dict[int, Kept]]:
        if upload not in self._uploads:
            raise RefusedError(404, "NoSuchUpload")
        return self._uploads[upload]

    def _require(self, path: str, headers: Mapping[str, str]) -> None:
        """Check If-None-Match and If-Match."""
        if path in self.source:
            raise RefusedError(403, "AccessDenied")
        found, wanted = self._kept.get(path), headers.get("If-Match")
        if wanted is not None and found is None:
            raise RefusedError(404, "NoSuchKey")
        if found is not None and (headers.get("If-None-Match") == "*" or wanted not in (None, found.etag)):
            raise RefusedError(412, "PreconditionFailed")


# ---- Caps and counts of workers


@dataclass(slots=True)
class Cap:
    """The bytes a second of one worker in one direction, as by a network card of its own; 0 for no limit."""

    rate: float
    _free: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, nbytes: int) -> None:
        """Wait until these bytes have passed."""
        if not self.rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now - _BURST) + nbytes / self.rate
            wait = self._free - now
        if wait > 0:
            time.sleep(wait)


@dataclass(slots=True)
class Tally:
    """The requests and bytes of each worker, and when units began and ended; the gate before the first unit.

    Attributes:
        rate: bytes a second of a worker, each way.
        workers: number of workers that the gate waits for: the first claim of each is answered once all have sent one,
            so that the time in which interpreters start on shared cores is apart from the time in which units are made.
    """

    rate: float = 0.0
    workers: int = 0
    _requests: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    _bytes: dict[str, Counter[str]] = field(default_factory=dict[str, Counter[str]])
    _arrived: set[str] = field(default_factory=set[str])
    _units: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    _moments: dict[str, float] = field(default_factory=dict[str, float])
    _caps: dict[tuple[str, str], Cap] = field(default_factory=dict[tuple[str, str], Cap])
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def cap(self, worker: str, direction: str) -> Cap:
        """The cap of a worker in one direction; who is no worker has none."""
        with self._changed:
            rate = self.rate if worker.startswith("worker") else 0
            return self._caps.setdefault((worker, direction), Cap(rate))

    def note(self, worker: str, operation: str) -> None:
        """Count a request."""
        with self._changed:
            self._requests.setdefault(worker, Counter())[operation] += 1

    def moved(self, worker: str, *, sent: int = 0, received: int = 0) -> None:
        """Count bytes of bodies, also of those that were cut short."""
        with self._changed:
            self._bytes.setdefault(worker, Counter()).update(sent=sent, received=received)

    def claim(self, worker: str) -> None:
        """A worker asks for a unit: it waits until all have done so."""
        with self._changed:
            self._arrived.add(worker)
            if len(self._arrived) >= self.workers:
                self._moments.setdefault("first_claim", time.time())
                self._changed.notify_all()
            self._changed.wait_for(lambda: "first_claim" in self._moments, _GATE_SECONDS)

    def receipt(self, worker: str, seconds: float) -> None:
        """A worker has made a unit, in so many seconds."""
        with self._changed:
            self._moments["last_receipt"] = time.time()
            self._units.append((worker, seconds))

    def to_json(self) -> dict[str, Any]:
        """Requests and bytes by worker, the moments in seconds since 1970, and worker and seconds of each unit."""
        with self._changed:
            return {
                "requests": {worker: dict(one) for worker, one in self._requests.items()},
                "bytes": {worker: dict(one) for worker, one in self._bytes.items()},
                "moments": dict(self._moments),
                "units": list(self._units),
            }


# ---- The answers: XML and headers, as the API reference of S3 has them

_HEAD = '<?xml version="1.0" encoding="UTF-8"?>'


def _xml(root: str, *inner: str, **stated: object) -> bytes:
    space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    return f"{_HEAD}<{root} {space}>{_tags(**stated)}{''.join(inner)}</{root}>".encode()


def _tags(**stated: object) -> str:
    return "".join(f"<{name}>{escape(str(text))}</{name}>" for name, text in stated.items())


def object_headers(found: Served | Kept) -> dict[str, str]:
    """The headers that say the state of an object."""
    headers = {"ETag": found.etag, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Accept-Ranges": "bytes",
               "Content-Type": "application/octet-stream"}  # fmt: skip
    if not isinstance(found, Kept):
        return headers
    checked = {"x-amz-checksum-crc32c": found.checksum, "x-amz-checksum-type": "FULL_OBJECT"}
    return {**headers, **found.metadata, **checked}


def listing(found: Sequence[tuple[str, Served | Kept]], bucket: str, query: Mapping[str, str]) -> bytes:
    """One page of ListObjectsV2; the token is the last name of the page before."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token", query.get("start-after", ""))
    most = int(query.get("max-keys", PAGE))
    names: dict[str, Served | Kept | None] = {}
    for path, one in found:
        key = path.removeprefix(f"{bucket}/")
        below, cut, _rest = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        names[prefix + below + cut if cut else key] = None if cut else one
    rest = [name for name in names if name > after]
    page, entries = rest[:most], list[str]()
    for name in page:
        one = names[name]
        if one is None:
            entries.append(f"<CommonPrefixes>{_tags(Prefix=name)}</CommonPrefixes>")
        else:
            state = _tags(LastModified="2026-01-01T00:00:00.000Z", ETag=one.etag, Size=one.nbytes)
            entries.append(f"<Contents>{_tags(Key=name)}{state}{_tags(StorageClass='STANDARD')}</Contents>")
    more = _tags(NextContinuationToken=page[-1]) if len(rest) > most else ""
    counts = _tags(KeyCount=len(page), MaxKeys=most, IsTruncated=str(len(rest) > most).lower())
    return _xml("ListBucketResult", counts, more, *entries, Name=bucket, Prefix=prefix)


# ---- The server


class Double(ThreadingHTTPServer):
    """The server and what it holds."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, objects: Objects, tally: Tally) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects, self.tally = objects, tally

    def handle_error(self, request: object, client_address: object) -> None:
        """Say what went wrong, unless a worker was killed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]


class Handler(BaseHTTPRequestHandler):
    """One connection of a worker."""

    protocol_version = "HTTP/1.1"
    server: Double
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Objects, listings and the tally."""
        self._answer(self._get)

    def do_HEAD(self) -> None:
        """The state of an object."""
        self._answer(self._head)

    def do_PUT(self) -> None:
        """Objects and parts."""
        self._answer(self._put)

    def do_POST(self) -> None:
        """The beginning and the completion of an upload, and removals of many."""
        self._answer(self._post)

    def do_DELETE(self) -> None:
        """Removals, and uploads that are given up."""
        self._answer(self._delete)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self, act: Callable[[], None]) -> None:
        url = urlsplit(self.path)
        stated = parse_qs(url.query, keep_blank_values=True)
        self._query = {name: values[0] for name, values in stated.items()}
        self._path, self._objects = unquote(url.path).strip("/"), self.server.objects
        signed = f"{self.headers.get('Authorization', '')} {unquote(url.query)}"
        key = re.search(r"Credential=([^/&]+)", signed)
        self._worker = key[1] if key else ""
        try:
            act()
        except RefusedError as error:
            self._send(
                error.status, f"{_HEAD}<Error>{_tags(Code=error.code, Message=error.code)}</Error>".encode()
            )
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _note(self, operation: str) -> None:
        self.server.tally.note(self._worker, operation)

    def _get(self) -> None:
        prefix = f"{self._path}/{self._query.get('prefix', '')}"
        if self._path == "-/tally":
            self._send(200, json.dumps(self.server.tally.to_json()).encode())
        elif "uploadId" in self._query:
            self._note("ListParts")
            rows = [
                f"<Part>{_tags(PartNumber=number, ETag=one.etag, Size=one.nbytes, ChecksumCRC32C=one.checksum)}</Part>"
                for number, one in self._objects.parts_of(self._query["uploadId"])
            ]
            self._send(200, _xml("ListPartsResult", *rows, IsTruncated="false"))
        elif "uploads" in self._query:
            self._note("ListMultipartUploads")
            rows = [
                f"<Upload>{_tags(Key=path.partition('/')[2], UploadId=name)}</Upload>"
                for path, name in self._objects.uploads(prefix)
            ]
            self._send(200, _xml("ListMultipartUploadsResult", *rows, IsTruncated="false"))
        elif "/" not in self._path:
            self._note("ListObjectsV2")
            self._send(200, listing(self._objects.listed(prefix), self._path, self._query))
        else:
            self._object()

    def _object(self) -> None:
        """A range of an object, at the rate of the worker."""
        found = self._objects.get(self._path)
        if self.headers.get("If-Match", found.etag) != found.etag:
            raise RefusedError(412, "PreconditionFailed")
        start, stop = _span(self.headers.get("Range"), found.nbytes)
        pieces = _pieces(found, start, stop)
        self._note("GetObject")
        ranged = "Range" in self.headers
        span = {"Content-Range": f"bytes {start}-{stop - 1}/{found.nbytes}"} if ranged else {}
        self._begin(
            206 if ranged else 200, {**object_headers(found), "Content-Length": str(stop - start), **span}
        )
        cap, done = self.server.tally.cap(self._worker, "sent"), 0
        try:
            for piece in pieces:
                cap.take(len(piece))
                self.wfile.write(piece)
                done += len(piece)
        finally:
            self.server.tally.moved(self._worker, sent=done)

    def _head(self) -> None:
        self._note("HeadObject")
        if "/" not in self._path:
            self._send(200, b"")
            return
        found = self._objects.get(self._path)
        self._send(200, b"", {**object_headers(found), "Content-Length": str(found.nbytes)})

    def _put(self) -> None:
        name = self._path.rpartition("/")[2]
        if name.startswith("claim-"):
            self.server.tally.claim(self._worker)
        if "x-amz-copy-source" in self.headers:
            self._copy_part()
            return
        upload = self._query.get("uploadId")
        # A run reads again what it puts aside.
        kept = KEPT_ASIDE if name.startswith(parts.OVERFLOW) else KEPT_HEAD if upload else KEPT_WHOLE
        body = self._body(kept)
        self._note("UploadPart" if upload else "PutObject")
        if self.headers.get("x-amz-checksum-crc32c", body.checksum) != body.checksum:
            raise RefusedError(400, "BadDigest")
        if upload:
            self._objects.add_part(upload, int(self._query["partNumber"]), body)
        else:
            self._objects.put(self._path, body, self._metadata(), self.headers)
        if name.startswith("receipt-"):  # a line of JSON, a tab and a signature
            seconds = json.loads(body.head.rpartition(b"\t")[0])["seconds"]
            self.server.tally.receipt(self._worker, float(seconds))
        self._send(200, b"", {"ETag": body.etag, "x-amz-checksum-crc32c": body.checksum})

    def _copy_part(self) -> None:
        """A part that is a range of another object, of which the bytes were kept."""
        self._note("UploadPartCopy")
        found = self._objects.get(unquote(self.headers["x-amz-copy-source"]).strip("/"))
        if self.headers.get("x-amz-copy-source-if-match", found.etag) != found.etag:
            raise RefusedError(412, "PreconditionFailed")
        start, stop = _span(self.headers.get("x-amz-copy-source-range"), found.nbytes)
        body = Kept(KEPT_HEAD)
        for piece in _pieces(found, start, stop):
            body.add(bytes(piece))
        self._objects.add_part(self._query["uploadId"], int(self._query["partNumber"]), body)
        stated = {
            "LastModified": "2026-01-01T00:00:00.000Z",
            "ETag": body.etag,
            "ChecksumCRC32C": body.checksum,
        }
        self._send(200, _xml("CopyPartResult", **stated))

    def _body(self, kept: int) -> Kept:
        """What is sent, at the rate of the worker."""
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            raise RefusedError(501, "NotImplemented")
        left, found = int(self.headers.get("Content-Length", 0)), Kept(kept)
        cap = self.server.tally.cap(self._worker, "received")
        try:
            while left:
                piece = self.rfile.read(min(left, _PIECE))
                if not piece:
                    raise ConnectionError("the worker has gone")
                cap.take(len(piece))
                found.add(piece)
                left -= len(piece)
        finally:
            self.server.tally.moved(self._worker, received=found.nbytes)
        return found

    def _post(self) -> None:
        body = self._body(KEPT_WHOLE).head
        bucket, _, key = self._path.partition("/")
        place = {"Bucket": bucket, "Key": key}
        if "uploads" in self._query:
            self._note("CreateMultipartUpload")
            name = self._objects.begin(self._path, self._metadata())
            self._send(200, _xml("InitiateMultipartUploadResult", **place, UploadId=name))
        elif "uploadId" in self._query:
            self._note("CompleteMultipartUpload")
            rows = list(zip(map(int, _texts(body, "PartNumber")), _texts(body, "ETag"), strict=True))
            made = self._objects.complete(self._query["uploadId"], rows, self.headers)
            state = {"ETag": made.etag, "ChecksumCRC32C": made.checksum, "ChecksumType": "FULL_OBJECT"}
            self._send(200, _xml("CompleteMultipartUploadResult", **place, **state))
        elif "delete" in self._query:
            self._note("DeleteObjects")
            for path in _texts(body, "Key"):
                self._objects.remove(f"{self._path}/{path}", {})
            self._send(200, _xml("DeleteResult"))
        else:
            raise RefusedError(501, "NotImplemented")

    def _delete(self) -> None:
        if "uploadId" in self._query:
            self._note("AbortMultipartUpload")
            self._objects.abort(self._query["uploadId"])
        else:
            self._note("DeleteObject")
            self._objects.remove(self._path, self.headers)
        self._send(204, b"")

    def _metadata(self) -> Mapping[str, str]:
        found = {name.lower(): value for name, value in self.headers.items()}
        return {name: value for name, value in found.items() if name.startswith("x-amz-meta-")}

    def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._begin(status, {"Content-Length": str(len(body)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(body)


def _span(text: str | None, nbytes: int) -> tuple[int, int]:
    """Start and stop of a range header; of the whole object without one."""
    if text is None:
        return 0, nbytes
    bounds = re.fullmatch(r"bytes=(\d+)-(\d*)", text)
    if bounds is None or int(bounds[1]) >= nbytes:
        raise RefusedError(416, "InvalidRange")
    return int(bounds[1]), min(int(bounds[2]) + 1, nbytes) if bounds[2] else nbytes


def _pieces(found: Served | Kept, start: int, stop: int) -> Iterable[memoryview]:
    if not isinstance(found, Kept):
        return found.pieces(start, stop, _PIECE)
    data = memoryview(found.head)
    if stop > len(data):
        raise RefusedError(501, "OnlyChecksumsAreKept")
    return (data[at : min(at + _PIECE, stop)] for at in range(start, stop, _PIECE))


def _texts(body: bytes, tag: str) -> list[str]:
    """The texts of all elements of a name, in whatever namespace."""
    return [one.text or "" for one in ET.fromstring(body).iter() if one.tag.rpartition("}")[2] == tag]


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=0, help="bytes of the source")
    parser.add_argument("--folder", type=Path, help="a folder of which the files are the source instead")
    parser.add_argument("--layers", type=int, default=64, help="number of layers, which become units")
    parser.add_argument(
        "--rate", type=float, default=0, help="bytes a second of a worker, each way; 0: no limit"
    )
    parser.add_argument("--workers", type=int, default=0, help="number of workers that begin together")
    given = parser.parse_args()
    if given.folder:
        source = folder_files(given.folder, "source")
    else:
        files = checkpoint(given.size, layers=given.layers)
        source = {f"{SOURCE}/{name}": file for name, file in files.items()}
    double = Double(Objects(source), Tally(given.rate, given.workers))
    print(double.server_address[1], flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        double.serve_forever()


if __name__ == "__main__":
    main()
