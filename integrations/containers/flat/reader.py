"""Reads checkpoints whose tensors are stored raw in files: safetensors files and Hugging Face folders.

Opening a checkpoint checks that every byte exists, so no tensor is absent afterwards. A region is read with as few
bytes as possible. No file descriptor is kept open between calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.errors import NotFoundError
from wherry.formats.contents import Access, Contents, Extent, Stored
from wherry.integrations.containers.flat.pack import PACKED, packed_access

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec
    from wherry.storage.location import Location
    from wherry.store.store import Entry


class FilesReader(Contents):
    """A reader of the files of one folder, which opening found complete; no descriptor is kept open between calls.

    Attributes:
        location: the checkpoint: a folder, or one file.
        files: every file of the checkpoint, names relative to the location.
        companions: the names among them that hold no tensors.
    """

    __slots__ = ()

    location: Location
    files: tuple[Entry, ...]
    companions: frozenset[str] = frozenset()

    def companion(self, name: str) -> Location:
        """The location of a companion, which lies next to the files."""
        return companion_location(self.location, name, self.companions)

    def members(self) -> Iterable[Entry]:
        """The files."""
        return self.files


@dataclass(frozen=True, slots=True)
class FlatReader(FilesReader):
    """Reads tensors that are stored raw.

    Attributes:
        location: the checkpoint: a folder, or one file.
        places: the extents of each tensor's stored bytes, in order.
        files: every file of the checkpoint, names relative to the location.
        companions: the names among them that hold no tensors.
    """

    location: Location
    places: Mapping[KeyPath, tuple[Extent, ...]]
    files: tuple[Entry, ...]
    companions: frozenset[str] = frozenset()

    def access(self, spec: TensorSpec) -> Access:
        """Stored, but for four-bit floats, which are unpacked."""
        places = self.places[spec.path]
        return packed_access(spec, places) if spec.dtype == PACKED else Stored(places)


def companion_location(location: Location, name: str, companions: frozenset[str]) -> Location:
    """The location of a companion.

    Raises:
        NotFoundError: the checkpoint has no companion of this name.
    """
    if name not in companions:
        raise NotFoundError(
            f"companion file not found: {name!r}",
            uri=location.uri,
            cure="run `wherry inspect` on the checkpoint to list its companion files",
        )
    return location.member(name)
