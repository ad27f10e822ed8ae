"""Emits pickles of protocol 2 opcode by opcode, so that the same values give the same bytes on any Python.

It covers what checkpoints need: plain scalars and containers, globals by name, calls of them, and objects that are
created empty and given a state. Only globals, repeated strings and the objects of `shared` go into the memo, because
Python's own memo depends on the identity of objects. Torch's `weights_only=True` reader knows every opcode used here.
Source of the opcodes: the documentation strings of CPython's `pickletools`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, cast

from wherry.errors import UnsupportedError

_U1, _U2, _I4, _U4 = 1 << 8, 1 << 16, 1 << 31, struct.Struct("<I")


class PickleWriter:
    """One pickle; `done` gives its bytes."""

    def __init__(self) -> None:
        self._out = bytearray(b"\x80\x02")
        self._memo: dict[object, bytes] = {}
        self._forms: dict[object, bytes] = {}
        self._fills: Iterator[bytes] = iter(())
        self._gaps: list[int] = []

    def raw(self, opcodes: bytes) -> None:
        """Append opcodes unchanged."""
        self._out += opcodes

    def name(self, module: str, name: str) -> None:
        """A global."""
        known = self._memo.get((module, name))
        if known is None:
            self._out += f"c{module}\n{name}\n".encode()
            self._remember((module, name))
        else:
            self._out += known

    def word(self, text: str) -> None:
        """A string that is repeated, and therefore in the memo."""
        self._out += self.stored(text)

    def stored(self, text: str) -> bytes:
        """The opcodes of such a string, which must be appended next."""
        return self._memo.get(text) or _text(text) + self._next(text)

    def shared(self, key: object, emit: Callable[[], None]) -> None:
        """One object wherever the same key is given; it must be one that no reader changes.

        Args:
            key: identifies the object in this pickle; not a string, nor the names of a global.
            emit: emits it, the first time.
        """
        known = self._memo.get(key)
        if known is None:
            emit()
            self._remember(key)
        else:
            self._out += known

    def like(self, form: object, fills: tuple[bytes, ...], emit: Callable[[], None]) -> None:
        """Append the opcodes that `emit` appends; for a form that was given before, append those with other fills.

        Opcodes are kept for the next call only if they store nothing in the memo, since a memo entry must be stored
        once.

        Args:
            form: identifies the opcodes between the fills.
            fills: opcodes that differ between those of one form.
            emit: appends all, and calls `gap` where the next fill belongs.
        """
        known = self._forms.get(form)
        if known is not None:
            self._out += known % fills
            return
        start, remembered, self._fills = len(self._out), len(self._memo), iter(fills)
        emit()
        cuts, self._gaps = [start, *self._gaps, len(self._out)], []
        if len(self._memo) == remembered:
            fixed = (self._out[begin:end] for begin, end in zip(cuts[::2], cuts[1::2], strict=True))
            self._forms[form] = b"%b".join(part.replace(b"%", b"%%") for part in fixed)

    def gap(self) -> None:
        """Append the next fill; see `like`."""
        fill = next(self._fills)
        self._gaps += (len(self._out), len(self._out) + len(fill))
        self._out += fill

    def value(self, value: Any) -> None:
        """A plain value: None, bool, int, float, str, list, tuple, or dict of such.

        Raises:
            UnsupportedError: it is of another type.
        """
        if isinstance(value, dict):
            children = cast("dict[Any, Any]", value)
            self.mapping((key, partial(self.value, item)) for key, item in children.items())
        elif isinstance(value, list):
            self.sequence([partial(self.value, item) for item in cast("list[Any]", value)])
        elif isinstance(value, tuple):
            self.tuple_of(cast("tuple[Any, ...]", value))
        else:
            self._out += _scalar(value)

    def tuple_of(self, items: tuple[Any, ...]) -> None:
        """A tuple of plain values."""
        short = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(items))
        self._out += b"" if short else b"("
        for item in items:
            self.value(item)
        self._out += short or b"t"

    def tuple_with(self, emits: list[Callable[[], None]]) -> None:
        """A tuple, each item emitted by a function."""
        self._out += b"("
        for emit in emits:
            emit()
        self._out += b"t"

    def made(self, module: str, name: str, args: Callable[[], None]) -> None:
        """The result of a global called with a tuple, which a function emits."""
        self.name(module, name)
        args()
        self._out += b"R"

    def mapping(self, items: Iterable[tuple[Any, Callable[[], None]]]) -> None:
        """A dict: each key a plain value, or a function that emits it, with a function that emits the value."""
        self.group(self._pairs(items))

    def _pairs(self, items: Iterable[tuple[Any, Callable[[], None]]]) -> Iterator[None]:
        for key, emit in items:
            key() if callable(key) else self.value(key)
            yield emit()

    def group(self, items: Iterable[None]) -> None:
        """A dict; each item of the iterator emits a key and a value when it is taken."""
        self._out += b"}("
        empty = len(self._out)
        for _item in items:
            pass
        if len(self._out) == empty:
            del self._out[-1:]
        else:
            self._out += b"u"

    def sequence(self, emits: list[Callable[[], None]]) -> None:
        """A list, each item emitted by a function."""
        self._out += b"](" if emits else b"]"
        for emit in emits:
            emit()
        self._out += b"e" if emits else b""

    def state(self, module: str, name: str, fields: Iterable[tuple[str, Callable[[], None]]]) -> None:
        """An object of a class, created empty and given attributes."""
        self.begin_state(module, name)
        del self._out[-1:]
        at = len(self._out)
        for word, emit in fields:
            self.word(word)
            emit()
        if len(self._out) > at:
            self._out[at:at] = b"("
            self._out += b"u"
        self._out += b"b"

    def begin_state(self, module: str, name: str) -> None:
        """The opcodes of an object of a class up to its first attribute; after the last one follow `u` and `b`."""
        self.name(module, name)
        self._out += b")\x81}("

    def done(self) -> bytes:
        """The whole pickle."""
        self._out += b"."
        return bytes(self._out)

    def _remember(self, key: object) -> None:
        """Put the last value into the memo."""
        self._out += self._next(key)

    def _next(self, key: object) -> bytes:
        """The opcode that puts a value into the memo."""
        at = len(self._memo)
        get, put, number = (b"h", b"q", bytes([at])) if at < _U1 else (b"j", b"r", _U4.pack(at))
        self._memo[key] = get + number
        return put + number


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + _U4.pack(len(data)) + data


def _scalar(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"\x88" if value else b"\x89"
    if isinstance(value, int):
        return integer(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return _text(value)
    raise UnsupportedError(f"cannot pickle a value of type {type(value).__name__}")


def integer(value: int) -> bytes:
    """The opcodes of an integer.

    Raises:
        UnsupportedError: it is very long.
    """
    if 0 <= value < _U1:
        return b"K" + bytes([value])
    if 0 <= value < _U2:
        return b"M" + struct.pack("<H", value)
    if -_I4 <= value < _I4:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) >= _U1:
        raise UnsupportedError(f"cannot pickle an integer of {len(data)} bytes: the limit is {_U1 - 1}")
    return b"\x8a" + bytes([len(data)]) + data
