"""Reads nested numpy arrays in a pickle: the globals that are allowed, and the position of each array.

An array is `_reconstruct(ndarray, (0,), b"b")` with a state (version, shape, dtype, Fortran order, bytes), or from
protocol 5 on `_frombuffer(bytes, dtype, shape, order)`; a numpy scalar is `scalar(dtype, bytes)`; a JAX array carries
the first of these in its arguments. The modules are `numpy.core…` before numpy 2 and `numpy._core…` since. A dtype is
`dtype(code, False, True)` with a state whose second item is the byte order; bfloat16 and the like are a class of
ml_dtypes there. The bytes are raw in the file from protocol 3 on (and in pickles of Python 2), so that large arrays are
read in place; protocol 2 of Python 3 encodes them as UTF-8 text of their Latin-1 characters, which `Latin` decodes.
Structured, object, string and time arrays are refused by name.
Source: numpy/_core/src/multiarray/methods.c (array_reduce, array_setstate), jax/_src/array.py, and pickles of both.

Locates the arrays of a numpy pickle: raw in the file, in memory if they are small, or encoded as text.

Protocol 2 encodes bytes as the UTF-8 of their Latin-1 characters: those from 128 on take two bytes. One pass over the
text counts them page by page; afterwards any range can be read with the memory of a page.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from threading import Lock
from typing import Any, cast

from wherry.core import dtypes
from wherry.core.tensorspec import c_strides
from wherry.errors import CorruptError, UnsupportedError, WherryError
from wherry.integrations.containers.flat.strides import PlacedTensor
from wherry.integrations.containers.pickle.tree import HARMLESS
from wherry.integrations.containers.pickle.values import PAGE, Allowed, CallRecord, Far, Global, Rules
from wherry.store.location import Location
from wherry.store.store import READ_ONLY, Entry, Store

_FAR = 1024  # bytes; shorter strings are kept
_CODES = {
    "b1": "bool",
    **{f"i{size}": f"int{size * 8}" for size in (1, 2, 4, 8)},
    **{f"u{size}": f"uint{size * 8}" for size in (1, 2, 4, 8)},
    **{f"f{size}": f"float{size * 8}" for size in (2, 4, 8)},
    **{f"c{size}": f"complex{size * 8}" for size in (8, 16)},
}
# Modules of the ml_dtypes classes, today and when they were part of JAX.
_ML_MODULES = ("ml_dtypes", "ml_dtypes._ml_dtypes_ext", "ml_dtypes._custom_floats", "jaxlib.xla_extension")
_ML_NAMES = (
    *("bfloat16", "int2", "int4", "uint2", "uint4", "float4_e2m1fn"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_OLD, _NEW = "numpy.core", "numpy._core"
_STATE = 5
_JAX_MODULES = ("jax._src.array", "jax.array", "jax._src.device_array")


class PickledArray:
    """An array that a pickle builds.

    Attributes:
        shape, dtype: extents, and the dtype as named in wherry.
        big_endian: whether the stored bytes are big endian.
        fortran: whether the first index varies fastest.
        data: the bytes, or their position.
    """

    __slots__ = ("big_endian", "data", "dtype", "fortran", "shape")

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.dtype = ""
        self.big_endian = False
        self.fortran = False
        self.data: bytes | Far = b""

    def build(self, state: Any) -> None:
        """Take the state that `array.__setstate__` would: (version,) shape, dtype, order, bytes."""
        if type(state) is not tuple or not _STATE - 1 <= len(cast("tuple[Any, ...]", state)) <= _STATE:
            raise CorruptError(
                "invalid state of a numpy array in the pickle",
                cure="restore the file from a backup or download it again",
            )
        shape, dtype, fortran, data = cast("tuple[Any, ...]", state)[-4:]
        self.fill(shape, dtype, data, fortran=bool(fortran))

    def fill(self, shape: Any, dtype: Any, data: Any, *, fortran: bool) -> None:
        """Set everything, and check that the sizes agree."""
        extents: tuple[Any, ...] = (shape,) if type(shape) is int else tuple(shape)
        if any(type(extent) is not int or extent < 0 for extent in extents):
            raise CorruptError(
                f"invalid shape {shape!r:.200} of a numpy array in the pickle",
                cure="restore the file from a backup or download it again",
            )
        self.shape, self.fortran = extents, fortran
        self.dtype, self.big_endian = _element_type(dtype)
        if isinstance(data, str):
            data = data.encode("latin-1")
        if not isinstance(data, (bytes, Far)):
            raise UnsupportedError(
                "unsupported numpy array without raw bytes in the pickle", cure="save arrays of numbers"
            )
        self.data = data
        size = dtypes.canonical_size(self.dtype, math.prod(self.shape))
        if isinstance(data, Far) and data.text:
            if not data.latin:
                raise CorruptError(
                    "invalid numpy array in the pickle: expected bytes, got text",
                    cure="restore the file from a backup or download it again",
                )
            right = size <= data.length <= 2 * size  # each byte is a character of one or two bytes
        else:
            right = size == (data.length if isinstance(data, Far) else len(data))
        if not right:
            raise CorruptError(
                f"size mismatch of a numpy array in the pickle: expected {size} bytes",
                cure="restore the file from a backup or download it again",
            )

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in elements, as stored."""
        return c_strides(self.shape[::-1])[::-1] if self.fortran else c_strides(self.shape)


def _element_type(dtype: Any) -> tuple[str, bool]:
    """The name in wherry, and whether the bytes are big endian."""
    if not isinstance(dtype, CallRecord) or not dtype.args:
        raise CorruptError(
            "missing dtype of a numpy array in the pickle",
            cure="restore the file from a backup or download it again",
        )
    code: Any = dtype.args[0]
    state: Any = dtype.state
    order = state[1] if type(state) is tuple and len(cast("tuple[Any, ...]", state)) > 1 else "|"
    if isinstance(code, Global) and code.module in _ML_MODULES:
        return code.name, order == ">"
    if type(code) is not str or code.lstrip("<>|=") not in _CODES:
        raise UnsupportedError(
            f"unsupported dtype {code!s:.40} of a numpy array in the pickle",
            cure="save arrays of numbers, and objects and strings in another file",
        )
    return _CODES[code.lstrip("<>|=")], order == ">" or code.startswith(">")


def _reconstruct(args: tuple[Any, ...]) -> PickledArray:
    if not args or args[0] != ("numpy", "ndarray"):
        raise UnsupportedError(
            f"unsupported class {args[0] if args else '?'} of a numpy array in the pickle",
            cure="save plain arrays",
        )
    return PickledArray()


def _from_buffer(args: tuple[Any, ...]) -> PickledArray:
    data, dtype, shape, order = args
    if order not in ("C", "F"):
        raise CorruptError(
            f"invalid order {order!r:.40} of a numpy array in the pickle; expected C or F",
            cure="restore the file from a backup or download it again",
        )
    array = PickledArray()
    array.fill(shape, dtype, data, fortran=order == "F")
    return array


def _scalar(args: tuple[Any, ...]) -> PickledArray:
    dtype, *data = args
    if len(data) != 1:
        raise UnsupportedError("unsupported numpy scalar in the pickle: not a number", cure="save numbers")
    array = PickledArray()
    array.fill((), dtype, data[0], fortran=False)
    return array


def _jax_array(args: tuple[Any, ...]) -> PickledArray:
    function, arguments, state, *_ = args
    if function not in _RECONSTRUCTS:
        raise UnsupportedError(f"unsupported JAX array in the pickle, built by {function}")
    array = _reconstruct(arguments)
    array.build(state)
    return array


def _refusal(wanted: Global) -> WherryError | None:
    if wanted.module == "numpy" or wanted in _KNOWN:
        return UnsupportedError(f"unsupported numpy object in the pickle: {wanted}", cure="save plain arrays")
    return None


_KNOWN = frozenset({("numpy.ma.core", "_mareconstruct"), ("numpy.matrixlib.defmatrix", "matrix")})
_RECONSTRUCTS = tuple((f"{package}.multiarray", "_reconstruct") for package in (_OLD, _NEW))
_ALLOWED: Allowed = {
    **HARMLESS,
    ("numpy", "ndarray"): None,
    ("numpy", "dtype"): None,
    **dict.fromkeys(_RECONSTRUCTS, _reconstruct),
    **{(f"{package}.multiarray", "scalar"): _scalar for package in (_OLD, _NEW)},
    **{(f"{package}.numeric", "_frombuffer"): _from_buffer for package in (_OLD, _NEW)},
    **{(module, "_reconstruct_array"): _jax_array for module in _JAX_MODULES},
    ("jax._src.device_array", "reconstruct_device_array"): _jax_array,
    **{(module, name): None for module in _ML_MODULES for name in _ML_NAMES},
}
NUMPY_RULES = Rules(allowed=_ALLOWED, refusal=_refusal, far=_FAR)


_CONTINUED, _MASK = 0x80, 0xC0


def placed_array(file: Location, array: PickledArray) -> PlacedTensor:
    """The position of an array's bytes."""
    data = array.data
    where, start, decoded = file, 0, True
    if isinstance(data, Far) and not data.text:
        start, length, decoded = data.start, data.length, False
    elif isinstance(data, Far):
        where, length = Location(_MemoryStore(Latin(file, data)), file.path), data.length
    else:
        where, length = Location(_MemoryStore(data), file.path), len(data)
    return PlacedTensor(
        where, start, length, 0, array.shape, array.strides, array.dtype, array.big_endian, decoded=decoded
    )


class Latin:
    """Bytes that are stored in a file as the UTF-8 of their Latin-1 characters."""

    def __init__(self, file: Location, far: Far) -> None:
        self._file = file
        self._far = far
        self._begins: list[int] = []
        self._lock = Lock()

    def __getitem__(self, index: slice) -> bytes:
        with self._lock:
            self._begins = self._begins or self._index()
        start, stop = index.start, index.stop
        pieces: list[bytes] = []
        page = bisect_right(self._begins, start) - 1
        while page < len(self._begins) and self._begins[page] < stop:
            begin = self._begins[page]
            pieces.append(self._decode(page)[max(start - begin, 0) : stop - begin])
            page += 1
        return b"".join(pieces)

    def _index(self) -> list[int]:
        """The number of bytes that are encoded before each page of the text."""
        import numpy as np

        begins, count = [0], 0
        for page in range(-(-self._far.length // PAGE)):
            raw = np.frombuffer(self._page(page), "u1")
            count += raw.size - int(np.count_nonzero((raw & _MASK) == _CONTINUED))
            begins.append(count)
        return begins[:-1] or [0]

    def _page(self, number: int, more: int = 0) -> bytes:
        start = number * PAGE
        stop = min(start + PAGE + more, self._far.length)
        return self._file.read(self._far.start + start, self._far.start + stop)

    def _decode(self, page: int) -> bytes:
        """The characters that begin in a page; the last one may end in the next."""
        raw = self._page(page, 1)
        first = 1 if page and raw[:1] and raw[0] & _MASK == _CONTINUED else 0
        last = PAGE + 1 if len(raw) > PAGE and raw[PAGE] & _MASK == _CONTINUED else PAGE
        try:
            return raw[first:last].decode("utf-8").encode("latin-1")
        except UnicodeError as error:
            raise CorruptError(
                "invalid Latin-1 text for the bytes of an array", uri=self._file.uri
            ) from error


class _MemoryStore(Store):
    """A store of one file: bytes in memory, or bytes that are decoded on demand."""

    protocol = "pickle"
    capabilities = READ_ONLY

    def __init__(self, data: bytes | Latin) -> None:
        self._data = data

    def stat(self, path: str) -> Entry | None:
        """See Store."""
        return Entry(path.rsplit("/", 1)[-1], 0, is_dir=False)

    def entries(self, path: str) -> list[Entry]:
        """See Store."""
        raise NotADirectoryError(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store."""
        del path
        return self._data[slice(start, stop)]
