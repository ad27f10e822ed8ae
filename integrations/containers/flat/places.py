"""Places: where the bytes of tensors lie that have one byte range each, as columns of numbers.

A large checkpoint has a hundred thousand such tensors, and the `Extent` of one is built only on request.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from wherry.formats.contents import Extent

if TYPE_CHECKING:
    from wherry.core.keypath import KeyPath
    from wherry.storage.location import Location


class Places(Mapping["KeyPath", "tuple[Extent, ...]"]):
    """Key path → the only extent of the tensor."""

    __slots__ = ("_files", "_firsts", "_lengths", "_rows", "_starts")

    def __init__(self) -> None:
        self._rows: dict[KeyPath, int] = {}
        self._starts, self._lengths = array("Q"), array("Q")
        self._files: list[Location] = []
        self._firsts: list[int] = []  # number of the first row of each file

    def begin(self, file: Location) -> None:
        """The following tensors lie in this file."""
        self._files.append(file)
        self._firsts.append(len(self._starts))

    def add(self, path: KeyPath, start: int, length: int) -> None:
        """Add a tensor of the present file.

        Args:
            path: its key path.
            start: the offset of its first byte.
            length: bytes.
        """
        self._rows[path] = len(self._starts)
        self._starts.append(start)
        self._lengths.append(length)

    def __getitem__(self, path: KeyPath) -> tuple[Extent, ...]:
        row = self._rows[path]
        file = self._files[bisect_right(self._firsts, row) - 1]
        return (Extent(file, self._starts[row], self._lengths[row]),)

    def __iter__(self) -> Iterator[KeyPath]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
