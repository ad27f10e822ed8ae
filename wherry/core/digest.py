"""Digests: the hashes by which tensors and checkpoints are compared.

- A **leaf** is 4 MiB of a tensor's canonical bytes (C order, little endian); the last one may be short.
- The **tensor digest** is a hash over dtype, shape and the hash of each leaf. It does not depend on the container,
  shards or chunks, can be computed in parallel, and a mismatch names the damaged leaf.
- The **weights digest** is a hash over the sorted (key path, tensor digest) pairs: equality of content.
- The **checkpoint digest** is a hash over weights digest, format, format version, non-tensor leaves and companion
  digests: identity. A change of container keeps the weights digest and changes the checkpoint digest.

All of them are computed with one algorithm, BLAKE3 or SHA-256, and printed as `blake3:` or `sha256:` with 64 hex
digits. The text that is hashed for the last three is canonical JSON (sorted keys, no spaces, UTF-8) after a header line
that names the kind and its version. It contains digests without the name of the algorithm if that is the algorithm of
the hash itself, so that SHA-256 digests are what they were.

Companion files, plans, fingerprints and the ledger's chain are always hashed with SHA-256.

`LeafValues` are what one process has hashed of a tensor of which others have the rest, and how it is joined. A leaf is
BLAKE3 of 4 MiB, and BLAKE3 is a tree. A process that has some bytes of a leaf gives the values of the largest subtrees
that it has whole, 32 bytes each, and the bytes themselves of KiB of which it has a part. The values of all processes
together give the leaf. The same bytes give the same values, so two processes that had the same can be compared.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import threading
from binascii import hexlify
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import islice, product
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from wherry import kernels
from wherry.core import dtypes
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Region, TensorSpec, c_strides, region_shape
from wherry.kernels import MOST_VALUES

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
    """A function that begins a hash with its first bytes; faster than `new_hash` in a loop over many small tensors."""
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


@dataclass(frozen=True, slots=True)
class LeafValues:
    """The part of a tensor's hashes that one process has.

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
        """The JSON form of the values; the inverse of `from_json`."""
        leaves, parts = sorted(self.leaves.items()), sorted(self.parts.items())
        return [
            [leaf for leaf, _digest in leaves],
            base64.b64encode(b"".join(digest for _leaf, digest in leaves)).decode(),
            [[leaf, base64.b64encode(part).decode()] for leaf, part in parts],
        ]

    @classmethod
    def from_json(cls, row: list[Any]) -> Self:
        """Read the values from a record; raises ValueError or TypeError if it has another form."""
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


LEAF = kernels.LEAF
SHORTEST_RUN = 1 << 10  # bytes; to hash shorter runs one by one costs more than to read them again in order
_LEAST_TOGETHER = 64 << 10  # bytes of runs that are hashed in one call
_MOST_LEAVES = 1 << 14  # between the first and the last byte of a box
_MOST_OPEN = 128 << 20  # bytes of memory for leaves that are not complete; beyond, no box counts
_ROWS_AT_ONCE = 1000
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
    """Like `sha256_of`, for a value whose canonical JSON has been computed already."""
    return hashlib.sha256(header_line(kind) + text).hexdigest()


def sha256_of_rows(kind: str, fields: Mapping[str, object], name: str, rows: Iterable[object]) -> str:
    """Like `sha256_of` of an object, one field of which is a long array.

    Args:
        kind: as for `sha256_of`.
        fields: the other fields.
        name: of the array.
        rows: its values; few of them are held at a time.
    """
    state = hashlib.sha256(header_line(kind))
    mark = b"{"
    for key in sorted({*fields, name}):
        state.update(b"%b%b:" % (mark, canonical_json(key)))
        if key == name:
            _update_with_rows(state, rows)
        else:
            state.update(canonical_json(fields[key]))
        mark = b","
    state.update(b"}")
    return state.hexdigest()


def _update_with_rows(state: HashState, rows: Iterable[object]) -> None:
    """Hash the canonical JSON of an array, some values at a time."""
    left, mark = iter(rows), b"["
    while some := list(islice(left, _ROWS_AT_ONCE)):
        state.update(mark + canonical_json(some)[1:-1])
        mark = b","
    state.update(b"[]" if mark == b"[" else b"]")


def header_line(kind: str) -> bytes:
    """The line before what is hashed, which names its kind."""
    return f"wherry {kind} 1\n".encode()


def leaf_count(nbytes: int) -> int:
    """Number of leaves of a tensor with this many bytes; 0 for an empty tensor."""
    return -(-nbytes // LEAF)


def tensor_digest(spec: TensorSpec, leaves: Sequence[bytes], algorithm: str) -> str:
    """Digest of one tensor.

    Args:
        spec: its dtype and shape are hashed, its key path is not.
        leaves: the raw hash of each leaf in order.
        algorithm: of the leaves and of the digest.
    """
    text = b'["' + b'","'.join(map(hexlify, leaves)) + b'"]]' if leaves else b"[]]"
    found = hash_function(algorithm)(_tensor_head(spec.dtype, spec.shape) + text)
    return f"{algorithm}:{found.digest().hex()}"


@lru_cache(1 << 12)
def _tensor_head(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The header and canonical JSON of a tensor's digest up to its leaves."""
    return header_line("tensor") + canonical_json([dtype, list(shape)])[:-1] + b","


def weights_digest(digests: Mapping[KeyPath, str], algorithm: str) -> str:
    """Digest of the content: the same for any container that holds the same tensors under the same paths."""
    own = f"{algorithm}:"
    state = new_hash(algorithm, header_line("weights"))
    _update_with_rows(state, ((path, digests[path].removeprefix(own)) for path in sorted(digests)))
    return f"{algorithm}:{state.digest().hex()}"


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

    A piece that covers whole leaves is hashed at once. Of other leaves the kernels keep 32 bytes for each KiB. Where
    there are no kernels, or another algorithm than BLAKE3, a leaf is hashed in order: if of two pieces that meet
    inside of it the second one arrives first, its bytes (at most one leaf) are kept until the first one has been
    hashed. Then every byte must come exactly once, and boxes are not hashed.

    Attributes:
        spec: the tensor.
        algorithms: with which each leaf is hashed: that of the record to make and, where it differs, that of the
            record to compare with.
        leaves: the hashes of each leaf, one after the other in the order of the algorithms; None until they are known.
    """

    __slots__ = ("_any_order", "_open", "_refused", "_waiting", "algorithms", "leaves", "spec")
    # One for all: it is held for a moment, and large checkpoints have thousands of hashers.
    _lock = threading.Lock()

    def __init__(self, spec: TensorSpec, algorithms: tuple[str, ...]) -> None:
        self.spec = spec
        self.algorithms = algorithms
        self.leaves: list[bytes | None] = [None] * leaf_count(spec.nbytes)
        self._any_order: kernels.OpenLeaves | None = None
        self._refused = False  # whether a box did not count
        self._open: dict[int, HashState] | None = None  # offset → hash that has consumed its leaf up to there
        self._waiting: dict[int, bytes] | None = (
            None  # offset → bytes inside a leaf that is not hashed so far
        )

    def preset(self, leaf: int, digest: bytes) -> None:
        """Set a leaf's hashes from the journal of an earlier run; its bytes are not needed then."""
        self.leaves[leaf] = digest
        if self._any_order is not None:
            self._any_order.skip(leaf)

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

    def update_box(self, region: Region, data: memoryview) -> bool:
        """Take the elements of a region, which need not be one run of the tensor's bytes; a region may be taken twice.

        Args:
            region: step-1 slices with explicit bounds.
            data: its elements in C order.

        Returns:
            Whether they count. Where they do not, the leaves of the region are not hashed: there are no kernels, the
            algorithm is not BLAKE3, the runs are short, or leaves that are not complete take too much memory. Then no
            other box of the tensor counts either.
        """
        if not all(part.start < part.stop for part in region):
            return True
        runs = None if self._refused else _boxed_runs(self.spec, region)
        hashes = None if runs is None else self._in_any_order()
        if runs is None or hashes is None or kernels.open_bytes() > _MOST_OPEN:
            self._refused, self._any_order = True, None  # what was hashed of it was in vain
            return False
        for offset, start in runs.starts:
            self._note(
                hashes.add(
                    data[start:],
                    offset,
                    length=runs.length,
                    count=runs.number,
                    apart=runs.apart,
                    step=runs.step,
                )
            )
        return True

    def takes_anywhere(self, nbytes: int) -> bool:
        """Whether a piece of this size can be taken before the bytes in front of it, at little cost."""
        return nbytes >= SHORTEST_RUN and self._in_any_order() is not None

    def take_values(self, leaf: int, values: bytes) -> None:
        """Take the values of a leaf that another process has computed; without kernels the leaf stays unknown.

        Args:
            leaf: its number.
            values: see `wherry.kernels.OpenLeaves.values`.

        Raises:
            ValueError: these are no values of this leaf.
        """
        hashes = self._in_any_order()
        digest = None if hashes is None else hashes.take_values(leaf, values)
        if digest is not None:
            self.leaves[leaf] = digest

    def take(self, values: LeafValues) -> None:
        """Take the leaves and values that another hasher of the same tensor has; see `take_values`."""
        for leaf, digest in values.leaves.items():
            self.preset(leaf, digest)
        for leaf, part in values.parts.items():
            self.take_values(leaf, part)

    def values(self) -> LeafValues | None:
        """The leaves and values so far, for a process that has the other bytes.

        None if a box did not count, if there are several algorithms, or if a leaf has so many short pieces that
        these take more than `wherry.kernels.MOST_VALUES`.
        """
        if self._refused or len(self.algorithms) > 1:
            return None
        leaves = {leaf: digest for leaf, digest in enumerate(self.leaves) if digest is not None}
        parts: dict[int, bytes] = {}
        if self._any_order is not None:
            for leaf in range(len(self.leaves)):
                part = b"" if leaf in leaves else self._any_order.values(leaf)
                if part is None:
                    return None
                if part:
                    parts[leaf] = part
        return LeafValues(leaves, parts)

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

    def _in_any_order(self) -> kernels.OpenLeaves | None:
        """The kernel that hashes pieces of leaves in any order; None if it cannot be used."""
        if self._any_order is None and self.algorithms == (BLAKE3,) and kernels.load() is not None:
            with self._lock:
                if self._any_order is None:
                    found = kernels.OpenLeaves(self.spec.nbytes)
                    for leaf, digest in enumerate(self.leaves):
                        if digest is not None:
                            found.skip(leaf)
                    self._any_order = found
        return self._any_order

    def _note(self, complete: list[tuple[int, bytes]]) -> None:
        for leaf, digest in complete:
            self.leaves[leaf] = digest

    def _piece(self, offset: int, data: memoryview) -> None:
        if offset % LEAF == 0 and (len(data) == LEAF or offset + len(data) == self.spec.nbytes):
            self.preset(offset // LEAF, self._begin(data).digest())
            return
        hashes = self._in_any_order()
        if hashes is not None:
            self._note(hashes.add(data, offset))
            return
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


class _Runs(NamedTuple):
    """The runs of a tensor's bytes of which a box consists.

    Attributes:
        length: bytes of a run.
        number: of the runs that lie equally far apart.
        apart: bytes between the beginnings of two of these in the box.
        step: the same in the tensor.
        starts: the offset of each first one, in the tensor and in the box.
        leaves: that they touch, at most.
        at_edge: whether they end where the tensor's rows do, and begin inside of these: such runs may be short.
    """

    length: int
    number: int
    apart: int
    step: int
    starts: tuple[tuple[int, int], ...]
    leaves: int
    at_edge: bool


def hashes_boxes(spec: TensorSpec, region: Region, algorithms: tuple[str, ...]) -> bool:
    """Whether this process hashes a box that is like others of a tensor; see `LeafHasher.update_box`.

    Args:
        spec: the tensor.
        region: of the box.
        algorithms: with which leaves are hashed.
    """
    return algorithms == (BLAKE3,) and kernels.load() is not None and _boxed_runs(spec, region) is not None


def leaves_touched(spec: TensorSpec, region: Region) -> range:
    """The leaves from that with the first byte of a region to that with the last one.

    Args:
        spec: the tensor; its elements are whole bytes.
        region: not empty.
    """
    first = last = 0
    for part, extent in zip(region, spec.shape, strict=True):
        first, last = first * extent + part.start, last * extent + part.stop - 1
    size = dtypes.bits(spec.dtype) // 8
    return range(first * size // LEAF, leaf_count((last + 1) * size))


def _boxed_runs(spec: TensorSpec, region: Region) -> _Runs | None:
    """The runs of a box; None if they are short, or if they touch too many leaves to be hashed."""
    runs = _runs_of(spec, region)
    if runs is None or runs.leaves > _MOST_LEAVES or (runs.length < SHORTEST_RUN and not runs.at_edge):
        return None
    return runs


def _runs_of(spec: TensorSpec, region: Region) -> _Runs | None:
    """The runs of a box that is not empty; None if elements are no whole bytes, or many groups of runs are short."""
    if dtypes.opaque(spec.dtype) or dtypes.bits(spec.dtype) % 8:
        return None
    size, extents = dtypes.bits(spec.dtype) // 8, region_shape(region)
    axis = len(extents)
    while axis and extents[axis - 1 :] == spec.shape[axis - 1 :]:
        axis -= 1
    axis = max(axis - 1, 0)  # runs go along this axis and those after it
    strides, inside = c_strides(spec.shape, size), c_strides(extents, size)
    loops = sorted((at for at in range(axis) if extents[at] > 1), key=lambda at: extents[at])
    inner = loops.pop() if loops else None
    count, apart, step = (1, 0, 0) if inner is None else (extents[inner], inside[inner], strides[inner])
    length = math.prod(extents[axis:]) * size
    if loops and count * length < _LEAST_TOGETHER:
        return None
    first = sum(part.start * stride for part, stride in zip(region, strides, strict=True))
    places = product(*(range(extents[at]) for at in loops))
    starts = tuple(
        (
            first + sum(index * strides[at] for index, at in zip(place, loops, strict=True)),
            sum(index * inside[at] for index, at in zip(place, loops, strict=True)),
        )
        for place in places
    )
    last = sum((part.stop - 1) * stride for part, stride in zip(region, strides, strict=True))
    at_edge = bool(region) and region[axis].start > 0 and region[axis].stop == spec.shape[axis]
    return _Runs(length, count, apart, step, starts, leaf_count(last - first + size) + 1, at_edge)
