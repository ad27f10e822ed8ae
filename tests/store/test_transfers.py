"""Bodies over connections of ours: straight into the buffer, in time, and never other bytes."""

from __future__ import annotations

import asyncio
import gzip
import io
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from safetensors.numpy import save
from urllib3.exceptions import HTTPError

import wherry
from tests.support.faults import cut_sent
from wherry.errors import StorageError
from wherry.store.amazon import presign, refusal
from wherry.store.content import Body, views_of
from wherry.store.failures import kind_of
from wherry.store.local_store import locate
from wherry.store.transfers import BodyRequest, BufferFill, HttpAnswer, exchange, is_plain

MIB = 1 << 20
BODY = bytes(range(256)) * (3 * MIB // 256)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    received = b""

    def do_PUT(self):
        if self.path == "/reset":
            cut_sent(self, None)
        else:
            type(self).received = self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(200, b"taken")

    def do_GET(self):
        if self.path == "/cut":
            self.answer(200, BODY[: len(BODY) // 2], len(BODY))
            self.close_connection = True
        elif self.path == "/slow":
            self.answer(200, b"", len(BODY))
            for _second in range(50):
                self.wfile.write(b"x")
                time.sleep(0.1)
        else:
            self.answer(404 if self.path == "/absent" else 206, BODY)

    def answer(self, status, body, length=None):
        self.send_response(status)
        self.send_header("ETag", '"mark"')
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    def handle_error(self, *_):
        pass


@pytest.fixture(scope="module")
def url():
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def get(url, seconds=30.0, size=3 * MIB):
    buffer = bytearray(size)
    with closing(BufferFill(memoryview(buffer))) as into:
        return exchange(BodyRequest("GET", url, {}), seconds, into=into), bytes(buffer[: into.count])


def put(url):
    large = memoryview(bytes(32 * MIB))  # more than the buffers of the sockets hold
    return exchange(BodyRequest("PUT", url, {}), 30, views=[large[:5], large[5:]])


def test_a_body_of_several_buffers_is_sent(url):
    pieces = [memoryview(BODY)[:5], memoryview(BODY)[5:]]
    answer = exchange(BodyRequest("PUT", f"{url}/x", {}), 30, views=pieces)
    assert (answer.is_success, answer.body, answer.headers["etag"]) == (True, b"taken", '"mark"')
    assert Handler.received == BODY


def test_a_body_that_is_cut_in_the_middle_is_an_error(url):
    with pytest.raises((HTTPError, OSError)) as caught:
        put(f"{url}/reset")
    assert kind_of(caught.value) == "broken"
    assert put(f"{url}/x").is_success, "the next request has another connection"


def test_an_answer_goes_into_the_buffer(url):
    answer, data = get(f"{url}/x")
    assert (answer.status, answer.body) == (206, b"")
    assert data == BODY


def test_a_refusal_leaves_the_buffer_alone(url):
    answer, data = get(f"{url}/absent")
    assert (answer.is_success, data) == (False, b"")
    assert answer.body.startswith(BODY[:100])


def test_an_answer_that_is_too_long_is_refused(url):
    with pytest.raises(StorageError, match="more than the 10 requested bytes"):
        get(f"{url}/x", size=10)


def test_an_answer_that_is_cut_is_an_error(url):
    with pytest.raises(Exception, match="IncompleteRead") as caught:
        get(f"{url}/cut")
    assert kind_of(caught.value) == "broken"


def test_an_answer_that_trickles_ends_in_time(url):
    with pytest.raises((TimeoutError, HTTPError)) as caught:
        get(f"{url}/slow", seconds=0.5)
    assert kind_of(caught.value) == "timeout"


def test_a_proxy_is_left_to_the_library(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert is_plain("https://storage.example/x")
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    assert not is_plain("https://storage.example/x")
    assert is_plain("http://127.0.0.1:9000/x")
    monkeypatch.setenv("no_proxy", "storage.example")
    assert is_plain("https://storage.example/x")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(503, "SlowDown", "throttled"), (404, "NoSuchKey", "absent"), (412, "PreconditionFailed", "exists")],
)
def test_a_status_that_tells_all_is_the_error(status, code, kind):
    error = refusal(
        HttpAnswer(status, {}, f"<Error><Code>{code}</Code></Error>".encode()), "plain", "GetObject"
    )
    assert error is not None
    assert kind_of(error) == kind


def amazon(**more):
    from s3fs import S3FileSystem

    options = {"key": "key", "secret": "secret", "endpoint_url": "http://127.0.0.1:1", **more}
    return S3FileSystem(config_kwargs={"signature_version": "s3v4"}, skip_instance_cache=True, **options)


def signed(fs, bucket):
    from fsspec.asyn import sync

    where = {"UploadId": "1", "PartNumber": 1}
    return sync(fs.loop, lambda: presign(fs, f"{bucket}/a b", "upload_part", {}, **where))


def test_a_request_is_signed_by_the_client():
    request = signed(amazon(), "signed")
    assert request is not None
    assert (request.method, request.headers) == ("PUT", {})
    assert request.url.startswith("http://127.0.0.1:1/signed/a%20b?")
    assert "X-Amz-Signature=" in request.url


@pytest.mark.parametrize(
    "options",
    [
        {"anon": True},
        {"s3_additional_kwargs": {"SSECustomerKey": "x" * 32, "SSECustomerAlgorithm": "AES256"}},
        {"client_kwargs": {"verify": False}},
    ],
)
def test_what_a_signature_does_not_tell_is_left_to_the_client(options):
    assert signed(amazon(**options), f"left-{next(iter(options))}") is None


@pytest.mark.parametrize(
    ("status", "code"), [(301, "PermanentRedirect"), (403, "AccessDenied"), (400, "Odd")]
)
def test_a_bucket_that_refuses_signatures_gets_requests_of_the_client(status, code):
    bucket = f"refusing-{status}"
    assert signed(amazon(), bucket) is not None
    body = f"<Error><Code>{code}</Code></Error>".encode()
    assert refusal(HttpAnswer(status, {}, body), bucket, "GetObject") is None
    assert signed(amazon(), bucket) is None


# The body of a request: clients read, rewind and iterate it, whatever the pieces are.


KIB = 1 << 10
SIZES = [[], [0, 0], [1, 2, 3], [300 * KIB, 0, 5, 70 * KIB, *[KIB] * 200, 64 * KIB]]


def pieces(sizes):
    return [memoryview(bytes([number % 251]) * size) for number, size in enumerate(sizes)]


async def blocks(body):
    return [bytes(block) async for block in body]


@pytest.mark.parametrize("sizes", SIZES)
def test_the_blocks_are_the_pieces_in_order_and_none_is_tiny_or_huge(sizes):
    body = Body(pieces(sizes))
    found = asyncio.run(blocks(body))
    assert b"".join(found) == b"".join(pieces(sizes))
    assert asyncio.run(blocks(body)) == found, "a second attempt sends the same"
    assert max(map(len, found), default=0) <= 256 * KIB
    assert len(found) <= sum(sizes) // (64 * KIB) + 4


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("step", [1000, 100 * KIB, 1 << 30])
def test_it_is_read_and_rewound(sizes, step):
    body, whole = Body(pieces(sizes)), b"".join(pieces(sizes))
    assert body.nbytes == len(whole) == body.seek(0, io.SEEK_END)
    assert body.read(step) == b""
    body.seek(0)
    assert b"".join(iter(lambda: body.read(step), b"")) == whole
    assert body.seek(-min(7, len(whole)), io.SEEK_CUR) == body.tell()
    assert body.read() == whole[len(whole) - min(7, len(whole)) :]


def test_bytes_are_one_buffer():
    assert views_of(b"abc") == [b"abc"]
    assert views_of(pieces([1, 2])) == pieces([1, 2])


# A web server that lies about ranges, sizes, encodings and addresses brings an error, and never other
# bytes.


pytest.importorskip("aiohttp")
BODY_OF_READS = save({"w": np.arange(4096, dtype=np.float32)})
HEADER = 8 + int.from_bytes(BODY_OF_READS[:8], "little")


class ServerReads:
    """One file, `m.safetensors`, and a lie about it."""

    def __init__(self, lie, from_byte=0):
        self.lie, self.from_byte, self.paths = lie, from_byte, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_arguments):
                pass

            def do_HEAD(self):
                known = self.path.split("?")[0].endswith("/m.safetensors")
                self.send_response(416 if outer.lie == "beyond" else 200 if known else 404)
                self.send_header("Content-Length", str(len(BODY_OF_READS)) if known else "0")
                self.send_header("Accept-Ranges", "bytes")
                self.end_headers()

            def do_GET(self):
                outer.paths.append(self.path)
                if not self.path.split("?")[0].endswith("/m.safetensors"):
                    self.send_error(404)
                    return
                first, _, last = self.headers.get("Range", "bytes=0-")[6:].partition("-")
                start, stop = int(first), min(int(last or len(BODY_OF_READS)) + 1, len(BODY_OF_READS))
                honest = start < outer.from_byte
                status, headers, body = (part if honest else LIES[outer.lie])(start, stop)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/m.safetensors"

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.server.shutdown()
        self.server.server_close()


def part(start, stop):
    return 206, {"Content-Range": f"bytes {start}-{stop - 1}/{len(BODY_OF_READS)}"}, BODY_OF_READS[start:stop]


LIES = {
    "none": part,
    "whole": lambda start, stop: (200, {}, BODY_OF_READS),
    "shifted": lambda start, stop: (*part(start + 3, stop)[:2], BODY_OF_READS[start + 3 : stop + 3]),
    "more": lambda start, stop: (*part(start, stop)[:2], BODY_OF_READS[start:stop] + b"Z" * 100_000),
    "unsaid": lambda start, stop: (206, {}, BODY_OF_READS[start:stop]),
    "gzip": lambda start, stop: (
        206,
        {**part(start, stop)[1], "Content-Encoding": "gzip"},
        gzip.compress(bytes(50 << 20)),
    ),
    "metadata": lambda start, stop: (302, {"Location": "http://169.254.169.254/latest/meta-data/iam"}, b""),
    "beyond": lambda start, stop: (416, {}, b""),
    "file": lambda start, stop: (302, {"Location": "file:///etc/passwd"}, b""),
}


def test_an_honest_server_is_read(tmp_path):
    with ServerReads("none") as server:
        assert wherry.detect(server.url).verdict == "ok"
        assert locate(server.url).read(len(BODY_OF_READS), len(BODY_OF_READS) + 10) == b"", (
            "nothing is beyond the end"
        )
        wherry.convert(server.url, tmp_path / "out", to="npz", lineage=False)
    assert np.load(tmp_path / "out")["w"].tolist() == list(range(4096))


def test_a_server_without_ranges_gives_the_beginning():
    with ServerReads("whole") as server:
        assert locate(server.url).read(0, 100) == BODY_OF_READS[:100]


@pytest.mark.parametrize(
    ("lie", "what"),
    [
        ("whole", "the complete object instead of the requested range"),
        ("shifted", "the range from byte .* instead of that from byte"),
        ("more", "more than the"),
        ("unsaid", "a range that it does not name"),
        ("gzip", "compressed its answer: gzip"),
        ("metadata", "the metadata address of this machine"),
        ("file", "redirects to a file address"),
    ],
)
def test_a_lie_about_a_range_is_an_error_and_leaves_nothing(lie, what, tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_STORAGE_TIMEOUT", "5s")
    with ServerReads(lie, from_byte=HEADER) as server, pytest.raises(StorageError, match=what):
        wherry.convert(server.url, tmp_path / "out", to="npz", lineage=False)
    assert not (tmp_path / "out").exists()


def test_a_range_is_refused_although_none_was_requested():
    with (
        ServerReads("beyond") as server,
        pytest.raises(StorageError, match="refuses a range, although none was"),
    ):
        wherry.detect(server.url)
