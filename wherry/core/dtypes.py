"""The names of element types, and which of them numpy can represent.

A dtype has its numpy or ml_dtypes name. Sub-byte types of ml_dtypes (int2, int4, uint2, uint4, float4_e2m1fn) take
one byte per element, in arrays and in digests. Types that numpy cannot represent (the 6-bit floats, complex32,
quantised blocks) are opaque: their canonical bytes are the stored ones, and only `read_bytes` returns them.
Quantised blocks are called `ggml:<type>`: a fixed number of elements shares a fixed number of bytes.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

from wherry.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np

# name → bits of one element in canonical bytes.
_BITS: dict[str, int] = {
    "bool": 8,
    **{f"{sign}int{bits}": bits for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"{sign}int{bits}": 8 for sign in ("", "u") for bits in (2, 4)},
    "float16": 16,
    "bfloat16": 16,
    "float32": 32,
    "float64": 64,
    "complex64": 64,
    "complex128": 128,
    "float4_e2m1fn": 8,
    "float8_e3m4": 8,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 8,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float6_e2m3fn": 6,
    "float6_e3m2fn": 6,
    "complex32": 32,
}
# name → (elements, bytes) of one block. Source: GGML_QUANT_SIZES of gguf 0.19.
_BLOCKS: dict[str, tuple[int, int]] = {
    **{f"ggml:{name}": (32, size) for name, size in (
        ("Q4_0", 18), ("Q4_1", 20), ("Q5_0", 22), ("Q5_1", 24), ("Q8_0", 34), ("IQ4_NL", 18), ("MXFP4", 17),
    )},
    **{f"ggml:{name}": (256, size) for name, size in (
        ("Q2_K", 84), ("Q3_K", 110), ("Q4_K", 144), ("Q5_K", 176), ("Q6_K", 210), ("Q8_K", 292),
        ("IQ1_S", 50), ("IQ1_M", 56), ("IQ2_XXS", 66), ("IQ2_XS", 74), ("IQ2_S", 82), ("IQ3_XXS", 98),
        ("IQ3_S", 110), ("IQ4_XS", 136), ("TQ1_0", 54), ("TQ2_0", 66),
    )},
    "ggml:NVFP4": (64, 36),
    "ggml:Q1_0": (128, 18),
}  # fmt: skip
# short name → name; `float` is none of them, as it has 32 bits in torch and 64 in numpy.
_SHORT = {
    "bf16": "bfloat16", "f16": "float16", "fp16": "float16", "half": "float16", "f32": "float32", "fp32": "float32",
    "f64": "float64", "fp64": "float64", "double": "float64",
}  # fmt: skip
_OPAQUE = frozenset({"float6_e2m3fn", "float6_e3m2fn", "complex32", *_BLOCKS})
NUMPY = frozenset(_BITS) - _OPAQUE  # dtypes of numpy and ml_dtypes arrays
_NUMPY_OWN = frozenset(
    {"bool", "float16", "float32", "float64", "complex64", "complex128"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


def is_known(name: str) -> bool:
    """Whether a TensorSpec may have this dtype."""
    return name in _BITS or name in _BLOCKS


def full_name(name: str) -> str:
    """The name of a dtype that a user states: `bfloat16` for `bf16` and for `torch.bfloat16`."""
    bare = name.rpartition(".")[2]
    return _SHORT.get(bare, bare)


def block_elements(name: str) -> int:
    """Number of elements that are stored as one block; 1 for all but quantised blocks."""
    return _BLOCKS[name][0] if name in _BLOCKS else 1


def opaque(name: str) -> bool:
    """Whether numpy cannot represent this type, so that only its stored bytes are available."""
    return name in _OPAQUE


def ready() -> None:
    """Import numpy and ml_dtypes now: threads that import them concurrently see them half initialised."""
    import_module("ml_dtypes")  # it imports numpy


def is_paired(name: str) -> bool:
    """Whether flat containers store two elements of this type in a byte, so that no cut may fall between them."""
    return name == "float4_e2m1fn"


def bits(name: str) -> int:
    """Bits of one element in canonical bytes (8 for every type below a byte that ml_dtypes holds).

    Raises:
        UnsupportedError: the name is unknown, or names quantised blocks, whose elements do not have separate bytes.
    """
    if name not in _BITS:
        raise UnsupportedError(f"unknown dtype {name!r}")
    return _BITS[name]


def canonical_size(name: str, elements: int) -> int:
    """Bytes of this many elements in canonical form (opaque types are packed, rounded up to a byte or block)."""
    if name in _BLOCKS:
        block, size = _BLOCKS[name]
        return -(-elements // block) * size
    return (bits(name) * elements + 7) // 8


@lru_cache(1 << 12)
def canonical_bytes(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in canonical form; large models have thousands of tensors of each shape."""
    return canonical_size(name, math.prod(shape))


@cache
def numpy_dtype(name: str) -> np.dtype:
    """The little-endian numpy dtype of this name.

    Raises:
        UnsupportedError: the name is unknown, or numpy cannot represent the type.
    """
    import numpy as np  # a third of the time of `wherry --help`

    if name in _NUMPY_OWN:
        return np.dtype(name).newbyteorder("<")
    if opaque(name) or not is_known(name):
        raise UnsupportedError(
            f"numpy cannot represent dtype {name!r}", cure="read its stored bytes with read_bytes"
        )
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name))
