"""Selection: a store in which only some files of a target are written.

Writers create every file of a target. Where a target is made by several processes, each writes only its own files: what
its writer puts into other files is left out. A plan selects no file, and learns the names and sizes of all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from wherry.storage.protocols import READ_ONLY
from wherry.storage.stores import LocalStore
from wherry.upload.staged_objects import StagedObjects

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.storage.location import Entry, Location, Store
    from wherry.upload.run import UploadRun


ROOT = "/target"  # of the target in a sketch


@runtime_checkable
class Selection(Protocol):
    """A store that selects files."""

    @property
    def region(self) -> tuple[int, int] | None:
        """Start and stop of the bytes of the one file that are written; None if files are written whole."""
        ...

    @property
    def guard(self) -> Callable[[], None]:
        """Called before bytes of a region are written; raises if somebody else has written them."""
        ...

    def takes(self, path: str, size: int) -> bool:
        """Whether a file is written.

        Args:
            path: of the file in the store.
            size: its bytes.
        """
        ...


@dataclass(frozen=True)
class SelectedLocal(LocalStore):
    """Local files, of which only those at some paths are written.

    Attributes:
        paths: of the files that are written.
        region, guard: see Selection.
    """

    paths: frozenset[str] = frozenset()
    region: tuple[int, int] | None = None
    guard: Callable[[], None] = lambda: None

    def takes(self, path: str, size: int) -> bool:  # noqa: ARG002  of the protocol
        """See Selection."""
        return path in self.paths

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """See Store; a small file that is not selected is left out."""
        if path in self.paths:
            super().put(path, data, create_only=create_only)


class SelectedObjects(StagedObjects):
    """The objects of one run, of which only those at some paths are written."""

    def __init__(
        self, base: Store, run: UploadRun, paths: frozenset[str], region: tuple[int, int] | None = None
    ) -> None:
        super().__init__(base, run)
        self._paths, self.region = paths, region

    def guard(self) -> None:
        """See Selection; a store keeps equal parts apart by itself."""

    def takes(self, path: str, size: int) -> bool:  # noqa: ARG002  of the protocol
        """See Selection."""
        return path in self._paths

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """See Store; a small file that is not selected is left out."""
        if path in self._paths:
            super().put(path, data, create_only=create_only)


@dataclass(frozen=True)
class FileSketch:
    """A store that holds nothing, and learns which files a writer would create.

    Attributes:
        sizes: path → bytes.
    """

    sizes: dict[str, int] = field(default_factory=dict[str, int])
    protocol = "sketch"
    capabilities = READ_ONLY
    region = None

    def guard(self) -> None:
        """See Selection."""

    def takes(self, path: str, size: int) -> bool:
        """See Selection."""
        self.sizes[path] = size
        return False

    def stat(self, path: str) -> Entry | None:  # noqa: ARG002  of the protocol
        """See Store: always None."""
        return None

    def entries(self, path: str) -> list[Entry]:
        """See Store."""
        raise FileNotFoundError(path)

    def read(self, path: str, start: int, stop: int) -> bytes:  # noqa: ARG002  of the protocol
        """See Store."""
        raise FileNotFoundError(path)

    def readinto(self, path: str, start: int, buffer: memoryview) -> int:  # noqa: ARG002  of the protocol
        """See Store."""
        raise FileNotFoundError(path)

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """See Store: nothing is kept."""


def is_selected(location: Location) -> bool:
    """Whether only some files of the target at a location are written, by one of several processes."""
    return isinstance(location.store, Selection)


def is_region(location: Location) -> bool:
    """Whether only a region of one file of the target at a location is written."""
    return (
        getattr(location.store, "region", None) is not None
    )  # asked for each tensor: no `isinstance` of a protocol


def name_at(path: str) -> str:
    """The name of a file, from its path in a sketch of the target."""
    return path[len(ROOT) :].strip("/") or "."
