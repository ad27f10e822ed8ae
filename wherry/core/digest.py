"""Digests: the hashes by which tensors and checkpoints are compared.

- A **leaf** is 4 MiB of a tensor's canonical bytes (C order, little endian); the last one may be short.
- The **tensor digest** is a hash over dtype, shape and the hash of each leaf. It does not depend on the container,
  shards or chunks, can be computed in parallel, and a mismatch names the damaged leaf.
- The **weights digest** is a hash over the sorted (key path, tensor digest) pairs: equality of content.
- The **checkpoint digest** is a hash over weights digest, format, format version, non-tensor leaves and companion
  digests: identity. A change of container keeps the weights digest and changes the checkpoint digest.

All of them are computed with one algorithm, BLAKE3 or SHA-256, and printed as `blake3:` or `sha256:` with 64 hex digits
(`wherry.core.algorithms`). The text that is hashed for the last three is canonical JSON (sorted keys, no spaces, UTF-8)
after a header line that names the kind and its version. It contains digests without the name of the algorithm if that
is the algorithm of the hash itself, so that SHA-256 digests are what they were.

Companion files, plans, fingerprints and the ledger's chain are always hashed with SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import threading
from functools import lru_cache
from typing import TYPE_CHECKING

from wherry.core.algorithms import HASH_BYTES, HashState, new_hash
from wherry.core.keypath import render

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from typing_extensions import Buffer

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import TensorSpec

LEAF = 4 << 20
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def canonical_json(value: object) -> bytes:
    """The canonical JSON of a value, over which digests are computed; a lone surrogate is escaped as in JSON."""
    return _CANONICAL.encode(value).encode("utf-8", "backslashreplace")


def sha256_of(kind: str, value: object) -> str:
    """Hex SHA-256 over a header line and the canonical JSON of a value."""
    return sha256_text(kind, canonical_json(value))


def origin_digest(origin: Mapping[str, object]) -> str:
    """Hex SHA-256 of the `origin` of a manifest."""
    return sha256_of("origin", dict(origin))


def sha256_text(kind: str, text: bytes) -> str:
    """As `sha256_of`, for a value whose canonical JSON has been computed already."""
    return hashlib.sha256(_header(kind) + text).hexdigest()


def _header(kind: str) -> bytes:
    return f"wherry {kind} 1\n".encode()


def _digest_of(algorithm: str, kind: str, value: object) -> str:
    found = new_hash(algorithm, _header(kind) + canonical_json(value))
    return f"{algorithm}:{found.digest().hex()}"


def leaf_count(nbytes: int) -> int:
    """Number of leaves of a tensor with this many bytes; 0 for an empty tensor."""
    return -(-nbytes // LEAF)


def tensor_digest(spec: TensorSpec, leaves: Iterable[bytes], algorithm: str) -> str:
    """Digest of one tensor.

    Args:
        spec: its dtype and shape are hashed, its key path is not.
        leaves: the raw hash of each leaf in order.
        algorithm: of the leaves and of the digest.
    """
    text = ",".join([f'"{leaf.hex()}"' for leaf in leaves])
    found = new_hash(algorithm, b"%b[%b]]" % (_tensor_head(spec.dtype, spec.shape), text.encode()))
    return f"{algorithm}:{found.digest().hex()}"


@lru_cache(1 << 12)
def _tensor_head(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The header and canonical JSON of a tensor's digest up to its leaves."""
    return _header("tensor") + canonical_json([dtype, list(shape)])[:-1] + b","


def weights_digest(digests: Mapping[KeyPath, str], algorithm: str) -> str:
    """Digest of the content: the same for any container that holds the same tensors under the same paths."""
    own = f"{algorithm}:"
    rows = [[list(path), digests[path].removeprefix(own)] for path in sorted(digests)]
    return _digest_of(algorithm, "weights", rows)


def checkpoint_digest(
    manifest: Manifest, format_name: str, format_version: str | None, algorithm: str
) -> str:
    """Digest of the identity: content, container and companions.

    Args:
        manifest: its contents, with the digests of its tensors.
        format_name: its format.
        format_version: the format's version of the layout.
        algorithm: of the tensors' digests and of this one.
    """
    return _digest_of(
        algorithm,
        "checkpoint",
        {
            "weights": weights_digest(manifest.digests, algorithm).removeprefix(f"{algorithm}:"),
            "format": format_name,
            "format_version": format_version,
            "values": {render(path): value for path, value in manifest.values.items()},
            "empties": {render(path): kind for path, kind in manifest.empties.items()},
            "companions": {companion.name: companion.sha256 for companion in manifest.companions},
        },
    )


class _Hashes:
    """Running hashes of the same bytes with several algorithms."""

    def __init__(self, algorithms: tuple[str, ...], data: Buffer = b"") -> None:
        self._states = [new_hash(one, data) for one in algorithms]

    def update(self, data: Buffer, /) -> None:
        for state in self._states:
            state.update(data)

    def digest(self) -> bytes:
        return b"".join(state.digest() for state in self._states)


class LeafHasher:
    """Hashes the leaves of one tensor from pieces that arrive in any order, from several threads.

    A piece that covers whole leaves is hashed without a copy. Where two pieces meet inside a leaf and the second one
    arrives first, its bytes (at most one leaf) are kept until the first one has been hashed.

    Attributes:
        spec: the tensor.
        algorithms: with which each leaf is hashed: that of the record to make and, where it differs, that of the
            record to compare with.
        leaves: the hashes of each leaf, one after the other in the order of the algorithms; None until they are known.
    """

    __slots__ = ("_open", "_waiting", "algorithms", "leaves", "spec")
    # One for all: it is held for a moment, and large checkpoints have thousands of hashers.
    _lock = threading.Lock()

    def __init__(self, spec: TensorSpec, algorithms: tuple[str, ...]) -> None:
        self.spec = spec
        self.algorithms = algorithms
        self.leaves: list[bytes | None] = [None] * leaf_count(spec.nbytes)
        self._open: dict[int, HashState] | None = None  # offset → hash that has consumed its leaf up to there
        self._waiting: dict[int, bytes] | None = (
            None  # offset → bytes inside a leaf that is not hashed so far
        )

    def preset(self, leaf: int, digest: bytes) -> None:
        """Set a leaf's hashes from the journal of an earlier run; its bytes are not needed then."""
        self.leaves[leaf] = digest

    def known(self, start: int, stop: int) -> dict[int, bytes] | None:
        """The hashes of all leaves that bytes [start, stop) touch; None while one of them is not complete."""
        touched = range(start // LEAF, leaf_count(stop))
        found = {leaf: digest for leaf in touched if (digest := self.leaves[leaf]) is not None}
        return found if len(found) == len(touched) else None

    def update(self, start: int, data: memoryview) -> None:
        """Take the canonical bytes [start, start + len(data)); each byte must come exactly once."""
        position, stop = start, start + len(data)
        if (
            start == 0 and stop <= LEAF and stop == self.spec.nbytes
        ):  # as almost always, where tensors are small
            if stop and self.leaves[0] is None:
                self.leaves[0] = self._begin(data).digest()
            return
        while position < stop:
            end = min((position // LEAF + 1) * LEAF, stop)
            if self.leaves[position // LEAF] is None:
                self._piece(position, data[position - start : end - start])
            position = end

    def done(self) -> bool:
        """Whether every leaf has been hashed."""
        return None not in self.leaves

    def hashes(self, algorithm: str) -> tuple[bytes, ...]:
        """The hash of every leaf by one of the algorithms; requires that every byte has been passed to `update`."""
        complete = [leaf for leaf in self.leaves if leaf is not None]
        if len(complete) != len(self.leaves):
            raise AssertionError(
                f"{self.spec.name}: {len(self.leaves) - len(complete)} leaves were never hashed"
            )
        if self.algorithms == (algorithm,):
            return tuple(complete)
        place = self.algorithms.index(algorithm) * HASH_BYTES
        return tuple(leaf[place : place + HASH_BYTES] for leaf in complete)

    def digest(self, algorithm: str) -> str:
        """Digest of the tensor by one of the algorithms; requires that every byte has been passed to `update`."""
        return tensor_digest(self.spec, self.hashes(algorithm), algorithm)

    def _begin(self, data: Buffer = b"") -> HashState:
        return (
            new_hash(self.algorithms[0], data)
            if len(self.algorithms) == 1
            else _Hashes(self.algorithms, data)
        )

    def _piece(self, offset: int, data: memoryview) -> None:
        if offset % LEAF == 0:
            state = self._begin()
        else:
            with self._lock:
                state = None if self._open is None else self._open.pop(offset, None)
                if state is None:
                    self._waiting = self._waiting or {}
                    self._waiting[offset] = bytes(data)
                    return
        state.update(data)
        self._continue(offset + len(data), state)

    def _continue(self, offset: int, state: HashState) -> None:
        while offset % LEAF and offset != self.spec.nbytes:
            with self._lock:
                data = None if self._waiting is None else self._waiting.pop(offset, None)
                if data is None:
                    self._open = self._open or {}
                    self._open[offset] = state
                    return
            state.update(data)
            offset += len(data)
        self.leaves[(offset - 1) // LEAF] = state.digest()
