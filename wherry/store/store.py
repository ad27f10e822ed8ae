"""Store: the one interface of all stores, and what is known of each: what it can do, and what it says of its objects.

The capabilities of a protocol's store are declared in `PROTOCOLS`, not guessed (as in restic's `Properties`): whether
a put can be create-only, whether objects take parts.

A store of objects has no ranged writes and no rename. What it has instead: parts that arrive in any order and become
one object in one step, which can refuse to replace an existing object, and puts and removals that apply only to the
state of an object that the caller has seen. Every object that is created this way carries the id of the run that
created it, so that a run whose request was answered by a closed connection can tell its own object from that of
another run.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from datetime import datetime
from typing import TypeAlias

from wherry.core.lazy_dataclass import dataclass
from wherry.store.failures import AZURE as AZURE_NAMES

Content: TypeAlias = bytes | Sequence[memoryview]  # of an object, whole or in pieces


NAMED_STATES = ("generation", "etag")  # versions that the store gives, and that a read can name
# Their libraries take the name of the server and a login as arguments, not from the URI.
OF_SERVERS = frozenset({"ftp", "sftp", "smb", "ssh", "webdav", "webhdfs"})
# Their libraries open URIs of every other store by themselves, without the checks that wherry makes of its addresses.
OF_OTHER_STORES = frozenset({"generic"})


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a store.

    Attributes:
        local: paths are paths of this machine's file system.
        create_only_put: an object can be created on the condition that it does not exist yet.
        parts: objects are uploaded in parts, and created, replaced and removed in a known state: what `Store` has from
            `head` on.
        object_copy: the store copies an object into another one, without moving a byte over the network.
        checksums: algorithms whose checksums the store computes of whole objects or of parts, and wherry compares.
        one_commit: all files of a target appear in one step that cannot overwrite, without a rename.
        version: what identifies the state of an object: `generation`, `etag`, `blob` or `time`; empty if nothing does.
        fills: `readinto` holds the bytes only in its buffer; in other stores the library holds two more copies.
        pages: objects are listed in the order of their keys, whatever folders they are in: `Store.page`.
        staged: these are the staged objects of one run, whose files are uploaded as they are written.
    """

    local: bool = False
    create_only_put: bool = False
    parts: bool = False
    object_copy: bool = False
    checksums: tuple[str, ...] = ()
    one_commit: bool = False
    version: str = ""
    fills: bool = False
    pages: bool = False
    staged: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One file or folder.

    Attributes:
        name: its name in the parent folder, or its relative path.
        size: bytes; -1 for a broken link and for a file that must not be opened.
        is_dir: whether it is a folder.
        mark: time of the last modification (local files), ETag or generation; part of fingerprints.
        inode: device and inode of a local file; distinguishes two files of the same name and mark.
        changed: ctime in nanoseconds, which no program can set; 0 if the store has none.
        barred: why it must not be opened (`a FIFO`, `symbolic link points outside the checkpoint: /etc/passwd`); empty
            if it may be opened.
    """

    name: str
    size: int
    is_dir: bool
    mark: str = ""
    inode: str = ""
    changed: int = 0
    barred: str = ""


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


class Store:
    """A store; paths are absolute within it. This base class holds nothing; its subclasses override what they can do.

    Every call may be repeated: a response that was lost is resolved by asking the store what it has, and by the id of
    the run. Errors are those of `wherry.errors`, and those of the system that are named.

    Attributes:
        protocol: of its URIs.
        capabilities: what it can do; other calls are refused.
        part_limits: what it demands of parts.
        aborts_apart: whether an upload can be aborted without the others to the same path.
        names_uploads: whether the client names an upload: one whose answer was lost is not begun twice.
    """

    protocol: str
    capabilities: Capabilities
    part_limits = PartLimits()
    aborts_apart = True
    names_uploads = True

    def stat(self, path: str) -> Entry | None:  # noqa: ARG002  overridden
        """The entry at a path, following links, or None."""
        return None

    def entries(self, path: str) -> list[Entry]:
        """Children of a folder, sorted by name.

        Raises:
            FileNotFoundError, NotADirectoryError: there is none.
        """
        raise FileNotFoundError(path)

    def page(self, path: str, start: str) -> tuple[list[tuple[str, Entry]], bool]:
        """Some of the objects below a folder, in the order of their keys; only where `Capabilities.pages` holds.

        Args:
            path: the folder.
            start: path of the first object, or what it begins with.

        Returns:
            Path and entry of each object; and whether there are more.
        """
        raise NotImplementedError

    def modified(self, path: str) -> datetime:
        """When a file was written.

        Raises:
            FileNotFoundError: it does not exist.
            UnsupportedError: the store does not tell.
        """
        raise NotImplementedError

    def first_seen(self, path: str) -> Entry | None:  # noqa: ARG002  overridden
        """The entry of a file in the state that is read; None if it was never read, or files may change."""
        return None

    def read(self, path: str, start: int, stop: int) -> bytes:  # noqa: ARG002  overridden
        """Bytes [start, stop) of a file; fewer where the file ends earlier."""
        raise FileNotFoundError(path)

    def readinto(self, path: str, start: int, buffer: memoryview, mark: str = "") -> int:  # noqa: ARG002
        """Fill a buffer from an offset; returns the number of bytes read.

        Args:
            path: of the file.
            start: offset of the first byte.
            buffer: what is filled.
            mark: of the state that the object must have, as in its entry; empty for any. Only where
                `Capabilities.version` is one of `NAMED_STATES`.

        Raises:
            MismatchError: the object is not in that state.
        """
        data = self.read(path, start, start + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:  # noqa: ARG002  overridden
        """Write a small file; with `create_only`, raise FileExistsError if it exists."""
        raise PermissionError(errno.EROFS, f"cannot write to {self.protocol}://", path)

    def remove(self, path: str, *, recursive: bool = False) -> None:
        """Delete an object, or everything below a prefix.

        Raises:
            FileNotFoundError: it did not exist before the first attempt.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release what reading holds."""

    def head(self, path: str) -> StoredObject | None:
        """The object at a path; None if there is none. Never from a cache."""
        raise NotImplementedError

    def put_object(self, path: str, data: Content, run: str, *, replaces: str = "") -> StoredObject:
        """Create a small object, or replace it in one state.

        Args:
            path: of the object.
            data: its bytes, whole or in pieces, which are sent one after the other.
            run: id of the run.
            replaces: the mark of the state that is replaced; empty to create the object. Two states with the same
                bytes may have the same mark: let what is replaced differ.

        Raises:
            FileExistsError: the object exists, or is in another state, and is not the one that this call sent.
        """
        raise NotImplementedError

    def remove_object(self, path: str, mark: str, guard: Callable[[], None] = lambda: None) -> bool:
        """Remove an object in one state; False if it is in another state or does not exist.

        If two runs remove the same state at the same time, both may get True, because a lost answer looks the same;
        the create-only put that follows decides between them.

        Args:
            path: of the object.
            mark: the state that is removed.
            guard: called between the last look at the object and the request that removes it; raises if the removal
                must not happen: a run that has taken the lease over may have adopted the object as it is.
        """
        raise NotImplementedError

    def remove_many(self, marks: Mapping[str, str]) -> None:
        """Remove objects of the same bucket that nobody but this run may replace, with as few requests as possible.

        The caller holds a lease that keeps others away from them: a store that removes many objects with one request
        does not compare their states. Objects that no longer exist are left out.

        Args:
            marks: path → the state of the object.
        """
        raise NotImplementedError

    def begin(self, path: str, run: str) -> Upload:
        """Begin an upload; nothing appears at the path."""
        raise NotImplementedError

    def put_part(self, upload: Upload, number: int, data: Sequence[memoryview]) -> Part:
        """Send one part, or replace it; the buffers are sent one after the other, without a copy of them all.

        Raises:
            FileNotFoundError: the upload no longer exists.
        """
        raise NotImplementedError

    def copy_object(
        self, source: str, mark: str, path: str, run: str, guard: Callable[[], None] = lambda: None
    ) -> StoredObject:
        """Create an object of all bytes of another one of the same bucket, without moving them over the network.

        Only where `Capabilities.object_copy` holds.

        Args:
            source: path of the object that is copied.
            mark: the state that it must have.
            path: of the new object.
            run: id of the run, which the new object carries instead of that of the source.
            guard: called before the request by which the object appears; raises if it must not.

        Raises:
            FileExistsError: an object exists at the path that another run created.
            FileNotFoundError: the source no longer exists, or is in another state.
        """
        raise NotImplementedError

    def parts(self, upload: Upload) -> list[Part]:
        """The parts that the store has, by number.

        A part that was replaced may be missing, if the store also lists the former state and does not tell which one
        is newer; a former state is never returned. A caller sends what is missing again.

        Raises:
            FileNotFoundError: the upload no longer exists.
        """
        raise NotImplementedError

    def assemble(self, upload: Upload, parts: Sequence[Part]) -> StoredObject:
        """Make the object of all parts, in one step; an object at its path is not replaced.

        Args:
            upload: that has the parts.
            parts: all of them, by number; at least one, which may be empty.

        Raises:
            FileExistsError: an object exists at the path that another run created; the upload is still there.
            FileNotFoundError: the upload no longer exists, and the object is not the one it would have become.
        """
        raise NotImplementedError

    def abort(self, upload: Upload) -> None:
        """Remove an upload and its parts; nothing happens if it no longer exists."""
        raise NotImplementedError

    def uploads(self, prefix: str) -> Iterator[Upload]:
        """Uploads of objects whose path begins with a prefix, that are not assembled.

        Where the store does not tell the run, it is empty; an `AnonymousUpload` may be that of another program.
        """
        raise NotImplementedError


class StoreOver(Store):
    """A store that is read through; its classes change some of the answers.

    Attributes:
        inner: the store.
    """

    def __init__(self, inner: Store) -> None:
        self.inner, self.protocol = inner, inner.protocol
        self.capabilities = replace(inner.capabilities, parts=False, pages=False)

    def stat(self, path: str) -> Entry | None:
        """See Store."""
        return self.inner.stat(path)

    def entries(self, path: str) -> list[Entry]:
        """See Store."""
        return self.inner.entries(path)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store."""
        return self.inner.read(path, start, stop)

    def readinto(self, path: str, start: int, buffer: memoryview, mark: str = "") -> int:
        """See Store."""
        return self.inner.readinto(path, start, buffer, mark)

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """See Store."""
        self.inner.put(path, data, create_only=create_only)


READ_ONLY = Capabilities()
LOCAL = Capabilities(local=True, create_only_put=True, version="time", fills=True)
# A store of objects of which nothing more is known.
OBJECTS = Capabilities(create_only_put=True)
_PARTS = replace(OBJECTS, parts=True, object_copy=True, fills=True)
MEMORY = replace(_PARTS, checksums=("crc32c",), version="time")
# Parts are objects that `compose` joins with ifGenerationMatch=0; a multipart upload of the XML API has no conditions.
GCS = replace(_PARTS, checksums=("crc32c",), version="generation", pages=True)
# If-None-Match on PutObject and on CompleteMultipartUpload.
S3 = replace(_PARTS, checksums=("crc32c",), version="etag", pages=True)
# If-None-Match on Put Blob and on Put Block List. Only what is sent at once has a checksum: small objects, and
# the parts of others.
AZURE = replace(_PARTS, checksums=("md5",), version="etag")
HUB = replace(READ_ONLY, one_commit=True, version="blob")


@dataclass(frozen=True, slots=True)
class StorageProtocol:
    """One protocol.

    Attributes:
        capabilities: what its stores can do.
        package: the package that provides it.
        extra: the extra of wherry that installs the package; empty if there is none.
        in_process: whether its calls never leave this process, so that they need neither deadlines nor retries.
        whole_uris: whether its library takes and lists URIs instead of paths.
    """

    capabilities: Capabilities
    package: str = "fsspec"
    extra: str = ""
    in_process: bool = False
    whole_uris: bool = False


PROTOCOLS: dict[str, StorageProtocol] = {
    "file": StorageProtocol(LOCAL, package="", in_process=True),
    "memory": StorageProtocol(MEMORY, in_process=True),
    "gs": StorageProtocol(GCS, "gcsfs", "gcs"),
    "gcs": StorageProtocol(GCS, "gcsfs", "gcs"),
    "s3": StorageProtocol(S3, "s3fs", "s3"),
    **dict.fromkeys(AZURE_NAMES, StorageProtocol(AZURE, "adlfs", "azure")),
    "hf": StorageProtocol(HUB, "huggingface_hub", "hub"),
    "http": StorageProtocol(READ_ONLY, "aiohttp", whole_uris=True),
    "https": StorageProtocol(READ_ONLY, "aiohttp", whole_uris=True),
}
OTHER = StorageProtocol(READ_ONLY)  # everything else that fsspec supports


def protocol_of(name: str) -> StorageProtocol:
    """The facts about a protocol."""
    return PROTOCOLS.get(name, OTHER)
