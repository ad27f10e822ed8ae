"""blank_values: which tensors hold only zeros, another value again and again, or NaN.

A download or a copy that was cut off leaves zeros in a file that has its full size, and a broken run leaves NaN. Zeros
are found from digests alone: the digest of a tensor is that of zeros of the same type and shape. So the answer is the
same wherever the digests come from: a pass, an interrupted run, other processes, a sidecar. NaN and other values are
seen while bytes are hashed, when they are in the cache; a value that seems to fill a tensor is proved by its digest.

Not promised: what other processes read, and what an interrupted run read, is not searched for values other than zeros
(`Losses` count its NaN); a tensor of more than 1 TiB is not compared.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import cache, lru_cache

from wherry import kernels
from wherry.core import dtypes
from wherry.core.account import some_names
from wherry.core.digest import LEAF, algorithm_of, new_hash, tensor_digest
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import TensorSpec, forms_of
from wherry.core.units import plural

_COUNTS = ("int", "uint", "bool")  # counters, masks and positions are often zero
_MAGNITUDES = {size: (1 << (8 * size - 1)) - 1 for size in (1, 2, 4, 8)}  # all bits of a word but the highest
# The word of infinity of each type that has one, above which the magnitudes of NaN are.
_INFINITIES = {
    "float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0000000000000,
    "float8_e5m2": 0x7C, "float8_e4m3": 0x78, "float8_e3m4": 0x70,
}  # fmt: skip
_MOST_BYTES = 1 << 40  # of a tensor: its digest takes 17 MB of text, and metadata can state any shape
_LOCK = threading.Lock()
_CURE = "if a download or a copy was cut off, compare the files with the original"


@dataclass(slots=True)
class SeenValues:
    """Facts about the values of tensors, which a pass collects while it hashes them.

    Attributes:
        nans: key path → how many elements are NaN, of the tensors that have some.
        repeated: key path → the bytes of the element that began and ended each piece of it, None if there is none;
            a tensor that was seen whole is left out then.
    """

    nans: dict[KeyPath, int] = field(default_factory=dict["KeyPath", int])
    repeated: dict[KeyPath, bytes | None] = field(default_factory=dict["KeyPath", "bytes | None"])

    def see(self, spec: TensorSpec, start: int, data: memoryview) -> int:
        """Look at a piece of a tensor; an element that was cut is not looked at.

        Args:
            spec: the tensor.
            start: the offset of the piece in the tensor's bytes.
            data: the piece.

        Returns:
            How many elements of it are NaN.
        """
        if not _form_counts(spec.dtype, spec.shape):
            return 0
        size = spec.nbytes // spec.size
        skipped = -start % size
        data = data[skipped : skipped + (len(data) - skipped) // size * size]
        if not data:
            return 0
        first, last = bytes(data[:size]), bytes(data[-size:])
        known = self.repeated.setdefault(spec.path, first)
        if first != last or first != known:
            self.repeated[spec.path] = None
        count = nan_count(spec.dtype, data)
        if count:
            with _LOCK:
                self.nans[spec.path] = self.nans.get(spec.path, 0) + count
        return count

    def see_whole(self, parts: Sequence[tuple[TensorSpec, memoryview]]) -> list[tuple[TensorSpec, int]]:
        """Examine many whole tensors at once: a call for each would cost more than hashing a few kilobytes.

        Args:
            parts: the tensors with all their bytes.

        Returns:
            The tensors that have NaN, and how many.
        """
        kinds: dict[str, list[tuple[TensorSpec, memoryview]]] = {}
        for part in parts:
            spec = part[0]
            if _form_counts(spec.dtype, spec.shape):
                kinds.setdefault(spec.dtype, []).append(part)
        found = [row for dtype, rows in kinds.items() for row in self._see_kind(dtype, rows)]
        self.nans |= {spec.path: count for spec, count in found}
        return found

    def _see_kind(
        self, dtype: str, rows: Sequence[tuple[TensorSpec, memoryview]]
    ) -> list[tuple[TensorSpec, int]]:
        """Look at whole tensors of one type: only those count whose first and last elements are the same."""
        size = dtypes.bits(dtype) // 8
        for spec, data in rows:
            if (first := bytes(data[:size])) == bytes(data[-size:]):
                self.repeated[spec.path] = first
        if not nan_count(dtype, memoryview(b"".join([data for _spec, data in rows]))):
            return []
        return [(spec, count) for spec, data in rows if (count := nan_count(dtype, data))]

    def renamed(self, names: Mapping[KeyPath, KeyPath]) -> SeenValues:
        """The values under other key paths; tensors without one are left out."""
        return SeenValues(
            {names[path]: count for path, count in self.nans.items() if path in names},
            {names[path]: element for path, element in self.repeated.items() if path in names},
        )

    def joined(self, other: SeenValues) -> SeenValues:
        """The values that this pass and another one, over other tensors, have seen."""
        return SeenValues({**self.nans, **other.nans}, {**self.repeated, **other.repeated})


def nan_count(dtype: str, data: memoryview) -> int:
    """How many elements are NaN."""
    infinity = _INFINITIES.get(dtype)
    if infinity is not None and kernels.load() is not None:
        return kernels.count_above(data, dtypes.bits(dtype) // 8, infinity)
    import numpy as np

    kind = dtypes.numpy_dtype(dtype)
    if kind.kind == "c":
        values = np.frombuffer(data, kind)
        real = values.view(f"<f{kind.itemsize // 2}")
        return int(np.count_nonzero(np.isnan(values))) if np.isnan(real.max()) else 0
    words = np.frombuffer(data, f"<u{kind.itemsize}")
    if infinity is None:  # a type with one or two words for NaN
        return sum(int(np.count_nonzero(words == word)) for word in _nan_words(dtype))
    return int(np.count_nonzero((words & words.dtype.type(_MAGNITUDES[kind.itemsize])) > infinity))


def counts_with_numpy(dtype: str) -> bool:
    """Whether `SeenValues` needs numpy for a tensor of this type."""
    return _may_be_blank(dtype) and not (dtype in _INFINITIES and kernels.load() is not None)


@cache
def _nan_words(dtype: str) -> tuple[int, ...]:
    """The words of a type of one byte that are NaN."""
    import numpy as np

    words = np.arange(256, dtype="u1")
    return tuple(np.flatnonzero(np.isnan(words.view(dtypes.numpy_dtype(dtype)).astype("f4"))).tolist())


@lru_cache(1 << 12)
def _form_counts(dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has several elements that are no counters, and bytes of its own for each."""
    return math.prod(shape) > 1 and _may_be_blank(dtype)


def _may_be_blank(dtype: str) -> bool:
    return not dtype.startswith(_COUNTS) and not dtypes.opaque(dtype)


def zeros_notes(specs: Mapping[KeyPath, TensorSpec], digests: Mapping[KeyPath, str]) -> list[str]:
    """A warning if tensors hold nothing but zeros.

    Args:
        specs: the tensors.
        digests: of all of them, or of some.

    Returns:
        One sentence, or nothing. Tensors of one element and of integers do not count.
    """
    algorithm = _algorithm_of_all(digests)
    filled = {_filled_form(algorithm, b"\0", *form) for form in forms_of(specs.values())}
    found = [path for path, digest in digests.items() if digest in filled]
    return _note(f"{len(found):,} of {plural(len(specs), 'tensor')} hold only zeros", found)


def repeated_notes(
    specs: Mapping[KeyPath, TensorSpec], digests: Mapping[KeyPath, str], seen: SeenValues
) -> list[str]:
    """A warning if tensors hold one value other than zero again and again.

    Args:
        specs: the tensors.
        digests: of all of them, or of some.
        seen: what the pass saw that made the digests.

    Returns:
        One sentence, or nothing. Ones do not count either: with them the scales of norms begin.
    """
    algorithm = _algorithm_of_all(digests)
    found = [
        path
        for path, element in seen.repeated.items()
        if element and any(element) and path in digests
        and element != _one(specs[path].dtype)
        and digests[path] == _filled_form(algorithm, element, specs[path].dtype, specs[path].shape)
    ]  # fmt: skip
    return _note(f"{len(found):,} of {plural(len(specs), 'tensor')} hold a single value", found)


def nans_notes(specs: Mapping[KeyPath, TensorSpec], seen: SeenValues) -> list[str]:
    """A warning if tensors hold NaN; see `zeros_notes`."""
    found = [path for path in seen.nans if path in specs]
    return (
        [f"{len(found):,} of {plural(len(specs), 'tensor')} contain NaN: {some_names(found)}"]
        if found
        else []
    )


def _note(what: str, found: Iterable[KeyPath]) -> list[str]:
    names = some_names(found)
    return [f"{what}: {names}; {_CURE}"] if names else []


def _algorithm_of_all(digests: Mapping[KeyPath, str]) -> str:
    """The algorithm of some digests, which is the same for all."""
    return algorithm_of(next(iter(digests.values()), ""))


@lru_cache(1 << 12)
def _filled_form(algorithm: str, element: bytes, dtype: str, shape: tuple[int, ...]) -> str:
    """The digest of all tensors of one form, of which large models have thousands."""
    spec = TensorSpec((), shape, dtype)
    if spec.size <= 1 or dtype.startswith(_COUNTS) or spec.nbytes > _MOST_BYTES:
        return ""
    whole, rest = divmod(spec.nbytes, LEAF)
    leaves = [_filled_leaf(algorithm, element, LEAF)] * whole
    leaves += [_filled_leaf(algorithm, element, rest)] if rest else []
    return tensor_digest(spec, leaves, algorithm)


@lru_cache(1 << 12)
def _filled_leaf(algorithm: str, element: bytes, nbytes: int) -> bytes:
    return new_hash(algorithm, (element * -(-nbytes // len(element)))[:nbytes]).digest()


@cache
def _one(dtype: str) -> bytes:
    infinity = _INFINITIES.get(dtype)
    if infinity is not None:  # all bits of the exponent, of which one has all but the highest
        lowest = infinity & -infinity
        return (infinity // lowest // 2 * lowest).to_bytes(dtypes.bits(dtype) // 8, "little")
    import numpy as np

    return np.ones((), "f4").astype(dtypes.numpy_dtype(dtype)).tobytes()
