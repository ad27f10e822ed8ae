"""Checkpoint: an opened, read-only checkpoint, and its fingerprint.

A checkpoint has a URI, a Detection, a Manifest and Contents. Opening reads metadata only. Nothing is ever unpickled,
and the source is never changed.

A fingerprint is the cheap answer to "has this stored checkpoint changed?": SHA-256 over the names, sizes and change
marks (mtime_ns, ETag or generation) of its files, without reading any of them. If the fingerprint is unchanged, a rerun
has nothing to do and a journal can be trusted. It proves nothing about the content; digests do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

from wherry.core import dtypes
from wherry.core.digest import sha256_of
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.manifest import Manifest
from wherry.core.request import SourceRequest
from wherry.core.services import service
from wherry.core.tensorspec import Region, TensorSpec, checked_region
from wherry.errors import CorruptError, NotFoundError, UsageError
from wherry.formats.lazy_tensor import LazyTensor
from wherry.formats.shortage import Shortage, shortage
from wherry.storage.location import Location
from wherry.storage.object_view import ObjectView
from wherry.storage.sidecar import OWN_NAMES
from wherry.storage.stores import LocalStore, PinnedStore, locate
from wherry.store.store import Entry

if TYPE_CHECKING:
    import numpy as np

    from wherry.core.account import Bound, IgnoredEntry
    from wherry.core.detection import Detection
    from wherry.formats.contents import Contents
    from wherry.formats.format import Opened


class JoinedPart(NamedTuple):
    """One of several checkpoints that are read as one.

    Attributes:
        prefix: what stands in front of its key paths in the whole.
        checkpoint: the stored checkpoint.
    """

    prefix: KeyPath
    checkpoint: Checkpoint


class Checkpoint:
    """One opened checkpoint; close it, or use it in a `with` statement.

    Attributes:
        detection: what it is and why.
        manifest: what it holds.
        reader: the format's reader, through which the mover reads bytes.
        ignored: what is next to it and is not read; of a view also the entries of the source that it omits.
        opaque: names of the pickle classes that were read as opaque values.
        bounds: key path → limit of what the values of a view's tensor lose in a round trip, if they can change.
        notes: what a view could not carry, as text.
        snippet: code that loads a view in its target software.
        is_view: whether it is a view of another checkpoint.
        laid_out: whether it is a view in the layout of the target's system.
        uses: options of the request on which names, values or metadata of a view depend: `--config`, or the name of a
            `--set`.
        uses_in_files: options on which only its companion files depend.
        parts: the stored checkpoints that are read as one; empty for one that is stored itself.
    """

    ignored: tuple[IgnoredEntry, ...] = ()
    bounds: Mapping[KeyPath, Bound] = {}
    opaque: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    snippet: str = ""
    is_view: bool = False
    laid_out: bool = False
    uses: frozenset[str] = frozenset()
    uses_in_files: frozenset[str] = frozenset()
    parts: tuple[JoinedPart, ...] = ()

    def __init__(
        self,
        opened: Opened,
        files: PinnedStore | ObjectView | None = None,
        opaque: Collection[str] = (),
        place: Location | None = None,
    ) -> None:
        """Create a checkpoint from what a format opened.

        Args:
            opened: detection, manifest and reader.
            files: the store of its files; closed with the checkpoint.
            opaque: names of the pickle classes that were read as opaque values.
            place: where it was opened; by default where its URI leads.

        Raises:
            CorruptError: two leaves have one key path.
        """
        tensors, values, empties = opened.manifest.tensors, opened.manifest.values, opened.manifest.empties
        both = (
            tensors.keys() & values.keys()
            or tensors.keys() & empties.keys()
            or values.keys() & empties.keys()
        )
        for path in both:
            raise CorruptError(
                f"two leaves have the key path {render(path)}",
                uri=opened.detection.uri,
                cure="restore the checkpoint from a backup; its metadata contradicts itself",
            )
        self._files = files
        self._place = place
        self.opaque = tuple(opaque)
        self.detection: Detection = opened.detection
        self.manifest: Manifest = opened.manifest
        self.reader: Contents = opened.reader
        self.ignored = opened.ignored

    @property
    def original(self) -> Checkpoint:
        """The stored checkpoint: itself, or the checkpoint of which it is a view."""
        return self

    @property
    def parameters(self) -> int:
        """The number of elements of its tensors; of a view those of its source."""
        return self.manifest.parameters

    @property
    def lossy(self) -> dict[KeyPath, Bound]:
        """The bounds of tensors whose values change even where none of them over- or underflows."""
        return {path: bound for path, bound in self.bounds.items() if not bound.exact}

    @property
    def shortages(self) -> list[tuple[str, Shortage]]:
        """What is missing of the weights of the stored checkpoint, or of those read as one, with their URIs."""
        stored = [part.checkpoint for part in self.original.parts] or [self.original]
        found = [(one.uri, shortage(one.manifest)) for one in stored]
        return [(uri, one) for uri, one in found if one is not None]

    def made_of(self, path: KeyPath) -> Collection[KeyPath]:
        """The tensors of `original` that a tensor is made of."""
        return (path,)

    def reader_over(self, reader: Contents) -> Contents:
        """Its reader on top of another reader of `original`."""
        return reader

    def first_seen(self, location: Location) -> Entry | None:
        """The entry of a local file at its first read, of an object when it was first seen; None if it never was."""
        return self._files.first_seen(location.path) if self._files is not None else None

    @property
    def uri(self) -> str:
        """Its location."""
        return self.detection.uri

    @property
    def location(self) -> Location:
        """Its place as it is now, for names and files that the reader has not read, in the folder that was opened."""
        if self.original is not self:
            return self.original.location
        if self.parts:
            return self.parts[0].checkpoint.location
        return locate(self.uri) if self._place is None else self._place

    def spec(self, path: KeyPath | str) -> TensorSpec:
        """The TensorSpec of a key path, given as a tuple or printed.

        Raises:
            NotFoundError: the checkpoint has no tensor at this key path.
        """
        key = parse(path) if isinstance(path, str) else tuple(path)
        if key not in self.manifest.tensors:
            raise NotFoundError(
                "tensor not found",
                uri=self.uri,
                path=render(key),
                cure="run `wherry inspect` to list all key paths",
            )
        return self.manifest.tensors[key]

    def __getitem__(self, path: KeyPath | str) -> LazyTensor:
        """A tensor by its key path, printed or as a tuple; indexing it reads that part: `checkpoint["a/w"][:8]`.

        Raises:
            NotFoundError: the checkpoint has no tensor at this key path.
        """
        spec = self.spec(path)
        return LazyTensor(spec, partial(self.read, spec.path))

    def __iter__(self) -> Iterator[KeyPath]:
        """The key paths of the tensors."""
        return iter(self.manifest.tensors)

    def __contains__(self, path: object) -> bool:
        """Whether there is a tensor at a key path, printed or as a tuple."""
        return (parse(path) if isinstance(path, str) else path) in self.manifest.tensors

    def __repr__(self) -> str:
        return f"<Checkpoint {self.uri!r}: {self.detection.format}, {self.manifest.summary}>"

    def _repr_html_(self) -> str:
        return self.manifest.to_html(repr(self))

    def read(self, path: KeyPath | str, region: Region | None = None) -> np.ndarray:
        """Elements of a tensor.

        Args:
            path: key path, as a tuple or printed.
            region: one step-1 slice per dimension; by default the whole tensor.

        Returns:
            A new C-order little-endian array of the region's shape (an ml_dtypes dtype where needed).

        Raises:
            NotFoundError: the checkpoint has no tensor at this key path.
            UsageError: the region does not fit, or numpy does not support the dtype (use `read_bytes`).
            DamagedError: bytes are missing or inconsistent.
        """
        spec = self.spec(path)
        if dtypes.opaque(spec.dtype):
            raise UsageError(
                f"numpy does not support dtype {spec.dtype}", path=spec.name, cure="use read_bytes"
            )
        return service("read").read_array(self.reader, spec, checked_region(spec, region))

    def read_bytes(self, path: KeyPath | str) -> bytes:
        """Canonical bytes of a whole tensor; the only way to read dtypes that numpy does not support."""
        return service("read").read_bytes(self.reader, self.spec(path))

    def close(self) -> None:
        """Close the reader and the files."""
        self.reader.close()
        if self._files is not None:
            self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_source(source: SourceRequest) -> Checkpoint:
    """Open the checkpoint that a request names.

    Raises:
        NotFoundError, NotACheckpointError, UnsupportedError, AmbiguousError: the URI does not name one checkpoint.
        DamagedError: metadata is missing or inconsistent. A checkpoint with missing chunks can be opened; `absent`
            of the reader and `verify` report them.
        HostileError: the checkpoint tries to reach outside its folder or to run code.
    """
    from wherry.formats.detect import resolve_source  # detect opens checkpoints too
    from wherry.formats.registry import find_format

    location, detection = resolve_source(source)
    store = location.store
    files = PinnedStore(store.root) if isinstance(store, LocalStore) else None
    if isinstance(store, ObjectView):
        files = store
    place = replace(location, store=files or store)
    stored = location if isinstance(store, LocalStore) else None
    return Checkpoint(
        find_format(detection.format).open(place, detection), files, source.allow_opaque, stored
    )


def open_again(checkpoint: Checkpoint) -> Checkpoint:
    """Open the files that a stored checkpoint has now; of a local one in the folder that was opened.

    Raises:
        WherryError: they no longer form the checkpoint.
    """
    from wherry.formats.registry import find_format

    found, place, opaque = checkpoint.detection, checkpoint.location, checkpoint.original.opaque
    if isinstance(place.store, LocalStore):
        return Checkpoint(find_format(found.format).open(place, found), None, opaque, place)
    return open_source(SourceRequest(checkpoint.uri, found.format, allow_opaque=opaque))


def fingerprint(members: Iterable[Entry], location: Location, *, marks: bool = True) -> str:
    """Hex fingerprint of a checkpoint's files.

    Args:
        members: its files, as its reader lists them.
        location: its location. A single file counts under the name `.`, so that a fingerprint taken in the
            staging area is still valid after the commit.
        marks: whether change marks count; not for a target on an object store, which assigns them on upload.
    """
    rows = [
        ["." if entry.name == location.name else entry.name, entry.size, entry.mark if marks else ""]
        for entry in members
        if entry.name not in OWN_NAMES
    ]
    return sha256_of("fingerprint", sorted(rows))


def present_fingerprint(checkpoint: Checkpoint, *, marks: bool = True) -> str:
    """Fingerprint of the current state of an opened checkpoint."""
    return fingerprint(checkpoint.reader.members(), checkpoint.location, marks=marks)
