"""azure_blocks: names of the blocks of Azure, from which a listing tells what each is.

Blocks that are not part of a blob yet lie at the name of the blob, those of all uploads together, and the service tells
of each only its name and its size. So the name says the rest, in fields of fixed width, because all blocks of a blob
must have names of the same length:

    12  key of the upload, hex
     5  number of the part; `begin` for the block with which the upload began
    11  milliseconds since 1970, hex: of two blocks for one part, the later one counts
    32  MD5 of the bytes, hex, which the service has compared with what it received; of the first block, the run
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.store.store import Part

if TYPE_CHECKING:
    from collections.abc import Iterable

_BEGIN = "begin"
_PADDING = "."
_FIELDS = re.compile(r"([0-9a-f]{12})(\d{5}|begin)([0-9a-f]{11})(.{32})")
_RUN = re.compile(r"[\w-]{1,32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class BlockName:
    """What the name of a block says.

    Attributes:
        text: the name.
        key: of the upload.
        number: of the part; None for the block with which the upload began.
        milliseconds: when it was sent.
        rest: MD5 of its bytes; of the first block the run, empty if its id does not fit.
    """

    text: str
    key: str
    number: int | None
    milliseconds: int
    rest: str


def first_block(key: str, run: str) -> str:
    """The name of the block with which an upload begins."""
    said = run if _RUN.fullmatch(run) else ""
    return f"{key}{_BEGIN}{0:011x}{said:{_PADDING}<32}"


def part_block(key: str, number: int, md5: str) -> str:
    """The name of the block of a part that is sent now."""
    return f"{key}{number:05d}{time.time_ns() // 10**6:011x}{md5}"


def parse_block_name(name: str) -> BlockName | None:
    """What a name says; None for that of a block of somebody else."""
    found = _FIELDS.fullmatch(name)
    if found is None:
        return None
    key, number, milliseconds, rest = found.groups()
    count = None if number == _BEGIN else int(number)
    return BlockName(name, key, count, int(milliseconds, 16), rest.rstrip(_PADDING))


def parts_of(blocks: Iterable[tuple[BlockName, int]]) -> list[Part]:
    """The parts of an upload, by number.

    Args:
        blocks: its blocks with their sizes in bytes.
    """
    found: dict[int, Part] = {}
    for name, nbytes in sorted(blocks, key=lambda block: block[0].milliseconds):
        if name.number is not None:
            found[name.number] = Part(name.number, nbytes, name.text, f"md5:{name.rest}")
    return [found[number] for number in sorted(found)]
