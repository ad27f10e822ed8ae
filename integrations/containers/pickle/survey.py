"""Lists the globals that the pickles of a file or folder import, for hostile files too, and without unpickling any.

Every file is examined: a stream of pickles from its first byte (a legacy torch file has five, and a payload may follow
the first), the members of a zip archive that are pickles by name or first bytes (compressed ones are inflated up
to a limit, flags that deceive scanners are ignored), the object array of a `.npy`. The machine allows every name and
calls nothing; for an invalid pickle, the globals before the error are listed together with the error.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict, field
from functools import cache
from typing import Any

from wherry.core.lazy_dataclass import dataclass
from wherry.errors import NotFoundError, WherryError
from wherry.formats.registry import formats
from wherry.integrations.containers.pickle.machine import is_opcode, load
from wherry.integrations.containers.pickle.values import (
    CallRecord,
    Global,
    PickleSource,
    Rules,
    open_for_walk,
)
from wherry.integrations.containers.zip.read import (
    LOCAL_MAGIC,
    Member,
    data_place,
    local_member,
    read_directory,
)
from wherry.store.local_store import locate
from wherry.store.location import Location

_NPY = b"\x93NUMPY"
_PICKLE_ENDINGS = (".pkl", ".pickle", ".metadata", ".p", ".joblib")
_STARTS = tuple(bytes([2**7, protocol]) for protocol in range(6)) + tuple(
    bytes([opcode]) for opcode in b"c(]}lIKJMNSUVXiL)"
)
_LARGEST_MEMBER = 1 << 28
_MOST_STREAMS = 100
_OBJECTS = re.compile(rb"'[|]?O[0-9]?'")
_DEFLATED = 8
_HEADER = 1 << 10
_FAR = 1 << 16


@dataclass(frozen=True, slots=True)
class WantedGlobal:
    """One global: its dotted name, first position, number of imports, and whether a reader of wherry allows it."""

    name: str
    position: int
    count: int
    known: bool


@dataclass(frozen=True, slots=True)
class Stream:
    """One pickle.

    Attributes:
        file: relative to the URI of the survey; a member of an archive follows after `!`.
        start: its offset in the file or member.
        globals: its imports, in order.
        error: why it could not be read to its end; None if it could.
    """

    file: str
    start: int
    globals: tuple[WantedGlobal, ...]
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which `inspect --pickles --json` prints."""
        return asdict(self)


@dataclass(slots=True)
class _GlobalNames:
    """Collects the imports of a pickle."""

    seen: dict[Global, list[int]] = field(default_factory=dict[Global, list[int]])

    def __call__(self, wanted: Global, position: int) -> None:
        self.seen.setdefault(wanted, []).append(position)

    def wanted(self) -> tuple[WantedGlobal, ...]:
        return tuple(
            WantedGlobal(str(name), places[0], len(places), known=_is_known(name))
            for name, places in self.seen.items()
        )


@cache
def _is_known(name: Global) -> bool:
    return any(name in row.pickle_globals() for row in formats().values())


def survey(uri: str | os.PathLike[str]) -> list[Stream]:
    """List the imports of all pickles below a URI.

    Args:
        uri: a file or folder; it need not be a checkpoint.

    Raises:
        NotFoundError: the file or folder does not exist.
        StorageError: the storage failed.
    """
    location = locate(uri)
    entry = location.stat()
    if entry is None:
        raise NotFoundError("file or folder not found", uri=location.uri, cure="check the path")
    if not entry.is_dir:
        return list(survey_file(location, location.name))
    return [stream for file in location.walk() for stream in survey_file(location.join(file.name), file.name)]


def survey_file(location: Location, name: str) -> Iterator[Stream]:
    """The pickles of one file."""
    head = location.read(0, 128)
    if head.startswith(LOCAL_MAGIC):
        try:
            members = read_directory(location).members.values()
        except WherryError:
            yield from _scan_pickles(location, name)
            return
        for member in members:
            yield from _member(location, member, f"{name}!{member.name}")
    elif head.startswith(_NPY):
        start = _after_header(head)
        if _OBJECTS.search(location.read(0, min(start, _LARGEST_MEMBER))):
            with open_for_walk(location) as data:
                yield from streams(data, name, start)
    elif _looks_pickled(head, name):
        with open_for_walk(location) as data:
            yield from streams(data, name)


def streams(data: PickleSource, name: str, start: int = 0) -> Iterator[Stream]:
    """Consecutive pickles from an offset on, up to the first bytes that are not a pickle."""
    size = len(data)
    for number in range(_MOST_STREAMS):
        if start >= size or (number and not _looks_pickled(data[start : start + 32], "")):
            return
        stream, after = one_stream(data, name, start)
        if number and stream.error and not stream.globals:
            return  # the data after the last pickle of a legacy file
        yield stream
        if stream.error:
            return
        start = after


def one_stream(data: PickleSource, name: str, start: int = 0) -> tuple[Stream, int]:
    """One pickle, and the offset of its end."""
    names = _GlobalNames()
    rules = Rules(allowed={}, persistent=_anything, far=_FAR, survey=names)
    try:
        _, end = load(data, rules, name, start)
    except WherryError as error:
        return Stream(name, start, names.wanted(), error.what), len(data)
    return Stream(name, start, names.wanted()), end


def _anything(persistent: Any) -> CallRecord:
    return CallRecord(Global("", "persistent id"), (persistent,))


def _looks_pickled(head: bytes, name: str) -> bool:
    return head.startswith(_STARTS) or name.endswith(_PICKLE_ENDINGS)


def _scan_pickles(location: Location, name: str) -> Iterator[Stream]:
    """Pickles of consecutive archives (the items of DCP files) and of truncated ones, found by their local headers."""
    with open_for_walk(location) as data:
        size, at = len(data), data.find(LOCAL_MAGIC, 0, len(data))
        while 0 <= at < size:
            member, start, compressed = local_member(data[at : at + _HEADER])
            if member.endswith(_PICKLE_ENDINGS):
                label = f"{name}!{member} at {at}"
                if compressed:
                    raw = data[at + start : at + start + _LARGEST_MEMBER]
                    yield from streams(zlib.decompressobj(-15).decompress(raw, _LARGEST_MEMBER), label)
                else:
                    yield one_stream(data, label, at + start)[0]
            at = data.find(LOCAL_MAGIC, at + 4, size)


def _member(location: Location, member: Member, name: str) -> Iterator[Stream]:
    try:
        place = data_place(location, member)
        head = _read_member(location, member, place, _HEADER)
        named = member.name.endswith(_PICKLE_ENDINGS) and is_opcode(head[:1])
        looks = named or head[:1] == b"\x80" or head.startswith(_NPY)
        # Of a member that begins with no opcode, where every reading ends, the first bytes suffice.
        data = _read_member(location, member, place, _LARGEST_MEMBER) if looks else head
    except (WherryError, zlib.error) as error:
        if name.endswith(_PICKLE_ENDINGS):
            yield Stream(name, 0, (), error.what if isinstance(error, WherryError) else str(error))
        return
    if data.startswith(_NPY):
        start = _after_header(data)
        if _OBJECTS.search(data[:start]):
            yield from streams(data, name, start)
    elif name.endswith(_PICKLE_ENDINGS) or data[:1] == b"\x80":
        yield from streams(data, name)


def _read_member(location: Location, member: Member, start: int, most: int) -> bytes:
    raw = location.read(start, start + min(member.size, most))
    return zlib.decompressobj(-15).decompress(raw, most) if member.method == _DEFLATED else raw


def _after_header(head: bytes) -> int:
    """Offset of the data in a `.npy` file."""
    wide = head[6:7] > b"\x01"
    return (12 if wide else 10) + int.from_bytes(head[8 : 12 if wide else 10], "little")
