"""Selection: a store in which only some files of a target are written.

Writers create every file of a target. Where a target is made by several processes, each writes only its own files: what
its writer puts into other files is left out. A plan selects no file, and learns the names and sizes of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.store.protocols import READ_ONLY
from wherry.store.store import Store, StoreOver

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.storage.location import Location

ROOT = "/target"  # of the target in a sketch


class Selection(StoreOver):
    """A store that selects files: local ones, or the staged objects of a run.

    Attributes:
        paths: of the files that are written.
        region: start and stop of the bytes of the one file that are written; None if files are written whole.
        guard: called before bytes of a region are written; raises if somebody else has written them. Where a store
            keeps equal parts apart by itself, it does nothing.
    """

    def __init__(
        self,
        inner: Store,
        paths: frozenset[str] = frozenset(),
        region: tuple[int, int] | None = None,
        guard: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(inner)
        self.paths, self.region, self.guard = paths, region, guard

    def takes(self, path: str, size: int) -> bool:  # noqa: ARG002  a sketch learns it
        """Whether a file is written.

        Args:
            path: of the file in the store.
            size: its bytes.
        """
        return path in self.paths


class FileSketch(Selection):
    """A store that holds nothing, and learns which files a writer would create.

    Attributes:
        sizes: path → bytes.
    """

    def __init__(self) -> None:
        super().__init__(_EmptyStore())
        self.sizes: dict[str, int] = {}

    def takes(self, path: str, size: int) -> bool:
        """See Selection."""
        self.sizes[path] = size
        return False


class _EmptyStore(Store):
    protocol, capabilities = "sketch", READ_ONLY


def is_selected(location: Location) -> bool:
    """Whether only some files of the target at a location are written, by one of several processes."""
    return isinstance(location.store, Selection)


def name_at(path: str) -> str:
    """The name of a file, from its path in a sketch of the target."""
    return path[len(ROOT) :].strip("/") or "."
