"""A proxy in front of a server of a store, which answers some requests with a fault."""

from __future__ import annotations

import http.client
import os
import random
import re
import socket
import struct
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ALWAYS = 1 << 30
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade"}


@dataclass
class Fault:
    """What happens to the next requests of some kind.

    Attributes:
        act: gets the handler, and answers instead of it.
        times: how many requests it happens to.
        method, path: the requests; those whose path contains the text.
        after: how many of them it leaves alone before.
    """

    act: object
    times: int = 1
    method: str = ""
    path: str = ""
    after: int = 0

    def applies(self, method, path):
        """Whether it happens to a request, which is counted."""
        if not self.times or self.method not in ("", method) or self.path not in path:
            return False
        self.after -= 1
        self.times -= self.after < 0
        return self.after < 0


class QuietServer(ThreadingHTTPServer):
    """Clients that are killed, or that give up, cut their connections: that is no error to print."""

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@dataclass
class Proxy:
    """The proxy.

    Attributes:
        port: where it listens.
        upstream: port of the server behind it.
        faults: the first that applies to a request is taken.
        requests: every request: method and path.
        rules: what the server behind it does not enforce: gets the handler and the body, and returns an answer (status,
            headers and body) or None.
        gone: what the rules keep: ids of uploads that were completed or aborted.
    """

    port: int = 0
    upstream: int = 0
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    rules: object = None
    gone: set[str] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def inject(self, act, times=1, method="", path="", after=0):
        self.faults.append(Fault(act, times, method, path, after))

    def clear(self):
        self.faults.clear()
        self.requests.clear()

    def take(self, method, path):
        self.requests.append((method, path))
        return next((fault.act for fault in self.faults if fault.applies(method, path)), None)


@contextmanager
def proxied():
    """A running proxy; the test sets `upstream`."""
    proxy = Proxy()
    server = QuietServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": proxy}))
    server.daemon_threads = True
    proxy.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()


def status(code, body=b"", headers=()):
    """Answer with a status."""

    def act(handler, _body):
        handler.reply(code, [("Content-Length", str(len(body))), *headers], body)

    return act


def hang(handler, _body):
    """Never answer."""
    handler.proxy.ended.wait()
    handler.close_connection = True


def slow(seconds):
    """Answer late."""

    def act(handler, body):
        time.sleep(seconds)
        handler.reply(*handler.forward(body))

    return act


def cut(handler, body):
    """Send half of the answer's body, then close the connection."""
    code, headers, data = handler.forward(body)
    handler.reply(code, headers, data[: len(data) // 2])
    handler.close_connection = True


def lose_answer(handler, body):
    """Let the server act, then close the connection without an answer."""
    handler.forward(body)
    handler.close_connection = True


def passed(handler, body):
    """No fault."""
    handler.reply(*handler.forward(body))


@dataclass
class Choice:
    """One of several acts, which a function chooses from method and path before the body is read."""

    choose: object


def sometimes(share, *acts):
    """Faults of a share of the requests."""
    chance = random.Random(0)
    return Choice(lambda _method, _path: chance.choice(acts) if chance.random() < share else passed)


def first_of_each(act, kind):
    """A fault of the first request of each kind, which a function tells from method and path."""
    met = set()

    def choose(method, path):
        found = kind(method, path)
        known = found in met
        met.add(found)
        return passed if known else act

    return Choice(choose)


def shorten(handler, body):
    """Answer with half of the body, as if that were all."""
    code, headers, data = handler.forward(body)
    kept = [(name, value) for name, value in headers if name.lower() != "content-length"]
    data = data[: len(data) // 2]
    handler.reply(code, [*kept, ("Content-Length", str(len(data)))], data)


def flip_received(handler, body):
    """Change a bit of the answer's body."""
    code, headers, data = handler.forward(body)
    altered = bytearray(data)
    altered[len(data) // 2 : len(data) // 2 + 1] = bytes([altered[len(data) // 2] ^ 1]) if data else b""
    handler.reply(code, headers, bytes(altered))


def other_mark(handler, body):
    """Answer with another ETag or generation than that of the object."""
    code, headers, data = handler.forward(body)
    headers = [(name, '"' + "0" * 32 + '"' if name.lower() == "etag" else value) for name, value in headers]
    data = re.sub(
        rb'("generation": *")(\d+)',
        lambda found: found[1] + found[2][:-1] + b"%d" % (found[2][-1] == 48),
        data,
    )
    handler.reply(code, headers, data)


def lagging():
    """Lists that show nothing that was put after they were first requested."""
    shown = {}

    def one(handler, body):
        answer = shown.get(handler.path) or handler.forward(body)
        handler.reply(*shown.setdefault(handler.path, answer))

    return one


def flip_sent(handler, body):
    """Change a bit of the body on its way to the server."""
    altered = bytearray(body)
    altered[len(body) // 2] ^= 1
    handler.reply(*handler.forward(bytes(altered)))


def shorten_sent(handler, body):
    """Let half of the body arrive, as if that were all."""
    handler.reply(*handler.forward(body[: len(body) // 2]))


def before_body(act):
    """Let an act happen before the body is read; it gets None in its place."""
    act.before_body = True
    return act


@before_body
def cut_sent(handler, _body):
    """Read half of the body, then reset the connection: the server sees nothing of it."""
    handler.rfile.read(int(handler.headers.get("Content-Length", 0)) // 2)
    reset(handler.connection)
    handler.close_connection = True


def reset(connection):
    """Close a connection by RST, so that what its other side still sends is refused."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    os.close(connection.detach())


class _Handler(BaseHTTPRequestHandler):
    """Forwards a request, or lets a fault answer it."""

    protocol_version = "HTTP/1.1"
    proxy: Proxy

    def __getattr__(self, name):
        if name.startswith("do_"):
            return self.serve
        raise AttributeError(name)

    def serve(self):
        act = self.proxy.take(self.command, self.path) or passed
        if isinstance(act, Choice):
            act = act.choose(self.command, self.path)
        act(self, None if hasattr(act, "before_body") else self._body())

    def forward(self, body):
        """What the server answers: status, headers and body."""
        if self.proxy.rules is None:
            return self.ask(self.command, self.path, body)
        with self.proxy.lock:
            return self.proxy.rules(self, body) or self.ask(self.command, self.path, body)

    def ask(self, method, path, body=b""):
        """What the server answers to a request with the headers of this one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream, timeout=30)
        sent = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        connection.request(method, path, body, sent | {"Content-Length": str(len(body))})
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_BY_HOP]
        if method != "HEAD" and not any(name.lower() == "content-length" for name, _ in kept):
            kept.append(("Content-Length", str(len(data))))
        return answer.status, kept, data

    def reply(self, code, headers, body):
        self.send_response_only(code)
        for name, value in headers:
            self.send_header(name, value)
        with suppress(ConnectionError):  # the client did not wait
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def _body(self):
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, *_):
        pass
