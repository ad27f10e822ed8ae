"""encode: the arithmetic of `quantize`: scales of the largest magnitude in a block, and the nearest code to each value.

The rules are closed: a block's codes depend on its values alone, not on data for calibration. With scales that were
kept, a code is the one whose product with its scale rounds to the value, which `agree` checks.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.quantized.codes import code_table, scale_values

if TYPE_CHECKING:
    import numpy as np

_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float4_e2m1fn": 6.0, "int4": 7.5, "int8": 127.5}
_EXPONENT = 2  # of the largest 4-bit float, 6 = 1.5 × 2²
_BIAS = 127


def largest_error(code: str) -> float:
    """The largest error of a value, as a share of the largest magnitude of its block.

    Half the distance of the two largest codes, which is the widest, over the largest code. A scale that is a power of
    two leaves values above 6, up to 8, of 4-bit floats. Scales of integers are rounded to bfloat16.
    """
    return {"float8_e4m3fn": 1 / 28, "float4_e2m1fn": 1 / 4, "int4": 1 / 14, "int8": 1 / 200}[code]


def block_scales(largest: np.ndarray, code: str, kind: str) -> np.ndarray:
    """The stored scales of blocks.

    Args:
        largest: float32, the largest magnitude of each block.
        code: the name of the code.
        kind: element type of the scales; of uint8 the exponent of a power of two is stored.
    """
    import numpy as np

    whole = np.where(largest > 0, largest, np.float32(1))
    if kind == "uint8":
        exponents = np.floor(np.log2(whole)) - _EXPONENT + _BIAS
        return np.where(largest > 0, np.clip(exponents, 0, 254), _BIAS).astype("u1")
    if code.startswith("float8"):
        return (np.float32(1) / _factors(largest, code)).astype(dtypes.numpy_dtype(kind))
    return np.where(largest > 0, whole / np.float32(_LARGEST[code]), 1).astype(dtypes.numpy_dtype(kind))


def _factors(largest: np.ndarray, code: str) -> np.ndarray:
    """What transformers multiplies 8-bit floats with, rounded as torch divides a number by a tensor: by its inverse."""
    import numpy as np

    inverse = np.float32(1) / np.where(largest > 0, largest, np.float32(1))
    return np.where(largest > 0, inverse * np.float32(_LARGEST[code]), np.float32(1))


def encode(
    values: np.ndarray, scales: np.ndarray, code: str, *, largest: np.ndarray | None = None
) -> np.ndarray:
    """The nearest codes of values.

    Args:
        values: float32 [rows, columns].
        scales: stored scales, one for each value [rows, columns] or broadcast to that.
        code: the name of the code.
        largest: the largest magnitude of each value's block, for the factor that transformers multiplies 8-bit floats
            with; None divides by the scale.

    Returns:
        uint8 [rows, columns], a code in each byte.
    """
    import numpy as np

    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        if code.startswith("float8") and largest is not None:
            top = np.float32(_LARGEST[code])
            scaled = np.clip(values * _factors(largest, code), -top, top)
            return scaled.astype(dtypes.numpy_dtype(code)).view("u1")
        scaled = values / scale_values(scales, code)
    if code.startswith("float8"):
        return scaled.astype(dtypes.numpy_dtype(code)).view("u1")
    if code.startswith("int"):
        half = len(code_table(code)) // 2
        return (np.clip(np.rint(scaled), -half, half - 1).astype("i4") + half).astype("u1")
    # 4-bit floats, halves to the even code; `scaled` is twice the values, as the table is.
    middles, upper = _middles()
    size = np.abs(scaled)
    codes = np.searchsorted(middles, size, side="left").astype("u1")
    codes += (
        (codes < len(middles))
        & (size == np.take(middles, codes, mode="clip"))
        & np.take(upper, codes, mode="clip")
    )
    return codes | (np.signbit(scaled).astype("u1") << 3)


@cache
def _middles() -> tuple[np.ndarray, np.ndarray]:
    """Halfway points of the magnitudes, and whether a value on one belongs to the upper code, which is even."""
    import numpy as np

    sizes = code_table("float4_e2m1fn")[:8]
    return (sizes[1:] + sizes[:-1]) / 2, np.arange(1, 8) % 2 == 0


def pack_codes(codes: np.ndarray, code: str) -> np.ndarray:
    """Codes [rows, columns] as the bytes of their tensor: uint8 [rows, bytes]; the lower half of a byte comes first."""
    import numpy as np

    if len(code_table(code)) > 16:  # noqa: PLR2004  a whole byte
        return np.ascontiguousarray(codes)
    return codes[:, 0::2] | codes[:, 1::2] << 4
