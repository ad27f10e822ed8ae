"""uploads: objects that are uploaded in parts, and objects that are replaced only in a known state.

A store of objects has no ranged writes and no rename. What it has instead is declared here: parts that arrive in any
order and become one object in one step, which can refuse to replace an existing object, and puts and removals that
apply only to the state of an object that the caller has seen. Every object that is created this way carries the id of
the run that created it, so that a run whose request was answered by a closed connection can tell its own object from
that of another run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.objects.body import Content


@dataclass(frozen=True, slots=True)
class PartLimits:
    """What a store demands of the parts of an object.

    Attributes:
        smallest: bytes of every part but the last one, at least.
        largest: bytes of a part, at most.
        most: number of parts of an object, at most.
    """

    smallest: int = 5 << 20
    largest: int = 5 << 30
    most: int = 10_000


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that was begun and is not assembled yet.

    Attributes:
        path: of the object that it becomes.
        key: the store's name for the upload; with the path it is all that another process needs to go on.
        run: id of the run that began it.
    """

    path: str
    key: str
    run: str


@dataclass(frozen=True, slots=True)
class AnonymousUpload(Upload):
    """An upload of which the store does not tell who began it; it can be one of another program.

    Attributes:
        begun: when, in seconds since 1970.
    """

    begun: float = 0.0


@dataclass(frozen=True, slots=True)
class Part:
    """A part that the store has.

    Attributes:
        number: counted from 0, in the order of the object's bytes.
        nbytes: its size.
        mark: what the store calls its state, an ETag or a generation.
        checksum: as the store computed it, `algorithm:hex`; empty if the store computes none.
    """

    number: int
    nbytes: int
    mark: str
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as the store describes it.

    Attributes:
        nbytes: its size.
        mark: its state, an ETag or a generation.
        run: id of the run that created it; empty if none is recorded.
        checksums: algorithm → hex digest, as the store computed them, of the whole object.
    """

    nbytes: int
    mark: str
    run: str = ""
    checksums: Mapping[str, str] = field(default_factory=dict[str, str])


class ObjectStore(Protocol):
    """A store of objects that takes parts; paths are absolute within the store.

    Every call may be repeated: a response that was lost is resolved by asking the store what it has, and by the id of
    the run. Errors are those of `wherry.errors`, and FileExistsError or FileNotFoundError where it is said.
    """

    part_limits: PartLimits
    aborts_apart: bool  # whether an upload can be aborted without the others to the same path

    def head(self, path: str) -> StoredObject | None:
        """The object at a path; None if there is none. Never from a cache."""
        ...

    def put_object(self, path: str, data: Content, run: str, *, replaces: str = "") -> StoredObject:
        """Create a small object, or replace it in one state.

        Args:
            path: of the object.
            data: its bytes, whole or in pieces, which are sent one after the other.
            run: id of the run.
            replaces: the mark of the state that is replaced; empty to create the object.

        Raises:
            FileExistsError: the object exists, or is in another state, and is not the one that this call sent.
        """
        ...

    def remove_object(self, path: str, mark: str) -> bool:
        """Remove an object in one state; False if it is in another state or does not exist.

        Of two runs that remove the same state at the same time, both may be told True, because an answer that was lost
        looks the same: what follows is decided by a put that creates.
        """
        ...

    def remove_many(self, marks: Mapping[str, str]) -> None:
        """Remove objects of the same bucket that nobody but this run may replace, with as few requests as possible.

        The caller holds a lease that keeps others away from them: a store that removes many objects with one request
        does not compare their states. What no longer exists is left out.

        Args:
            marks: path → the state of the object.
        """
        ...

    def begin(self, path: str, run: str) -> Upload:
        """Begin an upload; nothing appears at the path."""
        ...

    def put_part(self, upload: Upload, number: int, data: Sequence[memoryview]) -> Part:
        """Send one part, or replace it; the buffers are sent one after the other, without a copy of them all.

        Raises:
            FileNotFoundError: the upload no longer exists.
        """
        ...

    def copy_part(self, upload: Upload, number: int, source: str, start: int, stop: int, mark: str) -> Part:
        """Make a part of bytes [start, stop) of an object in the state `mark`, without moving them over the network.

        Only where `Capabilities.range_copy` holds.

        Raises:
            FileNotFoundError: the upload or the object no longer exists, or the object is in another state.
        """
        ...

    def copy_object(self, source: str, mark: str, path: str, run: str) -> StoredObject:
        """Create an object of all bytes of another one of the same bucket, without moving them over the network.

        Only where `Capabilities.object_copy` holds.

        Args:
            source: path of the object that is copied.
            mark: the state that it must have.
            path: of the new object.
            run: id of the run, which the new object carries instead of that of the source.

        Raises:
            FileExistsError: an object exists at the path that another run created.
            FileNotFoundError: the source no longer exists, or is in another state.
        """
        ...

    def parts(self, upload: Upload) -> list[Part]:
        """The parts that the store has, by number.

        A part that was replaced may be missing, where the store also lists what it replaced and does not tell which one
        is newer; its former state is never given. A caller sends what is missing again.

        Raises:
            FileNotFoundError: the upload no longer exists.
        """
        ...

    def assemble(self, upload: Upload, parts: Sequence[Part], *, create_only: bool = True) -> StoredObject:
        """Make the object of all parts, in one step.

        Args:
            upload: that has the parts.
            parts: all of them, by number; at least one, which may be empty.
            create_only: whether an object at the path is not replaced.

        Raises:
            FileExistsError: an object exists at the path that another run created; the upload is still there.
            FileNotFoundError: the upload no longer exists, and the object is not the one it would have become.
        """
        ...

    def abort(self, upload: Upload) -> None:
        """Remove an upload and its parts; nothing happens if it no longer exists."""
        ...

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Uploads of objects whose path begins with a prefix, that are not assembled.

        Where the store does not tell the run, it is empty; an `AnonymousUpload` may be that of another program.
        """
        ...
