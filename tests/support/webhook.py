"""A webhook of this machine that keeps what it receives."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


@dataclass
class Webhook:
    """Its address, the path and JSON of each request, and the statuses of its next answers; 200 by default."""

    url: str
    got: list[tuple[str, Any]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)


@contextmanager
def webhook_server(path: str) -> Iterator[Webhook]:
    """A running webhook."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["Content-Length"])
            webhook.got.append((self.path, json.loads(self.rfile.read(length))))
            self.send_response(webhook.statuses.pop(0) if webhook.statuses else 200)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    webhook = Webhook(f"http://127.0.0.1:{server.server_port}{path}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield webhook
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
