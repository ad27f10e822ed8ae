"""Protocols that plug-ins of earlier releases import from the modules of this room; until 0.2.

The engine does not ask for them any more: a reader says how its bytes can be had by `access`, and one without it is
adapted by `formats.reader.with_access`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, Span, TensorSpec
    from wherry.formats.reader import Block


@runtime_checkable
class StreamingReader(Protocol):
    """Decodes a chunk in less memory than the chunk takes."""

    def held(self, spec: TensorSpec, cell: Region) -> int | None: ...  # noqa: D102
    def stream(self, spec: TensorSpec, cell: Region) -> Iterator[Block]: ...  # noqa: D102


@runtime_checkable
class FillingReader(Protocol):
    """Puts a region into memory of the caller."""

    def fill(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None: ...  # noqa: D102
    def overhead(self, spec: TensorSpec, region: Region) -> int: ...  # noqa: D102


@runtime_checkable
class RegionReader(Protocol):
    """Reads any region of some tensors without decoding whole chunks."""

    def cheap(self, spec: TensorSpec) -> bool: ...  # noqa: D102
    def region(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None: ...  # noqa: D102


@runtime_checkable
class ReckoningReader(Protocol):
    """Says what is missing of a sharded checkpoint."""

    def shortfall(self) -> str | None: ...  # noqa: D102


@runtime_checkable
class PlacingWriter(Protocol):
    """Puts canonical bytes into files as they are."""

    def place(self, path: KeyPath, where: Region | Span) -> int | None: ...  # noqa: D102


_NAMES = {
    "wherry.formats.format": {"StreamingReader": StreamingReader},
    "wherry.formats.reader": {
        "FillingReader": FillingReader, "RegionReader": RegionReader, "PlacingWriter": PlacingWriter,
    },
    "wherry.formats.detect": {"ReckoningReader": ReckoningReader},
}  # fmt: skip


def former(module: str, name: str) -> Any:
    """What a module had under a name.

    Raises:
        AttributeError: it never had one.
    """
    if name not in _NAMES[module]:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return _NAMES[module][name]
