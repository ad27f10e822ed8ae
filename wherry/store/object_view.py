"""Views of remote stores, for one command each: nothing is requested twice; no object changes between two reads.

Detecting and opening a checkpoint looks at the same few names and headers again and again. On local files that costs
nothing; on a store each look is a request. In an `ObjectView` each folder is listed once, each object is looked up
once, and small reads are served from blocks that were read before. A read names the state of the object in which it was
first seen, its generation or its ETag, so that a replaced object is an error and never a mixture of two states.

A `ListingView` is for a walk over many folders, with few requests and in bounded memory. It lists the objects of many
folders at once, in the order of their keys, and so knows the folders that come next; a folder of very many objects is
listed by itself. Folders are forgotten once the walk has left them.

A view lives as long as one command needs its source. What must be current is requested from the store itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace

from wherry.store.local_store import crowd_refusal
from wherry.store.location import Location
from wherry.store.store import NAMED_STATES, Entry, Store, StoreOver

BLOCK = 64 << 10  # a smaller read reads so much, and keeps it
_WHOLE = 4 * BLOCK  # a smaller object is read at once
_MOST_BLOCKS = 64
_MOST_SKIPPED = 64


class ObjectView(StoreOver):
    """A remote store whose answers are kept; used from several threads."""

    def __init__(self, inner: Store) -> None:
        """A view of a store; nothing is requested yet."""
        super().__init__(inner)
        self._pins = inner.capabilities.version in NAMED_STATES
        self._lock = threading.Lock()
        self._entries: dict[str, Entry | None] = {}
        self._folders: dict[str, dict[str, Entry]] = {}
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def first_seen(self, path: str) -> Entry | None:
        """See Store; None if reads name no states."""
        return self._look_up(path)[1] if self._pins else None

    def stat(self, path: str) -> Entry | None:
        """See Store; the state that was seen first."""
        known, found = self._look_up(path)
        if not known:
            found = self.inner.stat(path)
            with self._lock:
                found = self._entries.setdefault(path, found)
        return found

    def entries(self, path: str) -> list[Entry]:
        """See Store; the state that was seen first.

        Raises:
            CrowdedFolderError: the folder has more than `MOST_ENTRIES` entries.
        """
        key = path.rstrip("/")
        if key not in self._folders:
            known, found = self._look_up(path)
            if known and (found is None or not found.is_dir):
                raise FileNotFoundError(path)
            listed = {entry.name: entry for entry in self.inner.entries(path)}
            if (error := crowd_refusal(len(listed), f"{self.protocol}://{path}")) is not None:
                listed.clear()  # the error keeps this frame
                raise error
            with self._lock:
                self._folders.setdefault(key, listed)
        return list(self._folders[key].values())

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store; of the state that was seen first.

        Raises:
            MismatchError: the object was replaced or removed since.
        """
        entry = self.stat(path) if self._pins else self._look_up(path)[1]
        if entry is None or entry.is_dir or entry.size < 0:
            return self.inner.read(path, start, stop)
        stop = min(stop, entry.size)
        if start >= stop:
            return b""
        if stop - start > BLOCK and entry.size > _WHOLE:
            return self._read(path, start, stop, entry)
        # All from one block, or from a few that follow each other.
        step = _WHOLE if entry.size <= _WHOLE else BLOCK
        first = start // step * step
        parts = [self._block(path, at, min(at + step, entry.size), entry) for at in range(first, stop, step)]
        return b"".join(parts)[start - first : stop - first]

    def readinto(self, path: str, start: int, buffer: memoryview, mark: str = "") -> int:
        """See Store; the mover's reads are large, and nothing of them is kept."""
        entry = self.stat(path) if self._pins else None
        if entry is None or not entry.mark:
            return self.inner.readinto(path, start, buffer, mark)
        return self.inner.readinto(path, start, buffer[: max(entry.size - start, 0)], entry.mark)

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """See Store; everything that is known is forgotten."""
        self.inner.put(path, data, create_only=create_only)
        with self._lock:
            for known in (self._entries, self._folders, self._blocks):
                known.clear()

    def close(self) -> None:
        """Forget the blocks."""
        with self._lock:
            self._blocks.clear()

    def _folder(self, path: str) -> dict[str, Entry] | None:
        """The children of a folder by name; None if it was not listed."""
        return self._folders.get(path)

    def _look_up(self, path: str) -> tuple[bool, Entry | None]:
        """Whether an earlier request, or the listing of a folder above, has shown what is at a path; and what it is."""
        path = path.rstrip("/")
        if path in self._entries:
            return True, self._entries[path]
        head, _, name = path.rpartition("/")
        while head:
            folder = self._folder(head)
            if folder is not None:
                found = folder.get(name)
                below = f"{head}/{name}" != path
                if not below or found is None or not found.is_dir:
                    return True, None if below else found
                return False, None
            head, _, name = head.rpartition("/")
        return False, None

    def _read(self, path: str, start: int, stop: int, entry: Entry) -> bytes:
        if not (self._pins and entry.mark):
            return self.inner.read(path, start, stop)
        data = memoryview(bytearray(stop - start))
        return bytes(data[: self.inner.readinto(path, start, data, entry.mark)])

    def _block(self, path: str, start: int, stop: int, entry: Entry) -> bytes:
        key = (path, start)
        with self._lock:
            held = self._blocks.get(key)
            if held is not None:
                self._blocks.move_to_end(key)
                return held
        data = self._read(path, start, stop, entry)
        with self._lock:
            self._blocks[key] = data
            while len(self._blocks) > _MOST_BLOCKS:
                self._blocks.popitem(last=False)
        return data


def has_view(store: Store) -> bool:
    """Whether the listings of a store state as much as a request for each object; plain web servers' do not."""
    return not store.capabilities.local and bool(store.capabilities.version)


def view_of_store(location: Location) -> Location:
    """A location through a view of its store; unchanged if it has one, or if the store allows none (`has_view`)."""
    store = location.store
    if isinstance(store, ObjectView) or not has_view(store):
        return location
    return Location(ObjectView(store), location.path, location.opaque)


class ListingView(ObjectView):
    """A remote store whose folders are visited in the order of their names; for one thread."""

    def __init__(self, inner: Store) -> None:
        """A view of a store; nothing is requested yet."""
        super().__init__(inner)
        self._ahead: dict[str, dict[str, Entry]] = {}
        self._misses = self._skipped = 0

    def entries(self, path: str) -> list[Entry]:
        """See Store; the folders that the walk has left are forgotten."""
        key = path.rstrip("/")
        for known in (self._folders, self._entries):
            for left in [one for one in known if not f"{key}/".startswith(f"{one}/")]:
                del known[left]
        if key not in self._folders and key not in self._ahead:
            self._look_ahead(key)
        if key in self._ahead:
            self._folders[key] = self._ahead.pop(key)
        return super().entries(path)

    def _folder(self, path: str) -> dict[str, Entry] | None:
        return self._ahead.get(path, self._folders.get(path))

    def _look_ahead(self, key: str) -> None:
        """List the objects from a folder on, in the folder above it, and keep the folders that are complete."""
        parent = key.rpartition("/")[0]
        if not self.inner.capabilities.pages or parent not in self._folders:
            return
        if self._skipped > 0:
            self._skipped -= 1
            return
        rows, more = self.inner.page(parent, f"{key}/")
        self._ahead = _folders(rows, parent)
        last = rows[-1][0] if more and rows else ""
        for folder in [one for one in self._ahead if last.startswith(f"{one}/")]:
            del self._ahead[folder]  # there is more of it
        covered = key in self._ahead
        self._misses = 0 if covered else self._misses + 1
        self._skipped = 0 if covered else min(2**self._misses, _MOST_SKIPPED)


def _folders(rows: Iterable[tuple[str, Entry]], parent: str) -> dict[str, dict[str, Entry]]:
    """The folders of objects: path → its children by name; without the folder above all of them."""
    found: dict[str, dict[str, Entry]] = {}
    for path, entry in rows:
        folder, _, name = path.rpartition("/")
        if name:  # else it only marks a folder
            found.setdefault(folder, {})[name] = entry
        while folder != parent:
            above, _, name = folder.rpartition("/")
            found.setdefault(folder, {})
            found.setdefault(above, {}).setdefault(name, Entry(name, 0, is_dir=True))
            folder = above
    found.pop(parent, None)
    return {folder: dict(sorted(children.items())) for folder, children in found.items()}


def view_for_walk(location: Location) -> Location:
    """A location through a view for a walk; as it is, if no view can be had."""
    store = location.store
    if not has_view(store):
        return location
    inner = store.inner if isinstance(store, ObjectView) else store
    return Location(ListingView(inner), location.path, location.opaque)


def objects_below(folder: Location) -> Iterator[Entry]:
    """Every object below a folder, with its path relative to it; a page of keys is listed when it is needed.

    Raises:
        StorageError: the storage failed.
    """
    store = folder.store
    if not store.capabilities.pages:
        yield from folder.walk()
        return
    inside = f"{folder.path.rstrip('/')}/"
    last, more = inside, True
    while more:
        rows, more = store.page(folder.path, last)
        for path, entry in rows:
            if path != last and not path.endswith(
                "/"
            ):  # the first of a page was the last one; others mark folders
                yield replace(entry, name=path[len(inside) :])
        last, more = (rows[-1][0], more) if rows else (last, False)
