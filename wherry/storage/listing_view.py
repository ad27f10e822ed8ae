"""ListingView: a view of a store for a walk over many folders, with few requests and in bounded memory.

A listing of each folder is a request for each folder. The view lists the objects of many folders at once, in the order
of their keys, and so knows the folders that come next; a folder of very many objects is listed by itself. Folders are
forgotten once the walk has left them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.storage.location import Location
from wherry.storage.object_view import ObjectView, has_view
from wherry.store.store import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from wherry.store.store import Store

_MOST_SKIPPED = 64


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
