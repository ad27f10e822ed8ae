"""addresses: which addresses of the network storage may be reached at, and the check of each connection.

A URI can come from an event, a registry, a ledger or a server's redirect, and its host can be any name, which DNS may
let point anywhere. So the rule holds for the address that a connection is made to, after DNS:

- *Metadata*: addresses of the link (169.254.0.0/16, fe80::/10) and others at which clouds answer questions of a machine
  about itself, with its credentials. No store is there, so they are always refused.
- *Local*: this machine (127.0.0.0/8, ::1, 0.0.0.0). Allowed where a user has said so: in a URI that states the address
  or `localhost`, and for the servers of buckets, of the Hub and of MLflow, which only the user's configuration names:
  where one of them is on this machine, all that it leads to may be here. Refused for a name that DNS lets point here,
  for redirects from elsewhere, and for URIs that a registry or the ledger states.

Texts of hosts are read in every form that some resolver takes: 127.1, 0x7f.1, 017700000001, 2130706433, ::ffff:7f00:1,
fullwidth digits, ideographic full stops; and 0-padded numbers both as octal and as decimal.

A refusal is carried through the clients of other libraries as an exception that is no OSError: those they try again,
for minutes.
"""

from __future__ import annotations

import re
import unicodedata
import urllib.request
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from socket import AF_INET
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

from wherry.core.emit import opener
from wherry.errors import StorageError

if TYPE_CHECKING:
    from http.client import HTTPConnection


Check: TypeAlias = Callable[[str, str], None]  # of a host and its address; raises AddressError


METADATA, LOCAL, ELSEWHERE = "metadata", "local", "elsewhere"
_Address: TypeAlias = "IPv4Address | IPv6Address"
_METADATA_NAMES = frozenset({
    "instance-data", "instance-data.ec2.internal", "metadata", "metadata.azure.internal", "metadata.goog",
    "metadata.google.internal", "metadata.tencentyun.com",
})  # fmt: skip
_LOCAL_NAMES = re.compile(r"(.*\.)?localhost|localhost\.localdomain|localhost[46]|ip6-(localhost|loopback)")
_METADATA_NETWORKS = tuple(map(ip_network, (
    "169.254.0.0/16", "fe80::/10",
    "100.100.100.200/32",  # Alibaba Cloud
    "168.63.129.16/32",  # Azure
    "192.0.0.192/32", "fd00:c1::a9fe:a9fe/128",  # Oracle Cloud
    "fd00:ec2::/32",  # Amazon EC2
    "fd20:ce::254/128",  # Google Cloud
    "fd00:42::42/128",  # Scaleway
)))  # fmt: skip
_LOCAL_NETWORKS = tuple(map(ip_network, ("127.0.0.0/8", "0.0.0.0/8", "::/128", "::1/128")))
# IPv6 networks whose addresses hold one of IPv4, and by how many bits it is shifted: compatible, NAT64, 6to4.
_HOLDING = tuple((ip_network(text), shift) for text, shift in (
    ("::/96", 0), ("::ffff:0:0/96", 0), ("::ffff:0:0:0/96", 0), ("64:ff9b::/96", 0), ("64:ff9b:1::/48", 0),
    ("2002::/16", 80),
))  # fmt: skip
_ISATAP = (0x00005EFE, 0x02005EFE)  # bits 64 to 96
_LONGEST = 300  # characters of a host; no name in DNS is longer
_STOPS = re.compile("[.\u3002\uff0e\uff61]")
_MOST_PARTS = 4
_CURE = "use a URI of a server that only stores checkpoints"
_configured: ContextVar[frozenset[str] | None] = ContextVar("wherry_configured_hosts", default=None)


class AddressError(StorageError):
    """A connection to an address that no storage may be reached at."""


def kind_of_host(host: str) -> str:
    """The kind of a host by its text alone, without a request to DNS.

    Args:
        host: a name or an address in any form, with or without brackets.

    Returns:
        METADATA, LOCAL, or ELSEWHERE, which names that are not known are too.
    """
    text = _plain(host)
    if text in _METADATA_NAMES:
        return METADATA
    kinds = {_kind_of(address) for address in _addresses(text)}
    if METADATA in kinds:
        return METADATA
    return LOCAL if LOCAL in kinds or _LOCAL_NAMES.fullmatch(text) else ELSEWHERE


def host_of(uri: str) -> str:
    """The host of an http or https URI, without login and port; empty if there is none."""
    place = re.split(r"[/\\?#]", uri.partition("://")[2], maxsplit=1)[0].rpartition("@")[2]
    found = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::.*)?", place, re.DOTALL)
    return found[1] if found else place


def require_host(uri: str, *, stated: bool = True) -> None:
    """Refuse an http or https URI by its text, before anything of it is opened.

    Args:
        uri: the URI.
        stated: whether a user states it; else it comes from a registry, a ledger or a server.

    Raises:
        AddressError: its host is a metadata address, or this machine although no user states it.
    """
    host = host_of(uri)
    kind = kind_of_host(host)
    if kind == METADATA or (kind == LOCAL and not stated):
        raise _refusal(host, kind, "", uri)


def require_address(host: str, address: str, *, local: bool) -> None:
    """Refuse the address that a connection is about to be made to.

    Args:
        host: of the request.
        address: that DNS gives for it, or the host itself.
        local: whether it may be this machine.

    Raises:
        AddressError: it is a metadata address, or this machine although it may not be.
    """
    kind = kind_of_host(address)
    if kind == METADATA or (kind == LOCAL and not local):
        raise _refusal(host, kind, address, None)


def require_named_address(host: str, address: str, names: Collection[str]) -> None:
    """Refuse the address that a client is about to connect to, all of whose servers the configuration names.

    Args:
        host: of the request, or of a redirect that the client follows.
        address: that DNS gives for it, or the host itself.
        names: the hosts of the servers that the configuration names.

    Raises:
        AddressError: it is a metadata address, or this machine although no server that is named is here.
    """
    require_address(host, address, local=host in names or LOCAL in map(kind_of_host, names))


def guard(session: Any, *, configured: bool) -> Any:
    """Have a session of aiohttp check every address, also those that need no DNS; returns the session.

    Args:
        session: whose connector is not shared with other sessions.
        configured: whether only the user's configuration names the servers: they may be on this machine. Else only a
            host that says so itself may be.
    """
    connector = session.connector
    resolve = connector._resolve_host  # noqa: SLF001  its resolver does not get IP addresses, which must be checked too

    async def resolve_checked(host: str, port: int, traces: Any = None) -> Any:
        rows = await resolve(host, port, traces)
        for row in rows:
            require_address(host, row["host"], local=configured or kind_of_host(host) == LOCAL)
        return rows

    connector._resolve_host = resolve_checked  # noqa: SLF001
    return session


@cache
def checking_resolver() -> Any:
    """A resolver of aiohttp that checks what DNS gives for the servers that the user's configuration names."""
    from aiohttp import DefaultResolver
    from aiohttp.abc import AbstractResolver

    class Resolver(AbstractResolver):
        async def resolve(self, host: str, port: int = 0, family: Any = AF_INET) -> Any:
            rows = await DefaultResolver().resolve(host, port, family)
            for row in rows:
                require_address(host, row["host"], local=True)
            return rows

        async def close(self) -> None:
            """Nothing is held."""

    return Resolver()


@cache
def redirect_guard() -> Any:
    """A trace of aiohttp that refuses redirects from elsewhere to this machine, or to one that answers about it."""
    from aiohttp import TraceConfig

    trace = TraceConfig()
    trace.on_request_redirect.append(_require_elsewhere)
    return trace


async def _require_elsewhere(_session: Any, _context: Any, parameters: Any) -> None:
    origin = parameters.response.url
    target = origin.join(type(origin)(parameters.response.headers.get("Location", "")))
    host = target.host or ""
    kind = kind_of_host(host)
    if target.scheme not in ("http", "https"):
        what = f"a {target.scheme} address"
    elif kind == METADATA:
        what = f"the metadata address of this machine: {host}"
    elif kind == LOCAL and kind_of_host(origin.host or "") != LOCAL:
        what = f"an address of this machine: {host}"
    else:
        return
    raise AddressError(f"the server redirects to {what}", cure="do not use this server")


def refusal_in(error: BaseException) -> AddressError | None:
    """The refusal of an address that a library has replaced by an exception of its own; None if there is none."""
    found: BaseException | None = error
    for _ in range(20):
        if found is None or isinstance(found, AddressError):
            return found
        found = found.__cause__ or found.__context__
    return None


def _refusal(host: str, kind: str, address: str, uri: str | None) -> AddressError:
    leads = f" leads to {address}," if address and address != host.strip("[]") else " is"
    meaning = "where clouds tell a machine its secrets" if kind == METADATA else "an address of this machine"
    cure = (
        _CURE
        if kind == METADATA
        else "if you trust it, pass a URI that states the address, such as 127.0.0.1"
    )
    return AddressError(f"the address is refused: {host}{leads} {meaning}", uri=uri, cure=cure)


def _plain(host: str) -> str:
    """A host as resolvers see it: decoded, in lower case, with ASCII digits and dots, without unseen characters."""
    text = unicodedata.normalize("NFKC", unquote(unquote(host[:_LONGEST])))
    text = "".join(sign for sign in text if unicodedata.category(sign) not in ("Cf", "Cc", "Mn"))
    words = text.strip("[]").partition("%")[0].split()
    return ".".join(_STOPS.split(words[0])).rstrip(".").strip("[]").lower() if words else ""


def _addresses(text: str) -> Iterator[_Address]:
    """The addresses that a text can mean, each with those that it holds."""
    try:
        found = ip_address(text)
    except ValueError:
        yield from _loose(text)
        return
    yield found
    if not isinstance(found, IPv6Address):
        return
    number = int(found)
    for network, shift in _HOLDING:
        if found in network and number > 1:
            yield IPv4Address(number >> shift & 0xFFFFFFFF)
    if number >> 32 & 0xFFFFFFFF in _ISATAP:
        yield IPv4Address(number & 0xFFFFFFFF)
    if found.teredo is not None:
        yield from found.teredo


def _loose(text: str) -> Iterator[IPv4Address]:
    """IPv4 addresses in the forms of inet_aton: one to four numbers in base 8, 10 or 16, where the last fills the rest.

    A number that is too large wraps around, as it does in careless parsers.
    """
    parts = text.split(".")
    if not 1 <= len(parts) <= _MOST_PARTS:
        return
    for padded_base in (8, 10):
        numbers = [_number(part, padded_base) for part in parts]
        if None in numbers:
            continue
        *first, last = (number or 0 for number in numbers)
        value = sum((number & 0xFF) << (24 - 8 * index) for index, number in enumerate(first))
        yield IPv4Address(value | last & ((1 << (32 - 8 * len(first))) - 1))


def _number(text: str, padded_base: int) -> int | None:
    found = re.fullmatch(r"(?:(0x)([0-9a-f]*)|(0+)?(\d+))", text)
    if found is None:
        return None
    if found[1]:
        return int(found[2] or "0", 16)
    try:
        return int(found[4], padded_base if found[3] else 10)
    except ValueError:
        return None


def _kind_of(address: _Address) -> str:
    for kind, networks in ((METADATA, _METADATA_NETWORKS), (LOCAL, _LOCAL_NETWORKS)):
        if any(address in network for network in networks):
            return kind
    return ELSEWHERE


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
    check = partial(require_named_address, names=configured_hosts(request.full_url))
    try:
        return opener(_Http(check), _Https(check)).open(request, timeout=seconds)
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
                found = real(place, *rest, **more)
                return _check_connection(found, place[0], found.getpeername, self._check)

            connection._create_connection = create  # noqa: SLF001
            return connection

        return super().do_open(connect, req, **options)  # type: ignore[misc]


class _Http(_CheckedOpening, urllib.request.HTTPHandler):
    pass


class _Https(_CheckedOpening, urllib.request.HTTPSHandler):
    pass


def _check_connection(connection: Any, host: str, peer: Callable[[], tuple[str, int]], check: Check) -> Any:
    """Check the address of a connection before anything is sent; returns the connection.

    Raises:
        RefusedConnectionError: the address is refused; the connection is closed.
    """
    try:
        check(host, peer()[0])
    except BaseException as error:
        connection.close()
        if isinstance(error, AddressError):
            raise RefusedConnectionError(error.what) from error
        raise
    return connection


def guard_requests(session: Any, check: Check) -> Any:
    """Have a session of `requests` check every address; returns the session. A proxy connects by itself.

    Args:
        session: of requests.
        check: the same function for the same session.
    """
    classes = checked_pools(check)
    for adapter in session.adapters.values():
        manager = adapter.poolmanager
        if manager.pool_classes_by_scheme is not classes:
            manager.clear()  # connections that nothing has checked
            manager.pool_classes_by_scheme = classes
    return session


@cache
def checked_pools(check: Check) -> dict[str, Any]:
    """The pools of urllib3 for http and https, whose connections are checked before a byte is sent.

    A refusal is a RefusedConnectionError.

    Args:
        check: raises AddressError for a host and its address.
    """
    from urllib3 import HTTPConnectionPool, HTTPSConnectionPool

    def checking(kind: Any) -> Any:
        class Connection(kind.ConnectionCls):
            def _new_conn(self) -> Any:
                found = super()._new_conn()
                return _check_connection(found, self.host, found.getpeername, check)

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
        return _check_connection(stream, host, partial(stream.get_extra_info, "server_addr"), self.check)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return getattr(self._backend, name)
