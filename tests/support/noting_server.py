"""A web server of this machine that notes the requests that it gets."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def noting_server(body=None, redirect=None, address="127.0.0.1"):
    """A running server; yields its port and the paths of its requests.

    Args:
        body: what it answers to each request; without it and a redirect, that nothing is there.
        redirect: the address to which it redirects each request.
        address: at which it listens, of this machine.
    """
    paths = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_arguments):
            pass

        def do_GET(self):
            paths.append(self.path)
            data = body if body and not redirect else b""
            self.send_response(302 if redirect else 404 if body is None else 200)
            if redirect:
                self.send_header("Location", redirect)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET  # noqa: N815  name of the base class

    server = ThreadingHTTPServer((address, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port, paths
    finally:
        server.shutdown()
        server.server_close()
