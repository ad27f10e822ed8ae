"""server: answers GET requests with the pages of the ledger, and nothing else.

It listens on the loopback interface, unless `--host` names another for a proxy. Every user of the machine can reach
the port, so the printed address carries a token; the answer to it puts the token into a cookie, and no other request is
answered without it. A page of another site could send requests to this address, under a name of its own that it lets
point here; requests whose `Host` is neither this server nor that of the setting `lineage.url` are therefore refused,
and no page may be framed or read from elsewhere.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import secrets
import shlex
import socket
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from wherry.config.settings import pages_url
from wherry.cures import Argument, Cure
from wherry.errors import AmbiguousError, NotFoundError, UsageError, WherryError, internal_error
from wherry.trace.site_contents import LedgerReader
from wherry.trace.site_pages import Page, page_at, shell, text

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

    def __init__(self, port: int, host: str = HOST, public: str | None = None) -> None:
        """Bind the port; 0 chooses a free one.

        Args:
            port: to listen on.
            host: address of the interface to listen on.
            public: where a proxy shows the pages, as `wherry.config.settings.pages_url` gives it.

        Raises:
            UsageError: the port is taken, there is no such interface, or no name leads to it.
        """
        if _is_any(host) and public is None:
            raise UsageError(
                f"--host {shlex.quote(host)} listens on every interface, but nothing says under which name"
                " the pages are shown",
                cure="set `lineage.url` in wherry.toml to the address of the proxy, or pass that of one interface",
            )
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) or isinstance(error, socket.gaierror):
                what = f"--host {shlex.quote(host)} is not an address of this machine: {error.strerror}"
                raise UsageError(
                    what, cure=f"pass the address of one of its interfaces, or {HOST}"
                ) from error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise UsageError(
                f"port {port} cannot be used: {error.strerror}",
                cure=Cure("give another {}; 0 chooses a free one", Argument("port")),
            ) from error
        self.contents = LedgerReader()
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        self.host, self.public = f"[{host}]" if ":" in host else host, public

    @property
    def url(self) -> str:
        """The address of the pages, with the token that it asks for."""
        base = self.public or f"http://{self.host}:{self.server_port}"
        return f"{base}/?{_TOKEN}={self.token}"

    @property
    def names(self) -> set[str]:
        """What `Host` of a request may be."""
        own = {f"{name}:{self.server_port}" for name in (HOST, "localhost", self.host)}
        return own | self._public_names()

    def is_secure(self, host: str) -> bool:
        """Whether a request came through the proxy over https; then the cookie goes nowhere else."""
        return (self.public or "").startswith("https:") and host.lower() in self._public_names()

    def _public_names(self) -> set[str]:
        if self.public is None:
            return set()
        scheme, _, place = self.public.partition("://")
        return {place, place.removesuffix(":443" if scheme == "https" else ":80")}

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
        if self.headers.get("Host", "").lower() not in site.names:
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
            secure = "; Secure" if site.is_secure(self.headers.get("Host", "")) else ""
            cookie = f"{site.cookie}={site.token}; Path=/; HttpOnly; SameSite=Lax{secure}"
            self.send_header("Set-Cookie", cookie)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing about requests."""


def _sorry(what: str) -> Page:
    return shell("Not shown", f"<p>{text(what)}</p>", ledger="", here="")


def _is_any(host: str) -> bool:
    """Whether an address stands for every interface."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def serve(port: int, ready: Callable[[str], None], *, host: str = HOST) -> None:
    """Serve the pages until the process is interrupted.

    Args:
        port: to listen on; 0 chooses a free one.
        ready: called with the address.
        host: address of the interface to listen on.

    Raises:
        UsageError: the port is taken, there is no such interface, or `lineage.url` is missing or invalid.
        StorageError: the ledger cannot be read.
    """
    with SiteServer(port, host, pages_url()) as server:
        server.contents.read()
        ready(server.url)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
