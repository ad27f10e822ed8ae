"""ReadUnit: a part of a checkpoint that one worker reads and hashes. The same everywhere, as the tensors decide it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.digest import LEAF, leaf_count, sha256_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec

_MOST_CHUNK = (
    64 << 20
)  # a tensor of larger chunks is not cut: each of its readers would decode all of a chunk


@dataclass(frozen=True, slots=True)
class ReadUnit:
    """Leaves of tensors that are read together.

    Attributes:
        parts: key path → numbers of leaves.
    """

    parts: Mapping[KeyPath, range]

    def nbytes(self, specs: Mapping[KeyPath, TensorSpec]) -> int:
        """Bytes of its leaves."""
        return sum(
            min(rows.stop * LEAF, specs[path].nbytes) - rows.start * LEAF for path, rows in self.parts.items()
        )


def read_units(specs: Mapping[KeyPath, TensorSpec], unit_bytes: int) -> tuple[ReadUnit, ...]:
    """Cut a checkpoint into units; every leaf of a tensor with elements is in exactly one.

    Args:
        specs: its tensors.
        unit_bytes: size of a unit; one leaf at least.
    """
    return tuple(ReadUnit(parts) for parts in _units(specs, max(unit_bytes // LEAF, 1)))


def units_digest(units: tuple[ReadUnit, ...]) -> str:
    """Identifies how a checkpoint was cut."""
    rows = [[[list(path), rows.start, rows.stop] for path, rows in unit.parts.items()] for unit in units]
    return sha256_of("reading", rows)


def _units(specs: Mapping[KeyPath, TensorSpec], most: int) -> Iterator[dict[KeyPath, range]]:
    held: dict[KeyPath, range] = {}
    filled = 0
    for path, spec in specs.items():
        count = leaf_count(spec.nbytes)
        step = most if _can_be_cut(spec) else max(count, 1)
        for start in range(0, count, step):
            part = range(start, min(start + step, count))
            if held and filled + len(part) > most:
                yield held
                held, filled = {}, 0
            held[path] = part
            filled += len(part)
            if filled >= most:
                yield held
                held, filled = {}, 0
    if held:
        yield held


def _can_be_cut(spec: TensorSpec) -> bool:
    if spec.chunks is None:
        return True
    elements = 1
    for extent in spec.chunks:
        elements *= extent
    return dtypes.canonical_size(spec.dtype, elements) <= _MOST_CHUNK
