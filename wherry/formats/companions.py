"""Companion files: hashed and copied in pieces, so that a file of any size takes 8 MiB of memory, or ignored by a rule.

A companion may hold weights of its own, as a module of sentence-transformers does: it may stay behind only on request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import field, replace
from itertools import chain
from typing import TYPE_CHECKING

from wherry.core.account import COMPANIONS, OTHERS, IgnoredEntry, ignored_file
from wherry.core.lazy_dataclass import dataclass
from wherry.errors import MismatchError
from wherry.formats.file_names import is_weights
from wherry.formats.format import Contents, ContentsOver
from wherry.store.local_store import LocalStore, make_folder
from wherry.store.location import Location
from wherry.store.store import Entry
from wherry.target.files import open_files

if TYPE_CHECKING:
    from wherry.core.manifest import Companion
    from wherry.formats.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class MemoryFiles(LocalStore):
    """Files that exist in memory only, until they are copied to the target."""

    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    def stat(self, path: str) -> Entry | None:
        """See Store."""
        return Entry(path, len(self.files[path]), is_dir=False) if path in self.files else None

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store."""
        return self.files[path][start:stop]


class CompanionsReader(ContentsOver):
    """Other contents with new companion files: tensors through the reader below, and these files from memory."""

    def __init__(self, reader: Contents, files: Mapping[str, bytes]) -> None:
        """Nothing is read yet.

        Args:
            reader: the reader below; it is closed together with this one.
            files: companion files that differ from those below, by name.
        """
        self.base, self._files = reader, files

    def companion(self, name: str) -> Location:
        """The location of a companion: in memory, or where the reader below has it."""
        if name in self._files:
            return Location(MemoryFiles(files=self._files), name)
        return super().companion(name)


def ignored_companion(name: str, reason: str) -> IgnoredEntry:
    """The entry of a companion that a target does not get."""
    if is_weights(name):
        return ignored_file(name, OTHERS, "weights of a module outside the model", reason, weights=True)
    return ignored_file(name, COMPANIONS, "companion", reason)


def digest_companion(checkpoint: Checkpoint, companion: Companion) -> Companion:
    """A companion with the digest of its bytes.

    Raises:
        NotFoundError, HostileError, StorageError: it cannot be read.
    """
    return replace(companion, sha256=file_digest(checkpoint.reader.companion(companion.name)))


def file_digest(place: Location) -> str:
    """The SHA-256 of a companion file.

    Raises:
        NotFoundError, HostileError, StorageError: it cannot be read.
    """
    digest = hashlib.sha256()
    for piece in place.pieces():
        digest.update(piece)
    return digest.hexdigest()


def copy_companion(checkpoint: Checkpoint, companion: Companion, target: Location) -> Companion:
    """Copy a companion durably to a local file, or to the staged objects of a run.

    Args:
        checkpoint: where it is read.
        companion: the companion as recorded in the plan.
        target: the file; its folder is created.

    Returns:
        The companion with its digest.

    Raises:
        MismatchError: its size differs from the size in the plan.
        NotFoundError, HostileError, StorageError: it cannot be read or written.
    """
    source, digest, length = checkpoint.reader.companion(companion.name), hashlib.sha256(), 0
    pieces = source.pieces()
    first = next(pieces)  # a sparse file that is too large is refused before its space is allocated
    make_folder(target.parent)
    with closing(open_files(target.parent, {target.name: companion.size})) as files:
        for piece in chain([first], pieces):
            digest.update(piece)
            files.write(target.name, length, piece)
            length += len(piece)
        files.sync()
    if length != companion.size:
        raise MismatchError(
            f"a companion file changed during the conversion: expected {companion.size} bytes, got {length}",
            uri=source.uri,
        )
    return replace(companion, sha256=digest.hexdigest())
