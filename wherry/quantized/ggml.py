"""ggml: what the quantised blocks of GGUF files mean, in float32 as the `gguf` package computes it.

A block has a fixed number of elements in a fixed number of bytes. Source of the layouts: ggml-common.h and
gguf/quants.py of llama.cpp. Half floats, 6-bit scales and codes have exact products in float32; where a minimum is
subtracted the difference is rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

_FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the 4-bit floats; their scale is halved


def _parts(blocks: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """The fields of blocks [blocks, bytes], the last one the rest."""
    import numpy as np

    return np.split(blocks, np.cumsum(sizes), axis=1)


def _half(field: np.ndarray) -> np.ndarray:
    """A half float in two bytes as float32 [blocks, 1]."""
    import numpy as np

    return np.ascontiguousarray(field).view("<f2").astype(np.float32)


def _halves(packed: np.ndarray, run: int) -> np.ndarray:
    """4-bit codes [blocks, codes]: of each run of bytes first all lower halves, then all upper ones."""
    import numpy as np

    wide = packed.reshape(len(packed), -1, 1, run) >> np.array([0, 4], "u1").reshape(1, 1, 2, 1)
    return (wide & 15).reshape(len(packed), -1)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    scale, codes = _parts(blocks, 2)
    return _half(scale) * (_halves(codes, 16).astype("i1") - 8).astype("f4")


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    scale, codes = _parts(blocks, 2)
    return codes.view("i1").astype("f4") * _half(scale)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    import numpy as np

    count = len(blocks)
    scale, least, small, codes = _parts(blocks, 2, 2, 12)
    low, high, mixed = np.split(small.reshape(count, 3, 4), 3, axis=1)
    low, high, mixed = (one.reshape(count, 4) for one in (low, high, mixed))
    scales = np.concatenate([low & 0x3F, (mixed & 0x0F) | ((low >> 2) & 0x30)], axis=1)
    minima = np.concatenate([high & 0x3F, (mixed >> 4) | ((high >> 2) & 0x30)], axis=1)
    values = _halves(codes, 32).reshape(count, 8, 32).astype("f4")
    scaled = (_half(scale) * scales.astype("f4"))[..., None] * values
    return (scaled - (_half(least) * minima.astype("f4"))[..., None]).reshape(count, 256)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    import numpy as np

    count = len(blocks)
    low, high, scales, scale = _parts(blocks, 128, 64, 16)
    upper = high.reshape(count, -1, 1, 32) >> np.array([0, 2, 4, 6], "u1").reshape(1, 1, 4, 1)
    codes = _halves(low, 64) | ((upper & 3).reshape(count, -1) << 4)
    values = (codes.astype("i1") - 32).reshape(count, 16, 16).astype("f4")
    return ((_half(scale) * scales.view("i1").astype("f4"))[..., None] * values).reshape(count, 256)


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    import numpy as np

    exponent, codes = _parts(blocks, 1)
    bits = exponent.astype("u4")
    scale = np.where(bits < 2, np.uint32(0x00200000) << bits, (bits - np.uint32(1)) << np.uint32(23))  # noqa: PLR2004
    table = np.array([*_FLOAT4, *(-one for one in _FLOAT4)], "i1")
    return scale.astype("u4").view("f4") * table[_halves(codes, 16)].astype("f4")


RULES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ggml:Q4_0": _q4_0, "ggml:Q8_0": _q8_0, "ggml:Q4_K": _q4_k, "ggml:Q6_K": _q6_k, "ggml:MXFP4": _mxfp4,
}  # fmt: skip
_SIGNIFICANT = {
    "ggml:Q4_0": 15,
    "ggml:Q8_0": 19,
    "ggml:MXFP4": 4,
}  # bits of a product; the others may be rounded


def exact(kind: str, bits: int) -> bool:
    """Whether no value of a kind of block needs rounding in a type with this many significant bits."""
    return _SIGNIFICANT.get(kind, bits + 1) <= bits


def values_of(stored: np.ndarray, kind: str) -> np.ndarray:
    """The values of blocks.

    Args:
        stored: uint8 [blocks, bytes of a block].
        kind: `ggml:` and the name of the type; one of RULES.

    Returns:
        float32 [blocks, elements of a block].
    """
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        return RULES[kind](stored)
