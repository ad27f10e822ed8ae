"""Kernels: the inner loops that Python and numpy are too slow for, compiled from the C files of this folder.

- `tree_hash.c` hashes leaves with BLAKE3 from pieces that arrive in any order, from several threads.
- `transpose.c` permutes the axes of arrays.
- `gather.c` reads rows of a file that lie apart.
- `look_up.c` replaces codes by words of tables, one for each block.
- `magnitude.c` counts words above a limit, such as the NaN of a type.

They are compiled when wherry is installed, if a C compiler is there (`wherry.kernels.compile`), and loaded with ctypes,
which lets other threads run meanwhile. Without them wherry does the same with numpy and the `blake3` package, slower:
`kernels()` says which of both it is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from wherry.kernels.compile import library_file

if TYPE_CHECKING:
    import numpy as np

_LANES = {16: "AVX-512", 8: "AVX2", 4: "portable"}
_HASH = 32  # bytes of a hash
_ABSENT = -2  # there is no such leaf, or bytes are no values of it
LEAF = 4 << 20  # bytes; the kernels know no other size
_PY_BUFFER_WORDS = 16  # room for a Py_buffer, whose first word is the address
MOST_VALUES = LEAF // 32  # bytes that are exchanged of a leaf: as much as the values of its chunks are


@cache
def load() -> ctypes.CDLL | None:
    """The compiled library; None if wherry was installed without a compiler, or the C files were changed since."""
    file = library_file()
    if not file.exists():
        return None
    try:
        found = ctypes.CDLL(str(file))
    except OSError:  # of another processor or C library
        return None
    size, signed, unsigned, place = ctypes.c_size_t, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
    found.wherry_leaves_new.restype, found.wherry_leaves_new.argtypes = place, [unsigned]
    found.wherry_leaves_free.restype, found.wherry_leaves_free.argtypes = None, [place]
    found.wherry_leaves_skip.restype, found.wherry_leaves_skip.argtypes = None, [place, size]
    found.wherry_leaves_add.restype = signed
    found.wherry_leaves_add.argtypes = [place, place, signed, *[unsigned] * 4, place, place]
    found.wherry_leaves_export.restype = signed
    found.wherry_leaves_export.argtypes = [place, size, place, unsigned]
    found.wherry_leaves_import.argtypes = [place, size, place, unsigned, place]
    found.wherry_leaves_bytes.restype, found.wherry_leaves_bytes.argtypes = signed, []
    found.wherry_look_up.argtypes = [
        place, size, size, ctypes.c_int, size, size, place, ctypes.c_int, *[size] * 5, place, size,
        ctypes.c_int, place, place,
    ]  # fmt: skip
    found.wherry_above.restype, found.wherry_above.argtypes = (
        signed,
        [place, unsigned, ctypes.c_int, unsigned],
    )
    found.wherry_permute.argtypes = [place, place, place, place, place, ctypes.c_int, ctypes.c_int]
    number = ctypes.c_int
    found.wherry_gather.argtypes = [number, unsigned, unsigned, number, *[place] * 5, unsigned]
    return found


def kernels() -> str:
    """What the inner loops run on: the vectors of this processor, or `none` where nothing was compiled."""
    library = load()
    return "none" if library is None else _LANES[library.wherry_lanes(0)]


def open_bytes() -> int:
    """Bytes of memory for the leaves of this process that have begun and are not complete."""
    library = load()
    return 0 if library is None else library.wherry_leaves_bytes()


class OpenLeaves:
    """The leaves of a tensor whose bytes arrive in any order; used from several threads.

    Of each leaf that has begun, 32 bytes are kept for each KiB, or for 8 KiB that lie together, and the bytes of those
    KiB that came in part.
    """

    __slots__ = ("_count", "_library", "_state")

    def __init__(self, nbytes: int) -> None:
        """Create the leaves of a tensor with this many bytes; requires `load()`.

        Raises:
            MemoryError: there is no memory.
        """
        library = load()
        assert library is not None, "the caller asks load() first"
        self._library = library
        self._count = -(-nbytes // LEAF)
        self._state = library.wherry_leaves_new(nbytes)
        if not self._state:
            raise MemoryError

    def __del__(self) -> None:
        if getattr(self, "_state", None):
            self._library.wherry_leaves_free(self._state)

    def skip(self, leaf: int) -> None:
        """The hash of a leaf is known from elsewhere: its bytes are not needed."""
        self._library.wherry_leaves_skip(self._state, leaf)

    def add(
        self, data: memoryview, offset: int, *, length: int = 0, count: int = 1, apart: int = 0, step: int = 0
    ) -> list[tuple[int, bytes]]:
        """Take runs of bytes, in any order and again.

        Args:
            data: holds the runs.
            offset: of the first run in the tensor's canonical bytes.
            length: bytes of each run; all of `data` by default.
            count: of the runs.
            apart: bytes from a run to the next in `data`.
            step: bytes from a run to the next in the tensor.

        Returns:
            The number and the hash of each leaf that is complete now.

        Raises:
            MemoryError: there is no memory.
        """
        length = length or len(data)
        assert (count - 1) * apart + length <= len(data)
        touched = min(self._count, ((count - 1) * step + length) // LEAF + 2)
        numbers = (ctypes.c_uint64 * touched)()
        hashes = ctypes.create_string_buffer(touched * _HASH)
        found = self._library.wherry_leaves_add(
            self._state,
            _start(data),
            apart,
            count,
            length,
            offset,
            step,
            numbers,
            hashes,
        )
        if found == -1:
            raise MemoryError
        assert found >= 0, f"{count} runs of {length} bytes at {offset} lie outside of the tensor"
        return [(numbers[at], hashes.raw[at * _HASH : (at + 1) * _HASH]) for at in range(found)]

    def values(self, leaf: int) -> bytes | None:
        """The values of an incomplete leaf, for another process that has other bytes of it.

        They are the values of the largest subtrees of whole KiB, and the bytes of every incomplete KiB. Equal bytes
        give equal values, whatever pieces they arrived in.

        Args:
            leaf: its number.

        Returns:
            The argument of `take_values`; empty if no byte of the leaf has arrived, None if it is more than
            `MOST_VALUES`.
        """
        held = (ctypes.c_char * MOST_VALUES)()
        size = self._library.wherry_leaves_export(self._state, leaf, held, MOST_VALUES)
        assert size != _ABSENT, f"the tensor has no leaf {leaf}"
        return None if size < 0 else ctypes.string_at(held, size)

    def take_values(self, leaf: int, values: bytes) -> bytes | None:
        """Take the values of a leaf that another process has computed; some of its bytes may have been taken before.

        Args:
            leaf: its number.
            values: see `values`.

        Returns:
            The hash of the leaf if it is complete now.

        Raises:
            ValueError: these are no values of this leaf.
            MemoryError: there is no memory.
        """
        if leaf < 0 or len(values) > MOST_VALUES:
            raise ValueError(f"invalid values of leaf {leaf}")
        found = ctypes.create_string_buffer(_HASH)
        complete = self._library.wherry_leaves_import(self._state, leaf, values, len(values), found)
        if complete == _ABSENT:
            raise ValueError(f"invalid values of leaf {leaf}")
        if complete < 0:
            raise MemoryError
        return found.raw if complete else None


def count_above(words: bytes | memoryview, size: int, limit: int) -> int:
    """How many words have a magnitude, which is all bits but the highest, above a limit; requires `load()`.

    Args:
        words: unsigned words one after another.
        size: of a word: 1, 2, 4 or 8 bytes.
        limit: for example the magnitude of infinity, above which that of NaN is.
    """
    library = load()
    assert library is not None, "the caller asks load() first"
    nbytes = memoryview(words).nbytes
    assert nbytes % size == 0
    found = library.wherry_above(_start(words), nbytes // size, size, limit)
    assert found >= 0, f"words of {size} bytes"
    return found


def permute(view: np.ndarray, out: np.ndarray) -> bool:
    """Copy an array of plain words into another of the same shape, with any strides.

    Returns:
        Whether it was done: not without the library, nor for elements that no kernel has.
    """
    library = load()
    if library is None:
        return False
    axes = view.ndim
    extents = (ctypes.c_uint64 * axes)(*view.shape)
    source, target = (ctypes.c_int64 * axes)(*view.strides), (ctypes.c_int64 * axes)(*out.strides)
    return not library.wherry_permute(
        _address(view), source, _address(out), target, extents, axes, view.itemsize
    )


def gather(
    descriptor: int,
    offset: int,
    length: int,
    grid: Sequence[tuple[int, int, int]],
    out: memoryview,
    held: memoryview,
) -> bool:
    """Read bytes at each place of a grid of a file; requires `load()`.

    Args:
        descriptor: of the file.
        offset: of the first place.
        length: bytes at each place.
        grid: extent, bytes from a place to the next in the file, and the same in `out`, of each axis; the last axis is
            the one whose places are nearest to each other in the file.
        out: receives the bytes.
        held: memory in which places are read together with the bytes between them; empty if each is read by itself.

    Returns:
        Whether the file was long enough.

    Raises:
        OSError: the storage failed.
    """
    library = load()
    assert library is not None, "the caller asks load() first"
    extents, file_strides, out_strides = zip(*grid, strict=True)
    last = sum((extent - 1) * stride for extent, stride in zip(extents, out_strides, strict=True))
    assert 0 in extents or last + length <= len(out), "the places lie outside of the memory"
    words = ctypes.c_uint64 * len(grid)
    failed = library.wherry_gather(
        descriptor, offset, length, len(grid), words(*extents), words(*file_strides), words(*out_strides),
        _start(out), _start(held) if held else None, len(held),
    )  # fmt: skip
    if failed < 0:
        raise OSError(-failed, os.strerror(-failed))
    return not failed


def look_up(
    codes: np.ndarray,
    tables: np.ndarray,
    orders: np.ndarray | None,
    first: tuple[int, int],
    block: tuple[int, int],
    out: np.ndarray,
    skip: int = 0,
) -> np.ndarray:
    """Replace codes by words of tables; requires `load()`.

    Args:
        codes: uint8 [rows, bytes], C order: codes of 8 bits, or of 4, of which the lower half of a byte is the first.
        tables: words of 2 or 4 bytes [block rows, block columns, 256 or 16], C order, of all blocks that codes touch.
        orders: uint8, of the same shape: all codes of each block, in any order; None if it is not needed.
        first: row and column of the first code, counted from the corner of the first block.
        block: rows and columns of a block.
        out: receives the words [rows, columns]; each row is contiguous, or each column.
        skip: codes at the beginning of each row that are not wanted.

    Returns:
        Words of the tables that are among them: all, of codes of 4 bits. Of codes of 8 bits some, with that of the last
        code of each block; none without orders.
    """
    import numpy as np

    library = load()
    assert library is not None, "the caller asks load() first"
    rows, columns = out.shape
    bits = {256: 8, 16: 4}[tables.shape[-1]]
    seen = np.zeros(tables.shape, np.bool_)
    assert codes.flags.c_contiguous
    assert tables.flags.c_contiguous
    assert orders is None or (orders.flags.c_contiguous and orders.shape == tables.shape)
    assert len(codes) == rows
    assert not rows or skip + columns <= codes.shape[1] * 8 // bits
    across, down = out.strides[1], out.strides[0]
    turned = across != out.itemsize
    assert not out.size or out.itemsize == tables.itemsize == (down if turned else across)
    assert min(down, across) >= 0
    assert not out.size or (first[0] + rows - 1) // block[0] < tables.shape[0]
    assert not out.size or (first[1] + columns - 1) // block[1] < tables.shape[1]
    done = library.wherry_look_up(
        _address(codes), codes.shape[1], skip, bits, rows, columns,
        _address(tables), tables.itemsize, tables.shape[1], *first, *block,
        _address(out), across if turned else down, turned, None if orders is None else _address(orders), _address(seen),
    )  # fmt: skip
    assert done == 0, "words have 2 or 4 bytes"
    return seen


def _start(data: bytes | memoryview) -> int | None:
    """The address of bytes, also of those that cannot be written, for as long as the caller holds them.

    numpy would tell it too, but takes longer to import than a small conversion takes without it.
    """
    view = (ctypes.c_void_p * _PY_BUFFER_WORDS)()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), view, 0)
    ctypes.pythonapi.PyBuffer_Release(view)
    return view[0]


def _address(array: np.ndarray) -> int:
    found: Any = array.__array_interface__["data"][0]
    return found
