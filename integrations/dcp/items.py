"""One item of a `.distcp` file: a complete torch.save archive, for one chunk of a tensor or one other object.

Its end is read once and its beginning once; directory, pickle and local header all lie in these two, so that a
checkpoint of a hundred thousand items opens in seconds. Pickles of equal bytes are interpreted once: those of equal
chunks are equal. The archive's data begins at a multiple of 64 of the item, not of the file.
Source: torch/distributed/checkpoint/filesystem.py of torch 2.13, and its files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.errors import CorruptError, IncompleteError, NotACheckpointError, NotFoundError
from wherry.integrations.containers.stored_zip import read_directory
from wherry.integrations.containers.torch_zip import Archive, PlacedTensor, read_object
from wherry.location import Entry, Location

if TYPE_CHECKING:
    from wherry.integrations.containers.torch_tree import Tree
    from wherry.integrations.dcp.metadata import Stored
    from wherry.location import Store

_HEAD, _TAIL = 1 << 10, 1 << 11
_REMEMBERED = 10_000


class _Window:
    """A store that answers reads inside the two ends of an item from memory, all others from the file."""

    def __init__(self, file: Location, stored: Stored, entry: Entry) -> None:
        self.protocol = file.store.protocol
        self.capabilities = file.store.capabilities
        self._store: Store = file.store
        self._entry = entry
        self._head_at, stop = stored.offset, stored.offset + stored.length
        self._head = file.read(stored.offset, min(stored.offset + _HEAD, stop))
        self._tail_at = max(stop - _TAIL, stored.offset)
        self._tail = file.read(self._tail_at, stop)

    def stat(self, path: str) -> Entry | None:
        """See Store."""
        del path
        return self._entry

    def entries(self, path: str) -> list[Entry]:
        """See Store."""
        return self._store.entries(path)

    def read(self, path: str, start: int, stop: int | None) -> bytes:
        """See Store."""
        for at, held in ((self._tail_at, self._tail), (self._head_at, self._head)):
            if at <= start and stop is not None and stop <= at + len(held):
                return held[start - at : stop - at]
        return self._store.read(path, start, stop)

    def readinto(self, path: str, start: int, buffer: memoryview) -> int:
        """See Store."""
        return self._store.readinto(path, start, buffer)

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """See Store."""
        self._store.put(path, data, create_only=create_only)


class Items:
    """The items of one checkpoint."""

    def __init__(self, folder: Location, files: dict[str, Entry]) -> None:
        """Take the folder and those of its `.distcp` files that are there."""
        self._folder = folder
        self._files = files
        self._known: dict[bytes, Tree] = {}

    def read(self, stored: Stored, name: str) -> Archive:
        """Interpret an item.

        Args:
            stored: where it lies.
            name: of the tensor or object, for errors.

        Raises:
            IncompleteError: its file is not there.
            CorruptError: it is no archive, or contradicts itself.
            HostileError, UnsupportedError: as `torch_zip.read_object`.
        """
        file = self._folder.member(stored.file)
        entry = self._files.get(stored.file)
        if entry is None:
            raise IncompleteError(
                f"{stored.file} is not there", uri=self._folder.uri, path=name, cure="restore the file"
            )
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        try:
            window = Location(_Window(file, stored, entry), file.path)
            directory = read_directory(window, stored.offset, stored.offset + stored.length, _TAIL)
            return read_object(window, directory, self._known)
        except (CorruptError, NotFoundError) as error:
            error.path = error.path or name
            raise
        except NotACheckpointError as error:
            raise CorruptError(
                f"its item is no archive of torch: {error.what}", uri=file.uri, path=name
            ) from error

    def tensor(self, stored: Stored, name: str) -> PlacedTensor:
        """A chunk's item.

        Raises:
            CorruptError: it is not one tensor; and as `read`.
        """
        archive = self.read(stored, name)
        if set(archive.placed) != {()}:
            raise CorruptError(
                "its item is not one tensor", uri=self._folder.uri, path=name, cure="restore it"
            )
        return self.at_home(archive.placed[()], stored)

    def at_home(self, placed: PlacedTensor, stored: Stored) -> PlacedTensor:
        """A tensor of an archive that was read through a window, as one of its file."""
        return replace(placed, file=self._folder.member(stored.file))

    def there(self, stored: Stored) -> bool:
        """Whether an item's file is there."""
        return stored.file in self._files
