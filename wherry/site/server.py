"""server: answers GET requests on the loopback interface with the pages of the ledger, and nothing else.

A page of another site could send requests to this address, under a name of its own that it lets point here; requests
whose `Host` is not this server are therefore refused, and no page may be framed or read from elsewhere.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from wherry.errors import AmbiguousError, NotFoundError, UsageError, WherryError, internal_error
from wherry.site.contents import LedgerReader
from wherry.site.pages import page_at
from wherry.site.shell import Page, shell, text

if TYPE_CHECKING:
    from collections.abc import Callable

HOST = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Type": "text/html; charset=utf-8",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_SECONDS = 30  # for a request to arrive


class SiteServer(ThreadingHTTPServer):
    """The server; `serve_forever` runs it."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        """Bind the port; 0 chooses a free one.

        Raises:
            UsageError: the port is taken.
        """
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise UsageError(
                f"port {port} cannot be used: {error.strerror}",
                cure="give another --port; 0 chooses a free one",
            ) from error
        self.contents = LedgerReader()

    @property
    def url(self) -> str:
        """The address of the pages."""
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a browser that goes away."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _SECONDS
    server_version, sys_version = "wherry", ""

    def do_GET(self) -> None:
        """Send a page."""
        status, page = self._answer()
        self._send(status, page, body=True)

    def do_HEAD(self) -> None:
        """Send the headers of a page."""
        status, page = self._answer()
        self._send(status, page, body=False)

    def _refuse(self) -> None:
        self.close_connection = True
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, _sorry("only GET is answered"), body=True)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse  # noqa: N815  names of the base class

    def _answer(self) -> tuple[HTTPStatus, Page]:
        site = cast("SiteServer", self.server)
        if self.headers.get("Host") not in [f"{name}:{site.server_port}" for name in (HOST, "localhost")]:
            return HTTPStatus.MISDIRECTED_REQUEST, _sorry("this server has another name")
        try:
            url = urlsplit(self.path)
            query = dict(parse_qsl(url.query, max_num_fields=10))
            return HTTPStatus.OK, page_at(unquote(url.path), query, site.contents.read())
        except NotFoundError as error:
            return HTTPStatus.NOT_FOUND, _sorry(error.what)
        except (AmbiguousError, ValueError) as error:
            return HTTPStatus.BAD_REQUEST, _sorry(str(error))
        except WherryError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, _sorry(error.for_shell())
        except Exception as error:  # noqa: BLE001  a bug must not end the server
            return HTTPStatus.INTERNAL_SERVER_ERROR, _sorry(internal_error(error).what)

    def _send(self, status: HTTPStatus, page: Page, *, body: bool) -> None:
        content = page.html.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", f"{page.policy}; frame-ancestors 'none'")
        self.send_header("Content-Length", str(len(content)))
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing about requests."""


def _sorry(what: str) -> Page:
    return shell("Not shown", f"<p>{text(what)}</p>", ledger="", here="")


def serve(port: int, ready: Callable[[str], None]) -> None:
    """Serve the pages until the process is interrupted.

    Args:
        port: of the loopback interface; 0 chooses a free one.
        ready: called with the address.

    Raises:
        UsageError: the port is taken.
        StorageError: the ledger cannot be read.
    """
    with SiteServer(port) as server:
        server.contents.read()
        ready(server.url)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
