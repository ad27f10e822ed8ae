"""Bodies over connections of ours: straight into the buffer, in time, and left to the library where it knows more."""

import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from urllib3.exceptions import HTTPError

from tests.support.faults import cut_sent
from wherry.errors import StorageError
from wherry.remote.failures import kind_of
from wherry.remote.transfers import BodyRequest, BufferFill, HttpAnswer, exchange, is_plain
from wherry.store.amazon import presign, refusal

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
