"""ggml_encode: float32 values in quantised blocks of GGUF files, with the bits that the `gguf` package gives them.

A block is a scale, float16, and a code for each of 32 values. The scale is rounded after the codes are chosen. Of Q8_0
the code of the largest magnitude is ±127, and halves are rounded away from zero; of Q4_0 it is 0, which means -8, so a
value of the same magnitude and the other sign loses an eighth. A value without a code (a block that is not finite, or
too small for a scale) gets the code 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core.account import Bound

if TYPE_CHECKING:
    import numpy as np

BLOCK = 32
_SCALE = 2.0**-11  # relative error of a scale
_TINY = 2.0**-25  # of a scale that is subnormal, absolute
# The bound of each type that is written: a share of the largest magnitude of a block, and what underflow takes.
BOUNDS = {
    "ggml:Q8_0": Bound(block=0.5 / 127 + _SCALE, absolute=127 * _TINY),
    "ggml:Q4_0": Bound(block=1 / 8 + _SCALE, absolute=8 * _TINY),
}


def encode_blocks(values: np.ndarray, kind: str) -> np.ndarray:
    """The blocks of values.

    Args:
        values: float32 [blocks, 32].
        kind: one of BOUNDS.

    Returns:
        uint8 [blocks, bytes of a block].
    """
    import numpy as np

    with np.errstate(all="ignore"):
        scales, codes = _q8_0(values) if kind == "ggml:Q8_0" else _q4_0(values)
        return np.concatenate([scales.astype("<f2").view("u1"), codes.view("u1")], axis=1)


def _inverse(scales: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.where(scales == 0, np.float32(0), np.float32(1) / scales)


def _q8_0(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np

    scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = values * _inverse(scales)
    scaled[~np.isfinite(scaled)] = 0
    whole = np.trunc(scaled)
    return scales, (whole + np.trunc(2 * (scaled - whole))).astype("i1")


def _q4_0(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    import numpy as np

    largest = np.abs(values).argmax(axis=1)[:, None]
    scales = np.take_along_axis(values, largest, axis=1) / np.float32(-8)
    shifted = values * _inverse(scales) + np.float32(8.5)
    shifted[~np.isfinite(shifted)] = 0
    codes = np.trunc(shifted).clip(0, 15).astype("u1")
    half = BLOCK // 2
    return scales, codes[:, :half] | codes[:, half:] << 4
