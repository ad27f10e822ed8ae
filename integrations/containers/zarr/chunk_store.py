"""ChunkStore: where the chunks of zarr arrays are written; `store` chooses one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.integrations.containers.ocdbt.write import Reference


class ChunkStore(Protocol):
    """Takes chunks and small values by key."""

    def put(self, key: str, data: memoryview, size: int = 0) -> None:
        """Write a chunk, padded with zeros to `size`; thread-safe and repeatable."""

    def place(self, key: str) -> Reference:
        """The byte range of a chunk that was put; the file is relative to the store's folder."""
        ...

    def stored(self, key: str) -> bool:
        """Whether a chunk that was put is durable after a `sync`; in a store of objects, its bytes have to be sent."""
        ...

    def sync(self) -> None:
        """Make every chunk durable whose `put` has returned."""

    def finish(self, values: Mapping[str, bytes]) -> None:
        """Write the small values and complete the store; idempotent."""

    def close(self) -> None:
        """Release the resources."""
