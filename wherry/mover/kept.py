"""Kept: small decoded tensors in memory, until every element was taken or newer ones need the room."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.tensorspec import region_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec

_MOST = 64 << 20  # bytes of tensors that are not taken yet


@dataclass(slots=True)
class _Kept:
    array: np.ndarray
    left: int  # elements that will still be taken


class Kept:
    """Decoded tensors by key path; used from several threads."""

    def __init__(self, decode: Callable[[TensorSpec, memoryview], int]) -> None:
        """Keep nothing yet.

        Args:
            decode: fills memory with a tensor's canonical bytes, and says how many times all of it will be taken.
        """
        self._decode = decode
        self._lock = threading.Lock()
        self._making: dict[KeyPath, threading.Lock] = {}
        self._arrays: OrderedDict[KeyPath, _Kept] = OrderedDict()

    def take(self, spec: TensorSpec, region: Region) -> np.ndarray:
        """A region of a tensor, which is decoded if it is not there.

        Raises: what `decode` does.
        """
        with self._maker(spec.path):
            held = self._made(spec)
        with self._lock:
            held.left -= math.prod(region_shape(region))
            if held.left <= 0:
                self._arrays.pop(spec.path, None)
        return held.array[region]

    def prepare(self, spec: TensorSpec) -> None:
        """Decode a tensor that is not there.

        Raises: what `decode` does.
        """
        with self._maker(spec.path):
            self._made(spec)

    def drop(self, paths: Iterable[KeyPath]) -> None:
        """Forget tensors that nobody will ask for."""
        with self._lock:
            for path in paths:
                self._arrays.pop(path, None)
                self._making.pop(path, None)

    def _maker(self, path: KeyPath) -> threading.Lock:
        with self._lock:
            return self._making.setdefault(path, threading.Lock())

    def _made(self, spec: TensorSpec) -> _Kept:
        import numpy as np

        with self._lock:
            held = self._arrays.get(spec.path)
        if held is None:
            array = np.empty(spec.shape, dtypes.numpy_dtype(spec.dtype))
            times = self._decode(spec, array.reshape(-1).view("u1").data)
            held = _Kept(array, times * spec.size)
            with self._lock:
                self._arrays[spec.path] = held
                self._make_room()
        return held

    def _make_room(self) -> None:
        held = sum(one.array.nbytes for one in self._arrays.values())
        while held > _MOST and len(self._arrays) > 1:
            held -= self._arrays.popitem(last=False)[1].array.nbytes
