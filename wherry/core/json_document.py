"""JSON within limits: a document of a checkpoint, in one piece (`parse_text`) or not (`scan_json`); any other value.

A document is refused before it is parsed if it could become more values than its limits allow: each value but the
first follows one of the four characters `, : [ {`, so their number bounds that of the values, and counting them takes
a hundredth of the time of parsing.

`json_value` is for what wherry, a child process, a server or a user has written. Everything that is not JSON, nested
too deeply or too much is a ValueError with a short text, and the caller knows what it means; errors of documents of
checkpoints name the file.

`scan_json` hands large objects and arrays over entry by entry. The rows of `_METADATA` or the tensors of a header are
read in pieces of the file; each entry is parsed by the scanner of the standard library and handed to a function, which
keeps what it needs. Memory then depends on what is kept, not on the length of the file, and it takes no longer than
parsing the whole.

    scan_json(pieces, "model.safetensors.index.json", {"weight_map": keep}, uri=uri)
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, count
from json import decoder as json_decoder
from json.decoder import JSONDecoder
from typing import Any, TypeAlias, cast

from wherry.core.limits import DOCUMENT, MOST_NAME_TEXT, JsonLimits, beyond, exceeds, scale_limit
from wherry.errors import CorruptError, HostileError

BEFORE_VALUES = ",:[{"
_BEFORE_VALUES = BEFORE_VALUES.encode()
_NESTING = frozenset({dict, list})


def parse_json(
    data: bytes,
    what: str,
    *,
    uri: str | None = None,
    limits: JsonLimits = DOCUMENT,
    unique: bool = False,
    constants: bool = True,
    cure: str | None = None,
) -> Any:
    """Parse a document.

    Args:
        data: UTF-8 text.
        what: its name, for errors.
        uri: the file, for errors.
        limits: what it may become.
        unique: whether a duplicate key is an error.
        constants: whether NaN and Infinity are allowed.
        cure: of an error about invalid JSON.

    Raises:
        CorruptError: it is not JSON.
        HostileError: it exceeds a limit.
    """
    require_size(len(data), what, limits, uri)
    require_nodes(data, what, limits, uri)
    found = parse_text(data, what, uri=uri, limits=limits, unique=unique, constants=constants, cure=cure)
    if may_be_deep(data, limits):
        require_depth(found, what, limits, uri)
    return found


def parse_text(
    data: bytes,
    what: str,
    *,
    uri: str | None,
    limits: JsonLimits,
    unique: bool,
    constants: bool,
    cure: str | None,
) -> Any:
    """Parse a document whose size and number of values are within the limits; the caller checks its depth."""
    try:
        return decoder(unique=unique, constants=constants).decode(data.decode("utf-8-sig"))
    except RecursionError as error:
        raise too_deep(what, limits, uri) from error
    except ValueError as error:
        ours = (
            isinstance(error, json.JSONDecodeError) and not error.doc
        )  # of `_unique`, which knows no position
        reason = str(error).partition(":")[0] if ours else error
        raise CorruptError(f"invalid JSON in {what}: {reason}", uri=uri, cure=cure) from error


def may_be_deep(data: bytes, limits: JsonLimits) -> bool:
    """Whether a document has so many arrays and objects that it may be nested too deeply."""
    return data.count(b"{") + data.count(b"[") > limits.depth


def require_nodes(data: bytes, what: str, limits: JsonLimits = DOCUMENT, uri: str | None = None) -> None:
    """Refuse a document that could become too many values.

    Raises:
        HostileError: it could.
    """
    if len(data) > limits.nodes and exceeds(count_values(data), limits.nodes):
        raise beyond(what, scale_limit(limits.nodes), "JSON values", uri=uri)


def count_values(data: bytes) -> int:
    """The number of values that a document has at most, less one."""
    return sum(map(data.count, _BEFORE_VALUES))


def require_depth(found: Any, what: str, limits: JsonLimits = DOCUMENT, uri: str | None = None) -> None:
    """Refuse a value that is nested too deeply.

    Raises:
        HostileError: it is.
    """
    level = [found]
    for _ in range(limits.depth + 1):
        level = [
            inner
            for outer in level
            if type(outer) in _NESTING
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) in _NESTING
        ]
        if not level:
            return
    raise too_deep(what, limits, uri)


def decoder(*, unique: bool, constants: bool) -> JSONDecoder:
    """A decoder that can refuse duplicate keys and constants."""
    return JSONDecoder(
        object_pairs_hook=_unique if unique else None, parse_constant=None if constants else _no_constant
    )


def _no_constant(text: str) -> None:
    raise json.JSONDecodeError(f"{text} is not valid JSON", "", 0)


def require_size(size: int, what: str, limits: JsonLimits, uri: str | None) -> None:
    """Refuse a document that is too long.

    Raises:
        HostileError: it is.
    """
    if exceeds(size, limits.nbytes):
        raise beyond(what, scale_limit(limits.nbytes), "bytes", uri=uri)


def too_deep(what: str, limits: JsonLimits, uri: str | None) -> HostileError:
    """The error for a document that is nested too deeply."""
    return beyond(what, limits.depth, "nested arrays and objects", uri=uri)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names: set[str] = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))
        raise json.JSONDecodeError(f"duplicate key {twice!r}", "", 0)
    return found


_OWN = JsonLimits(nbytes=1 << 30, nodes=1 << 22)  # the receipt of 250,000 tensors


def json_value(text: str | bytes) -> Any:
    """Parse a value.

    Args:
        text: the text, or its UTF-8 bytes.

    Raises:
        ValueError: it is not JSON, or becomes too much.
    """
    if len(text) > _OWN.nodes:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        if exceeds(count_values(data), _OWN.nodes):
            raise ValueError(f"exceeds the limit of {scale_limit(_OWN.nodes):,} JSON values")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


# Functions of the standard library that its type hints do not declare: a string after its first quote, and its end.
_scanstring: Callable[[str, int, bool], tuple[str, int]] = vars(json_decoder)["scanstring"]
PIECE = 1 << 20  # bytes that are read at a time
DROPPED: Any = object()  # a value that is not kept

# How to read an object or array: by entries, each converted by a function of key (or index) and value; or by keys, each
# read as its row says (`*`: all others); or not at all, with `DROPPED`. Anything else is read as one value.
Rows: TypeAlias = "Callable[[Any, Any], Any] | Mapping[str, Rows]"

_SPACE = re.compile(r"[ \t\n\r]*").match
_MOST_WHOLE, _MOST_WHOLE_BYTES = (
    1 << 18,
    10 << 20,
)  # values and bytes up to which a document is parsed as a whole
_MOST_WINDOW = 16 << 20  # characters of one entry
_OPENING = (dict, list)
_ENDS = frozenset(" \t\n\r,]}")  # characters after a value
_NEAR = 32  # characters: an error so near to the end of the window may be caused by that end
_STRING_END = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL).match


def scan_json(
    pieces: Iterable[bytes],
    what: str,
    rows: Rows,
    *,
    uri: str | None = None,
    limits: JsonLimits = DOCUMENT,
    unique: bool = False,
    constants: bool = True,
    cure: str | None = None,
) -> Any:
    """Parse a document whose large objects and arrays are read entry by entry.

    Args:
        pieces: UTF-8 text in pieces.
        rows: how to read which object or array.
        what, uri, limits, unique, constants, cure: as for `parse_json`; `nodes` limits each entry, and all values that
            no function converts, and `rows` the number of entries.

    Returns:
        The document, with what the functions returned in the place of the entries.

    Raises:
        CorruptError: it is not JSON.
        HostileError: it exceeds a limit.
    """
    head, rest = _head(pieces)
    most = min(_MOST_WHOLE, limits.nodes)
    if rest is None and (len(head) <= most or count_values(head) <= most):
        require_size(len(head), what, limits, uri)
        whole = parse_text(head, what, uri=uri, limits=limits, unique=unique, constants=constants, cure=cure)
        try:
            found = _convert(whole, rows, what, uri, limits)
        except RecursionError as error:
            raise too_deep(what, limits, uri) from error
        if may_be_deep(head, limits):  # what is kept of it must not be
            require_depth(found, what, limits, uri)
        return found
    pieces = chain(file_pieces(lambda start, stop: head[start:stop], 0, len(head)), rest or ())
    scanner = _Scanner(pieces, what, uri, limits, decoder(unique=unique, constants=constants), unique=unique)
    try:
        found = scanner.value(rows)
        scanner.finish()
    except RecursionError as error:
        raise too_deep(what, limits, uri) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptError(f"invalid JSON in {what}: {scanner.located(error)}", uri=uri, cure=cure) from error
    return found


def _head(pieces: Iterable[bytes]) -> tuple[bytes, Iterator[bytes] | None]:
    """The first bytes of a document, and the pieces after them; None if there are none."""
    left, parts, size = iter(pieces), list[bytes](), 0
    for piece in left:
        parts.append(piece)
        size += len(piece)
        if size > _MOST_WHOLE_BYTES:
            return b"".join(parts), left
    return b"".join(parts), None


def _convert(found: Any, rows: Rows | None, what: str, uri: str | None, limits: JsonLimits) -> Any:
    """A small document, which was parsed as a whole, with its entries converted."""
    if rows is None or rows is DROPPED or type(found) not in _OPENING:
        return DROPPED if rows is DROPPED else found
    if exceeds(len(found), limits.rows):
        raise beyond(what, scale_limit(limits.rows), "entries", uri=uri)
    if type(found) is list:
        return [entry for entry in _convert_items(found, rows, what, uri, limits) if entry is not DROPPED]
    if callable(rows):
        for key, value in found.items():  # in place: what an entry was is freed before the next one
            found[key] = rows(key, value)
        return {key: entry for key, entry in found.items() if entry is not DROPPED}
    others = rows.get("*")
    for key in [*found] if others is not None else rows.keys() & found.keys():
        entry = _convert(found[key], rows.get(key, others), what, uri, limits)
        if entry is DROPPED:
            del found[key]
        else:
            found[key] = entry
    return found


def _convert_items(
    found: list[Any], rows: Rows, what: str, uri: str | None, limits: JsonLimits
) -> Iterable[Any]:
    if callable(rows):
        return map(rows, count(), found)
    row = rows.get("*")
    return found if row is None else (_convert(value, row, what, uri, limits) for value in found)


class _Scanner:
    """The text of a document as a window that moves forward; what was read is dropped."""

    def __init__(
        self,
        pieces: Iterable[bytes],
        what: str,
        uri: str | None,
        limits: JsonLimits,
        values: JSONDecoder,
        *,
        unique: bool,
    ) -> None:
        self._pieces = iter(pieces)
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._what, self._uri, self._limits, self._unique = what, uri, limits, unique
        self._scan: Callable[[str, int], tuple[Any, int]] = vars(values)["scan_once"]
        self._text, self._at, self._before = "", 0, 0
        self._bytes = self._rows = self._names = self._nodes = 0
        self._ended = False

    def located(self, error: ValueError) -> str:
        """The text of an error, with its position in the document."""
        if isinstance(error, json.JSONDecodeError):
            return f"{error.msg}: char {self._before + error.pos}"
        return str(error)

    def value(self, rows: Rows | None) -> Any:
        """The value at the present position."""
        first = self._sign()
        if rows is DROPPED and first == '"':
            return self._skip_string()
        if rows is not None and rows is not DROPPED and first in ("{", "["):
            return self._object(rows) if first == "{" else self._array(rows)
        found, end = self._scan_value()
        if rows is not DROPPED:
            self._nodes += 1 + sum(self._text.count(sign, self._at, end) for sign in BEFORE_VALUES)
            if self._nodes > scale_limit(self._limits.nodes):
                raise beyond(self._what, scale_limit(self._limits.nodes), "JSON values", uri=self._uri)
            require_depth(found, self._what, self._limits, self._uri)
        self._at = end
        return DROPPED if rows is DROPPED else found

    def _skip_string(self) -> Any:
        """Skip a string of any length."""
        self._at += 1
        while (end := _STRING_END(self._text, self._at)) is None:
            tail = self._text[self._at :]
            escaped = (
                len(tail) - len(tail.rstrip("\\"))
            ) % 2  # a backslash at the end belongs to what follows
            self._at = len(self._text) - escaped
            self._extend()
        self._at = end.end()
        return DROPPED

    def finish(self) -> None:
        """Refuse anything after the value but white space."""
        while not self._ended or self._at < len(self._text):
            self._at = _SPACE(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if self._at < len(self._text):
                raise self._error("Extra data")
            if not self._more():
                return

    def _object(self, rows: Rows) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._at += 1
        if self._sign() == "}":
            self._at += 1
            return found
        most = scale_limit(self._limits.rows)
        while True:
            if callable(rows):
                self._entries(rows, found, most)
            key = self._key()
            if callable(rows):
                value, self._at = self._scan_value()
                value = rows(key, value)
            else:
                table = cast("Mapping[str, Rows]", rows)
                value = self.value(table.get(key, table.get("*")))
            if self._unique and key in found:
                raise self._error(f"duplicate key {key!r}")
            if value is not DROPPED:
                found[key] = value
            self._count(1, len(key), most)
            if not self._goes_on("}"):
                return found

    def _entries(self, convert: Callable[[Any, Any], Any], found: dict[str, Any], most: int) -> None:
        """Read entries as long as they are in the window and in usual form; never the last of the object.

        This is most of the work for large objects: it calls nothing that it could do itself.
        """
        text, at, scan, unique = self._text, self._at, self._scan, self._unique
        rows = names = 0
        try:
            while rows <= most:
                if text[at] != '"':
                    break
                key, end = _scanstring(text, at + 1, True)
                if text[end] != ":":
                    break
                value, end = scan(text, end + 2 if text[end + 1] == " " else end + 1)
                if text[end] != ",":
                    break
                after = end + 1
                if text[after] != '"':
                    after = _SPACE(text, after).end()  # pyright: ignore[reportOptionalMemberAccess]
                    if after == len(text):
                        break
                if unique and key in found:
                    break
                value = convert(key, value)
                if value is not DROPPED:
                    found[key] = value
                at = after
                rows += 1
                names += len(key)
        except (ValueError, StopIteration, IndexError):
            pass  # the entry goes on behind the window, or is not valid: it is read again, with errors
        finally:
            self._at = at
        self._count(rows, names, most)

    def _array(self, rows: Rows) -> list[Any]:
        found: list[Any] = []
        self._at += 1
        if self._sign() == "]":
            self._at += 1
            return found
        most, number = scale_limit(self._limits.rows), 0
        while True:
            if callable(rows):
                self._sign()
                value, self._at = self._scan_value()
                value = rows(number, value)
            else:
                value = self.value(rows.get("*"))
            if value is not DROPPED:
                found.append(value)
            self._count(1, 0, most)
            number += 1
            if not self._goes_on("]"):
                return found

    def _count(self, rows: int, names: int, most: int) -> None:
        self._rows += rows
        self._names += names
        if self._rows > most:
            raise beyond(self._what, most, "entries", uri=self._uri)
        if self._names > scale_limit(MOST_NAME_TEXT):
            raise beyond(self._what, scale_limit(MOST_NAME_TEXT), "characters of names", uri=self._uri)

    def _goes_on(self, end: str) -> bool:
        """Whether another entry follows; the position is then that of its first character."""
        sign = self._sign()
        if sign not in (",", end):
            raise self._error("Expecting ',' delimiter")
        self._at += 1
        if sign == end:
            return False
        self._sign()
        return True

    def _key(self) -> str:
        """The key of an entry; the position is then that of its value."""
        while True:
            if self._text[self._at] != '"':
                raise self._error("Expecting property name enclosed in double quotes")
            try:
                key, end = _scanstring(self._text, self._at + 1, True)
                break
            except json.JSONDecodeError as error:
                self._extend_or(error)
        self._at = end
        if self._sign() != ":":
            raise self._error("Expecting ':' delimiter")
        self._at += 1
        self._sign()
        return key

    def _scan_value(self) -> tuple[Any, int]:
        """The value at the position and its end; a value at the end of the window may go on behind it."""
        while True:
            try:
                at = self._at
                found, end = self._scan(self._text, at)
                # At the end of the window a number may go on, after `e-` for example.
                if end + 2 < len(self._text) or self._text[end : end + 1] in _ENDS:
                    return found, end
                if not self._more():
                    return found, end - at  # the window begins at the value now
            except StopIteration as stop:
                self._extend_or(json.JSONDecodeError("Expecting value", self._text, stop.value))
            except json.JSONDecodeError as error:
                self._extend_or(error)
            except ValueError as error:  # an integer of too many digits
                raise self._error(str(error)) from error

    def _sign(self) -> str:
        """The next character that is not white space."""
        while True:
            self._at = _SPACE(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if self._at < len(self._text):
                return self._text[self._at]
            self._extend()

    def _extend(self) -> None:
        if not self._more():
            raise self._error("unexpected end")

    def _extend_or(self, error: json.JSONDecodeError) -> None:
        """Extend the window if its end can be the cause of an error; else raise the error."""
        cut = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - _NEAR
        if not cut or not self._more():
            raise error

    def _more(self) -> bool:
        """Double the window; False if the text has ended."""
        kept = self._text[self._at :]
        self._before += self._at
        self._at, parts, size = 0, [kept], len(kept)
        if size > scale_limit(_MOST_WINDOW):
            raise beyond(f"one entry of {self._what}", scale_limit(_MOST_WINDOW), "characters", uri=self._uri)
        most = scale_limit(self._limits.nodes)
        if size > most and sum(map(kept.count, BEFORE_VALUES)) > most:
            raise beyond(f"one entry of {self._what}", most, "JSON values", uri=self._uri)
        while not self._ended and size < max(2 * len(kept), 1):
            piece = next(self._pieces, None)
            self._ended = piece is None
            self._bytes += len(piece or b"")
            require_size(self._bytes, self._what, self._limits, self._uri)
            parts.append(self._decoder.decode(piece or b"", final=piece is None))
            size += len(parts[-1])
        self._text = "".join(parts)
        return len(self._text) > len(kept)

    def _error(self, message: str) -> json.JSONDecodeError:
        return json.JSONDecodeError(message, self._text, self._at)


def file_pieces(read: Callable[[int, int], bytes], start: int, stop: int) -> Iterator[bytes]:
    """The bytes [start, stop) of a file in pieces; fewer if the file ends earlier."""
    while start < stop:
        wanted = min(PIECE, stop - start)
        piece = read(start, start + wanted)
        if piece:
            yield piece
        if len(piece) < wanted:
            return  # stores refuse a range that begins at the end of an object
        start += wanted
