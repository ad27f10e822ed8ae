"""codes: the arithmetic of `dequantize` and `quantize`: codes and scales of blocks, and the values that they mean.

value = code × scale, in float32, rounded once to the target's element type. A code is a byte, or half of one, the lower
half first. What each code means is a table of float32 values, so 8-bit floats, 4-bit floats and integers with and
without an offset differ by their table only. Of asymmetric integers a block also has a zero point: value = (code - zero
point) × scale; the difference is a whole number below 256, exact in every float. Scales are floats, or one byte with
the exponent of a power of two.

The rules of `quantize` are closed: a block's scale follows from its largest magnitude, and each value gets the nearest
code, so that codes depend on the values of their block alone, not on data for calibration. With scales that were kept,
a code is the one whose product with its scale rounds to the value.

Two such rules exist. `block_scales` is that of transformers and of gpt-oss; `observed_scales` is that of
compressed-tensors' `calculate_qparams` for the smallest and largest values, which rounds each step to the element type
of the weights. Its codes are those of value / scale in float32, as its kernels compute them; without a kernel it rounds
that quotient to the weights' type first, so that some codes are not the nearest ones.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.layout.words import significant

if TYPE_CHECKING:
    import numpy as np

_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of the exponent that a scale of one byte is
_SIGNED = "signed8"
_HALVED = "float4_e2m1fn"  # see `code_table`
_SIGNIFICANT = {  # bits
    _HALVED: 2, "float4": 2, "int4": 3, "int8": 7, _SIGNED: 7, "float8_e4m3fn": 4, "float8_e5m2": 3,
}  # fmt: skip
_EXPONENTS = ("uint8", "float8_e8m0fnu")
SCALE_TYPES = ("bfloat16", "float16", "float32", "float64", *_EXPONENTS)  # element types of scales
_WIDE = ("bfloat16", "float32", "float64")  # they have all exponents of such scales
_LARGEST = {
    "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, _HALVED: 6.0, "float4": 6.0, "int4": 7.5, "int8": 127.5,
}  # fmt: skip
_EXPONENT = 2  # of the largest 4-bit float, 6 = 1.5 × 2²
_SPARE = 2.0**-22  # for the arithmetic in float32 with which an error is measured
_SCALE = "float8_e4m3fn"  # of blocks whose tensor has a global scale


def is_code(name: str) -> bool:
    """Whether this is the name of a code."""
    return name in _SIGNIFICANT


def code_bits(code: str) -> int:
    """Bits of one code."""
    return 4 if code in (_HALVED, "float4", "int4") else 8


@cache
def code_table(code: str) -> np.ndarray:
    """The values of all codes, float32 [2^bits].

    `int4` and `int8` are stored with half of their range added, as compressed-tensors packs them; `signed8` is an
    8-bit integer as it is. Those of `float4_e2m1fn` are twice their values, since `scale_values` halves its scales;
    `float4` has the same codes as they are.
    """
    import numpy as np

    if code.startswith("float4"):
        values = np.array([*_FLOAT4, *(-value for value in _FLOAT4)], np.float32)
        return 2 * values if code == _HALVED else values
    if code == _SIGNED:
        return np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
    if code.startswith("int"):
        count = 1 << code_bits(code)
        return np.arange(-count // 2, count // 2).astype(np.float32)
    return np.arange(256, dtype=np.uint8).view(dtypes.numpy_dtype(code)).astype(np.float32)


@cache
def _by_byte(code: str) -> np.ndarray:
    """The values of each byte: float32 [256], or of two codes as one 8-byte word [256]."""
    import numpy as np

    table = code_table(code)
    if code_bits(code) == 8:  # noqa: PLR2004  a whole byte
        return table
    every = np.arange(256)
    return np.stack([table[every & 15], table[every >> 4]], axis=1).copy().view(np.uint64).reshape(256)


def decode(stored: np.ndarray, code: str) -> np.ndarray:
    """The values of codes, without their scales.

    Args:
        stored: uint8 [rows, bytes], C order.
        code: the name of the code.

    Returns:
        float32 [rows, codes].
    """
    import numpy as np

    table = _by_byte(code)
    # every byte is a valid index: `clip` only spares numpy the check
    return np.take(table, stored, mode="clip").view(np.float32)


def scale_values(scales: np.ndarray, code: str, factor: np.float32 | None = None) -> np.ndarray:
    """Scales as float32: floats, or one byte with the exponent of a power of two.

    Where a tensor has a global scale, `factor`, they are divided by it.

    The byte 255 is infinity in a uint8, as transformers computes it, and not a number in a float8_e8m0fnu. Scales of
    `float4_e2m1fn` are halved: 2^128 is no float32, but its product with 0.5 is one.
    """
    import numpy as np

    if factor is not None:
        with np.errstate(all="ignore"):
            return scales.astype(np.float32) / factor
    if scales.dtype.name not in _EXPONENTS:
        return scales.astype(np.float32)
    exponents = scales.view(np.uint8)
    halved = code == _HALVED
    with np.errstate(over="ignore"):
        values = np.ldexp(np.float32(1), exponents.astype(np.int32) - _BIAS - halved)
    return np.where(exponents == 255, np.float32(np.nan), values) if scales.dtype != np.uint8 else values  # noqa: PLR2004


def unpack_rows(packed: np.ndarray, code: str, rows: slice) -> np.ndarray:
    """Integers that are packed along rows, as compressed-tensors packs zero points.

    Args:
        packed: int32 [..., words, columns]; a word has the integers of neighbouring rows, the lowest bits first.
        code: the name of their code.
        rows: the rows that are wanted, counted from the first of the words.

    Returns:
        float32 [..., rows, columns].
    """
    import numpy as np

    turned = np.ascontiguousarray(packed.swapaxes(-1, -2))
    values = decode(turned.reshape(-1, turned.shape[-1]).view(np.uint8), code)
    return values.reshape(*turned.shape[:-1], -1)[..., rows].swapaxes(-1, -2)


def in_blocks(
    operation: np.ufunc, values: np.ndarray, grid: np.ndarray, first: tuple[int, int], block: tuple[int, int]
) -> None:
    """Combine values with the number of their block, in place.

    Args:
        operation: of a value and a number.
        values: float32 [rows, columns].
        grid: float32 [block rows, block columns], of all blocks that the values touch.
        first: row and column of the first value, counted from the corner of the first block.
        block: rows and columns of a block.
    """
    import numpy as np

    rows, columns = values.shape
    wide = np.take(grid, (first[1] + np.arange(columns)) // block[1], axis=1) if grid.shape[1] > 1 else grid
    if block[0] == 1:
        operation(values, wide[first[0] : first[0] + rows], out=values)
        return
    at = 0
    while at < rows:
        row = (first[0] + at) // block[0]
        end = min((row + 1) * block[0] - first[0], rows)
        operation(values[at:end], wide[row], out=values[at:end])
        at = end


def exact(code: str, scale: str, target: str, *, zeros: bool = False) -> bool:
    """Whether no product of a code and a scale, both element types, needs rounding in the target's element type.

    Args:
        code: the name of the code.
        scale: element type of the scales.
        target: element type of the products.
        zeros: whether a zero point is subtracted, which takes another bit.
    """
    bits = 0 if scale in _EXPONENTS else significant(scale)
    return target in _WIDE and _SIGNIFICANT[code] + zeros + bits <= significant(target)


def largest_error(code: str, kind: str = "float32") -> float:
    """The largest error of a value, as a share of the largest magnitude of its block.

    Half the distance of the two largest codes, which is the widest, over the largest code, and what the rounding of the
    scale adds. A scale that is a power of two leaves values above 6, up to 8, of `float4_e2m1fn`, and up to 7 of
    `float4`. Scales of `int4` are in bfloat16. One in float8_e4m3fn is off by up to a 17th; see `least_largest`.

    Args:
        code: the name of the code.
        kind: element type of the scales.
    """
    if code == "float4":
        return 1 / 5 if kind in _EXPONENTS else 2 / 11
    if code not in ("float8_e4m3fn", "int8"):
        return {_HALVED: 1 / 4, "int4": 1 / 14}[code]
    unit = 2.0 ** -significant(kind)
    return _SPARE + ((1 + unit) / 28 if code.startswith("float8") else 1 / 255 + unit)


def lost_to_scale(code: str, kind: str, plain: str) -> float:
    """The largest magnitude of a block that may be lost, since its scale is too small for the weights' element type.

    Args:
        code: the name of the code.
        kind: element type of the scales.
        plain: that of the weights.
    """
    from ml_dtypes import finfo

    limits = finfo(dtypes.numpy_dtype(plain))
    if kind in _EXPONENTS:
        return float(limits.smallest_normal)
    return _LARGEST[code] * float(limits.smallest_subnormal) + (2.0**-115 if kind == _SCALE else 0.0)


def least_largest(whole: float) -> float:
    """The least magnitude of which the error of a block is a share, if its tensor has a global scale.

    It is that of the least scale that is a normal float8_e4m3fn; smaller ones have fewer bits.

    Args:
        whole: the largest magnitude of the tensors that share the global scale.
    """
    return whole * 2.0**-6 / _LARGEST[_SCALE]


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
    """The factors that transformers multiplies 8-bit floats by, rounded as torch does: it multiplies by inverses."""
    import numpy as np

    inverse = np.float32(1) / np.where(largest > 0, largest, np.float32(1))
    return np.where(largest > 0, inverse * np.float32(_LARGEST[code]), np.float32(1))


def global_scale(whole: float, plain: str) -> np.float32:
    """The global scale with which the largest scale of a tensor is the largest float8_e4m3fn.

    It is that of compressed-tensors' `generate_gparam`, which multiplies by an inverse in the weights' element type;
    for float16, whose range that leaves, it is computed in float32. 1 if float32 has no number for it.

    Args:
        whole: the largest magnitude of the tensors that share it.
        plain: element type of the weights.
    """
    import numpy as np
    from ml_dtypes import finfo

    kind = dtypes.numpy_dtype("float32" if plain == "float16" else plain)
    top = np.float32(_LARGEST[_SCALE] * _LARGEST["float4"])
    with np.errstate(over="ignore", under="ignore"):
        inverse = (np.float32(1) / np.float32(max(whole, float(finfo(kind).smallest_normal)))).astype(kind)
        found = np.float32((inverse.astype(np.float32) * top).astype(kind))
    return found if np.isfinite(found) else np.float32(1)


def observed_scales(
    largest: np.ndarray, code: str, kind: str, plain: str, factor: np.float32 | None = None
) -> np.ndarray:
    """The stored scales of blocks by the rule of compressed-tensors, each step rounded to the weights' element type.

    Args:
        largest: float32, the largest magnitude of each block.
        code: the name of the code.
        kind: element type of the scales; of uint8 the exponent of a power of two is stored.
        plain: element type of the weights.
        factor: the global scale, if there is one.

    Returns:
        An array of the shape of `largest`; a scale that would be 0 is the epsilon of its type.
    """
    import numpy as np
    from ml_dtypes import finfo

    if kind in _EXPONENTS:
        return _observed_exponents(largest, plain)
    with np.errstate(over="ignore", under="ignore"):
        scales = (largest / np.float32(_LARGEST[code])).astype(dtypes.numpy_dtype(plain))
        if factor is not None:
            scales = np.minimum(scales.astype(np.float32) * factor, np.float32(_LARGEST[_SCALE]))
        stored = scales.astype(dtypes.numpy_dtype(kind))
    return np.where(stored == 0, np.asarray(finfo(stored.dtype).eps, stored.dtype), stored)


def _observed_exponents(largest: np.ndarray, plain: str) -> np.ndarray:
    """Exponents for 4-bit floats: the next power of two from 1.75 of one on, over 4; 1 where a scale would be 0."""
    import numpy as np
    from ml_dtypes import finfo

    kind = dtypes.numpy_dtype(plain)
    limits, words = finfo(kind), np.dtype(f"u{kind.itemsize}")
    with np.errstate(over="ignore", under="ignore"):
        bits = largest.astype(kind).view(words) + words.type(1 << limits.nmant - 2)
        powers = (bits >> words.type(limits.nmant) << words.type(limits.nmant)).view(kind).astype(np.float32)
        exponents = np.where(np.isfinite(powers), np.frexp(powers)[1] - 1, limits.maxexp)
        stored = np.where(powers > 0, np.clip(exponents - _EXPONENT + _BIAS, 0, 254), 0)
        zero = np.ldexp(np.float32(1), stored - _BIAS).astype(kind) == 0
    return np.where(zero, _BIAS, stored).astype("u1")


def encode(
    values: np.ndarray,
    scales: np.ndarray,
    code: str,
    *,
    largest: np.ndarray | None = None,
    kept: bool = False,
) -> np.ndarray:
    """The nearest codes of values.

    Args:
        values: float32 [rows, columns].
        scales: scales as `scale_values` has them, one for each value [rows, columns] or broadcast to that.
        code: the name of the code.
        largest: the largest magnitude of each value's block, for the factor that transformers multiplies 8-bit floats
            with; None divides by the scale.
        kept: whether the scales were kept, so that a zero keeps its sign in every code.

    Returns:
        uint8 [rows, columns], a code in each byte.
    """
    import numpy as np

    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        if code.startswith("float8") and largest is not None:
            top = np.float32(_LARGEST[code])
            scaled = np.clip(values * _factors(largest, code), -top, top)
            return scaled.astype(dtypes.numpy_dtype(code)).view("u1")
        scaled = values / scales
    if code.startswith("float8"):
        if code == "float8_e4m3fn":  # it has no infinity
            scaled = np.clip(scaled, -_LARGEST[code], _LARGEST[code])
        return scaled.astype(dtypes.numpy_dtype(code)).view("u1")
    if code.startswith("int"):
        half = len(code_table(code)) // 2
        return (np.clip(np.rint(scaled), -half, half - 1).astype("i4") + half).astype("u1")
    # 4-bit floats, halves to the even code; `scaled` is twice the values where the table is.
    middles, upper = _middles(code)
    size = np.abs(scaled)
    codes = np.searchsorted(middles, size, side="left").astype("u1")
    codes += (
        (codes < len(middles))
        & (size == np.take(middles, codes, mode="clip"))
        & np.take(upper, codes, mode="clip")
    )
    negative = np.signbit(scaled) if kept or code == _HALVED else scaled < 0
    return codes | (negative.astype("u1") << 3)


@cache
def _middles(code: str) -> tuple[np.ndarray, np.ndarray]:
    """Halfway points of the magnitudes, and whether a value on one belongs to the upper code, which is even."""
    import numpy as np

    sizes = code_table(code)[:8]
    return (sizes[1:] + sizes[:-1]) / 2, np.arange(1, 8) % 2 == 0


def pack_codes(codes: np.ndarray, code: str) -> np.ndarray:
    """Codes [rows, columns] as the bytes of their tensor: uint8 [rows, bytes]; the lower half of a byte comes first."""
    import numpy as np

    if len(code_table(code)) > 16:  # noqa: PLR2004  a whole byte
        return np.ascontiguousarray(codes)
    return codes[:, 0::2] | codes[:, 1::2] << 4
