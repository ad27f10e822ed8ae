"""The values of an inert pickle machine: globals that are only names, and records of calls that are never made.

Also the rules that a format gives to the machine, and the makers that formats share. Keys of dicts and
members of sets must be cheap to hash, whatever the data: nested tuples (a pickle of 400 bytes can build one
whose hash takes 2^60 steps), long integers (all multiples of 2^61-1 collide) and floats are refused.

The bytes that a pickle machine reads, without loading the file: a memory map, or pages of a remote or huge file.

Large pickles are mostly tensor data that the machine skips; only the pages that it reads are loaded.
"""

from __future__ import annotations

import errno
import mmap
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, overload, runtime_checkable

from wherry.core.lazy_dataclass import dataclass
from wherry.errors import (
    CorruptError,
    HostileError,
    NotFoundError,
    UnsupportedError,
    WherryError,
    storage_error,
)
from wherry.store.local_store import LocalStore
from wherry.store.location import Location

_SCALARS = frozenset({str, bool, bytes, type(None)})
_LONGEST_KEY = 16
_LARGEST_KEY = (1 << 61) - 1  # beyond it integers share hashes, and a dict of them takes quadratic time


class Global(NamedTuple):
    """A name that a pickle imports."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class CallRecord:
    """A call that a pickle would make.

    Attributes:
        kind: the callable.
        args: the arguments.
        state: the state that it would set on the result; None if there is none.
        items: the items that it would append, or the keys and values that it would set.
    """

    kind: Global
    args: tuple[Any, ...]
    state: Any = None
    items: Sequence[Any] = ()

    def add(self, items: list[Any]) -> None:
        """Append items; most records have none, and no list."""
        if type(self.items) is list:
            self.items += items
        else:
            self.items = list(items)


class Attributes(dict[Any, Any]):
    """An object that consists of its attributes or items only, as a dict (`argparse.Namespace`).

    Attributes:
        kind: name of its class.
    """

    __slots__ = ("kind",)

    def __init__(self, kind: str, items: Mapping[Any, Any] | None = None) -> None:
        super().__init__(items or {})
        self.kind = kind


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """A harmless object, as plain data.

    Attributes:
        kind: name of its class.
        value: str, number, None, or a list or dict of inert values.
    """

    kind: str
    value: Any


@dataclass(frozen=True, slots=True)
class Far:
    """Bytes (or text) so long that they stay in the file.

    Attributes:
        start: offset of the first byte in the file.
        length: bytes in the file.
        text: whether they are UTF-8 text.
        latin: whether the text encodes bytes, one per character (as in protocol 2).
    """

    start: int
    length: int
    text: bool = False
    latin: bool = False


@runtime_checkable
class Buildable(Protocol):
    """A value of a format that accepts the state that a pickle sets on it."""

    def build(self, state: Any) -> None:
        """Take the state."""


class PickleSource(Protocol):
    """The bytes of a pickle: `bytes`, a memory map, or a file that is read page by page."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> bytes: ...
    def find(self, sub: bytes, start: int, stop: int, /) -> int:
        """Like `bytes.find`."""
        ...


Maker: TypeAlias = Callable[[tuple[Any, ...]], Any]
# Global → None (a call becomes a CallRecord), or a function that makes the value from the arguments.
Allowed: TypeAlias = Mapping[tuple[str, str], Maker | None]


@dataclass(frozen=True, slots=True)
class Rules:
    """What one format allows in a pickle.

    Attributes:
        allowed: the allowed globals.
        persistent: converts a persistent id to a value; None if the format has none.
        refusal: a better error than `HostileError` for a global that is not allowed, or None.
        within: the same for a global among the arguments of a function, by that function; it also gets the argument
            before it.
        far: byte strings and texts of at least this many bytes stay in the file, as `Far`; None for no limit.
        members: enumerations whose members may be named: class → name → value. CPython 3.11.0 to 3.11.3 pickles a
            member as `getattr(class, name)`, every other version as `class(value)`; the record is that of the latter.
        attributes: classes of which a pickle has very many objects → the names of their attributes. An object that has
            these, in this order, may get the tuple of their values as its state.
        opaque: names of further classes whose objects become opaque values.
        survey: called with every global; if given, all globals are allowed and all calls are recorded, to list
            the imports of a hostile pickle.
    """

    allowed: Allowed
    persistent: Callable[[Any], Any] | None = None
    refusal: Callable[[Global], WherryError | None] = lambda _wanted: None
    within: Mapping[tuple[str, str], Callable[[Global, Any], WherryError | None]] = field(
        default_factory=dict["tuple[str, str]", "Callable[[Global, Any], WherryError | None]"]
    )
    far: int | None = None
    members: Mapping[tuple[str, str], Mapping[str, int]] = field(
        default_factory=dict["tuple[str, str]", "Mapping[str, int]"]
    )
    attributes: Mapping[tuple[str, str], list[str]] = field(
        default_factory=dict["tuple[str, str]", "list[str]"]
    )
    opaque: frozenset[str] = frozenset()
    survey: Callable[[Global, int], None] | None = None


def set_of(args: tuple[Any, ...]) -> frozenset[Any]:
    """A maker for `set` and `frozenset`: one argument, a sequence of hashable values."""
    (members,) = args or ((),)
    return frozenset(checked_key(member) for member in members)


def dict_of(args: tuple[Any, ...]) -> dict[Any, Any]:
    """A maker for `dict` and `OrderedDict`: no argument, a dict, or one sequence of pairs."""
    (pairs,) = args or ((),)
    if isinstance(pairs, dict):
        return dict(cast("dict[Any, Any]", pairs))
    return {checked_key(key): value for key, value in pairs}


def checked_key(key: Any) -> Any:
    """A key of a dict or member of a set that is cheap to hash.

    Raises:
        HostileError: it is not cheap to hash.
        UnsupportedError: it is a float.
    """
    if _cheap(key) or isinstance(key, (CallRecord, Global)):
        return key
    if type(key) is tuple and len(key) <= _LONGEST_KEY and all(map(_cheap, key)):
        return key
    if type(key) is float:
        raise UnsupportedError("unsupported dict key of type float in the pickle")
    raise HostileError(
        f"unsafe key of type {type(key).__name__} in the pickle: its hash could take unlimited time",
        cure="do not use this file; it was created to hang programs",
    )


def plain_number(text: str) -> int | bool:
    """A decimal number of protocol 0; `00` and `01` are False and True.

    Raises:
        CorruptError: the text is not a number.
    """
    if text in ("00", "01"):
        return text == "01"
    if not text.lstrip("-").isdecimal():
        raise CorruptError(
            f"invalid number {text[:20]!r} in the pickle",
            cure="restore the file from a backup or download it again",
        )
    return int(text)


def _cheap(key: Any) -> bool:
    return type(key) in _SCALARS or (type(key) is int and -_LARGEST_KEY < key < _LARGEST_KEY)


PAGE = 1 << 20
_PAGES = 32


class PagedFile:
    """A remote file as a sequence of bytes; the pages that were read last are cached."""

    def __init__(self, location: Location, size: int) -> None:
        self._location = location
        self._size = size
        self._pages: OrderedDict[int, bytes] = OrderedDict()
        self._number, self._page = -1, b""

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> bytes: ...
    def __getitem__(self, index: int | slice, /) -> int | bytes:
        if isinstance(index, slice):
            start, stop, _ = index.indices(self._size)
            return self._bytes(start, stop)
        if index // PAGE != self._number:
            self._number, self._page = index // PAGE, self._fetch(index // PAGE)
        return self._page[index % PAGE]

    def find(self, sub: bytes, start: int, stop: int, /) -> int:
        """Like `bytes.find`."""
        found = self._bytes(start, stop).find(sub)
        return found if found < 0 else start + found

    def _bytes(self, start: int, stop: int) -> bytes:
        first, last = start // PAGE, max(stop - 1, start) // PAGE
        if first == last:
            return self._fetch(first)[start - first * PAGE : stop - first * PAGE]
        return self._location.read(start, stop)

    def _fetch(self, number: int) -> bytes:
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = self._location.read(
                number * PAGE, min((number + 1) * PAGE, self._size)
            )
            if len(page) != min(PAGE, self._size - number * PAGE):
                raise CorruptError("the file was truncated while it was read", uri=self._location.uri)
            if len(self._pages) > _PAGES:
                self._pages.popitem(last=False)
        return page


@contextmanager
def open_for_walk(location: Location) -> Generator[PickleSource]:
    """The bytes of a file, for random access.

    Raises:
        NotFoundError: the file does not exist.
        CorruptError: the file was truncated while it was read.
        HostileError: it is not a regular file, or a link points to a forbidden place.
        StorageError: the storage failed.
    """
    entry = location.stat()
    size = entry.size if entry else 0
    if not isinstance(location.store, LocalStore) or not size:
        yield PagedFile(location, size)
        return
    mapped = _mapped_file(location)
    if mapped is None:
        yield PagedFile(location, size)
        return
    with mapped:
        yield mapped


def _mapped_file(location: Location) -> mmap.mmap | None:
    """The file as a memory map; None if it does not fit into the address space of a limited process."""
    assert isinstance(location.store, LocalStore)
    try:
        with location.store.descriptor(location.path) as descriptor:
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise NotFoundError(
            f"file not found: {location.name}", uri=location.uri, cure="check the path"
        ) from error
    except OSError as error:
        if error.errno == errno.ENOMEM:
            return None
        raise storage_error(error, location.uri) from error
    except ValueError as error:
        raise CorruptError("the file was truncated while it was opened", uri=location.uri) from error
