"""ggml: the quantised blocks of GGUF files: what they mean in float32, as the `gguf` package computes it, and back.

A block has a fixed number of elements in a fixed number of bytes: fields of scales and of codes, which `_FIELDS` lists.
Source of the layouts: ggml-common.h and the documentation of the types in llama.cpp. Scales and codes have exact
products in float32, except where a minimum is added or subtracted: that is rounded once.

Codes of a few bits are packed in runs: of each run of bytes first the lowest bits of all bytes, then the next ones.

Eight types are written. Six have the bits that the `gguf` package gives them: a scale, and a code for each of 32
values. A scale in float16 is rounded after the codes are chosen.

- Q8_0: the code of the largest magnitude is ±127, and halves are rounded away from zero.
- Q4_0, Q5_0: the code of the largest magnitude is 0, which means -8 or -16, so a value of the same magnitude and the
  other sign loses an eighth or a sixteenth.
- Q4_1, Q5_1: codes count from the least value of a block, which is stored like the scale.
- MXFP4: the scale is a power of two, with which the largest magnitude is between 4 and 8; the nearest 4-bit float is
  chosen, of two the smaller one. So what is between 6 and 8 loses up to a quarter.

The K types have the bits of ggml's reference functions where a processor rounds each product: 256 values, in runs that
have a scale each (and a minimum), which are codes themselves. Of several scales, around the one that the largest
magnitude needs, a run gets the one with the least squared error, weighted by the values' magnitudes. Then the codes are
chosen again for the scales as they are stored.

- Q4_K: runs of 32 values, codes from 0 to 15, minima that are not above 0.
- Q6_K: runs of 16 values, codes from -32 to 31.

A value without a code (of a block that is not finite, or too small for a scale) gets the code 0.
"""

from __future__ import annotations

import base64
import tomllib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.account import Bound
from wherry.layout.words import significant

if TYPE_CHECKING:
    import numpy as np

_CODEBOOKS = Path(__file__).with_name("ggml_codebooks.toml")
_FLOAT4 = (
    0,
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    0,
    -1,
    -2,
    -3,
    -4,
    -6,
    -8,
    -12,
)  # twice the 4-bit floats; their scale is halved
_BETWEEN = (0.5, 1.5, 2.5, 3.5, 5, 7, 10)  # the middles of its magnitudes
_NOT_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # IQ4_NL, IQ4_XS
_SHIFT = 0.125  # of the groups of IQ1_S and IQ1_M, up or down
# Fields of a block: name, element type, number.
_FIELDS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "Q4_0": (("scale", "<f2", 1), ("codes", "u1", 16)),
    "Q4_1": (("scale", "<f2", 1), ("least", "<f2", 1), ("codes", "u1", 16)),
    "Q5_0": (("scale", "<f2", 1), ("upper", "u1", 4), ("codes", "u1", 16)),
    "Q5_1": (("scale", "<f2", 1), ("least", "<f2", 1), ("upper", "u1", 4), ("codes", "u1", 16)),
    "Q8_0": (("scale", "<f2", 1), ("codes", "i1", 32)),
    "Q2_K": (("scales", "u1", 16), ("codes", "u1", 64), ("scale", "<f2", 1), ("least", "<f2", 1)),
    "Q3_K": (("upper", "u1", 32), ("codes", "u1", 64), ("scales", "u1", 12), ("scale", "<f2", 1)),
    "Q4_K": (("scale", "<f2", 1), ("least", "<f2", 1), ("scales", "u1", 12), ("codes", "u1", 128)),
    "Q5_K": (
        ("scale", "<f2", 1), ("least", "<f2", 1), ("scales", "u1", 12), ("upper", "u1", 32), ("codes", "u1", 128),
    ),
    "Q6_K": (("codes", "u1", 128), ("upper", "u1", 64), ("scales", "i1", 16), ("scale", "<f2", 1)),
    "TQ1_0": (("codes", "u1", 48), ("rest", "u1", 4), ("scale", "<f2", 1)),
    "TQ2_0": (("codes", "u1", 64), ("scale", "<f2", 1)),
    "MXFP4": (("exponent", "u1", 1), ("codes", "u1", 16)),
    "NVFP4": (("scales", "u1", 4), ("codes", "u1", 32)),
    "IQ2_XXS": (("scale", "<f2", 1), ("words", "<u4", 16)),
    "IQ2_XS": (("scale", "<f2", 1), ("codes", "<u2", 32), ("scales", "u1", 8)),
    "IQ2_S": (("scale", "<f2", 1), ("codes", "u1", 32), ("signs", "u1", 32), ("upper", "u1", 8), ("scales", "u1", 8)),
    "IQ3_XXS": (("scale", "<f2", 1), ("codes", "u1", 64), ("words", "<u4", 8)),
    "IQ3_S": (("scale", "<f2", 1), ("codes", "u1", 64), ("upper", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)),
    "IQ1_S": (("scale", "<f2", 1), ("codes", "u1", 32), ("words", "<u2", 8)),
    "IQ1_M": (("codes", "u1", 32), ("upper", "u1", 16), ("words", "<u2", 4)),
    "IQ4_NL": (("scale", "<f2", 1), ("codes", "u1", 16)),
    "IQ4_XS": (("scale", "<f2", 1), ("upper", "<u2", 1), ("scales", "u1", 4), ("codes", "u1", 128)),
}  # fmt: skip
_SCALE = 2.0**-11  # relative error of a scale
_TINY = 2.0**-25  # of a scale that is subnormal, absolute
# The bound of each type that is written: a share of the largest magnitude of a block, and what underflow takes.
BOUNDS = {
    "ggml:Q8_0": Bound(block=0.5 / 127 + _SCALE, absolute=127 * _TINY),
    "ggml:Q4_0": Bound(block=1 / 8 + _SCALE, absolute=8 * _TINY),
    "ggml:Q5_0": Bound(block=1 / 16 + _SCALE, absolute=16 * _TINY),
    # Values lie up to two magnitudes from the least one, and both are rounded.
    "ggml:Q4_1": Bound(block=1 / 15 + 3 * _SCALE, absolute=16 * _TINY),
    "ggml:Q5_1": Bound(block=1 / 31 + 3 * _SCALE, absolute=32 * _TINY),
    "ggml:MXFP4": Bound(block=1 / 4, absolute=2.0**-126),
    # The weighted error of a run is at most that of the first scale, which one value alone may have: 4 steps of 2/15.
    # The codes of scales and minima add as much as a 20th of that.
    "ggml:Q4_K": Bound(block=0.58 + 5 * _SCALE, absolute=63 * 16 * _TINY),
    "ggml:Q6_K": Bound(block=0.21 + 2 * _SCALE, absolute=128 * 32 * _TINY),
}


def _unpack(packed: np.ndarray, bits: int, run: int = 1) -> np.ndarray:
    """Codes of a few bits [blocks, codes]; `run` items of a field are read together."""
    import numpy as np

    shifts = np.arange(0, 8 * packed.itemsize - bits + 1, bits).astype(packed.dtype)
    wide = packed.reshape(len(packed), -1, 1, run) >> shifts[:, None]
    return (wide & packed.dtype.type((1 << bits) - 1)).reshape(len(packed), -1)


def _times(scales: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values times the scales of their runs: [blocks, values] and [blocks, runs]."""
    count, runs = scales.shape
    return scales[..., None] * values.reshape(count, runs, -1).astype("f4")


def _wide(block: np.ndarray, name: str) -> np.ndarray:
    """A field as float32."""
    return block[name].astype("f4")


def _five_bits(block: np.ndarray) -> np.ndarray:
    return _unpack(block["codes"], 4, 16) | _unpack(block["upper"], 1) << 4


def _q4_0(block: np.ndarray) -> np.ndarray:
    return _times(_wide(block, "scale"), _unpack(block["codes"], 4, 16).astype("i1") - 8)


def _q4_1(block: np.ndarray) -> np.ndarray:
    return _times(_wide(block, "scale"), _unpack(block["codes"], 4, 16)) + _wide(block, "least")[..., None]


def _q5_0(block: np.ndarray) -> np.ndarray:
    return _times(_wide(block, "scale"), _five_bits(block).astype("i1") - 16)


def _q5_1(block: np.ndarray) -> np.ndarray:
    return _times(_wide(block, "scale"), _five_bits(block)) + _wide(block, "least")[..., None]


def _q8_0(block: np.ndarray) -> np.ndarray:
    return _times(_wide(block, "scale"), block["codes"])


def _q2_k(block: np.ndarray) -> np.ndarray:
    scales = _wide(block, "scale") * (block["scales"] & 15).astype("f4")
    least = _wide(block, "least") * (block["scales"] >> 4).astype("f4")
    return _times(scales, _unpack(block["codes"], 2, 32)) - least[..., None]


def _q3_k(block: np.ndarray) -> np.ndarray:
    packed = block["scales"]
    scales = (_unpack(packed[:, :8], 4, 8) | _unpack(packed[:, 8:], 2, 4) << 4).astype("i1") - 32
    codes = _unpack(block["codes"], 2, 32) | _unpack(block["upper"], 1, 32) << 2
    return _times(_wide(block, "scale") * scales.astype("f4"), codes.astype("i1") - 4)


def _with_minima(block: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Codes of Q4_K and Q5_K: 8 runs, each with a scale and a minimum of 6 bits."""
    import numpy as np

    low, high, mixed = np.split(block["scales"], 3, axis=1)
    scales = np.concatenate([low & 63, mixed & 15 | low >> 2 & 48], axis=1)
    minima = np.concatenate([high & 63, mixed >> 4 | high >> 2 & 48], axis=1)
    scaled = _times(_wide(block, "scale") * scales.astype("f4"), codes)
    return scaled - (_wide(block, "least") * minima.astype("f4"))[..., None]


def _q4_k(block: np.ndarray) -> np.ndarray:
    return _with_minima(block, _unpack(block["codes"], 4, 32))


def _q5_k(block: np.ndarray) -> np.ndarray:
    return _with_minima(block, _unpack(block["codes"], 4, 32) | _unpack(block["upper"], 1, 32) << 4)


def _q6_k(block: np.ndarray) -> np.ndarray:
    codes = _unpack(block["codes"], 4, 64) | _unpack(block["upper"], 2, 32) << 4
    return _times(_wide(block, "scale") * _wide(block, "scales"), codes.astype("i1") - 32)


def _digits(packed: np.ndarray, count: int, run: int) -> np.ndarray:
    """The first digits of fractions in base 3 [blocks, digits]: a byte is 256 times the fraction."""
    import numpy as np

    powers = (3 ** np.arange(count)).astype("u1")
    rest = packed.reshape(len(packed), -1, 1, run) * powers[:, None]
    return (rest.astype("u2") * 3 >> 8).reshape(len(packed), -1)


def _tq1_0(block: np.ndarray) -> np.ndarray:
    import numpy as np

    codes, rest = block["codes"], block["rest"]
    digits = [_digits(codes[:, :32], 5, 32), _digits(codes[:, 32:], 5, 16), _digits(rest, 4, 4)]
    return _times(_wide(block, "scale"), np.concatenate(digits, axis=1).astype("i1") - 1)


def _tq2_0(block: np.ndarray) -> np.ndarray:
    return _times(_wide(block, "scale"), _unpack(block["codes"], 2, 32).astype("i1") - 1)


def _power_of_two(exponents: np.ndarray) -> np.ndarray:
    """The scales of MXFP4, halved as `_FLOAT4` is doubled: 2^(exponent - 128), float32."""
    import numpy as np

    bits = exponents.astype("u4")
    scale = np.where(bits < 2, np.uint32(0x00200000) << bits, (bits - np.uint32(1)) << np.uint32(23))  # noqa: PLR2004
    return scale.astype("u4").view("f4")


def _mxfp4(block: np.ndarray) -> np.ndarray:
    import numpy as np

    return _times(_power_of_two(block["exponent"]), np.array(_FLOAT4, "i1")[_unpack(block["codes"], 4, 16)])


def _nvfp4(block: np.ndarray) -> np.ndarray:
    """Scales are 8-bit floats, e4m3, without a sign; of the two codes that are not numbers one is 0, one is 480."""
    import numpy as np

    scales = block["scales"]
    values = (scales & 127).view(dtypes.numpy_dtype("float8_e4m3fn")).astype("f4")
    values = np.where(scales == 127, 0, np.where(scales == 255, 480, values)).astype("f4")  # noqa: PLR2004
    return _times(values * np.float32(0.5), np.array(_FLOAT4, "i1")[_unpack(block["codes"], 4, 8)])


@cache
def _codebook(name: str) -> np.ndarray:
    """The values that the indices of a type mean: int8 [indices, values of a group]."""
    import numpy as np

    row = tomllib.loads(_CODEBOOKS.read_text(encoding="utf-8"))[name]
    digits = _unpack(np.frombuffer(base64.b64decode(row["rows"]), "u1")[None], row["bits"])
    return np.array(row["values"], "i1")[digits].reshape(-1, row["size"])


def _from_codebook(name: str, indices: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """The groups of a codebook [blocks, values], negative where a bit of `signs`, a byte for 8 values, is set."""
    values = _codebook(name)[indices].reshape(len(indices), -1)
    return values * (1 - 2 * _unpack(signs, 1).astype("i1"))


def _with_parity(signs: np.ndarray) -> np.ndarray:
    """Seven signs as eight: the number of negative values in a group is even."""
    import numpy as np

    odd = np.bitwise_xor.reduce(signs[..., None] >> np.arange(7).astype(signs.dtype) & 1, axis=-1)
    return (signs | odd << 7).astype("u1")


def _half_steps(scale: np.ndarray, steps: np.ndarray, factor: float) -> np.ndarray:
    return scale * (steps.astype("f4") + scale.dtype.type(0.5)) * scale.dtype.type(factor)


def _iq2_xxs(block: np.ndarray) -> np.ndarray:
    import numpy as np

    words = block["words"].reshape(len(block), 8, 2)
    indices = np.ascontiguousarray(words[..., 0]).view("u1")
    signs = _with_parity(_unpack(np.ascontiguousarray(words[..., 1]), 7))
    scales = _half_steps(_wide(block, "scale"), words[..., 1] >> 28, 0.25)
    return _times(scales, _from_codebook("IQ2_XXS", indices, signs))


def _iq2_xs(block: np.ndarray) -> np.ndarray:
    scales = _half_steps(_wide(block, "scale"), _unpack(block["scales"], 4), 0.25)
    signs = _with_parity(block["codes"] >> 9)
    return _times(scales, _from_codebook("IQ2_XS", block["codes"] & 511, signs))


def _iq2_s(block: np.ndarray) -> np.ndarray:
    scales = _half_steps(_wide(block, "scale"), _unpack(block["scales"], 4), 0.25)
    indices = block["codes"] | _unpack(block["upper"], 2).astype("u2") << 8
    return _times(scales, _from_codebook("IQ2_S", indices, block["signs"]))


def _iq3_xxs(block: np.ndarray) -> np.ndarray:
    scales = _half_steps(_wide(block, "scale"), block["words"] >> 28, 0.5)
    signs = _with_parity(_unpack(block["words"], 7))
    return _times(scales, _from_codebook("IQ3_XXS", block["codes"], signs))


def _iq3_s(block: np.ndarray) -> np.ndarray:
    scales = _wide(block, "scale") * (1 + 2 * _unpack(block["scales"], 4)).astype("f4")
    indices = block["codes"] | _unpack(block["upper"], 1).astype("u2") << 8
    return _times(scales, _from_codebook("IQ3_S", indices, block["signs"]))


def _with_shift(scales: np.ndarray, indices: np.ndarray, is_down: np.ndarray) -> np.ndarray:
    """Groups of IQ1_S and IQ1_M: values of -1, 0 and 1, all of a group shifted up or down."""
    import numpy as np

    shift = np.where(is_down, np.float32(-_SHIFT), np.float32(_SHIFT))
    values = _codebook("IQ1_S")[indices].astype("f4") + shift[..., None]
    return _times(scales, values.reshape(len(scales), -1))


def _iq1_s(block: np.ndarray) -> np.ndarray:
    import numpy as np

    words = block["words"]
    scales = _wide(block, "scale") * (2 * (words >> 12 & 7) + 1).astype("f4")
    upper = _unpack(words, 3).reshape(len(block), 8, 5)[..., :4].reshape(len(block), 32)
    return _with_shift(scales, block["codes"] | upper << 8, np.repeat(words >> 15 == 1, 4, axis=1))


def _iq1_m(block: np.ndarray) -> np.ndarray:
    import numpy as np

    words, upper = block["words"], _unpack(block["upper"], 4)
    nibbles = words >> 12 << np.array([0, 4, 8, 12], "u2")
    scale = np.bitwise_or.reduce(nibbles, axis=1, keepdims=True).view("<f2").astype("f4")
    steps = _unpack(words, 3).reshape(len(block), 4, 5)[..., :4].reshape(len(block), 16)
    indices = block["codes"] | (upper & 7).astype("u2") << 8
    return _with_shift(scale * (2 * steps + 1).astype("f4"), indices, upper >> 3 == 1)


def _iq4_nl(block: np.ndarray) -> np.ndarray:
    import numpy as np

    return _times(_wide(block, "scale"), np.array(_NOT_LINEAR, "i1")[_unpack(block["codes"], 4, 16)])


def _iq4_xs(block: np.ndarray) -> np.ndarray:
    import numpy as np

    steps = (_unpack(block["scales"], 4) | _unpack(block["upper"], 2).astype("u1") << 4).astype("i1") - 32
    values = np.array(_NOT_LINEAR, "i1")[_unpack(block["codes"], 4, 16)]
    return _times(_wide(block, "scale") * steps.astype("f4"), values)


_RULES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "MXFP4": _mxfp4, "NVFP4": _nvfp4,
    "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s, "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s,
    "IQ1_S": _iq1_s, "IQ1_M": _iq1_m, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
_PREFIX = "ggml:"
KINDS = frozenset(f"{_PREFIX}{name}" for name in _RULES)
# Significant bits of a value; those of the other types are rounded.
_SIGNIFICANT = {
    "Q4_0": 14, "Q5_0": 15, "Q8_0": 18, "Q3_K": 18, "Q6_K": 23, "TQ1_0": 11, "TQ2_0": 11, "MXFP4": 2, "NVFP4": 6,
    "IQ2_XXS": 22, "IQ2_XS": 22, "IQ2_S": 22, "IQ3_XXS": 21, "IQ3_S": 20, "IQ1_S": 19, "IQ1_M": 19, "IQ4_NL": 18,
    "IQ4_XS": 23,
}  # fmt: skip
_BEYOND_HALF = ("MXFP4",)  # their exponents exceed those of float16


def exact(kind: str, dtype: str) -> bool:
    """Whether no value of a kind of block needs rounding in an element type."""
    name = kind.removeprefix(_PREFIX)
    if name not in _SIGNIFICANT or (name in _BEYOND_HALF and dtype == "float16"):
        return False
    return _SIGNIFICANT[name] <= significant(dtype)


def values_of(stored: np.ndarray, kind: str) -> np.ndarray:
    """The values of blocks.

    Args:
        stored: uint8 [blocks, bytes of a block], C order.
        kind: `ggml:` and the name of the type; one of KINDS.

    Returns:
        float32 [blocks, elements of a block].
    """
    import numpy as np

    name = kind.removeprefix(_PREFIX)
    block = np.dtype([(field, form, (count,)) for field, form, count in _FIELDS[name]])
    assert block.itemsize == stored.shape[-1], (kind, block.itemsize, stored.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        return _RULES[name](stored.view(block)[:, 0]).reshape(len(stored), -1)


def encode_blocks(values: np.ndarray, kind: str) -> np.ndarray:
    """The blocks of values.

    Args:
        values: float32 [blocks, elements of a block].
        kind: one of BOUNDS.

    Returns:
        uint8 [blocks, bytes of a block].
    """
    import numpy as np

    with np.errstate(all="ignore"):
        return np.concatenate([field.view("u1") for field in _WRITERS[kind](values)], axis=1)


def _inverse(scales: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.where(scales == 0, np.float32(0), np.float32(1) / scales)


def _encode_q8_0(values: np.ndarray) -> tuple[np.ndarray, ...]:
    import numpy as np

    # Columns of one block each, since numpy is slow along axes of 32 elements; a copy, also of a single block.
    columns = np.array(values.T, order="C", copy=True)
    scales = np.abs(columns).max(axis=0) / np.float32(127)
    columns *= _inverse(scales)
    without = ~np.isfinite(columns)
    if without.any():
        columns[without] = 0
    whole = np.trunc(columns)
    columns -= whole
    columns += columns
    whole += np.trunc(columns, out=columns)
    return scales.astype("<f2")[:, None], np.ascontiguousarray(whole.astype("i1").T)


def _encode_from_largest(values: np.ndarray, bits: int) -> tuple[np.ndarray, ...]:
    """Scale and codes; the largest magnitude has the least code."""
    import numpy as np

    half = np.float32(1 << bits - 1)
    largest = np.abs(values).argmax(axis=1)[:, None]
    scales = np.take_along_axis(values, largest, axis=1) / -half
    codes = _codes(values * _inverse(scales) + half, bits)
    return scales.astype("<f2"), *_pack_codes(codes, bits)


def _encode_from_least(values: np.ndarray, bits: int) -> tuple[np.ndarray, ...]:
    """Scale, least value and codes, which count from it."""
    import numpy as np

    least = values.min(axis=1, keepdims=True)
    scales = (values.max(axis=1, keepdims=True) - least) / np.float32((1 << bits) - 1)
    codes = _codes((values - least) * _inverse(scales), bits)
    return scales.astype("<f2"), least.astype("<f2"), *_pack_codes(codes, bits)


def _codes(scaled: np.ndarray, bits: int) -> np.ndarray:
    """The nearest whole numbers of so many bits; halves are rounded up."""
    import numpy as np

    scaled += np.float32(0.5)
    scaled[~np.isfinite(scaled)] = 0
    return np.trunc(scaled).clip(0, (1 << bits) - 1).astype("u1")


def _pack_codes(codes: np.ndarray, bits: int) -> tuple[np.ndarray, ...]:
    """Fields of codes [blocks, 32]: the fifth bits, if there are any, and the lower four of both halves of a block."""
    import numpy as np

    half = codes.shape[1] // 2
    lower = codes[:, :half] & 15 | codes[:, half:] << 4
    return (lower,) if bits == 4 else (np.packbits(codes >> 4, axis=1, bitorder="little"), lower)  # noqa: PLR2004


def _encode_mxfp4(values: np.ndarray) -> tuple[np.ndarray, ...]:
    import numpy as np

    magnitudes = np.abs(values)
    largest = magnitudes.max(axis=1, keepdims=True)
    exponents = np.where(largest > 0, np.floor(np.log2(largest)) + 125, 0).clip(0, 254).astype("u1")
    units = magnitudes / _power_of_two(exponents)
    codes = np.searchsorted(_BETWEEN, units).astype("u1")  # the middle of two belongs to the smaller one
    codes[np.isnan(units)] = 0
    codes = np.where(exponents == 253, codes.clip(0, 5), codes)  # 8 and 12 such units are infinite  # noqa: PLR2004
    negative = (values < 0) & (codes > 0)
    return exponents, *_pack_codes(codes | negative.astype("u1") << 3, 4)


def _sum(terms: np.ndarray) -> np.ndarray:
    """Sums over the first axis, one value after the other."""
    import numpy as np

    return np.add.reduce(terms, axis=0)


def _nearest(scaled: np.ndarray, least: int, most: int) -> np.ndarray:
    """The nearest whole numbers within limits, as float32; of two the even one."""
    import numpy as np

    return np.where(np.isfinite(scaled), np.rint(scaled), np.float32(0)).clip(least, most)


def _fit_with_minimum(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale, negative minimum and codes of runs, of which each is a column of `values`."""
    import numpy as np

    weights = np.sqrt(_sum(values * values) / np.float32(len(values))) + np.abs(values)
    total, weighted = _sum(weights), _sum(weights * values)
    most, least = values.max(axis=0), np.minimum(values.min(axis=0), np.float32(0))
    flat = most == least
    first = np.float32(15) / (most - least)
    scales, codes = np.float32(1) / first, _nearest(first * (values - least), 0, 15)
    best = _sum(weights * (scales * codes + least - values) ** 2)
    for step in range(21):
        share = np.float32(-1) + np.float32(0.1) * np.float32(step) + np.float32(15)
        tried = _nearest(share / (most - least) * (values - least), 0, 15)
        products = weights * tried
        once, twice, mixed = _sum(products), _sum(products * tried), _sum(products * values)
        determinant = total * twice - once * once
        scale = (total * mixed - weighted * once) / determinant
        offset = (twice * weighted - once * mixed) / determinant
        scale = np.where(offset > 0, mixed / twice, scale)
        offset = np.where(offset > 0, np.float32(0), offset)
        error = _sum(weights * (scale * tried + offset - values) ** 2)
        better = (determinant > 0) & (error < best) & ~flat
        scales, least, best = (
            np.where(better, new, old) for new, old in ((scale, scales), (offset, least), (error, best))
        )
        codes = np.where(better, tried, codes)
    return np.where(flat, np.float32(0), scales), -least, np.where(flat, np.float32(0), codes)


def _six_bits(values: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """Scales or minima [blocks, runs] as codes from 0 to 63, the largest as 63."""
    import numpy as np

    shares = np.where(largest > 0, np.float32(63) / largest, np.float32(0))
    whole = np.rint(np.nan_to_num(shares * values)).astype("i4").astype("u1")
    return np.minimum(whole, 63)


def _encode_q4_k(values: np.ndarray) -> tuple[np.ndarray, ...]:
    import numpy as np

    count = len(values)
    runs = values.reshape(-1, 32)
    scales, minima, codes = _fit_with_minimum(np.ascontiguousarray(runs.T))
    scales, minima = scales.reshape(count, 8), minima.reshape(count, 8)
    largest, lowest = (np.maximum(one.max(axis=1, keepdims=True), np.float32(0)) for one in (scales, minima))
    scale_codes, minimum_codes = _six_bits(scales, largest), _six_bits(minima, lowest)
    scale, least = (one / np.float32(63) for one in (largest, lowest))
    scale, least = scale.astype("<f2"), least.astype("<f2")
    steps = (scale.astype("f4") * scale_codes.astype("f4")).reshape(-1, 1)
    offsets = (least.astype("f4") * minimum_codes.astype("f4")).reshape(-1, 1)
    again = _nearest((runs + offsets) / steps, 0, 15)
    chosen = np.where(steps != 0, again, codes.T).astype("u1").reshape(count, 4, 2, 32)
    packed = np.concatenate(
        [
            scale_codes[:, :4] | scale_codes[:, 4:] >> 4 << 6,
            minimum_codes[:, :4] | minimum_codes[:, 4:] >> 4 << 6,
            scale_codes[:, 4:] & 15 | minimum_codes[:, 4:] << 4,
        ],
        axis=1,
    )
    return scale, least, packed, (chosen[:, :, 0] | chosen[:, :, 1] << 4).reshape(count, 128)


_LEAST_Q6_K = 1e-15  # a run whose largest magnitude is below it is zero


def _fit(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and codes, counted from 0, of runs, of which each is a column of `values`."""
    import numpy as np

    magnitudes = np.abs(values)
    largest = np.take_along_axis(values, magnitudes.argmax(axis=0)[None], axis=0)[0]
    empty = magnitudes.max(axis=0) < np.float32(_LEAST_Q6_K)
    weights = values * values
    weighted = weights * values
    scales, best, codes = np.zeros_like(largest), np.zeros_like(largest), np.zeros_like(values)
    for step in (0, *range(-9, 0), *range(1, 10)):
        share = -(np.float32(32) + np.float32(0.1) * np.float32(step))
        tried = _nearest(share / largest * values, -32, 31)
        mixed, twice = _sum(weighted * tried), _sum(weights * tried * tried)
        better = (twice > 0) & (mixed * mixed > best * twice) if step else np.ones_like(empty)
        scale = np.where(twice != 0, mixed / twice, np.float32(0))
        scales, best = np.where(better, scale, scales), np.where(better, scale * mixed, best)
        codes = np.where(better, tried, codes)
    return np.where(empty, np.float32(0), scales), np.where(empty, np.float32(0), codes + np.float32(32))


def _encode_q6_k(values: np.ndarray) -> tuple[np.ndarray, ...]:
    import numpy as np

    count = len(values)
    runs = values.reshape(-1, 16)
    scales, codes = _fit(np.ascontiguousarray(runs.T))
    scales = scales.reshape(count, 16)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], axis=1)
    empty = np.abs(largest) < np.float32(_LEAST_Q6_K)
    shares = np.float32(-128) / largest
    scale = np.where(empty, np.float32(0), np.float32(1) / shares).astype("<f2")
    wide = np.where(empty, np.float32(0), np.minimum(np.rint(shares * scales), np.float32(127)))
    steps = (scale.astype("f4") * wide).reshape(-1, 1)
    again = _nearest(runs / steps, -32, 31) + np.float32(32)
    chosen = np.where(steps != 0, again, codes.T).reshape(count, -1)
    chosen = np.where(empty, np.float32(0), chosen).astype("u1").reshape(count, 2, 4, 32)
    lower = chosen[:, :, :2] & 15 | chosen[:, :, 2:] << 4
    upper = np.bitwise_or.reduce(chosen >> 4 << np.array([0, 2, 4, 6], "u1")[:, None], axis=2)
    return lower.reshape(count, 128), upper.reshape(count, 64), np.nan_to_num(wide).astype("i1"), scale


_WRITERS: dict[str, Callable[[np.ndarray], tuple[np.ndarray, ...]]] = {
    "ggml:Q8_0": _encode_q8_0,
    "ggml:Q4_0": partial(_encode_from_largest, bits=4),
    "ggml:Q5_0": partial(_encode_from_largest, bits=5),
    "ggml:Q4_1": partial(_encode_from_least, bits=4),
    "ggml:Q5_1": partial(_encode_from_least, bits=5),
    "ggml:MXFP4": _encode_mxfp4,
    "ggml:Q4_K": _encode_q4_k,
    "ggml:Q6_K": _encode_q6_k,
}
assert _WRITERS.keys() == BOUNDS.keys()
