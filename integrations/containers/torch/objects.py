"""Rebuilds from key paths the nested object that torch.save would pickle.

Nodes are dicts, or lists where the manifest says so. The manifest's `custom` says which keys were numbers and which
values were objects of a class; these are restored (`emit_typed`). Tensors stay TensorSpecs until they are pickled.

The reader stores the plain value of an object that is more than a dict, list or scalar, and its class next to it
(`manifest.custom["pickle"]["types"]`). Common classes of torch files (tuples, bytes, sets, sizes, devices, dtypes) and
plain records (`Namespace`, paths, dates) are pickled as Python would; every other class cannot be written, and the
error names it. Numpy scalars become plain numbers of the same value.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

from wherry.core.keypath import KeyPath, render
from wherry.core.tensorspec import TensorSpec
from wherry.errors import UnrepresentableError
from wherry.integrations.containers.pickle.writer import PickleWriter
from wherry.integrations.containers.torch.layout import emit_tensor
from wherry.integrations.containers.torch.values import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wherry.core.manifest import Manifest


_RECORDS = ("argparse.Namespace", "types.SimpleNamespace")
_MAPPINGS = ("collections.defaultdict", "collections.Counter")
_DTYPES = frozenset(f"torch.{torch}" for torch, _, _ in DTYPES)


@dataclass(frozen=True, slots=True)
class TypedObject:
    """A value or node with the class that it had."""

    kind: str
    value: Any


def require_written(path: KeyPath, kind: str, value: Any) -> None:
    """Refuse a class that can be read but not written.

    Raises:
        UnrepresentableError: the class cannot be written.
    """
    plain = kind.startswith("numpy.") and not isinstance(value, (dict, list))
    known = plain or kind.startswith("pathlib.") or kind in (*_EMITTERS, *_RECORDS, *_MAPPINGS)
    odd = (kind == "global" and value not in _DTYPES) or (
        kind.startswith("datetime.") and _moment(kind, value) is None
    )
    if known and not odd:
        return
    raise UnrepresentableError(
        f"cannot write {render(path)!r}: unsupported class {value if kind == 'global' else kind}",
        cure="pass --ignore values to leave out such objects",
    )


def emit_typed(out: PickleWriter, typed: TypedObject, emit: Callable[[Any], None]) -> None:
    """Pickle an object of a class.

    Args:
        out: the pickle.
        typed: the object.
        emit: pickles a child.
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
    """A class that is called with one argument: a list or tuple of items, or a string."""

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
    """Arguments of a date or time from its ISO 8601 form; None if that is not enough (with a time zone)."""
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


_EMPTIES: Mapping[str, Any] = {"dict": {}, "list": [], "tuple": (), "none": None}


@dataclass(frozen=True, slots=True)
class _TensorLeaf:
    value: Any


def build(manifest: Manifest) -> Any:
    """The object that holds a manifest's tensors, values and empties.

    Raises:
        UnrepresentableError: a leaf is below another leaf, a list has a gap, or the class of an object cannot
            be written.
    """
    leaves: dict[KeyPath, _TensorLeaf] = {path: _TensorLeaf(spec) for path, spec in manifest.tensors.items()}
    leaves |= {path: _TensorLeaf(value) for path, value in manifest.values.items()}
    leaves |= {path: _TensorLeaf(_EMPTIES[kind]) for path, kind in manifest.empties.items()}
    if () in leaves and len(leaves) == 1:
        return _Finish(manifest).node(leaves[()], ())
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        _insert(root, path, leaf)
    return _Finish(manifest).node(root, ())


def _insert(root: dict[str, Any], path: KeyPath, leaf: _TensorLeaf) -> None:
    node: Any = root
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            break
    if not path or not isinstance(node, dict) or path[-1] in node:
        raise UnrepresentableError(
            f"{render(path)!r} is both a leaf and a node",
            cure="rename it in the source",
        )
    node[path[-1]] = leaf


class _Finish:
    """Turns the tree of key paths into the object."""

    def __init__(self, manifest: Manifest) -> None:
        said: Any = manifest.custom.get("pickle")
        notes: dict[str, Any] = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
        self._types: dict[str, Any] = notes.get("types") or {}
        self._keys: dict[str, Any] = notes.get("keys") or {}
        self._lists = manifest.lists

    def node(self, node: Any, path: KeyPath) -> Any:
        value = self._plain(node, path)
        kind = self._types.get(render(path)) if self._types else None
        if not isinstance(kind, str) or isinstance(value, TensorSpec):
            return value
        require_written(path, kind, value)
        return TypedObject(kind, value)

    def _plain(self, node: Any, path: KeyPath) -> Any:
        if isinstance(node, _TensorLeaf):
            return node.value
        children = {name: self.node(child, (*path, name)) for name, child in node.items()}
        if path not in self._lists:
            if not self._keys:
                return children
            return {self._keys.get(render((*path, name)), name): child for name, child in children.items()}
        names = [str(index) for index in range(len(children))]
        if set(names) != set(children):
            raise UnrepresentableError(f"list {render(path)!r} has gaps in its indices")
        return [children[name] for name in names]


def pickle_object(root: Any) -> tuple[bytes, list[TensorSpec]]:
    """The pickle of an object, and its tensors in the order in which it numbers their storages."""
    out, specs = PickleWriter(), list[TensorSpec]()
    _emit(out, root, specs)
    return out.done(), specs


def alike(node: Any) -> tuple[bytes, list[TensorSpec]]:
    """As `pickle_object`; the pickles of tensors of one dtype and shape are equal, and made once."""
    if isinstance(node, TensorSpec):
        return _tensor_pickle(node.dtype, node.shape), [node]
    return pickle_object(node)


@lru_cache(1 << 12)
def _tensor_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    return pickle_object(TensorSpec((), shape, dtype))[0]


def _emit(out: PickleWriter, node: Any, specs: list[TensorSpec]) -> None:
    if isinstance(node, TensorSpec):
        emit_tensor(out, node, str(len(specs)))
        specs.append(node)
    elif isinstance(node, TypedObject):
        emit_typed(out, node, lambda child: _emit(out, child, specs))
    elif isinstance(node, dict):
        children = cast("dict[str, Any]", node)
        out.mapping((key, partial(_emit, out, child, specs)) for key, child in children.items())
    elif isinstance(node, list):
        out.sequence([partial(_emit, out, child, specs) for child in cast("list[Any]", node)])
    else:
        out.value(node)
