"""What an inert pickle machine makes: globals that are only names, records of calls that never happen.

Also the rules that a format gives to the machine, and the few makers that formats share. Keys of dicts and
members of sets must be cheap to hash for whatever the data says: nested tuples (a pickle of 400 bytes can make one
whose hash takes 2^60 steps), long integers (all multiples of 2^61-1 collide) and floats are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, overload, runtime_checkable

from wherry.errors import CorruptError, HostileError, UnsupportedError, WherryError

_SCALARS = frozenset({str, bool, bytes, type(None)})
_LONGEST_KEY = 16
_LARGEST_KEY = (1 << 61) - 1  # beyond it integers share hashes, and a dict of them takes quadratic time


class Global(NamedTuple):
    """A name that a pickle wants to import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class CallRecord:
    """What a pickle would have made by a call.

    Attributes:
        kind: what it would have called.
        args: with which arguments.
        state: what it would have set on the result; None where nothing.
        items: what it would have appended, or pairs that it would have set.
    """

    kind: Global
    args: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list[Any])


class Attributes(dict[Any, Any]):
    """An object that is no more than its attributes or items, as a dict (`argparse.Namespace`).

    Attributes:
        kind: name of its class.
    """

    __slots__ = ("kind",)

    def __init__(self, kind: str, items: Mapping[Any, Any] | None = None) -> None:
        super().__init__(items or {})
        self.kind = kind


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """A harmless object, told as plain data.

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
        length: bytes as they lie there.
        text: whether they are UTF-8 text.
        latin: whether the text stands for bytes, one per character (protocol 2 has no other way).
    """

    start: int
    length: int
    text: bool = False
    latin: bool = False


@runtime_checkable
class Buildable(Protocol):
    """A value of a format's own that takes the state that a pickle sets on it."""

    def build(self, state: Any) -> None:
        """Take the state."""


class PickleSource(Protocol):
    """The bytes of a pickle: `bytes`, a memory map, or a file that is read in pages."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> bytes: ...
    def find(self, sub: bytes, start: int, stop: int, /) -> int:
        """As `bytes.find`."""
        ...


Maker: TypeAlias = Callable[[tuple[Any, ...]], Any]
# Global → None (a Record is made of a call), or a function of ours that makes the value from the arguments.
Allowed: TypeAlias = Mapping[tuple[str, str], Maker | None]


@dataclass(frozen=True, slots=True)
class Rules:
    """What one format lets a pickle say.

    Attributes:
        allowed: the globals.
        persistent: makes a value of a persistent id; None where the format has none.
        refusal: a better error than `HostileError` for a global that is not allowed, or None.
        far: byte strings and texts of at least so many bytes stay where they lie, as `Far`; None for none.
        opaque: names of further classes whose objects become opaque values.
        survey: called with every global; given, all globals are allowed and all calls are recorded, so that a
            list can be made of what a hostile pickle wants.
    """

    allowed: Allowed
    persistent: Callable[[Any], Any] | None = None
    refusal: Callable[[Global], WherryError | None] = lambda _wanted: None
    far: int | None = None
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
        HostileError: it is not.
        UnsupportedError: it is a float.
    """
    if _cheap(key) or isinstance(key, (CallRecord, Global)):
        return key
    if type(key) is tuple and len(key) <= _LONGEST_KEY and all(map(_cheap, key)):
        return key
    if type(key) is float:
        raise UnsupportedError("a float as the key of a dict")
    raise HostileError(
        f"a {type(key).__name__} as a key whose hash could take for ever",
        cure="do not use this file; it was made to hang programs",
    )


def plain_number(text: str) -> int | bool:
    """A number of protocol 0 in digits; `00` and `01` are False and True.

    Raises:
        CorruptError: it is none.
    """
    if text in ("00", "01"):
        return text == "01"
    if not text.lstrip("-").isdecimal():
        raise CorruptError(f"{text[:20]!r} as a number in a pickle", cure="restore the file")
    return int(text)


def _cheap(key: Any) -> bool:
    return type(key) in _SCALARS or (type(key) is int and -_LARGEST_KEY < key < _LARGEST_KEY)
