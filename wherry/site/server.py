"""server: answers GET requests on the loopback interface with the pages of the ledger, and nothing else.

Every user of the machine can reach the port, so the printed address carries a token; the answer to it puts the token
into a cookie, and no other request is answered without it. A page of another site could send requests to this address,
under a name of its own that it lets point here; requests whose `Host` is not this server are therefore refused, and no
page may be framed or read from elsewhere.
"""

from __future__ import annotations

import errno
import hmac
import secrets
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
_TOKEN, _TOKEN_BYTES = "token", 24
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
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)

    @property
    def url(self) -> str:
        """The address of the pages, with the token that it asks for."""
        return f"http://{HOST}:{self.server_port}/?{_TOKEN}={self.token}"

    @property
    def cookie(self) -> str:
        """The name of the cookie; cookies of all ports of a host are sent to each of them."""
        return f"wherry-{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about a browser that goes away."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _SECONDS
    _is_first = False  # whether the last request stated the token in its address
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

    def _answer(self) -> tuple[HTTPStatus, Page]:  # noqa: PLR0911  a table of errors
        site = cast("SiteServer", self.server)
        if self.headers.get("Host") not in [f"{name}:{site.server_port}" for name in (HOST, "localhost")]:
            return HTTPStatus.MISDIRECTED_REQUEST, _sorry("this server has another name")
        try:
            url = urlsplit(self.path)
            query = dict(parse_qsl(url.query, max_num_fields=10))
            self._require_token(query.pop(_TOKEN, ""))
            return HTTPStatus.OK, page_at(unquote(url.path), query, site.contents.read())
        except PermissionError as error:
            return HTTPStatus.FORBIDDEN, _sorry(str(error))
        except NotFoundError as error:
            return HTTPStatus.NOT_FOUND, _sorry(error.what)
        except (AmbiguousError, ValueError) as error:
            return HTTPStatus.BAD_REQUEST, _sorry(str(error))
        except WherryError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, _sorry(error.for_shell())
        except Exception as error:  # noqa: BLE001  a bug must not end the server
            return HTTPStatus.INTERNAL_SERVER_ERROR, _sorry(internal_error(error).what)

    def _require_token(self, stated: str) -> None:
        """Refuse a request that has the token neither in its address nor in the cookie that the address has set.

        Raises:
            PermissionError: it has none.
        """
        site = cast("SiteServer", self.server)
        self._is_first = hmac.compare_digest(stated.encode(), site.token.encode())
        cookies = (
            part.strip().encode("latin-1", "replace") for part in self.headers.get("Cookie", "").split(";")
        )
        expected = f"{site.cookie}={site.token}".encode()
        if not self._is_first and not any(hmac.compare_digest(part, expected) for part in cookies):
            raise PermissionError("open the address that `wherry lineage serve` printed")

    def _send(self, status: HTTPStatus, page: Page, *, body: bool) -> None:
        content = page.html.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", f"{page.policy}; frame-ancestors 'none'")
        self.send_header("Content-Length", str(len(content)))
        if self._is_first:
            site = cast("SiteServer", self.server)
            self.send_header("Set-Cookie", f"{site.cookie}={site.token}; Path=/; HttpOnly; SameSite=Lax")
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
