"""Web servers that lie about what they have: other bytes, other sizes, answers without end, redirects to this machine.

`python -m infra.attacks.servers` serves every lie on a port of 127.0.0.1, which it prints. The name `files.example`
has an address elsewhere, since wherry connects to no name that leads to this machine; only the connection is made here.
So a redirect to this machine comes from elsewhere. A connection to any other port counts as executed.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from infra.attacks import heads
from infra.attacks.case import Case
from infra.attacks.lies import LONG

HOST = "files.example"
HERE = "127.0.0.1"
ELSEWHERE = "203.0.113.7"  # of documentation: no name of this machine, so that wherry connects to it
FILE = "m.safetensors"
TIMEOUT = "1s"  # of a store: a silent server ends by it, and retries within twice as long
VERBS = (
    "detect", "inspect", "inspect digest", "verify digest", "plan", "convert torch", "fetch", "audit check",
)  # fmt: skip
_HEADER = json.dumps({"w": {"dtype": "F32", "shape": [4096], "data_offsets": [0, 16384]}}).encode()
BODY = heads.safetensors(_HEADER)[:-32] + bytes(range(256)) * 64
_DATA = len(BODY) - 16384  # where the tensor begins
_PAUSE = 0.4  # between bytes of a slow answer
_OTHER = 9  # a port at which no server of the attack listens


@dataclass(frozen=True, slots=True)
class ByteRange:
    """The bytes of the file that a request names; all of them if it names none."""

    start: int
    stop: int

    @property
    def range(self) -> str:
        """As an answer states it."""
        return f"bytes {self.start}-{self.stop - 1}/{len(BODY)}"

    @property
    def data(self) -> bytes:
        """The bytes themselves."""
        return BODY[self.start : self.stop]


def answer(status: object, headers: dict[str, object] | None = None, body: bytes = b"") -> bytes:
    """A whole answer of HTTP, with the length of its body unless another is stated."""
    stated = {"Content-Length": len(body), "Connection": "close", **(headers or {})}
    lines = [
        f"HTTP/1.1 {status}",
        *(f"{name}: {value}" for name, value in stated.items() if value is not None),
    ]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass") + body


def part(requested: ByteRange, body: bytes | None = None, **headers: object) -> bytes:
    """A range, in which one thing may be another."""
    found = {
        "Content-Range": requested.range,
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    return answer("206 Partial Content", found, requested.data if body is None else body)


def _redirect(location: str, _requested: ByteRange) -> Iterable[bytes]:
    return [answer("302 Found", {"Location": location})]


def _stated(headers: dict[str, object], requested: ByteRange) -> Iterable[bytes]:
    return [part(requested, **headers)]


def _status(status: str, headers: dict[str, object], _requested: ByteRange) -> Iterable[bytes]:
    return [answer(status, headers)]


def _packed(encoding: str, requested: ByteRange) -> Iterable[bytes]:
    """300 MB of zeros, compressed."""
    return [part(requested, gzip.compress(bytes(300 << 20), 1), Content_Encoding=encoding)]


def _endless(begin: bytes, each: bytes, _requested: ByteRange) -> Iterator[bytes]:
    yield from itertools.chain([begin], itertools.repeat(each))


def _slow(requested: ByteRange) -> Iterator[bytes]:
    """A byte at a time, and no end."""
    yield part(requested, b"", Content_Length=1 << 40)
    for number in itertools.count():
        time.sleep(_PAUSE)
        yield requested.data[number % len(requested.data) :][:1]


def _silent(_requested: ByteRange) -> Iterator[bytes]:
    time.sleep(60)
    yield b""


def _changing(requested: ByteRange) -> Iterable[bytes]:
    """Other bytes, under another tag, each time."""
    return [
        part(
            requested,
            bytes([time.monotonic_ns() & 255]) * len(requested.data),
            ETag=f'"{time.monotonic_ns()}"',
        )
    ]


_NUMBERS = ("-1", "x", "0", "1", f"{2**40}", f"{2**63}", LONG, "7, 8", "\u0663")
_PACKINGS = ("gzip", "deflate", "br", "zstd", "gzip, gzip", "x")
_STATUSES = ("304", "401 x", "416", "418 \x1b]0;title\x07", "500", "999", "x", LONG)
_TARGETS = {
    "metadata": "http://169.254.169.254/latest/meta-data/iam", "metadata-name": "http://metadata.google.internal/",
    "file": "file:///etc/passwd", "ftp": "ftp://127.0.0.1/x", "store": "gs://bucket/x", "data": "data:,x",
    "local": f"http://{HERE}:{_OTHER}/x", "relative": f"//{HERE}:{_OTHER}/x", "name": f"http://localhost:{_OTHER}/x",
    "six": f"http://[::1]:{_OTHER}/x", "mapped": f"http://[::ffff:7f00:1]:{_OTHER}/x", "zero": f"http://0:{_OTHER}/x",
    "decimal": f"http://2130706433:{_OTHER}/x", "short": f"http://127.1:{_OTHER}/x", "hex": f"http://0x7f.1:{_OTHER}/",
    "octal": f"http://0177.0.0.1:{_OTHER}/x", "user": f"http://{HOST}@{HERE}:{_OTHER}/x", "dot": "http://localhost.:9/",
    "other": f"http://127.9.9.9:{_OTHER}/x", "nothing": "", "itself": FILE, "longer": f"x/{FILE}",
    "port": "http://files.example:99999999/", "wide": "http://１２７.0.0.1:9/", "controls": "/\x1b]0;title\x07",
}  # fmt: skip
# What is answered from a byte on, or to every question.
LIES: dict[str, Callable[[ByteRange], Iterable[bytes]]] = {
    "sound": lambda requested: [part(requested)],
    "whole": lambda _requested: [answer("200 OK", {}, BODY)],
    "shifted": lambda requested: [part(ByteRange(requested.start + 3, requested.stop + 3))],
    "other": lambda requested: [part(requested, BODY[3:] + BODY[:3])],
    "more": lambda requested: [part(requested, requested.data + bytes(1 << 20))],
    "fewer": lambda requested: [part(requested, requested.data[:-1])],
    "nothing": lambda requested: [part(requested, b"")],
    "cut": lambda requested: [part(requested, requested.data[:-1], Content_Length=len(requested.data))],
    "no-content": lambda _requested: [answer("204 No Content")],
    "closed": lambda _requested: [],
    "junk": lambda _requested: [b"\xff" * 4096],
    "page": lambda _requested: [answer("200 OK", {"Content-Type": "text/html"}, b"<a href='/x'>x</a>" * 100)],
    "changing": _changing,
    "slow": _slow,
    "silent": _silent,
    **{f"packed-{number}": partial(_packed, name) for number, name in enumerate(_PACKINGS)},
    "endless": partial(
        _endless, answer("206 x", {"Content-Length": 1 << 60, "Content-Range": "bytes 0-9/9"}), b"x" * 65536
    ),
    "endless-whole": partial(_endless, answer("200 OK", {"Content-Length": None}), b"x" * 65536),
    "endless-chunks": partial(
        _endless, answer("200 OK", {"Content-Length": None, "Transfer-Encoding": "chunked"}), b"4\r\nxxxx\r\n" * 9000
    ),
    "endless-chunk": partial(
        _endless, answer("200 OK", {"Content-Length": None, "Transfer-Encoding": "chunked"}), b"f" * 65536
    ),
    "endless-headers": partial(_endless, b"HTTP/1.1 200 OK\r\n", b"X-Name: value\r\n" * 4000),
    "endless-header": partial(_endless, b"HTTP/1.1 200 OK\r\nX-Name: ", b"x" * 65536),
    "endless-status": partial(_endless, b"HTTP/1.1 200 ", b"x" * 65536),
    "endless-continue": partial(_endless, b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2000),
    **{f"length-{number}": partial(_stated, {"Content_Length": text}) for number, text in enumerate(_NUMBERS)},
    **{f"range-{number}": partial(_stated, {"Content_Range": f"bytes {text}-{text}/{text}"}) for number, text in
       enumerate(_NUMBERS)},
    "unsaid": partial(_stated, {"Content_Range": None}),
    "range-junk": partial(_stated, {"Content_Range": "\x1b]0;title\x07"}),
    "tag": partial(_stated, {"ETag": "\x1b]0;title\x07", "Last_Modified": "zzz"}),
    "parts": partial(_stated, {"Content_Type": "multipart/byteranges; boundary=x", "Content_Range": None}),
    **{f"redirect-{name}": partial(_redirect, target) for name, target in _TARGETS.items()},
    **{f"status-{number}": partial(_status, text, {}) for number, text in enumerate(_STATUSES)},
    **{f"later-{number}": partial(_status, "503 Busy", {"Retry-After": text}) for number, text in enumerate(_NUMBERS)},
}  # fmt: skip
_FROM = {"first": 0, "data": _DATA}  # the first byte about which the server lies
_EVERY = "every"  # it lies about every name, and to every question


# ---- The server


class Handler(BaseHTTPRequestHandler):
    """Answers `/LIE/WHERE/m.safetensors`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_words: Any) -> None:
        """Logs nothing."""

    def do_HEAD(self) -> None:
        """The size, which is true."""
        lie, where, name = self._place()
        if where == _EVERY:
            self._write(LIES[lie](ByteRange(0, len(BODY))))
        elif name == FILE:
            self._write([answer("200 OK", {"Content-Length": len(BODY), "Accept-Ranges": "bytes"})])
        else:
            self._write([answer("404 Not Found")])

    def do_GET(self) -> None:
        """A range."""
        lie, where, name = self._place()
        first, _, last = self.headers.get("Range", "bytes=0-")[6:].partition("-")
        requested = ByteRange(int(first or 0), min(int(last or len(BODY)) + 1, len(BODY)))
        if name != FILE and where != _EVERY:
            self._write([answer("404 Not Found")])
        else:
            honest = requested.start < _FROM.get(where, 0)
            self._write((LIES["sound"] if honest else LIES[lie])(requested))

    def _place(self) -> tuple[str, str, str]:
        _, lie, where, *_, name = self.path.partition("?")[0].split("/")
        return (lie if lie in LIES else "sound"), where, name

    def _write(self, pieces: Iterable[bytes]) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            for piece in pieces:
                self.wfile.write(piece)


@contextlib.contextmanager
def running() -> Iterator[int]:
    """A process that serves every lie; its port."""
    command = [sys.executable, "-m", "infra.attacks.servers"]
    streams: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
    }
    with subprocess.Popen(command, text=True, **streams) as process:
        try:
            yield int((process.stdout or sys.stdin).readline())
        finally:
            process.kill()


# ---- In the child


def connect_here(port: int) -> None:
    """From now on, connections to the server's address elsewhere lead to this machine, in this process."""
    resolve, connect = socket.getaddrinfo, socket.socket.connect

    def found(host: Any, at: Any, *values: Any, **named: Any) -> Any:
        if host in (HOST, ELSEWHERE):
            place = ELSEWHERE, int(at or port)
            return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", place)]
        return resolve(host, at, *values, **named)

    def connected(self: socket.socket, place: Any) -> None:
        connect(self, (HERE, place[1]) if place[0] == ELSEWHERE else place)

    socket.getaddrinfo, socket.socket.connect = found, connected


def cases(port: int) -> Iterator[Case]:
    """Every lie, from the first byte on, about the tensors only, and to every question."""
    for lie in LIES:
        for where in (*_FROM, _EVERY):
            url = f"http://{HOST}:{port}/{lie}/{where}/{FILE}"
            yield Case(f"server-{where}/{lie}", partial(_named, url))


def _named(url: str, _folder: Path) -> str:
    return url


def main() -> None:
    """Serve until it is killed, or the process that started it has ended."""
    server = ThreadingHTTPServer((HERE, 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
