"""Algorithms: the hash algorithms of digests, and digests as text.

A digest is printed as `blake3:` or `sha256:` with 64 hex digits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

HASH_BYTES = 32  # length of a hash, of either algorithm
BLAKE3, SHA256 = "blake3", "sha256"
ALGORITHMS = (BLAKE3, SHA256)
_DIGEST = re.compile(rf"({'|'.join(ALGORITHMS)}):([0-9a-f]{{64}})")
_URI = re.compile(rf"wherry://({'|'.join(ALGORITHMS)})/([0-9a-f]{{64}})")


class HashState(Protocol):
    """A running hash, as `hashlib` and `blake3` have it."""

    def update(self, data: Buffer, /) -> object:
        """Add bytes."""

    def digest(self) -> bytes:
        """The hash of all bytes so far."""
        ...


def new_hash(algorithm: str, data: Buffer = b"") -> HashState:
    """A running hash.

    Args:
        algorithm: one of `ALGORITHMS`.
        data: its first bytes.
    """
    return hash_function(algorithm)(data)


@cache
def hash_function(algorithm: str) -> Callable[[Buffer], HashState]:
    """What begins a hash with its first bytes; for a loop over many small tensors."""
    if algorithm == BLAKE3:
        from blake3 import blake3  # a compiled module, which `wherry --help` does not need

        return blake3
    assert algorithm == SHA256, algorithm
    return hashlib.sha256


def require_digest(text: str) -> str:
    """A digest of a record.

    Raises:
        TypeError: it is not a digest with a known algorithm.
    """
    if not _DIGEST.fullmatch(text):
        raise TypeError(f"expected a digest with its algorithm, got {text[:80]!r}")
    return text


def algorithm_of(digest: str) -> str:
    """The algorithm of a digest; SHA-256 if it names none that is known."""
    found = _DIGEST.fullmatch(digest)
    return found[1] if found else SHA256


def digits_of(digest: str) -> str:
    """The hex digits of a digest, without its algorithm."""
    return digest.rpartition(":")[2]


def digest_uri(digest: str) -> str:
    """The URI of the checkpoint with a checkpoint digest, `wherry://ALGORITHM/DIGITS`; see `digest_in`."""
    return f"wherry://{algorithm_of(digest)}/{digits_of(digest)}"


def digest_in(uri: str) -> str | None:
    """The checkpoint digest that a `wherry://` URI contains; None if it is no such URI."""
    found = _URI.fullmatch(uri)
    return f"{found[1]}:{found[2]}" if found else None
