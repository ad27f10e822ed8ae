"""Parts: regions of stored tensors as arrays, in memory that is used again.

For readers that compute: they take a region, turn it into something else, and need it no more. Threads that are done
give their memory back, so that there is as much of it as regions are made at a time, however many threads there are.
At the end of a pass `drop_free_parts` returns it to the system. Large regions lie in memory of their own, outside of
malloc's, where freed blocks of such sizes leave gaps.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from wherry.core import dtypes
from wherry.core.tensorspec import Region, TensorSpec, region_shape
from wherry.mover.decode import DecodedReader
from wherry.mover.pool import map_memory
from wherry.mover.read import fill

if TYPE_CHECKING:
    import mmap
    from collections.abc import Mapping

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.formats.contents import Contents

_MAPPED = 1 << 20  # bytes from which memory is mapped
_EVERY: WeakSet[Parts] = WeakSet()


def drop_free_parts() -> None:
    """Return the memory that waits for reuse; for the end of a pass, whose successor reads other tensors."""
    for parts in list(_EVERY):
        parts.drop_free()


class Parts:
    """Reads regions of a reader's tensors; used from several threads."""

    def __init__(self, reader: Contents, specs: Mapping[KeyPath, TensorSpec]) -> None:
        """Read nothing yet.

        Args:
            reader: the reader; one that hashes what is taken of its tensors gets each region with its bytes.
            specs: its tensors.
        """
        self._reader = reader
        self._decoded = reader if isinstance(reader, DecodedReader) else None
        self._specs = specs
        self._own = threading.local()
        self._free: list[bytearray | mmap.mmap] = []
        self._lock = threading.Lock()
        _EVERY.add(self)

    def read(self, path: KeyPath, region: Region) -> np.ndarray:
        """A region of a tensor, valid until this thread reads the next one or releases its memory."""
        import numpy as np

        spec = self._specs[path]
        if self._decoded is not None and self._decoded.keeps(spec):
            return self._decoded.look(spec, region)
        access = self._reader.access(spec)
        shape, dtype = region_shape(region), dtypes.numpy_dtype(spec.dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        # Reused memory: fresh memory costs more than filling it.
        held: Any = getattr(self._own, "buffer", None)
        with self._lock:
            if held is None and self._free:
                held = self._free.pop()
            if held is None or len(held) < nbytes:
                self._free.clear()  # they are as small
                held = None
        self._own.buffer = held = held or (map_memory(nbytes) if nbytes >= _MAPPED else bytearray(nbytes))
        out = memoryview(held)[:nbytes]
        if out:
            fill(access, spec, region, out)
        if self._decoded is not None and access.decoder is None:
            self._decoded.take_region(spec, region, out)
        return np.frombuffer(out, dtype).reshape(shape)

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
