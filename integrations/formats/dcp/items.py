"""One item of a `.distcp` file: a complete torch.save archive, for one chunk of a tensor or one other object.

The beginning and the end of an item are read once each; directory, pickle and local header are all in these two parts,
so that a checkpoint of a hundred thousand items opens in seconds. Small items that follow each other, with less than 64
bytes between them, are read together. Equal pickles are interpreted only once, since equal chunks have equal pickles;
the same goes for the archives around them, see `alike.py`.
The archive's data begins at a multiple of 64 of the item, not of the file.
Source: torch/distributed/checkpoint/filesystem.py of torch 2.13, and its files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from wherry.errors import CorruptError, IncompleteError, NotACheckpointError, NotFoundError
from wherry.formats.contents import Extent
from wherry.integrations.containers.torch.archive import Archive, read_object
from wherry.integrations.containers.zip.read import read_directory
from wherry.integrations.containers.zip.write import ALIGNMENT
from wherry.integrations.formats.dcp.alike import Alike
from wherry.integrations.formats.dcp.transforms import InflatedItem
from wherry.store.store import StoreOver

if TYPE_CHECKING:
    from wherry.integrations.containers.flat.strides import PlacedTensor
    from wherry.integrations.containers.torch.values import PickleTree
    from wherry.integrations.containers.zip.read import Directory
    from wherry.integrations.formats.dcp.metadata import StoredItem
    from wherry.storage.location import Location
    from wherry.store.store import Entry

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
