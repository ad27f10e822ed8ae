"""Converts an inert value to key paths: the contents of a pickled object, as a tree.

Dicts and sequences become nodes, with list and tuple indices as decimal strings; tensors and plain scalars are
leaves; None and empty containers are empties. Facts that key paths cannot express are stored separately: which keys
were numbers, and the class of every node and value that is more than a plain dict, list or scalar, so that a writer can
restore it, or refuse it by name. A small pickle can be huge as a tree, because it may refer to one list a thousand
times; the number of nodes is limited by the length of the pickle.

Converts harmless classes that are often pickled with tensors to plain data: trainer arguments, dates, paths.

Each object becomes a dict of attributes, or an `Opaque`: the name of its class with a value of strings, numbers, lists
and dicts. Nothing is imported; arguments that are not readable as they are (dates are packed bytes, numpy scalars raw
bytes) are decoded here as the class's constructor would. OmegaConf nodes hold links to their parents; only their
contents are kept.
Source: `__reduce__` of CPython 3.8 to 3.13's classes, omegaconf 2.3's pickles, numpy 1.x and 2.x.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, TypeAlias, cast

from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest, Value
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, HostileError, UnsupportedError, WherryError
from wherry.integrations.containers.pickle.values import (
    Allowed,
    Attributes,
    CallRecord,
    Far,
    Global,
    Maker,
    Opaque,
    dict_of,
    set_of,
)

_BUILTINS = ("builtins", "__builtin__")
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path", "PurePath")
# Types that occur as names only: the factory of a defaultdict, the element type of an OmegaConf node.
_TYPES = (
    "dict",
    "list",
    "tuple",
    "int",
    "float",
    "str",
    "bool",
    "long",
    "object",
    "type",
    "unicode",
    "NoneType",
)
_CONTAINERS = ("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig")
_NODES = tuple(
    f"omegaconf.nodes.{kind}Node"
    for kind in (
        "Any",
        "Integer",
        "Float",
        "String",
        "Boolean",
        "Bytes",
        "Path",
        "Enum",
        "Interpolation",
        "Value",
    )
)
_OMEGACONF_HIDDEN = ("omegaconf.base.ContainerMetadata", "omegaconf.base.Metadata")
_DATE_BYTES, _DATETIME_BYTES, _TIME_BYTES = 4, 10, 6


def unwrap_config(record: CallRecord) -> tuple[str, Any] | None:
    """Class name and contents of an OmegaConf object (no name for a plain node); None for other objects."""
    kind = str(record.kind)
    state: Any = record.state
    if kind in _CONTAINERS and isinstance(state, dict):
        return kind, cast("dict[str, Any]", state).get("_content")
    if kind in _NODES and isinstance(state, dict):
        return "", cast("dict[str, Any]", state).get("_val")
    return None


def _attributes(kind: str) -> Maker:
    return lambda args: Attributes(kind, dict_of(args) if args else None)


def _bare(kind: str) -> Maker:
    """A dict with a factory that is not part of its contents."""
    return lambda args: Attributes(kind, dict_of(args[1:]) if args[1:] else None)


def _with_notice(kind: str, tell: Callable[..., Any]) -> Maker:
    def make(args: tuple[Any, ...]) -> Opaque:
        try:
            return Opaque(kind, tell(*args))
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            raise CorruptError(
                f"invalid arguments of {kind} in the pickle",
                cure="restore the file from a backup or download it again",
            ) from error

    return make


def _date(packed: Any, *rest: Any) -> str:
    if type(packed) is int:
        return dt.date(packed, *rest).isoformat()
    data = _pack(packed, _DATE_BYTES)
    return dt.date(data[0] * 256 + data[1], data[2], data[3]).isoformat()


def _datetime(packed: Any, zone: Any = None, *rest: Any) -> str:
    if type(packed) is int:
        day, clock = dt.date(packed, zone, *rest[:1]), dt.time(*rest[1:])
        return dt.datetime.combine(day, clock).isoformat()
    data = _pack(packed, _DATETIME_BYTES)
    micro = int.from_bytes(data[7:], "big")
    # The highest bit of the month is `fold`, which is dropped.
    clock = dt.time(data[4], data[5], data[6], micro)
    moment = dt.datetime.combine(dt.date(data[0] * 256 + data[1], data[2] & 0x7F, data[3]), clock)
    return moment.isoformat() + (f" {zone.value}" if isinstance(zone, Opaque) else "")


def _time(packed: Any, zone: Any = None, *rest: Any) -> str:
    if type(packed) is int:
        return dt.time(packed, zone, *rest).isoformat()
    data = _pack(packed, _TIME_BYTES)
    moment = dt.time(data[0] & 0x7F, data[1], data[2], int.from_bytes(data[3:], "big"))
    return moment.isoformat() + (f" {zone.value}" if isinstance(zone, Opaque) else "")


def _pack(packed: Any, length: int) -> bytes:
    data = packed.encode("latin-1") if isinstance(packed, str) else packed
    if type(data) is not bytes or len(data) != length:
        raise ValueError(length)
    return data


def _timedelta(days: int = 0, seconds: int = 0, micro: int = 0) -> str:
    return str(dt.timedelta(int(days), int(seconds), int(micro)))


def _timezone(offset: Any, name: Any = None) -> str:
    return str(name) if name is not None else f"UTC+{offset.value}"


def path_text(parts: tuple[Any, ...]) -> str:
    """A pathlib path from its parts; the first part of an absolute path is its root."""
    words = [str(part) for part in parts]
    if words and words[0].endswith(("/", "\\")):
        return words[0] + "/".join(words[1:])
    return "/".join(words)


def _encode(args: tuple[Any, ...]) -> bytes | Far:
    text, *encoding = args
    if encoding not in (["latin1"], ["latin-1"]):
        raise CorruptError(
            "invalid encoding of bytes in the pickle: expected latin1",
            cure="restore the file from a backup or download it again",
        )
    if isinstance(text, Far):
        return Far(text.start, text.length, text=True, latin=True)
    return text.encode("latin1")


def _no_bytes(args: tuple[Any, ...]) -> bytes:
    if args and type(args[0]) is not bytes:
        raise UnsupportedError(f"unsupported argument of bytes in the pickle: {type(args[0]).__name__}")
    return args[0] if args else b""


def _complex(real: float, imaginary: float) -> str:
    return str(complex(real, imaginary))


def _deque(items: Any = (), most: Any = None) -> list[Any]:
    if most is not None and type(most) is not int:
        raise ValueError(most)
    return list(items)


def _numpy_scalar(args: tuple[Any, ...]) -> Opaque:
    """A numpy scalar as a plain number."""
    import numpy as np

    dtype, *raw = args
    if not isinstance(dtype, CallRecord) or not dtype.args or type(dtype.args[0]) is not str:
        raise UnsupportedError("unsupported dtype of a numpy scalar in the pickle", cure="save plain numbers")
    code: str = dtype.args[0]
    state: Any = dtype.state
    order = str(state[1]) if isinstance(state, tuple) and len(cast("tuple[Any, ...]", state)) > 1 else "|"
    if code[:1] not in tuple("biuf") or len(raw) != 1:
        raise UnsupportedError(
            f"unsupported dtype {code!r} of a numpy scalar in the pickle", cure="save plain numbers"
        )
    try:
        kind = np.dtype(code).newbyteorder(order if order in ("<", ">") else "=")
        (value,) = np.frombuffer(raw[0], kind).tolist()
    except (TypeError, ValueError) as error:
        raise CorruptError(
            f"invalid numpy scalar of dtype {code!r} in the pickle",
            cure="restore the file from a backup or download it again",
        ) from error
    said = value if not isinstance(value, float) or math.isfinite(value) else str(value)
    return Opaque(f"numpy.{kind.name}", said)


# Types that are mere names on their own; a call of one of them becomes a record.
_NAMES: Mapping[tuple[str, str], Maker | None] = {
    **{(module, name): None for module in _BUILTINS for name in _TYPES},
    ("typing", "Any"): None,
}
HARMLESS: Allowed = {
    **_NAMES,
    **{(module, "set"): lambda args: set(set_of(args)) for module in _BUILTINS},
    **{(module, "frozenset"): set_of for module in _BUILTINS},
    **{(module, "bytes"): _no_bytes for module in _BUILTINS},
    **{
        (module, "bytearray"): _with_notice("bytearray", lambda *args: _no_bytes(args))
        for module in _BUILTINS
    },
    **{(module, "complex"): _with_notice("complex", _complex) for module in _BUILTINS},
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): dict_of,
    ("collections", "defaultdict"): _bare("collections.defaultdict"),
    ("collections", "Counter"): _attributes("collections.Counter"),
    ("collections", "deque"): _with_notice("collections.deque", _deque),
    ("argparse", "Namespace"): _attributes("argparse.Namespace"),
    ("types", "SimpleNamespace"): _attributes("types.SimpleNamespace"),
    ("datetime", "date"): _with_notice("datetime.date", _date),
    ("datetime", "datetime"): _with_notice("datetime.datetime", _datetime),
    ("datetime", "time"): _with_notice("datetime.time", _time),
    ("datetime", "timedelta"): _with_notice("datetime.timedelta", _timedelta),
    ("datetime", "timezone"): _with_notice("datetime.timezone", _timezone),
    ("decimal", "Decimal"): _with_notice("decimal.Decimal", str),
    **{
        (module, name): _with_notice(f"pathlib.{name}", lambda *args: path_text(args))
        for module in ("pathlib", "pathlib._local")
        for name in _PATHS
    },
    **{(name.rpartition(".")[0], name.rpartition(".")[2]): None for name in (*_CONTAINERS, *_NODES)},
    **{(name.rpartition(".")[0], name.rpartition(".")[2]): None for name in _OMEGACONF_HIDDEN},
}
NUMPY_SCALARS: Allowed = {
    **{(module, "scalar"): _numpy_scalar for module in ("numpy.core.multiarray", "numpy._core.multiarray")},
    ("numpy", "dtype"): None,
}


Key: TypeAlias = int | bool | None
_MAX_DEPTH = 100
_FREE_NODES = 10_000
_MOST_BYTES = 1 << 20  # of one byte string that is kept as a value
LONG = "bytes, not kept"


@dataclass(slots=True)
class PickleTree:
    """The leaves of a pickled object by key path; see `Manifest` for the meaning of the first fields.

    Attributes:
        types: class of a node or value that is more than a dict, list, or plain scalar.
        keys: path of a child → its key in the dict, if that is not a string.
    """

    tensors: dict[KeyPath, Any] = field(default_factory=dict[KeyPath, Any])
    values: dict[KeyPath, Value] = field(default_factory=dict[KeyPath, Value])
    empties: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    lists: set[KeyPath] = field(default_factory=set[KeyPath])
    types: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    keys: dict[KeyPath, Key] = field(default_factory=dict[KeyPath, Key])

    @property
    def custom(self) -> Mapping[str, Any]:
        """`types` and `keys` as a manifest keeps them, paths printed."""
        parts = {"types": self.types, "keys": self.keys}
        found = {
            name: {render(path): said for path, said in part.items()} for name, part in parts.items() if part
        }
        return {"pickle": found} if found else {}

    def manifest(self, specs: Mapping[KeyPath, TensorSpec], step: int | None) -> Manifest:
        """What the object holds; `specs` are its tensors."""
        lists = frozenset(self.lists)
        return Manifest(
            specs, values=self.values, empties=self.empties, lists=lists, step=step, custom=self.custom
        )


def plant(root: Any, pickle_bytes: int, tensor: type, uri: str | None = None) -> PickleTree:
    """List the leaves of an inert value.

    Args:
        root: the value from the machine.
        pickle_bytes: length of the pickle, which limits the number of nodes.
        tensor: the type of tensors in this format.
        uri: the file, for errors.

    Raises:
        HostileError: the tree exceeds the limit of levels, or of nodes for a pickle of that length.
        CorruptError: two keys of one dict print alike.
        UnsupportedError: a key has an unsupported type.
    """
    walk = _TreeWalk(pickle_bytes + _FREE_NODES, tensor)
    try:
        walk.node((), root)
    except WherryError as error:
        error.uri = error.uri or uri
        raise
    return walk.tree


class _TreeWalk:
    """One walk with its limit of nodes."""

    def __init__(self, allowance: int, tensor: type) -> None:
        self.tree = PickleTree()
        self._left = allowance
        self._tensor = tensor
        self._above: set[int] = set()

    def node(self, path: KeyPath, value: Any) -> None:
        self._left -= 1
        if self._left < 0 or len(path) > _MAX_DEPTH:
            raise HostileError(
                "the tree of the pickle exceeds the limit of nodes or levels", cure="do not use this file"
            )
        if isinstance(value, self._tensor):
            self.tree.tensors[path] = value
        elif isinstance(value, dict):
            self._mapping(path, value)
        elif type(value) in (list, tuple):
            self._sequence(path, value)
        elif isinstance(value, (set, frozenset)):
            self._add_typed(path, type(value).__name__, sorted(value, key=repr))
        elif isinstance(value, CallRecord):
            self._record(path, value)
        elif isinstance(value, Opaque):
            self._add_typed(path, value.kind, value.value)
        elif value is None:
            self.tree.empties[path] = "none"
        else:
            self._leaf(path, value)

    def _leaf(self, path: KeyPath, value: Any) -> None:
        if isinstance(value, bytes):
            kept = len(value) <= _MOST_BYTES
            self.tree.types[path] = self.tree.types.get(path, "bytes") if kept else LONG
            value = value.decode("latin-1") if kept else f"<{len(value)} bytes>"
        elif isinstance(value, Global):
            self.tree.types[path] = "global"
            value = str(value)
        elif isinstance(value, Far):
            self.tree.types[path] = LONG
            value = f"<{value.length} bytes>"
        elif not isinstance(value, (str, bool, int, float)):
            raise UnsupportedError(
                f"unsupported value of type {type(value).__name__} in the pickle", path=render(path)
            )
        self.tree.values[path] = value

    def _add_typed(self, path: KeyPath, kind: str, value: Any) -> None:
        self.tree.types[path] = kind
        self.node(path, value)

    def _record(self, path: KeyPath, record: CallRecord) -> None:
        """An object of a class that is not interpreted: its arguments, state and items, once."""
        if id(record) in self._above:
            self.tree.values[path] = f"<the {record.kind} above>"
            return
        self._above.add(id(record))
        inner = unwrap_config(record)
        if inner is None:
            said = {"args": record.args, "state": record.state, "items": record.items}
            self._add_typed(path, str(record.kind), {name: part for name, part in said.items() if part})
        elif inner[0]:
            self._add_typed(path, *inner)
        else:
            self.node(path, inner[1])
        self._above.discard(id(record))

    def _mapping(self, path: KeyPath, value: dict[Any, Any]) -> None:
        if isinstance(value, Attributes):
            self.tree.types[path] = value.kind
        if not value:
            self.tree.empties[path] = "dict"
        if len({_key_text(key, path) for key in value}) != len(value):
            raise CorruptError("duplicate keys of a dict, when printed", path=render(path))
        for key, child in value.items():
            below = (*path, _key_text(key, path))
            if not isinstance(key, str):
                self.tree.keys[below] = key
            self.node(below, child)

    def _sequence(self, path: KeyPath, value: list[Any] | tuple[Any, ...]) -> None:
        if not value:
            self.tree.empties[path] = "list" if isinstance(value, list) else "tuple"
            return
        self.tree.lists.add(path)
        if isinstance(value, tuple):
            self.tree.types.setdefault(path, "tuple")
        for index, child in enumerate(value):
            self.node((*path, str(index)), child)


_LONGEST_SHOWN = 100  # characters of a key in an error


def _key_text(key: Any, path: KeyPath) -> str:
    if key is None or isinstance(key, (str, int)):
        return str(key)
    shown = repr(key)[:_LONGEST_SHOWN] if type(key) is tuple else type(key).__name__
    raise UnsupportedError(
        f"unsupported dict key {shown} of type {type(key).__name__}",
        path=render(path) or None,
        cure="save the dict with strings or numbers as keys",
    )
