"""Spans: canonical bytes that lie raw in files, read from where they lie."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from wherry.core.tensorspec import Span
from wherry.errors import CorruptError, storage_error
from wherry.storage.direct import readinto
from wherry.storage.stores import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.format import Extent
    from wherry.storage.location import Location


def file_offset(extents: tuple[Extent, ...], at: int) -> int:
    """Where in its file a canonical byte lies."""
    position = 0
    for extent in extents:
        if at < position + extent.length:
            return extent.offset + at - position
        position += extent.length
    return 0


def raw_bytes(extents: tuple[Extent, ...], spec: TensorSpec) -> Callable[[int, memoryview], None]:
    """What fills a buffer from an offset in a tensor's canonical bytes on, which lie raw in files."""

    def read(at: int, buffer: memoryview) -> None:
        read_span(extents, Span(at, at + len(buffer)), buffer, spec)

    return read


def read_span(
    extents: tuple[Extent, ...], span: Span, buffer: memoryview, spec: TensorSpec, *, straight: bool = False
) -> None:
    """Fill a buffer with canonical bytes that lie raw in files.

    Args:
        extents: where.
        span: which of them.
        buffer: takes them.
        spec: the tensor, for what errors say.
        straight: past the page cache, where that goes.

    Raises:
        CorruptError: a file ends before the bytes that its metadata promises.
        StorageError: the storage failed.
    """
    position = 0
    for extent in extents:
        start, stop = max(span.start, position), min(span.stop, position + extent.length)
        if start < stop:
            part = buffer[start - span.start : stop - span.start]
            _fill(extent.location, extent.offset + start - position, part, spec, straight=straight)
        position += extent.length
    if position < span.stop:
        raise CorruptError(f"its bytes end at {position}, {spec.nbytes} were expected", path=spec.name)


def _fill(location: Location, offset: int, buffer: memoryview, spec: TensorSpec, *, straight: bool) -> None:
    store = location.store
    read = (
        partial(readinto, root=store.root) if straight and isinstance(store, LocalStore) else store.readinto
    )
    filled = 0
    while filled < len(buffer):
        try:
            count = read(location.path, offset + filled, buffer[filled:])
        except OSError as error:
            raise storage_error(error, location.uri) from error
        if count == 0:
            raise CorruptError("the file ends before this tensor does", uri=location.uri, path=spec.name)
        filled += count
