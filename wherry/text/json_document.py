"""Parses JSON documents of checkpoints, within limits; `json_scan` reads large ones entry by entry.

A document is refused before it is parsed if it could become more values than its limits allow: each value but the
first follows one of the four characters `, : [ {`, so their number bounds that of the values, and counting them takes
a hundredth of the time of parsing.
"""

from __future__ import annotations

import json
from json.decoder import JSONDecoder
from typing import Any

from wherry.errors import CorruptError, HostileError
from wherry.text.limits import DOCUMENT, JsonLimits, beyond, exceeds, scale_limit

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
