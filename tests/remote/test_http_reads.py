"""A web server that lies about ranges, sizes, encodings and addresses brings an error, and never other bytes."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from safetensors.numpy import save

import wherry
from wherry.errors import StorageError
from wherry.storage.stores import locate

pytest.importorskip("aiohttp")
BODY = save({"w": np.arange(4096, dtype=np.float32)})
HEADER = 8 + int.from_bytes(BODY[:8], "little")


class Server:
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
                self.send_header("Content-Length", str(len(BODY)) if known else "0")
                self.send_header("Accept-Ranges", "bytes")
                self.end_headers()

            def do_GET(self):
                outer.paths.append(self.path)
                if not self.path.split("?")[0].endswith("/m.safetensors"):
                    self.send_error(404)
                    return
                first, _, last = self.headers.get("Range", "bytes=0-")[6:].partition("-")
                start, stop = int(first), min(int(last or len(BODY)) + 1, len(BODY))
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
    return 206, {"Content-Range": f"bytes {start}-{stop - 1}/{len(BODY)}"}, BODY[start:stop]


LIES = {
    "none": part,
    "whole": lambda start, stop: (200, {}, BODY),
    "shifted": lambda start, stop: (*part(start + 3, stop)[:2], BODY[start + 3 : stop + 3]),
    "more": lambda start, stop: (*part(start, stop)[:2], BODY[start:stop] + b"Z" * 100_000),
    "unsaid": lambda start, stop: (206, {}, BODY[start:stop]),
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
    with Server("none") as server:
        assert wherry.detect(server.url).verdict == "ok"
        assert locate(server.url).read(len(BODY), len(BODY) + 10) == b"", "nothing is beyond the end"
        wherry.convert(server.url, tmp_path / "out", to="npz", lineage=False)
    assert np.load(tmp_path / "out")["w"].tolist() == list(range(4096))


def test_a_server_without_ranges_gives_the_beginning():
    with Server("whole") as server:
        assert locate(server.url).read(0, 100) == BODY[:100]


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
    with Server(lie, from_byte=HEADER) as server, pytest.raises(StorageError, match=what):
        wherry.convert(server.url, tmp_path / "out", to="npz", lineage=False)
    assert not (tmp_path / "out").exists()


def test_a_range_is_refused_although_none_was_requested():
    with Server("beyond") as server, pytest.raises(StorageError, match="refuses a range, although none was"):
        wherry.detect(server.url)
