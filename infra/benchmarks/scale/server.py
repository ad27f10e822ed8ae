"""The double: a server with as much of the interface of S3 as wherry and its libraries use.

    python -m benchmarks.scale.server --size 4000000000 --rate 4000000 --workers 8     prints its port

Buckets are `source`, which is generated and read-only, and any other. Signatures are not checked: an access key only
says which worker asks. `GET /-/tally` answers what was counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as ET

from benchmarks.scale import answers
from benchmarks.scale.caps import Caps
from benchmarks.scale.content import checkpoint
from benchmarks.scale.folder import folder_files
from benchmarks.scale.objects import Objects, RefusedError, Served
from benchmarks.scale.parts import KEPT_ASIDE, KEPT_HEAD, KEPT_WHOLE, Kept, Received
from benchmarks.scale.tally import Tally
from wherry.target import parts

SOURCE = "source/model"
_PIECE = 128 << 10  # bytes that pass a cap at a time
_KEY = re.compile(r"Credential=([^/&]+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_META = "x-amz-meta-"


class Double(ThreadingHTTPServer):
    """The server and what it holds."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, objects: Objects, caps: Caps, tally: Tally) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects, self.caps, self.tally = objects, caps, tally

    def handle_error(self, request: object, client_address: object) -> None:
        """Say what went wrong, unless a worker was killed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # pyright: ignore[reportArgumentType]


class Handler(BaseHTTPRequestHandler):
    """One connection of a worker."""

    protocol_version = "HTTP/1.1"
    server: Double
    disable_nagle_algorithm = True
    _operation = ""

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

    def _answer(self, act: object) -> None:
        url = urlsplit(self.path)
        self._query = {
            name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()
        }
        self._path = unquote(url.path).strip("/")
        key = _KEY.search(self.headers.get("Authorization", "")) or _KEY.search(unquote(url.query))
        self._worker = key[1] if key else ""
        try:
            act()  # pyright: ignore[reportCallIssue]  one of the methods above
        except RefusedError as error:
            self._send(error.status, answers.error(error.code))
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _get(self) -> None:
        if self._path == "-/tally":
            self._send(200, json.dumps(self.server.tally.to_json()).encode())
        elif "uploadId" in self._query:
            self._note("ListParts")
            self._send(200, answers.parts(self.server.objects.parts_of(self._query["uploadId"])))
        elif "uploads" in self._query:
            self._note("ListMultipartUploads")
            found = self.server.objects.uploads(f"{self._path}/{self._query.get('prefix', '')}")
            self._send(200, answers.uploads(found))
        elif "/" not in self._path:
            self._note("ListObjectsV2")
            found = self.server.objects.listed(f"{self._path}/{self._query.get('prefix', '')}")
            self._send(200, answers.listing(found, self._path, self._query))
        else:
            self._object()

    def _object(self) -> None:
        """A range of an object, at the rate of the worker."""
        found = self.server.objects.get(self._path)
        if self.headers.get("If-Match", found.etag) != found.etag:
            raise RefusedError(412, "PreconditionFailed")
        start, stop = _span(self.headers.get("Range"), found.nbytes)
        pieces = _pieces(found, start, stop)
        self._note("GetObject")
        self.send_response(206 if "Range" in self.headers else 200)
        for name, value in answers.object_headers(found).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(stop - start))
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{found.nbytes}")
        self.end_headers()
        cap = self.server.caps.of(self._worker, "sent")
        done = 0
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
        found = self.server.objects.get(self._path)
        self._send(200, b"", {**answers.object_headers(found), "Content-Length": str(found.nbytes)})

    def _put(self) -> None:
        name = self._path.rpartition("/")[2]
        if name.startswith("claim-"):
            self.server.tally.claim(self._worker)
        if "x-amz-copy-source" in self.headers:
            self._copy_part()
            return
        upload = self._query.get("uploadId")
        body = self._body(_kept(name, upload))
        self._note("UploadPart" if upload else "PutObject")
        if self.headers.get("x-amz-checksum-crc32c", body.checksum) != body.checksum:
            raise RefusedError(400, "BadDigest")
        etag = body.etag
        if upload:
            self.server.objects.add_part(upload, int(self._query["partNumber"]), body)
        else:
            etag = self.server.objects.put(self._path, body, self._metadata(), self.headers).etag
        if name.startswith("receipt-"):
            self.server.tally.receipt(self._worker, _seconds(body.head))
        self._send(200, b"", {"ETag": etag, "x-amz-checksum-crc32c": body.checksum})

    def _copy_part(self) -> None:
        """A part that is a range of another object, of which the bytes were kept."""
        self._note("UploadPartCopy")
        found = self.server.objects.get(unquote(self.headers["x-amz-copy-source"]).strip("/"))
        if self.headers.get("x-amz-copy-source-if-match", found.etag) != found.etag:
            raise RefusedError(412, "PreconditionFailed")
        start, stop = _span(self.headers.get("x-amz-copy-source-range"), found.nbytes)
        body = Received(KEPT_HEAD)
        for piece in _pieces(found, start, stop):
            body.add(bytes(piece))
        self.server.objects.add_part(self._query["uploadId"], int(self._query["partNumber"]), body)
        self._send(200, answers.copy_answer(body))

    def _body(self, kept: int) -> Received:
        """What is sent, at the rate of the worker."""
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            raise RefusedError(501, "NotImplemented")
        left, found = int(self.headers.get("Content-Length", 0)), Received(kept)
        cap = self.server.caps.of(self._worker, "received")
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
        if "uploads" in self._query:
            self._note("CreateMultipartUpload")
            name = self.server.objects.begin(self._path, self._metadata())
            self._send(200, answers.begin_answer(self._path, name))
        elif "uploadId" in self._query:
            self._note("CompleteMultipartUpload")
            made = self.server.objects.complete(
                self._query["uploadId"], _parse_completion(body), self.headers
            )
            self._send(200, answers.complete_answer(self._path, made))
        elif "delete" in self._query:
            self._note("DeleteObjects")
            for path in _texts(body, "Key"):
                self.server.objects.remove(f"{self._path}/{path}", {})
            self._send(200, answers.nothing("DeleteResult"))
        else:
            raise RefusedError(501, "NotImplemented")

    def _delete(self) -> None:
        if "uploadId" in self._query:
            self._note("AbortMultipartUpload")
            self.server.objects.abort(self._query["uploadId"])
        else:
            self._note("DeleteObject")
            self.server.objects.remove(self._path, self.headers)
        self._send(204, b"")

    def _note(self, operation: str) -> None:
        self.server.tally.note(self._worker, operation)

    def _metadata(self) -> Mapping[str, str]:
        return {name.lower(): value for name, value in self.headers.items() if name.lower().startswith(_META)}

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        stated = {"Content-Length": str(len(body)), **(headers or {})}
        for name, value in stated.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _kept(name: str, upload: str | None) -> int:
    """How many bytes of a body are kept: a run reads again what it puts aside."""
    if name.startswith(parts.OVERFLOW):
        return KEPT_ASIDE
    return KEPT_HEAD if upload else KEPT_WHOLE


def _span(text: str | None, nbytes: int) -> tuple[int, int]:
    """Start and stop of a range header; of the whole object without one."""
    if text is None:
        return 0, nbytes
    bounds = _RANGE.fullmatch(text)
    if bounds is None or int(bounds[1]) >= nbytes:
        raise RefusedError(416, "InvalidRange")
    return int(bounds[1]), min(int(bounds[2]) + 1, nbytes) if bounds[2] else nbytes


def _pieces(found: Served | Kept, start: int, stop: int) -> Iterable[memoryview]:
    if not isinstance(found, Kept):
        return found.pieces(start, stop, _PIECE)
    if stop > len(found.head):
        raise RefusedError(501, "OnlyChecksumsAreKept")
    return _cut(memoryview(found.head)[start:stop])


def _cut(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE]


def _seconds(record: bytes) -> float:
    """How long a unit took, as its receipt says: a line of JSON, a tab and a signature."""
    return float(json.loads(record.rpartition(b"\t")[0])["seconds"])


def _parse_completion(body: bytes) -> list[tuple[int, str]]:
    numbers, etags = _texts(body, "PartNumber"), _texts(body, "ETag")
    return [(int(number), etag) for number, etag in zip(numbers, etags, strict=True)]


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
        source: dict[str, Served] = {**folder_files(given.folder, "source")}
    else:
        files = checkpoint(given.size, layers=given.layers)
        source = {f"{SOURCE}/{name}": file for name, file in files.items()}
    double = Double(Objects(source), Caps(given.rate), Tally(given.workers))
    print(double.server_address[1], flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        double.serve_forever()


if __name__ == "__main__":
    main()
