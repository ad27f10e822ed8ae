"""Digests: the hashes by which tensors and checkpoints are compared.

- A **leaf** is 4 MiB of a tensor's canonical bytes (C order, little endian); the last one may be short.
- The **tensor digest** is SHA-256 over dtype, shape and the SHA-256 of each leaf. It does not depend on the
  container, shards or chunks, can be computed in parallel, and a mismatch names the damaged leaf.
- The **weights digest** is SHA-256 over the sorted (key path, tensor digest) pairs: equality of content.
- The **checkpoint digest** is SHA-256 over weights digest, format, format version, non-tensor leaves and
  companion digests: identity. A change of container keeps the weights digest and changes the checkpoint digest.

All of them are printed as 64 hex digits. The text that is hashed for the last three is canonical JSON (sorted
keys, no spaces, UTF-8) after a header line that names the kind and its version.
"""

from __future__ import annotations

import hashlib
import json
import threading
from typing import TYPE_CHECKING, Any

from wherry.core.keypath import render

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import TensorSpec

LEAF = 4 << 20


def canonical_json(value: object) -> bytes:
    """The canonical JSON of a value, over which digests are computed; a lone surrogate is escaped as in JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace")


def sha256_of(kind: str, value: object) -> str:
    """Hex SHA-256 over a header line and the canonical JSON of a value."""
    return sha256_text(kind, canonical_json(value))


def sha256_text(kind: str, text: bytes) -> str:
    """As `sha256_of`, for a value whose canonical JSON has been computed already."""
    return hashlib.sha256(f"wherry {kind} 1\n".encode() + text).hexdigest()


def leaf_count(nbytes: int) -> int:
    """Number of leaves of a tensor with this many bytes; 0 for an empty tensor."""
    return -(-nbytes // LEAF)


def tensor_digest(spec: TensorSpec, leaves: Iterable[bytes]) -> str:
    """Digest of one tensor.

    Args:
        spec: its dtype and shape are hashed, its key path is not.
        leaves: the raw SHA-256 of each leaf in order.
    """
    return sha256_of("tensor", [spec.dtype, list(spec.shape), [leaf.hex() for leaf in leaves]])


def weights_digest(digests: Mapping[KeyPath, str]) -> str:
    """Digest of the content: the same for any container that holds the same tensors under the same paths."""
    return sha256_of("weights", [[list(path), digests[path]] for path in sorted(digests)])


def checkpoint_digest(manifest: Manifest, format_name: str, format_version: str | None) -> str:
    """Digest of the identity: content, container and companions."""
    return sha256_of(
        "checkpoint",
        {
            "weights": weights_digest(manifest.digests),
            "format": format_name,
            "format_version": format_version,
            "values": {render(path): value for path, value in manifest.values.items()},
            "empties": {render(path): kind for path, kind in manifest.empties.items()},
            "companions": {companion.name: companion.sha256 for companion in manifest.companions},
        },
    )


class LeafHasher:
    """Hashes the leaves of one tensor from pieces that arrive in any order, from several threads.

    A piece that covers whole leaves is hashed without a copy. Where two pieces meet inside a leaf and the second one
    arrives first, its bytes (at most one leaf) are kept until the first one has been hashed.
    """

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self.leaves: list[bytes | None] = [None] * leaf_count(spec.nbytes)
        self._lock = threading.Lock()
        self._open: dict[int, Any] = {}  # offset → SHA-256 state that has consumed its leaf up to there
        self._waiting: dict[int, bytes] = {}  # offset → bytes inside a leaf whose beginning is not hashed yet

    def preset(self, leaf: int, digest: bytes) -> None:
        """Set a leaf's digest from the journal of an earlier run; its bytes are not needed then."""
        self.leaves[leaf] = digest

    def known(self, start: int, stop: int) -> dict[int, bytes] | None:
        """The digests of all leaves that bytes [start, stop) touch; None while one of them is not complete."""
        touched = range(start // LEAF, leaf_count(stop))
        found = {leaf: digest for leaf in touched if (digest := self.leaves[leaf]) is not None}
        return found if len(found) == len(touched) else None

    def update(self, start: int, data: memoryview) -> None:
        """Take the canonical bytes [start, start + len(data)); each byte must come exactly once."""
        position, stop = start, start + len(data)
        while position < stop:
            end = min((position // LEAF + 1) * LEAF, stop)
            if self.leaves[position // LEAF] is None:
                self._piece(position, data[position - start : end - start])
            position = end

    def done(self) -> bool:
        """Whether every leaf has been hashed."""
        return all(leaf is not None for leaf in self.leaves)

    def digest(self) -> str:
        """Digest of the tensor; requires that every byte has been passed to `update`."""
        complete = [leaf for leaf in self.leaves if leaf is not None]
        if len(complete) != len(self.leaves):
            raise AssertionError(
                f"{self.spec.name}: {len(self.leaves) - len(complete)} leaves were never hashed"
            )
        return tensor_digest(self.spec, complete)

    def _piece(self, offset: int, data: memoryview) -> None:
        if offset % LEAF == 0:
            state = hashlib.sha256()
        else:
            with self._lock:
                state = self._open.pop(offset, None)
                if state is None:
                    self._waiting[offset] = bytes(data)
                    return
        state.update(data)
        self._continue(offset + len(data), state)

    def _continue(self, offset: int, state: hashlib._Hash) -> None:  # pyright: ignore[reportPrivateUsage]
        while offset % LEAF and offset != self.spec.nbytes:
            with self._lock:
                data = self._waiting.pop(offset, None)
                if data is None:
                    self._open[offset] = state
                    return
            state.update(data)
            offset += len(data)
        self.leaves[(offset - 1) // LEAF] = state.digest()
