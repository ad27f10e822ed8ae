"""The stores of local files, and the parsing of URIs; `wherry.store` has the interface, and the remote stores.

Local paths never import fsspec: they are the fast path, and `os.pread` is faster. Credentials come only from each
library's own chain; a URI never carries them, and they are never printed.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import stat
from collections.abc import Collection, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from urllib.parse import unquote

from wherry.core.lazy_dataclass import dataclass
from wherry.core.limits import MOST_ENTRIES, exceeds, larger_factor, scale_limit
from wherry.credentials import uri_has_credentials
from wherry.cures import Command, Cure
from wherry.errors import (
    CrowdedFolderError,
    HostileError,
    MismatchError,
    UsageError,
    storage_error,
    storage_errors,
)
from wherry.store.folders import make_folders, sync_folder
from wherry.store.location import Location
from wherry.store.open_file import (
    Descriptors,
    Root,
    local_path,
    loop_refusal,
    open_regular,
    open_root,
    opened_folder,
    opened_regular,
    read_descriptor,
    root_at,
    special,
    status_of,
    write_regular,
)
from wherry.store.store import LOCAL, READ_ONLY, Entry, Store

# The page of a model on the Hugging Face Hub, or of a folder or file in it, as a browser shows its address.
_HUB_PAGE = re.compile(
    r"https://(?:www\.)?(?:huggingface|hf)\.co/(?P<model>[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob)/(?P<revision>[\w.-]+)(?P<path>(?:/[^/?#]+)*))?/?(?:[?#].*)?"
)


_WITH_ACCOUNT = re.compile(r"(?:az|abfss?)://([^@/:]+)@([^./@:]+)\.(?:dfs|blob)\.[^/@:]+(.*)")
_ABSOLUTE = re.compile(r"(?:/(?!\.(?:/|\Z))[^/]+)+")  # a local path that needs no change to be absolute
CHANGED_CURE = "convert it again once nothing writes to it"


@dataclass(frozen=True)
class LocalStore(Store):
    """Files of this machine, opened by the rules of `wherry.store.open_file`.

    Attributes:
        root: the path that the user named, which limits links; None for files of wherry itself.
    """

    root: Root | None = None
    protocol = "file"
    capabilities = LOCAL

    def stat(self, path: str) -> Entry | None:
        """See Store."""
        name, root = path.rstrip("/").rpartition("/")[2], self.root
        try:
            status = os.stat(path) if root is None or root.folder is None else status_of(path, root)  # noqa: PTH116  as PTH123
        except (FileNotFoundError, NotADirectoryError):
            return None
        except HostileError as error:
            return Entry(name, -1, is_dir=False, barred=error.what)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise loop_refusal(path) from error
            raise
        return entry_of(name, status)

    def entries(self, path: str) -> list[Entry]:
        """See Store. A broken link has size -1, so that it is not mistaken for a missing file.

        Raises:
            CrowdedFolderError: a folder at or below the root has more than `MOST_ENTRIES` entries.
        """
        bounded = self.root is not None and self.root.holds(path)
        rows: list[Entry] = []
        with opened_folder(path, self.root) as folder, os.scandir(folder) as found:
            for entry in found:
                rows.append(self._scan_folder(path, entry))
                if bounded and (error := crowd_refusal(len(rows), path)) is not None:
                    rows.clear()  # the error keeps this frame
                    raise error
        return sorted(rows, key=attrgetter("name"))

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store."""
        with self.descriptor(path) as descriptor:
            return read_descriptor(descriptor, start, stop)

    def readinto(self, path: str, start: int, buffer: memoryview, mark: str = "") -> int:  # noqa: ARG002  for objects
        """See Store."""
        with self.descriptor(path) as descriptor:
            return os.preadv(descriptor, [buffer], start)

    def descriptor(self, path: str) -> AbstractContextManager[int]:
        """A descriptor for reading a file while the block runs.

        Raises on entering:
            HostileError, OSError: as `open_regular`.
        """
        return opened_regular(path, root=self.root)

    def put(self, path: str, data: bytes, *, create_only: bool = False) -> None:
        """See Store. The file is synced; syncing its folder is left to the caller."""
        write_regular(path, (data,), create_only=create_only)

    def _scan_folder(self, folder: str, entry: os.DirEntry[str]) -> Entry:
        linked = entry.is_symlink()
        try:
            if linked and self.root is not None:
                return entry_of(entry.name, status_of(f"{folder.rstrip('/')}/{entry.name}", self.root))
            return entry_of(entry.name, entry.stat())
        except (FileNotFoundError, NotADirectoryError):
            return Entry(entry.name, -1, is_dir=False)
        except HostileError as error:
            return Entry(entry.name, -1, is_dir=False, barred=error.what)
        except OSError as error:
            if linked:
                is_circle = error.errno == errno.ELOOP
                why = "points back to itself" if is_circle else f"cannot be followed: {error.strerror}"
                return Entry(entry.name, -1, is_dir=False, barred=f"symbolic link {why}")
            raise


def crowd_refusal(count: int, uri: str) -> CrowdedFolderError | None:
    """The error for a folder of a source with more than `MOST_ENTRIES` entries; None if it has no more.

    Args:
        count: its entries; those seen so far are enough.
        uri: the folder.
    """
    if not exceeds(count, MOST_ENTRIES):
        return None
    name = uri.rstrip("/").rpartition("/")[2]
    return CrowdedFolderError(
        f"the folder {name} has more than {scale_limit(MOST_ENTRIES):,} entries",
        uri=uri,
        cure="pass a folder in it, or move what is not part of the checkpoint away; if you trust its origin, set "
        f"WHERRY_LIMITS={larger_factor()} to raise all limits of metadata",
    )


class LiveStore(Store):
    """The store of training states in the memory of a process: names without files."""

    protocol = "live"
    capabilities = READ_ONLY


def is_live(uri: str) -> bool:
    """Whether a URI names a training state that was exported from memory; no file exists there."""
    return uri.startswith(f"{LiveStore.protocol}://")


def entry_of(name: str, status: os.stat_result) -> Entry:
    """The entry of a local file or folder from its status."""
    barred = special(status.st_mode)
    return Entry(
        name,
        -1 if barred else status.st_size,
        stat.S_ISDIR(status.st_mode),
        mark=str(status.st_mtime_ns),
        inode=f"{status.st_dev}:{status.st_ino}",
        changed=status.st_ctime_ns,
        barred=barred,
    )


def with_open_root(location: Location) -> Location:
    """A location whose root is open: what is below it is read from the folder that the root is now.

    In memory, in a store of objects, and below a root that is open or cannot be opened: the location as it is.
    """
    root = location.store.root if isinstance(location.store, LocalStore) else None
    if root is None or root.folder is not None:
        return location
    return replace(location, store=LocalStore(open_root(root)))


def make_folder(location: Location) -> None:
    """Make a local folder and its parents, but never a staging area; a store of objects has no folders to make.

    Raises:
        StorageError: the storage failed.
    """
    if not location.store.capabilities.local:
        return
    try:
        make_folders(Path(location.path))
    except OSError as error:
        raise storage_error(error, location.uri) from error


def sync_folders(folders: Iterable[Location]) -> None:
    """Make the names in local folders durable, in this order; in a store of objects they are.

    Raises:
        StorageError: the storage failed.
    """
    for folder in folders:
        if folder.store.capabilities.local:
            with storage_errors(folder.uri):
                sync_folder(Path(folder.path))


def locate(uri: str | os.PathLike[str], opaque: frozenset[str] = frozenset()) -> Location:
    """Parse a URI or a path.

    Links in a local path itself are followed; those below it obey `wherry.store.open_file`.

    Args:
        uri: the URI or path.
        opaque: names of the pickle classes that may be read as opaque values there.

    Raises:
        UsageError: the URI is empty, is a model URI, or carries credentials.
        AddressError: a web server at an address at which clouds tell a machine its secrets.
        MissingExtraError: the package for its protocol is not installed.
    """
    text = os.fspath(uri)
    if not text:
        raise UsageError("empty URI", cure="pass a path or a storage URI")
    if text.startswith(("models:/", "wherry://")):
        raise UsageError(
            f"{text} is a model URI; expected a path or a storage URI",
            cure=Cure("run {} to print the location of the checkpoint", Command("resolve", text)),
        )
    path = local_path(text)
    if path is not None:
        return replace(local_location(path), opaque=opaque)
    page = _HUB_PAGE.fullmatch(text)
    if page:
        revision = f"@{page['revision']}" if page["revision"] else ""
        text = f"hf://{page['model']}{revision}{unquote(page['path'] or '')}"
    protocol, _, rest = text.partition("://")
    if protocol == LiveStore.protocol:
        return Location(LiveStore(), rest, opaque=opaque)
    found = _WITH_ACCOUNT.match(text)
    if found:  # adlfs takes the account from the environment
        container, account, inner = found.groups()
        raise UsageError(
            f"{text} names the storage account {account!r}; a URI of wherry names only the container",
            cure=f"set AZURE_STORAGE_ACCOUNT_NAME={shlex.quote(account)} and write {shlex.quote(f'az://{container}{inner}')}",
        )
    if uri_has_credentials(text):
        raise UsageError(
            "a URI must not carry credentials", cure="use the storage library's own credential chain"
        )
    if protocol in ("http", "https"):
        from wherry.store.addresses import require_host

        require_host(text)
    from wherry.store.remote_store import remote_store  # local runs do not pay for it

    return Location(remote_store(protocol), rest.rstrip("/"), opaque=opaque)


def locate_below(root: str, uri: str | os.PathLike[str], opaque: frozenset[str] = frozenset()) -> Location:
    """Parse a URI that nobody named at the command line; it must lie below a root, and so must what its links mean.

    Nothing is opened. Links in the root itself are followed.

    Args:
        root: a folder or its URI.
        uri: the root, or a URI below it.
        opaque: as for `locate`.

    Raises:
        HostileError: the URI does not lie below the root.
        UsageError, MissingExtraError: as `locate`.
    """
    base, found = locate(root), locate(uri, opaque)
    parts = found.path[len(base.path.rstrip("/")) :].split("/")
    if not is_at_or_below(base, found) or ".." in parts:
        raise HostileError("the URI is not below its root", uri=found.uri, cure=f"pass one below {base.uri}")
    return Location(base.store, found.path, opaque=opaque)


def locate_recorded(uri: str) -> Location:
    """Parse a URI that a registry or a ledger states; it must not lead to a server of this machine.

    Raises:
        AddressError: it does; pass its URI itself to read it.
        UsageError, MissingExtraError: as `locate`.
    """
    if uri.startswith(("http://", "https://")):
        from wherry.store.addresses import require_host

        require_host(uri, stated=False)
    return locate(uri)


def is_at_or_below(root: Location, place: Location) -> bool:
    """Whether a path is a root or is below it, by their texts alone."""
    same = place.store.protocol == root.store.protocol
    return same and f"{place.path}/".startswith(f"{root.path.rstrip('/')}/")


def local_location(path: str, *, configurable: bool = True) -> Location:
    """A path of this machine, as the root of what is read below it.

    Args:
        path: relative to the working directory, or absolute.
        configurable: whether the configuration may allow further links.
    """
    absolute = path if _ABSOLUTE.fullmatch(path) else str(Path(path).absolute())
    return Location(LocalStore(root_at(absolute, configurable=configurable)), absolute)


def store_of(uri: str) -> str:
    """`file` for local paths, else protocol and bucket: `gs-models`."""
    protocol, separator, rest = uri.partition("://")
    if not separator or protocol == "file":
        return "file"
    return f"{'gs' if protocol == 'gcs' else protocol}-{rest.partition('/')[0]}"


def limits_of(uris: Iterable[str], limited: Collection[str]) -> list[str]:
    """The stores of these URIs that have a limit, each once."""
    return sorted({store for uri in uris if (store := store_of(uri)) in limited})


class PinnedStore(LocalStore):
    """The local files of one opened checkpoint; each stays the same file from the first read to the last.

    A file is opened once and read through that descriptor until `close`, so renaming another file over it does not
    change what is read. If too many files are open, a descriptor is closed and its file is opened again later; it must
    then be the same file as before. `wherry.formats.checkpoint` detects files that are changed in place.
    """

    def __init__(self, root: Root | None) -> None:
        super().__init__(root)
        self._descriptors = Descriptors(self._open)
        self._first: dict[str, Entry] = {}

    def first_seen(self, path: str) -> Entry | None:
        """The entry of a file when it was first opened; None if it was never read."""
        return self._first.get(path)

    @contextmanager
    def descriptor(self, path: str) -> Generator[int]:
        """The descriptor of a file; see LocalStore.

        Raises:
            MismatchError: the file at the path was replaced.
            HostileError, OSError: as `open_regular`.
        """
        with self._descriptors.using(path) as descriptor:
            yield descriptor

    def close(self) -> None:
        """Close the files, and the folder of the root."""
        self._descriptors.close()
        if self.root is not None and self.root.folder is not None:
            self.root.folder.close()

    def __del__(self) -> None:
        self.close()

    def _open(self, path: str) -> int:
        descriptor = open_regular(path, root=self.root)
        now = entry_of(Path(path).name, os.fstat(descriptor))
        if self._first.setdefault(path, now).inode != now.inode:
            os.close(descriptor)
            raise MismatchError("the file was replaced while it was read", uri=path, cure=CHANGED_CURE)
        return descriptor
