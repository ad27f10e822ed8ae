"""The kernel row: a 1 GB kernel with its axes in every order, hashed, compared with a plain copy that is hashed.

Both go from one array in memory to another whose pages were touched before, in one thread, and hash the result leaf
by leaf: the row is about transposition alone, and no disk hides it.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from itertools import permutations

_LEAF = 4 << 20
_ITEM = 2  # bytes of a bfloat16
_NOMINAL = 2_200_000_000
# A scanned attention kernel: embed, layer, head, width of a head. 1.07 GB.
_SHAPE = (8192, 16, 32, 128)


def kernel(size: str) -> Callable[[], float]:
    """The slowest order's time, as a multiple of the copy's; `size` other than 2.2 GB shrinks the kernel alike."""
    import numpy as np

    from wherry.layout.copies import permute

    shape = (max(_SHAPE[0] * int(size) // _NOMINAL, 1), *_SHAPE[1:])
    count = int(np.prod(shape))
    source = memoryview(np.random.default_rng(1).bytes(count * _ITEM))
    target = memoryview(bytearray(b"\1") * (count * _ITEM))
    array = np.frombuffer(source, "u2").reshape(shape)

    def copy() -> None:
        target[:] = source

    def run() -> float:
        floor = _time(copy, target)
        slowest = 0.0
        for order in permutations(range(len(shape))):
            view = array.transpose(order)
            out = np.frombuffer(target, "u2").reshape(view.shape)
            taken = _time(lambda view=view, out=out: permute(view, out), target)
            print(f"{order}: {taken:.2f} s, {taken / floor:.2f} × {floor:.2f} s", file=sys.stderr)
            slowest = max(slowest, taken)
        return slowest / floor

    return run


def _time(fill: Callable[[], None], target: memoryview) -> float:
    started = time.monotonic()
    fill()
    for start in range(0, len(target), _LEAF):
        hashlib.sha256(target[start : start + _LEAF]).digest()
    return time.monotonic() - started
