"""What earlier runs have sent of an object whose bytes are all known: kept where its checksum is that of these bytes.

Files that are written at offsets have the same bytes in every run. A compressed chunk or a text with a time in it may
not: another release of a codec compresses differently. Parts of two such objects must not become one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.store.checksums import checksum_of, is_same
from wherry.upload.uploaded_file import SentBefore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def agreeing(before: SentBefore, data: Sequence[memoryview], part: int) -> SentBefore:
    """What earlier runs have sent of these bytes, by the checksums that the store has computed.

    Args:
        before: what they have sent to the path.
        data: the bytes of the object, in pieces.
        part: size of its parts.
    """
    if before.found is not None:
        same = before.found.checksums and is_same(
            before.found, before.found.run, sum(map(len, data)), checksum_of(data)
        )
        return before if same else SentBefore()  # the parts of which it was made are gone
    total = sum(map(len, data))
    checksums = [checksum_of(_range(data, start, start + part)) for start in range(0, total, part)]
    parts = {
        number: sent
        for number, sent in before.parts.items()
        if number < len(checksums) and sent.checksum == checksums[number]
    }
    return replace(before, parts=parts)


def _range(data: Sequence[memoryview], start: int, stop: int) -> Iterator[memoryview]:
    """The bytes [start, stop) of the pieces."""
    at = 0
    for piece in data:
        if inside := piece[max(start - at, 0) : max(stop - at, 0)]:
            yield inside
        at += len(piece)
