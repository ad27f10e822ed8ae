"""One item of a `.distcp` file: a complete torch.save archive, for one chunk of a tensor or one other object.

The beginning and the end of an item are read once each; directory, pickle and local header are all in these two parts,
so that a checkpoint of a hundred thousand items opens in seconds. Small items that follow each other, with less than 64
bytes between them, are read together. Equal pickles are interpreted only once, since equal chunks have equal pickles;
the same goes for the archives around them, see `Alike`.
The archive's data begins at a multiple of 64 of the item, not of the file.
Source: torch/distributed/checkpoint/filesystem.py of torch 2.13, and its files.

Archives of the same kind: chunks of one dtype and shape, which differ only in their data and its checksums.

A checkpoint of a hundred thousand chunks has only a few dozen kinds. An archive is of a known kind if it has the same
length, the same bytes before its data (pickle, byte order, local headers), and the same directory except for the CRC-32
of the members from the data on: then its tensor has the same offset as in the first archive of that kind. All other
archives are read member by member.

Items with a stream transform: `stream.zstd/1`, the only one in torch (2.7 and later).

The transform compresses the item as a whole, so reading at an offset requires decompressing all bytes before it. An
item is read as a store: reads near its two ends come from memory after one pass, all others decompress piece by piece
up to their end. The metadata determines the largest size of an item; an item that grows beyond it is hostile. Source:
torch/distributed/checkpoint/_extension.py of torch 2.13.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from wherry.core.lazy_dataclass import dataclass
from wherry.errors import CorruptError, HostileError, IncompleteError, NotACheckpointError, NotFoundError
from wherry.formats.format import Extent
from wherry.integrations.containers.flat.strides import PlacedTensor
from wherry.integrations.containers.torch.archive import Archive, read_object
from wherry.integrations.containers.torch.values import PickleTree
from wherry.integrations.containers.zip.read import Directory, read_directory
from wherry.integrations.containers.zip.write import ALIGNMENT
from wherry.store.location import Location
from wherry.store.store import READ_ONLY, Entry, Store, StoreOver

if TYPE_CHECKING:
    from wherry.integrations.formats.dcp.metadata import StoredItem


# A directory entry: size of its fixed part, and the offsets in it of the CRC and of the lengths of name, extra field
# and comment.
_CENTRAL_SIZE = 46
_CRC_AT, _CRC_SIZE = 16, 4
_LENGTHS, _LENGTHS_AT = struct.Struct("<3H"), 28
_MOST_KINDS = 10_000
_MOST_OF_A_LENGTH = 16


@dataclass(frozen=True, slots=True)
class _Kind:
    """Common parts of the archives of one kind.

    Attributes:
        before: the bytes before the tensor's data.
        pieces: the directory and the bytes after it, without the CRCs: offset from the archive's end, and bytes.
        crc: offset of the CRC of the tensor's storage from the archive's end.
        placed: the tensor of the first such archive; `start` counts from the archive's beginning.
        raw: whether the tensor's bytes are stored raw, and are the whole storage.
    """

    before: bytes
    pieces: tuple[tuple[int, bytes], ...]
    crc: int
    placed: PlacedTensor
    raw: bool

    def ends(self, data: bytes, stop: int) -> bool:
        """Whether the bytes before an offset are the last ones of an archive of this kind."""
        for at, piece in self.pieces:  # noqa: SIM110  a generator takes twice as long, for every tensor
            if not data.startswith(piece, stop - at):
                return False
        return True


class Alike:
    """The kinds of archives seen so far."""

    def __init__(self) -> None:
        self._kinds: dict[int, tuple[_Kind, ...]] = {}

    def find(self, stored: StoredItem, head: bytes, tail: bytes, file: Location) -> PlacedTensor | None:
        """The tensor of an item of a known kind; None if its kind is not known.

        Args:
            stored: location of the item.
            head: its first bytes.
            tail: its last bytes.
            file: its file.
        """
        for kind in self._kinds.get(stored.length, ()):
            if head.startswith(kind.before) and kind.ends(tail, len(tail)):
                like, crc = kind.placed, len(tail) - kind.crc
                return PlacedTensor(
                    file, stored.offset + like.start, like.length, like.offset, like.shape, like.strides,
                    like.dtype, like.big_endian, int.from_bytes(tail[crc : crc + 4], "little"),
                )  # fmt: skip
        return None

    def find_raw(self, data: bytes, start: int, length: int) -> tuple[_Kind, int] | None:
        """The kind of an archive whose tensor is raw, and the CRC of that; None if it is not known.

        Args:
            data: bytes that have all of the archive.
            start: offset of the archive in them.
            length: of the archive.
        """
        stop = start + length
        for kind in self._kinds.get(length, ()):
            if kind.raw and data.startswith(kind.before, start) and kind.ends(data, stop):
                return kind, int.from_bytes(data[stop - kind.crc : stop - kind.crc + _CRC_SIZE], "little")
        return None

    def learn(
        self, stored: StoredItem, head: bytes, tail: bytes, placed: PlacedTensor, directory: Directory
    ) -> None:
        """Remember the kind of an item that was read member by member.

        Args:
            stored: location of the item.
            head: its first bytes.
            tail: its last bytes.
            placed: its tensor, in its file.
            directory: its members, in the order of the archive's directory.
        """
        start, others = placed.start - stored.offset, self._kinds.get(stored.length, ())
        entries = _entries(tail, stored.offset + stored.length - directory.start, len(directory.members))
        inside = 0 < start <= len(head) and entries is not None and placed.crc != 0
        if not inside or entries is None or len(self._kinds) > _MOST_KINDS or len(others) > _MOST_OF_A_LENGTH:
            return
        headers = [member.header for member in directory.members.values()]
        index = headers.index(max(header for header in headers if header < placed.start))
        crc, like = len(tail) - entries[index] - _CRC_AT, replace(placed, start=start)
        kind = _Kind(head[:start], _without(tail, entries, index), crc, like, like.raw and like.whole)
        self._kinds[stored.length] = (*others, kind)


def _entries(tail: bytes, length: int, count: int) -> list[int] | None:
    """Offset of each directory entry in the last bytes of an archive; None if the directory is not complete there.

    Args:
        tail: the last bytes.
        length: bytes from the directory's beginning to the archive's end.
        count: number of entries.
    """
    at, found = len(tail) - length, list[int]()
    if at < 0:
        return None
    for _ in range(count):
        found.append(at)
        at += _CENTRAL_SIZE + sum(_LENGTHS.unpack_from(tail, at + _LENGTHS_AT))
    return found


def _without(tail: bytes, entries: list[int], first: int) -> tuple[tuple[int, bytes], ...]:
    """The directory and the bytes after it, split at the CRC of each of these entries."""
    pieces: list[tuple[int, bytes]] = []
    begin = entries[0]
    for entry in entries[first:]:
        crc = entry + _CRC_AT
        pieces.append((len(tail) - begin, tail[begin:crc]))
        begin = crc + _CRC_SIZE
    return (*pieces, (len(tail) - begin, tail[begin:]))


HELD = 12 << 20  # memory for decompression: zstd's window at its usual levels, and a few pieces
_PIECE = 1 << 20
_END = 1 << 12


class InflatedItem(Store):
    """A store that holds one transformed item."""

    def __init__(self, file: Location, stored: StoredItem, most: int) -> None:
        """Decompress once, to get the two ends.

        Args:
            file: the file with the item.
            stored: location of the item in the file.
            most: largest plausible size after decompression.

        Raises:
            HostileError: the item exceeds `most`.
            CorruptError: the item cannot be decompressed.
        """
        self.protocol = file.store.protocol
        self.capabilities = READ_ONLY
        self._file, self._stored = file, stored
        self._head, self._tail, self.size = b"", b"", 0
        for piece in self.pieces():
            self.size += len(piece)
            if self.size > most:
                raise HostileError(
                    f"decompressed item of {stored.length} bytes exceeds the limit of {most} bytes",
                    uri=file.uri,
                    cure="do not use this checkpoint",
                )
            if len(self._head) < _END:
                self._head += piece[: _END - len(self._head)]
            self._tail = (self._tail + piece[-_END:])[-_END:]

    def pieces(self) -> Iterator[bytes]:
        """The decompressed item from its beginning.

        Raises:
            CorruptError: the item cannot be decompressed, or is truncated.
        """
        from zstandard import ZstdError  # loading it takes a tenth of the time of `wherry --help`

        stream = self._compressed_bytes()
        for _ in self._stored.transforms:
            stream = _unzstd(stream)
        try:
            yield from stream
        except ZstdError as error:
            raise CorruptError(
                f"cannot decompress an item: {error}", uri=self._file.uri, cure="restore the file"
            ) from error

    def stat(self, path: str) -> Entry | None:
        """See Store."""
        return self._file.store.stat(path)

    def entries(self, path: str) -> list[Entry]:
        """See Store."""
        return self._file.store.entries(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store; offsets are those of the decompressed item."""
        del path
        stop = min(stop, self.size)
        for at, held in ((0, self._head), (self.size - len(self._tail), self._tail)):
            if at <= start and stop <= at + len(held):
                return held[start - at : stop - at]
        return b"".join(self.between(start, stop))

    def between(self, start: int, stop: int) -> Iterator[bytes]:
        """The decompressed bytes [start, stop), piece by piece; fewer if the item ends earlier."""
        position = 0
        for piece in self.pieces():
            if position >= stop:
                return
            if position + len(piece) > start:
                yield piece[max(start - position, 0) : stop - position]
            position += len(piece)

    def _compressed_bytes(self) -> Iterator[bytes]:
        position, end = self._stored.offset, self._stored.offset + self._stored.length
        while position < end:
            piece = self._file.read(position, min(position + _PIECE, end))
            if not piece:
                raise CorruptError(
                    "the file is truncated inside an item", uri=self._file.uri, cure="restore the file"
                )
            yield piece
            position += len(piece)


def _unzstd(source: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress consecutive zstd frames in pieces."""
    from zstandard import ZstdDecompressor

    reader = ZstdDecompressor().stream_reader(_PieceFile(source), read_across_frames=True)  # pyright: ignore[reportArgumentType]
    while piece := reader.read(_PIECE):
        yield piece


class _PieceFile:
    """A file over pieces, with the one method that zstandard needs."""

    def __init__(self, source: Iterator[bytes]) -> None:
        self._source = source
        self._left = b""

    def read(self, size: int) -> bytes:
        """At most `size` bytes; empty at the end."""
        if not self._left:
            self._left = next(self._source, b"")
        piece, self._left = self._left[:size], self._left[size:]
        return piece


HEAD, TAIL = 1 << 10, 1 << 11
_REMEMBERED = 10_000
_SMALL, _AHEAD = 1 << 14, 1 << 18
_OVERHEAD = 1 << 20  # most bytes of an archive besides its tensor
_LARGEST_OBJECT = 1 << 26  # decompressed


class _Block(NamedTuple):
    file: str
    start: int
    data: bytes


class _Window(StoreOver):
    """A store that serves reads inside the two ends of an item from memory, and all others from the file."""

    def __init__(self, file: Location, stored: StoredItem, entry: Entry, head: bytes, tail: bytes) -> None:
        super().__init__(file.store)
        self._entry = entry
        self._head_at, self._head = stored.offset, head
        self._tail_at, self._tail = stored.offset + stored.length - len(tail), tail

    def stat(self, path: str) -> Entry | None:
        """See Store."""
        del path
        return self._entry

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store."""
        for at, held in ((self._tail_at, self._tail), (self._head_at, self._head)):
            if at <= start and stop <= at + len(held):
                return held[start - at : stop - at]
        return self.inner.read(path, start, stop)


@dataclass(frozen=True, slots=True)
class PlacedItems:
    """Parts of tensors that were located when their checkpoint was opened, in place of `Items`.

    Attributes:
        placed: the part that each item stands for.
    """

    placed: Mapping[StoredItem, PlacedTensor]

    def tensor(self, stored: StoredItem, name: str, nbytes: int) -> PlacedTensor:
        """See Items."""
        del name, nbytes
        return self.placed[stored]

    def there(self, stored: StoredItem) -> bool:
        """See Items."""
        return stored in self.placed


class Items:
    """The items of one checkpoint."""

    def __init__(self, folder: Location, files: dict[str, Entry]) -> None:
        """Take the folder and its existing `.distcp` files."""
        self._folder = folder
        self._files = files
        self._places = {name: folder.member(name) for name in files}
        self._known: dict[bytes, PickleTree] = {}
        self._alike = Alike()
        self._block = _Block("", 0, b"")
        self._end = ("", 0)

    def read(self, stored: StoredItem, name: str, most: int = _LARGEST_OBJECT) -> Archive:
        """Interpret an item.

        Args:
            stored: location of the item.
            name: name of the tensor or object, for errors.
            most: largest size in bytes after decompression.

        Raises:
            IncompleteError: its file is missing.
            CorruptError: the item is not an archive, or is inconsistent.
            HostileError, UnsupportedError: as `read_object`; or the item exceeds its size limit.
        """
        file = self._file(stored, name)
        if stored.transforms:
            inside = InflatedItem(file, stored, most)
            return self._interpret(replace(file, store=inside), 0, inside.size, name)[1]
        return self._in_window(file, stored, *self._ends(file, stored), name)[1]

    def tensor(self, stored: StoredItem, name: str, nbytes: int) -> PlacedTensor:
        """The tensor in a chunk's item.

        Args:
            stored: location of the item.
            name: name of the tensor, for errors.
            nbytes: size of the chunk according to the metadata.

        Raises:
            CorruptError: the item is not a single tensor; and as `read`.
        """
        file = self._file(stored, name)
        if stored.transforms:
            return self.at_home(self._only(self.read(stored, name, nbytes + _OVERHEAD), name), stored)
        head, tail = self._ends(file, stored)
        known = self._alike.find(stored, head, tail, file)
        if known is not None:
            return known
        directory, archive = self._in_window(file, stored, head, tail, name)
        placed = self.at_home(self._only(archive, name), stored)
        self._alike.learn(stored, head, tail, placed, directory)
        return placed

    def small_extent(self, stored: StoredItem, shape: tuple[int, ...], dtype: str) -> Extent | None:
        """Where the bytes of a small chunk lie whose archive is of a known kind; None for every other, see `tensor`."""
        file = self._places.get(stored.file)
        if file is None or stored.transforms or stored.length > _SMALL:
            return None
        data, start = self._small(file, stored)
        found = self._alike.find_raw(data, start, stored.length)
        if found is None or found[0].placed.shape != shape or found[0].placed.dtype != dtype:
            return None
        placed = found[0].placed
        return Extent(file, stored.offset + placed.start, placed.length, found[1] or None)

    def at_home(self, placed: PlacedTensor, stored: StoredItem) -> PlacedTensor:
        """Translate a tensor that was read through a window into the offsets of its file."""
        if stored.transforms:
            return replace(placed, decoded=True)
        return replace(placed, file=self._places[stored.file])

    def there(self, stored: StoredItem) -> bool:
        """Whether the file of an item exists."""
        return stored.file in self._files

    def _file(self, stored: StoredItem, name: str) -> Location:
        file = self._places.get(stored.file)
        if file is None:
            raise IncompleteError(
                f"file not found: {stored.file}", uri=self._folder.uri, path=name, cure="restore the file"
            )
        return file

    def _in_window(
        self, file: Location, stored: StoredItem, head: bytes, tail: bytes, name: str
    ) -> tuple[Directory, Archive]:
        window = _Window(file, stored, self._files[stored.file], head, tail)
        stop = stored.offset + stored.length
        return self._interpret(replace(file, store=window), stored.offset, stop, name)

    def _interpret(self, window: Location, start: int, stop: int, name: str) -> tuple[Directory, Archive]:
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        try:
            directory = read_directory(window, start, stop, TAIL)
            return directory, read_object(window, directory, self._known)
        except (CorruptError, NotFoundError) as error:
            error.path = error.path or name
            raise
        except NotACheckpointError as error:
            raise CorruptError(
                f"invalid item: not a torch archive: {error.what}", uri=window.uri, path=name
            ) from error

    def _only(self, archive: Archive, name: str) -> PlacedTensor:
        if set(archive.placed) != {()}:
            raise CorruptError(
                "invalid item: expected a single tensor",
                uri=self._folder.uri,
                path=name,
                cure="restore the file",
            )
        return archive.placed[()]

    def _ends(self, file: Location, stored: StoredItem) -> tuple[bytes, bytes]:
        """The first and the last bytes of an item."""
        start, stop = stored.offset, stored.offset + stored.length
        if stored.length > _SMALL:
            return file.read(start, start + HEAD), file.read(stop - TAIL, stop)
        data, start = self._small(file, stored)
        whole = data[start : start + stored.length]
        return whole[:HEAD], whole[-TAIL:]

    def _small(self, file: Location, stored: StoredItem) -> tuple[bytes, int]:
        """Read a small item whole; if items are read in file order, the next ones are read along with it.

        Returns:
            The bytes that were read, and the offset of the item in them.
        """
        block = self._block  # another thread may replace it meanwhile
        start = stored.offset - block.start
        if block.file != stored.file or start < 0 or start + stored.length > len(block.data):
            file_before, end = self._end
            follows = file_before == stored.file and 0 <= stored.offset - end < ALIGNMENT
            ahead = _AHEAD if follows else stored.length
            block = _Block(stored.file, stored.offset, file.read(stored.offset, stored.offset + ahead))
            self._block, start = block, 0
        self._end = (stored.file, stored.offset + stored.length)
        return block.data, start
