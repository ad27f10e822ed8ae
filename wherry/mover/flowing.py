"""Flowing: bytes that come one after another, cut into the spans that moves want."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.formats.format import Reader, StreamingReader
from wherry.runtime.crew import StoppedError

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator

    from wherry.core.tensorspec import Span, TensorSpec
    from wherry.formats.format import Block


def only_block(reader: Reader, spec: TensorSpec) -> Block | None:
    """The block that a tensor's only chunk is decoded in, if it comes as one; nothing is decoded yet."""
    if not isinstance(reader, StreamingReader):
        return None
    block = next(iter(reader.stream(spec, spec.whole)), None)
    return block if block is not None and block.region == spec.whole else None


def until(stopped: threading.Event, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
    """The same pieces, until a pass is stopped.

    Raises:
        StoppedError: it was.
    """
    for piece in pieces:
        if stopped.is_set():
            raise StoppedError
        yield piece


def spans_of(pieces: Iterator[memoryview], spans: Iterable[Span], buffer: memoryview) -> Iterator[memoryview]:
    """The bytes of each span, in the one buffer, valid until the next; what lies between them is passed over.

    The pieces are taken to their end, since whoever decodes them looks there whether all was well.

    Args:
        pieces: bytes from offset 0 on.
        spans: ascending and disjoint.
        buffer: holds the largest span.

    Raises:
        ValueError: the pieces end before the last span does.
    """
    flow = _Flow(pieces)
    for span in spans:
        flow.skip(span.start)
        part = buffer[: span.nbytes]
        flow.fill(part)
        yield part
    for _rest in pieces:
        pass


class _Flow:
    """Where in the pieces one is."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")
        self._position = 0

    def skip(self, position: int) -> None:
        while self._position < position:
            self._take(position - self._position)

    def fill(self, part: memoryview) -> None:
        done = 0
        while done < len(part):
            piece = self._take(len(part) - done)
            part[done : done + len(piece)] = piece
            done += len(piece)

    def _take(self, most: int) -> memoryview:
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                raise ValueError(f"the bytes end at {self._position}")
            self._rest = piece
        piece, self._rest = self._rest[:most], self._rest[most:]
        self._position += len(piece)
        return piece
