"""checked_clients: HTTP clients of other libraries, whose connections are checked after DNS.

Only the user's configuration names the servers of the Hub and of MLflow. So they may be on this machine, and then so
may all that they lead to. Where they are elsewhere, names that DNS lets point here, and redirects to here, are refused.
Addresses of metadata always are (`wherry.remote.addresses`).

A refusal is carried through the libraries as an exception that is no OSError: those they try again, for minutes.
"""

from __future__ import annotations

import urllib.request
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

from wherry.core.emit import opener
from wherry.remote.addresses import AddressError, host_of, require_named_address

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from http.client import HTTPConnection

    from wherry.remote.addresses import Check

_configured: ContextVar[frozenset[str] | None] = ContextVar("wherry_configured_hosts", default=None)


class RefusedConnectionError(Exception):
    """Carries the refusal of an address, its cause, through a library."""


@contextmanager
def configured_servers(*uris: str) -> Generator[None]:
    """While the block runs, only these servers and those of this machine that they are on may be here.

    Args:
        uris: of the servers that the configuration names; other URIs do not count.
    """
    token = _configured.set(configured_hosts(*uris))
    try:
        yield
    finally:
        _configured.reset(token)


def configured_hosts(*uris: str) -> frozenset[str]:
    """The hosts of the http and https URIs among some, and of the proxies of this process."""
    return frozenset(host_of(uri) for uri in (*uris, *urllib.request.getproxies().values()) if "://" in uri)


def require_configured_address(host: str, address: str) -> None:
    """The check of a client that the whole process uses: outside of `configured_servers`, only metadata is refused.

    Raises:
        AddressError: nothing may connect to the address.
    """
    hosts = _configured.get()
    require_named_address(host, address, frozenset((host,)) if hosts is None else hosts)


def open_checked(request: urllib.request.Request, seconds: float) -> Any:
    """The answer of a server that the configuration names; redirects are not followed.

    Args:
        request: of http or https.
        seconds: that it may take.

    Raises:
        AddressError: its host leads to an address that must not be reached.
        OSError, http.client.HTTPException: it does not answer, or answers with a failure.
    """
    hosts = configured_hosts(request.full_url)
    checked = _Http(lambda host, address: require_named_address(host, address, hosts))
    secure = _Https(lambda host, address: require_named_address(host, address, hosts))
    try:
        return opener(checked, secure).open(request, timeout=seconds)
    except RefusedConnectionError as error:
        raise error.__cause__ or error from None


class _CheckedOpening:
    """Handlers of urllib whose connections are checked."""

    def __init__(self, check: Check) -> None:
        super().__init__()
        self._check = check

    def do_open(self, http_class: Any, req: Any, **options: Any) -> Any:
        """See AbstractHTTPHandler."""

        def connect(*arguments: Any, **named: Any) -> HTTPConnection:
            connection = http_class(*arguments, **named)
            real = connection._create_connection  # noqa: SLF001  before TLS begins

            def create(place: tuple[str, int], *rest: Any, **more: Any) -> Any:
                return _require_peer(real(place, *rest, **more), place[0], self._check)

            connection._create_connection = create  # noqa: SLF001
            return connection

        return super().do_open(connect, req, **options)  # type: ignore[misc]


class _Http(_CheckedOpening, urllib.request.HTTPHandler):
    pass


class _Https(_CheckedOpening, urllib.request.HTTPSHandler):
    pass


def _require_peer(connection: Any, host: str, check: Check) -> Any:
    """A socket, whose address is checked before anything is sent.

    Raises:
        RefusedConnectionError: the address is refused; the socket is closed.
    """
    try:
        _require(host, connection.getpeername()[0], check)
    except BaseException:
        connection.close()
        raise
    return connection


def _require(host: str, address: str, check: Check) -> None:
    try:
        check(host, address)
    except AddressError as error:
        raise RefusedConnectionError(error.what) from error


def guard_requests(session: Any, check: Check) -> Any:
    """Have a session of `requests` check every address; returns the session. A proxy connects by itself.

    Args:
        session: of requests.
        check: the same function for the same session.
    """
    classes = checked_pools(check, refused=RefusedConnectionError)
    for adapter in session.adapters.values():
        manager = adapter.poolmanager
        if manager.pool_classes_by_scheme is not classes:
            manager.clear()  # connections that nothing has checked
            manager.pool_classes_by_scheme = classes
    return session


@cache
def checked_pools(check: Check, refused: type[Exception] | None = None) -> dict[str, Any]:
    """The pools of urllib3 for http and https, whose connections are checked before a byte is sent.

    Args:
        check: raises AddressError for a host and its address.
        refused: raised in its place, from it.
    """
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool

    def checking(kind: Any) -> Any:
        class Connection(kind.ConnectionCls):
            def _new_conn(self) -> Any:
                found = super()._new_conn()
                try:
                    check(self.host, found.getpeername()[0])
                except AddressError as error:
                    found.close()
                    if refused is None:
                        raise
                    raise refused(error.what) from error
                return found

        return type(kind.__name__, (kind,), {"ConnectionCls": Connection})

    return {"http": checking(HTTPConnectionPool), "https": checking(HTTPSConnectionPool)}


def guard_httpx(client: Any, check: Check) -> None:
    """Have a client of `httpx` check the address of every new connection.

    Args:
        client: of httpx, or of a library with the same parts; transports of other kinds are left as they are.
        check: raises AddressError for a host and its address.
    """
    for transport in (client._transport, *client._mounts.values()):  # noqa: SLF001  no option of httpx does it
        pool: Any = getattr(transport, "_pool", None)
        backend = getattr(pool, "_network_backend", None)
        if isinstance(backend, _CheckedBackend):
            backend.check = check
        elif backend is not None:
            pool._network_backend = _CheckedBackend(backend, check)  # noqa: SLF001


class _CheckedBackend:
    """What connects for a pool of httpx, with a check of each connection."""

    def __init__(self, backend: Any, check: Check) -> None:
        self._backend, self.check = backend, check

    def connect_tcp(self, host: str, *arguments: Any, **named: Any) -> Any:
        """See NetworkBackend of httpcore."""
        stream = self._backend.connect_tcp(host, *arguments, **named)
        try:
            _require(host, stream.get_extra_info("server_addr")[0], self.check)
        except BaseException:
            stream.close()
            raise
        return stream

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return getattr(self._backend, name)
