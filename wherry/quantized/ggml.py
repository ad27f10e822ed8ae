"""ggml: what the quantised blocks of GGUF files mean, in float32 as the `gguf` package computes it.

A block has a fixed number of elements in a fixed number of bytes: fields of scales and of codes, which `_FIELDS` lists.
Source of the layouts: ggml-common.h and the documentation of the types in llama.cpp. Scales and codes have exact
products in float32, except where a minimum is added or subtracted: that is rounded once.

Codes of a few bits are packed in runs: of each run of bytes first the lowest bits of all bytes, then the next ones.
"""

from __future__ import annotations

import base64
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.core import dtypes
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


def _mxfp4(block: np.ndarray) -> np.ndarray:
    import numpy as np

    bits = block["exponent"].astype("u4")
    scale = np.where(bits < 2, np.uint32(0x00200000) << bits, (bits - np.uint32(1)) << np.uint32(23))  # noqa: PLR2004
    return _times(scale.astype("u4").view("f4"), np.array(_FLOAT4, "i1")[_unpack(block["codes"], 4, 16)])


def _nvfp4(block: np.ndarray) -> np.ndarray:
    """Scales are 8-bit floats, e4m3, without a sign; of the two codes that are not numbers one is 0, one is 480."""
    import numpy as np

    scales = block["scales"]
    values = (scales & 127).view(dtypes.numpy_dtype("float8_e4m3fn")).astype("f4")
    values = np.where(scales == 127, 0, np.where(scales == 255, 480, values)).astype("f4")  # noqa: PLR2004
    return _times(values * np.float32(0.5), np.array(_FLOAT4, "i1")[_unpack(block["codes"], 4, 8)])


@cache
def _codebook(name: str) -> np.ndarray:
    """What the indices of a type stand for: int8 [indices, values of a group]."""
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
