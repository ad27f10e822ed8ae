"""Parts: regions of stored tensors as arrays, in memory that is used again.

For readers that compute: they take a region, turn it into something else, and need it no more. Threads that are done
give their memory back, so that there is as much of it as regions are made at a time, however many threads there are.
At the end of a pass `drop_free_parts` returns it to the system. Large regions lie in memory of their own, outside of
malloc's, where freed blocks of such sizes leave gaps.
"""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from wherry.core import dtypes
from wherry.core.tensorspec import Region, TensorSpec, region_shape
from wherry.mover.decode import DecodedReader
from wherry.mover.pool import map_memory
from wherry.mover.regions import RawBytes, fill_region

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Mapping

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.formats.reader import Reader

_MAPPED = 1 << 20  # bytes from which memory is mapped
_EVERY: WeakSet[Parts] = WeakSet()


def drop_free_parts() -> None:
    """Return the memory that waits for reuse; for the end of a pass, whose successor reads other tensors."""
    for parts in list(_EVERY):
        parts.drop_free()


class Parts:
    """Reads regions of a reader's tensors; used from several threads."""

    def __init__(self, reader: Reader, specs: Mapping[KeyPath, TensorSpec]) -> None:
        """Read nothing yet.

        Args:
            reader: the reader; one that hashes what is taken of its tensors gets each region with its bytes.
            specs: its tensors.
        """
        self._reader = reader
        self._taken = reader.take_region if isinstance(reader, DecodedReader) else None
        self._specs = specs
        self._own = threading.local()
        self._free: list[bytearray | mmap.mmap] = []
        self._lock = threading.Lock()
        _EVERY.add(self)

    def read(self, path: KeyPath, region: Region) -> np.ndarray:
        """A region of a tensor, valid until this thread reads the next one or releases its memory."""
        spec = self._specs[path]
        access = self._reader.access(spec)
        if access.raw is not None:
            read = RawBytes(access.raw, spec)
            return self._array(spec, region, partial(fill_region, spec, region, read))
        if access.kind == "regions":
            return self._array(spec, region, partial(self._reader.fill, spec, region))
        return self._reader.read(spec, region)

    def release(self) -> None:
        """Give the memory of this thread's last region back: another thread may use it."""
        held: Any = getattr(self._own, "buffer", None)
        if held is not None:
            self._own.buffer = None
            with self._lock:
                self._free.append(held)

    def drop_free(self) -> None:
        """Return the memory that no thread uses."""
        with self._lock:
            self._free.clear()

    def _array(self, spec: TensorSpec, region: Region, fill: Callable[[memoryview], None]) -> np.ndarray:
        import numpy as np

        shape, dtype = region_shape(region), dtypes.numpy_dtype(spec.dtype)
        out = self._scratch(math.prod(shape) * dtype.itemsize)
        fill(out)
        if self._taken is not None:
            self._taken(spec, region, out)
        return np.frombuffer(out, dtype).reshape(shape)

    def _scratch(self, nbytes: int) -> memoryview:
        """Reused memory: fresh memory costs more than filling it."""
        held: Any = getattr(self._own, "buffer", None)
        with self._lock:
            if held is None and self._free:
                held = self._free.pop()
            if held is None or len(held) < nbytes:
                self._free.clear()  # they are as small
                held = None
        self._own.buffer = held = held or (map_memory(nbytes) if nbytes >= _MAPPED else bytearray(nbytes))
        return memoryview(held)[:nbytes]
