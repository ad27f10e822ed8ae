"""Objects of torch files that are more than a dict, list or scalar: how each is written again.

The reader keeps their class beside the plain value (`manifest.custom["pickle"]["types"]`). Classes that torch files
hold by nature (tuples, bytes, sets, sizes, devices, dtypes) and plain records (`Namespace`, paths, dates) are
pickled as Python would; every other class was read around and cannot be written, which is said by name. Numpy
scalars become plain numbers of the same value.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from wherry.core.keypath import render
from wherry.errors import UnrepresentableError
from wherry.integrations.containers.torch.values import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.integrations.containers.pickle.writer import PickleWriter

_RECORDS = ("argparse.Namespace", "types.SimpleNamespace")
_MAPPINGS = ("collections.defaultdict", "collections.Counter")
_DTYPES = frozenset(f"torch.{torch}" for torch, _, _ in DTYPES)


@dataclass(frozen=True, slots=True)
class Typed:
    """A value or node with the class that it had."""

    kind: str
    value: Any


def require_written(path: KeyPath, kind: str, value: Any, uri: str) -> None:
    """Refuse a class that can be read but not written.

    Raises:
        UnrepresentableError: it is one.
    """
    plain = kind.startswith("numpy.") and not isinstance(value, (dict, list))
    known = plain or kind.startswith("pathlib.") or kind in (*_EMITTERS, *_RECORDS, *_MAPPINGS)
    odd = (kind == "global" and value not in _DTYPES) or (
        kind.startswith("datetime.") and _moment(kind, value) is None
    )
    if known and not odd:
        return
    raise UnrepresentableError(
        f"{render(path)!r} is a {value if kind == 'global' else kind}, which is read but not written",
        uri=uri,
        cure="leave such objects behind with --ignore values",
    )


def emit_typed(out: PickleWriter, typed: Typed, emit: Callable[[Any], None]) -> None:
    """Pickle an object of a class.

    Args:
        out: where to.
        typed: the object.
        emit: pickles what it holds.
    """
    module, _, name = typed.kind.rpartition(".")
    if typed.kind in _RECORDS:
        fields = cast("Mapping[str, Any]", typed.value or {})
        out.state(module, name, ((key, partial(emit, child)) for key, child in fields.items()))
    elif typed.kind in _MAPPINGS:
        out.made(module, name, partial(out.raw, b")"))
        if typed.value:
            out.raw(b"(")
            for key, child in typed.value.items():
                out.value(key)
                emit(child)
            out.raw(b"u")
    elif module == "pathlib":
        out.made(module, name, partial(out.tuple_of, (typed.value,)))
    elif module == "numpy":
        out.value(typed.value)
    else:
        _EMITTERS[typed.kind](out, typed.value, emit)


def _tuple(out: PickleWriter, value: Any, emit: Callable[[Any], None]) -> None:
    out.tuple_with([partial(emit, child) for child in value])


def _bytes(out: PickleWriter, value: str, _emit: Any) -> None:
    out.made("_codecs", "encode", partial(out.tuple_of, (value, "latin1")))


def _device(out: PickleWriter, value: str, _emit: Any) -> None:
    kind, _, index = value.partition(":")
    out.made("torch", "device", partial(out.tuple_of, (kind, int(index)) if index else (kind,)))


def _layout(out: PickleWriter, value: str, _emit: Any) -> None:
    out.made("torch.serialization", "_get_layout", partial(out.tuple_of, (value,)))


def _complex(out: PickleWriter, value: str, _emit: Any) -> None:
    number = complex(value)
    out.made("__builtin__", "complex", partial(out.tuple_of, (number.real, number.imag)))


def _dtype(out: PickleWriter, value: str, _emit: Any) -> None:
    out.name("torch", value.removeprefix("torch."))


def _of_one(module: str, name: str) -> Callable[[PickleWriter, Any, Callable[[Any], None]], None]:
    """A class that is called with one list or tuple of items, or one text."""

    def run(out: PickleWriter, value: Any, emit: Callable[[Any], None]) -> None:
        def args() -> None:
            emit(value)
            out.raw(b"\x85")

        out.made(module, name, args)

    return run


def _size(out: PickleWriter, value: Any, emit: Callable[[Any], None]) -> None:
    def args() -> None:
        _tuple(out, value, emit)
        out.raw(b"\x85")

    out.made("torch", "Size", args)


def _bytearray(out: PickleWriter, value: str, emit: Callable[[Any], None]) -> None:
    def args() -> None:
        _bytes(out, value, emit)
        out.raw(b"\x85")

    out.made("__builtin__", "bytearray", args)


def _moment(kind: str, value: Any) -> tuple[int, ...] | None:
    """Arguments of a date or time that ISO 8601 tells whole; None where it does not (one with a time zone)."""
    try:
        if kind == "datetime.date":
            day = dt.date.fromisoformat(value)
            return day.year, day.month, day.day
        if kind == "datetime.time":
            time = dt.time.fromisoformat(value)
            return time.hour, time.minute, time.second, time.microsecond
        whole = dt.datetime.fromisoformat(value)
    except ValueError:
        return None
    if kind != "datetime.datetime" or whole.tzinfo:
        return None
    return (*whole.timetuple()[:6], whole.microsecond)


def _moment_of(kind: str) -> Callable[[PickleWriter, Any, Callable[[Any], None]], None]:
    return lambda out, value, _emit: out.made(
        "datetime", kind.partition(".")[2], partial(out.tuple_of, _moment(kind, value) or ())
    )


_EMITTERS: Mapping[str, Callable[[PickleWriter, Any, Callable[[Any], None]], None]] = {
    "tuple": _tuple,
    "bytes": _bytes,
    "bytearray": _bytearray,
    "set": _of_one("__builtin__", "set"),
    "frozenset": _of_one("__builtin__", "frozenset"),
    "collections.deque": _of_one("collections", "deque"),
    "decimal.Decimal": _of_one("decimal", "Decimal"),
    "complex": _complex,
    "global": _dtype,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.layout": _layout,
    **{kind: _moment_of(kind) for kind in ("datetime.date", "datetime.time", "datetime.datetime")},
}
