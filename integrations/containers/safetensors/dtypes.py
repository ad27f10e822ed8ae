"""The element types of safetensors: their names, sizes and order, declared once for both directions.

Source: `Dtype` of the reference implementation (safetensors 0.8, `tensor.rs`). F4 is packed two per byte on disk,
low nibble first, and one byte per element in canonical form; the 6-bit floats are opaque.
"""

from __future__ import annotations

# (name on disk, bits on disk, our name) in the order of the reference implementation, which is the writing order
# reversed.
_DTYPES: tuple[tuple[str, int, str], ...] = (
    ("BOOL", 8, "bool"),
    ("F4", 4, "float4_e2m1fn"),
    ("F6_E2M3", 6, "float6_e2m3fn"),
    ("F6_E3M2", 6, "float6_e3m2fn"),
    ("U8", 8, "uint8"),
    ("I8", 8, "int8"),
    ("F8_E5M2", 8, "float8_e5m2"),
    ("F8_E4M3", 8, "float8_e4m3fn"),
    ("F8_E8M0", 8, "float8_e8m0fnu"),
    ("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
    ("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
    ("I16", 16, "int16"),
    ("U16", 16, "uint16"),
    ("F16", 16, "float16"),
    ("BF16", 16, "bfloat16"),
    ("I32", 32, "int32"),
    ("U32", 32, "uint32"),
    ("F32", 32, "float32"),
    ("C64", 64, "complex64"),
    ("F64", 64, "float64"),
    ("I64", 64, "int64"),
    ("U64", 64, "uint64"),
)
BITS = {stored: bits for stored, bits, _ in _DTYPES}
TO_OURS = {stored: ours for stored, _, ours in _DTYPES}
TO_STORED = {ours: stored for stored, _, ours in _DTYPES}
RANK = {stored: rank for rank, (stored, _, _) in enumerate(_DTYPES)}
DTYPES = frozenset(TO_STORED)
