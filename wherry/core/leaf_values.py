"""LeafValues: what one process has hashed of a tensor of which others have the rest, and how it is joined.

A leaf is BLAKE3 of 4 MiB, and BLAKE3 is a tree. A process that has some bytes of a leaf gives the values of the largest
subtrees that it has whole, 32 bytes each, and the bytes themselves of KiB of which it has a part. What all processes
have gives the leaf. The same bytes give the same values, so two processes that had the same can be compared.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from wherry.core.algorithms import HASH_BYTES
from wherry.kernels import MOST_VALUES


@dataclass(frozen=True, slots=True)
class LeafValues:
    """What one process has hashed of a tensor.

    Attributes:
        leaves: number → hash of each leaf of which it has every byte.
        parts: number → values of each leaf of which it has some; see `wherry.kernels.OpenLeaves.values`.
    """

    leaves: Mapping[int, bytes]
    parts: Mapping[int, bytes]

    @property
    def nbytes(self) -> int:
        """How many bytes are exchanged."""
        return HASH_BYTES * len(self.leaves) + sum(map(len, self.parts.values()))

    @property
    def digest(self) -> str:
        """Identifies which bytes were hashed, and what they were: hex SHA-256."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()

    def to_json(self) -> list[Any]:
        """Its form in a record; the inverse of `from_json`."""
        leaves, parts = sorted(self.leaves.items()), sorted(self.parts.items())
        return [
            [leaf for leaf, _digest in leaves],
            base64.b64encode(b"".join(digest for _leaf, digest in leaves)).decode(),
            [[leaf, base64.b64encode(part).decode()] for leaf, part in parts],
        ]

    @classmethod
    def from_json(cls, row: list[Any]) -> Self:
        """What a record holds; raises ValueError or TypeError if it has another form."""
        numbers, text, rows = row
        if not (isinstance(numbers, list) and isinstance(rows, list)):
            raise TypeError("leaves are listed")
        raw = base64.b64decode(text, validate=True)
        if len(raw) != HASH_BYTES * len(numbers):
            raise ValueError(f"{len(raw)} bytes are not the hashes of {len(numbers)} leaves")
        leaves = {
            number: raw[place * HASH_BYTES : (place + 1) * HASH_BYTES] for place, number in enumerate(numbers)
        }
        parts = {number: base64.b64decode(part, validate=True) for number, part in rows}
        if not all(type(number) is int and number >= 0 for number in (*leaves, *parts)):
            raise TypeError("leaves are counted by integers")
        if len(leaves) + len(parts) != len(numbers) + len(rows) or not leaves.keys().isdisjoint(parts):
            raise ValueError("a leaf is there twice")
        if not all(0 < len(part) <= MOST_VALUES for part in parts.values()):
            raise ValueError(f"a leaf has values of more than {MOST_VALUES:,} bytes, or none")
        return cls(leaves, parts)
