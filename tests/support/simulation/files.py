"""A file system of a simulation: what the functions of `os` do below `/sim`, and what a loss of power leaves of it.

Each call is a step of the schedule (`Simulation.call`). A name in a folder is durable when the folder was synced, and
the bytes of a file when the file was; a rename is one change. Of what was not synced a loss of power keeps any part
that a journalling file system can keep: a change of a name needs the earlier changes of the same names and files.

Numbers of files are used again as soon as a file is gone, names are listed in any order, and all times are those of one
clock. What some file systems lack is chosen: hard links, `renameat2`, locks.
"""

from __future__ import annotations

import errno
import fcntl
import heapq
import io
import os
import shutil
import stat
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from tests.support.simulation.schedule import current

ROOT = "/sim"
_FIRST = 1 << 20  # descriptors of the simulation
_CLOCK = 1.8e9
_GRAIN = 0.004  # seconds; the clock of a file system is coarse
_DEVICE = 7


class Node:
    """A file or folder.

    Attributes:
        number: which another one gets when it is gone.
        names: of a folder.
        data: of a file.
        durable: its names or bytes as a loss of power leaves them at least.
        dirty: writes to a file since its last sync, in order.
        holder: the open file that has the lock.
        opens: so many open files refer to it.
        links: so many names it has.
    """

    __slots__ = (
        "data", "dirty", "durable", "holder", "links", "mode", "modified", "names", "number", "opens", "serial",
    )  # fmt: skip

    def __init__(self, number, mode, modified, serial):
        self.number, self.mode, self.modified, self.serial = number, mode, modified, serial
        folder = stat.S_ISDIR(mode)
        self.names = {} if folder else None
        self.data = None if folder else bytearray()
        self.durable = {} if folder else b""
        self.dirty, self.holder, self.opens, self.links = [], None, 0, 0


class OpenFile:
    """An open file of one process."""

    __slots__ = ("flags", "node", "path", "position", "process")

    def __init__(self, node, flags, path, process):
        self.node, self.flags, self.path, self.process, self.position = node, flags, path, process, 0


class Status:
    """The result of `stat`."""

    __slots__ = (
        "st_ctime_ns", "st_dev", "st_gid", "st_ino", "st_mode", "st_mtime", "st_mtime_ns", "st_nlink", "st_size",
        "st_uid",
    )  # fmt: skip

    def __init__(self, node):
        self.st_dev, self.st_ino, self.st_mode, self.st_nlink = _DEVICE, node.number, node.mode, node.links
        self.st_uid, self.st_gid = os.geteuid(), os.getegid()
        self.st_size = len(node.names if node.data is None else node.data)
        self.st_mtime = node.modified
        self.st_mtime_ns = self.st_ctime_ns = int(node.modified * 1e9)


class ListedEntry:
    """A row of `scandir`."""

    __slots__ = ("_node", "name", "path")

    def __init__(self, name, path, node):
        self.name, self.path, self._node = name, path, node

    def is_dir(self, *, follow_symlinks=True):
        return self._node.names is not None

    def is_file(self, *, follow_symlinks=True):
        return self._node.names is None

    def is_symlink(self):
        return False

    def stat(self, *, follow_symlinks=True):
        return Status(self._node)


class Listing(list):
    """What `scandir` returns."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __next__(self):
        if not self:
            raise StopIteration
        return self.pop(0)

    def __iter__(self):
        return self

    def close(self):
        pass


def _error(code, path=""):
    return OSError(code, os.strerror(code), path)


class Files:
    """The file system of one simulation.

    Attributes:
        root: its folder `/sim`.
        lacks: of `links`, `renameat2` and `flock`.
        written: called with process, node and path when bytes of a file change.
    """

    def __init__(self, simulation, lacks=()):
        self.simulation, self.lacks = simulation, frozenset(lacks)
        self._free, self._next, self._serial = [], 2, 0
        self.root = self._node(stat.S_IFDIR | 0o755)
        self.pending = []
        self.open_files = {}
        self._descriptor = _FIRST
        self.written = lambda process, node, path: None
        simulation.on_power = self.lose_power
        simulation.on_death = self.close_all

    # What checkers ask, without a step.

    def find(self, path):
        """The node at a path; None if there is none."""
        node = self.root
        for part in _parts(path):
            if node.names is None or part not in node.names:
                return None
            node = node.names[part]
        return node

    def path_of(self, node):
        """A path of a node; None if it has no name."""
        return next((path for path, found in self.walk() if found is node), None)

    def walk(self, top=ROOT):
        """Path and node of everything below a folder."""
        found = self.find(top)
        for name, node in sorted((found.names if found else {}).items()):
            yield f"{top}/{name}", node
            if node.names is not None:
                yield from self.walk(f"{top}/{name}")

    # Calls.

    def _call(self, name, path, effect, *arguments, changes=True):
        return self.simulation.call(name, path, effect, arguments, changes=changes)

    def open(self, path, flags, mode=0o777, *, dir_fd=None):
        assert dir_fd is None
        return self._call(
            "open", path, self._open, path, flags, mode, changes=bool(flags & (os.O_CREAT | os.O_TRUNC))
        )

    def _open(self, path, flags, mode):
        folder, name = self._parent(path)
        node = folder.names.get(name) if name else folder
        if node is None:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT, path)
            node = self._node(stat.S_IFREG | mode & ~0o022)
            self._change((folder, name, node))
        elif flags & os.O_EXCL and flags & os.O_CREAT:
            raise _error(errno.EEXIST, path)
        if node.names is not None and flags & (os.O_WRONLY | os.O_RDWR):
            raise _error(errno.EISDIR, path)
        if node.names is None and flags & os.O_DIRECTORY:
            raise _error(errno.ENOTDIR, path)
        if flags & os.O_TRUNC and node.data:
            self._truncate(node, 0)
        self._descriptor += 1
        node.opens += 1
        self.open_files[self._descriptor] = OpenFile(node, flags, path, current().process)
        return self._descriptor

    def close(self, descriptor):
        found = self.open_files.pop(descriptor, None)
        if found is None:
            if current().process.alive:
                raise _error(errno.EBADF)
            return
        self._forget(found)

    def _forget(self, found):
        node = found.node
        if node.holder is found:
            node.holder = None
        node.opens -= 1
        self._release(node)

    def close_all(self, process):
        """The kernel closes the files of a process that has ended."""
        for descriptor, found in list(self.open_files.items()):
            if found.process is process:
                del self.open_files[descriptor]
                self._forget(found)

    def _file(self, descriptor):
        found = self.open_files.get(descriptor)
        if found is None:
            current().simulation.call("stale", "", lambda: None)  # a dead process ends here
            raise _error(errno.EBADF)
        return found

    def pread(self, descriptor, count, offset):
        file = self._file(descriptor)
        return self._call(
            "pread", file.path, lambda: bytes(file.node.data[offset : offset + count]), changes=False
        )

    def read(self, descriptor, count):
        file = self._file(descriptor)
        data = self.pread(descriptor, count, file.position)
        file.position += len(data)
        return data

    def pwrite(self, descriptor, data, offset):
        file = self._file(descriptor)
        return self._call("pwrite", file.path, self._write, file, bytes(data), offset)

    def write(self, descriptor, data):
        file = self._file(descriptor)
        return self._call("write", file.path, self._write, file, bytes(data), None)

    def _write(self, file, data, offset):
        node = file.node
        if offset is None:
            offset = len(node.data) if file.flags & os.O_APPEND else file.position
            file.position = offset + len(data)
        _apply(node.data, offset, data)
        node.dirty.append((offset, data))
        node.modified = self._time()
        self.written(file.process, node, file.path)
        return len(data)

    def ftruncate(self, descriptor, size):
        file = self._file(descriptor)
        self._call("ftruncate", file.path, self._truncate, file.node, size)

    def _truncate(self, node, size):
        if size != len(node.data):
            _apply(node.data, size, None)
            node.dirty.append((size, None))
            node.modified = self._time()

    def fsync(self, descriptor):
        file = self._file(descriptor)
        self._call("fsync", file.path, self._sync, file.node)

    def _sync(self, node):
        if node.names is not None:
            self._settle(
                [
                    number
                    for number, change in enumerate(self.pending)
                    if any(row[0] is node for row in change)
                ]
            )
        else:
            node.durable, node.dirty = bytes(node.data), []

    def fstat(self, descriptor):
        return Status(self._file(descriptor).node)

    def lseek(self, descriptor, offset, how=os.SEEK_SET):
        file = self._file(descriptor)
        if how in (os.SEEK_DATA, os.SEEK_HOLE):
            raise _error(errno.EINVAL)
        base = {os.SEEK_SET: 0, os.SEEK_CUR: file.position, os.SEEK_END: len(file.node.data or b"")}[how]
        file.position = base + offset
        return file.position

    def copy_file_range(self, *_arguments):
        raise _error(errno.EXDEV)

    def flock(self, descriptor, operation):
        file = self._file(descriptor)
        if "flock" in self.lacks:
            raise _error(errno.ENOLCK)
        self._call("flock", file.path, self._flock, file, operation)

    def _flock(self, file, operation):
        node = file.node
        if operation & fcntl.LOCK_UN:
            if node.holder is file:
                node.holder = None
            return
        if node.holder not in (None, file):
            if "stop" in node.holder.process.struck:
                file.process.struck.add("locked out")
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        node.holder = file

    def stat(self, path, *, dir_fd=None, follow_symlinks=True):
        assert dir_fd is None
        if isinstance(path, int):
            return self.fstat(path)
        return self._call("stat", path, self._stat, path, changes=False)

    def lstat(self, path, *, dir_fd=None):
        return self.stat(path, dir_fd=dir_fd)

    def _stat(self, path):
        folder, name = self._parent(path)
        node = folder.names.get(name) if name else folder
        if node is None:
            raise _error(errno.ENOENT, path)
        return Status(node)

    def mkdir(self, path, mode=0o777, *, dir_fd=None):
        assert dir_fd is None
        self._call("mkdir", path, self._mkdir, path, mode)

    def _mkdir(self, path, mode):
        folder, name = self._parent(path)
        if not name or name in folder.names:
            raise _error(errno.EEXIST, path)
        self._change((folder, name, self._node(stat.S_IFDIR | mode & ~0o022)))

    def rmdir(self, path, *, dir_fd=None):
        assert dir_fd is None
        self._call("rmdir", path, self._rmdir, path)

    def _rmdir(self, path):
        folder, name, node = self._present(path)
        if node.names is None:
            raise _error(errno.ENOTDIR, path)
        if node.names:
            raise _error(errno.ENOTEMPTY, path)
        self._change((folder, name, None))

    def unlink(self, path, *, dir_fd=None):
        assert dir_fd is None
        self._call("unlink", path, self._unlink, path)

    def _unlink(self, path):
        folder, name, node = self._present(path)
        if node.names is not None:
            raise _error(errno.EISDIR, path)
        self._change((folder, name, None))

    def link(self, source, target, **_how):
        source, target = os.fspath(source), os.fspath(target)
        self._call("link", f"{source} {target}", self._link, source, target)

    def _link(self, source, target):
        if "links" in self.lacks:
            raise _error(errno.EPERM, target)
        _folder, _name, node = self._present(source)
        folder, name = self._parent(target)
        if name in folder.names:
            raise _error(errno.EEXIST, target)
        self._change((folder, name, node))

    def rename(self, source, target, **_how):
        source, target = os.fspath(source), os.fspath(target)
        self._call("rename", f"{source} {target}", self._rename, source, target)

    replace = rename

    def rename_no_replace(self, source, target):
        """`renameat2(RENAME_NOREPLACE)`."""
        if "renameat2" in self.lacks:
            raise _error(errno.EINVAL)
        self._call("renameat2", f"{source} {target}", self._rename, source, target, False)

    def _rename(self, source, target, replaces=True):
        old, name, node = self._present(source)
        new, final = self._parent(target)
        there = new.names.get(final)
        if there is node:
            return
        if there is not None:
            if not replaces:
                raise _error(errno.EEXIST, target)
            if (there.names is None) != (node.names is None):
                raise _error(errno.ENOTDIR if there.names is None else errno.EISDIR, target)
            if there.names:
                raise _error(errno.ENOTEMPTY, target)
        self._change((old, name, None), (new, final, node))

    def listdir(self, path="."):
        return self._call("list", path, self._list, path, changes=False)

    def _list(self, path):
        node = self.find(path)
        if node is None:
            raise _error(errno.ENOENT, path)
        if node.names is None:
            raise _error(errno.ENOTDIR, path)
        names = sorted(node.names)
        self.simulation.random.shuffle(names)
        return names

    def scandir(self, path="."):
        text = os.fspath(path)
        return self._call("list", text, self._scan, text, changes=False)

    def _scan(self, path):
        nodes = dict(self.find(path).names) if self.find(path) is not None else {}
        return Listing(ListedEntry(name, f"{path}/{name}", nodes[name]) for name in self._list(path))

    def chmod(self, path, mode, **_how):
        node = self.find(os.fspath(path))
        node.mode = stat.S_IFMT(node.mode) | mode

    def remove_tree(self, path, ignore_errors=False, **_how):
        """`shutil.rmtree`."""
        try:
            for entry in self.scandir(path):
                if entry.is_dir():
                    self.remove_tree(entry.path, ignore_errors)
                else:
                    try:
                        self.unlink(entry.path)
                    except OSError:
                        if not ignore_errors:
                            raise
            self.rmdir(os.fspath(path))
        except OSError:
            if not ignore_errors:
                raise

    # Names and numbers.

    def _time(self):
        return _CLOCK + self.simulation.now // _GRAIN * _GRAIN

    def _node(self, mode):
        number = heapq.heappop(self._free) if self._free else self._next
        self._next = max(self._next, number + 1)
        self._serial += 1
        return Node(number, mode, self._time(), self._serial)

    def _parent(self, path):
        *folders, name = _parts(path) or [""]
        node = self.root
        for part in folders:
            if node.names is None:
                raise _error(errno.ENOTDIR, path)
            if part not in node.names:
                raise _error(errno.ENOENT, path)
            node = node.names[part]
        if node.names is None:
            raise _error(errno.ENOTDIR, path)
        return node, name

    def _present(self, path):
        folder, name = self._parent(os.fspath(path))
        if name not in folder.names:
            raise _error(errno.ENOENT, os.fspath(path))
        return folder, name, folder.names[name]

    def _change(self, *rows):
        """Change names in one step, which is not durable yet."""
        gone = []
        for folder, name, node in rows:
            before = folder.names.pop(name, None)
            if node is not None:
                folder.names[name] = node
                node.links += 1
            if before is not None:
                before.links -= 1
                gone.append(before)
            folder.modified = self._time()
        self.pending.append(rows)
        for node in gone:
            self._release(node)

    def _release(self, node):
        """Give a number back once a file has no name and is not open."""
        if not node.links and not node.opens and node.number and node is not self.root:
            heapq.heappush(self._free, node.number)
            node.number = 0

    # A loss of power.

    def _settle(self, chosen):
        """Make changes of names durable, and the earlier ones that they need."""
        needed, kept = set(chosen), []
        keys, nodes = set(), set()
        for number in range(len(self.pending) - 1, -1, -1):
            rows = self.pending[number]
            own = {(folder.serial, name) for folder, name, _node in rows}
            moved = {node.serial for _folder, _name, node in rows if node is not None}
            if number in needed or own & keys or moved & nodes:
                needed.add(number)
                keys |= own
                nodes |= moved
        for number, rows in enumerate(self.pending):
            if number not in needed:
                kept.append(rows)
                continue
            for folder, name, node in rows:
                if node is None:
                    folder.durable.pop(name, None)
                else:
                    folder.durable[name] = node
        self.pending = kept

    def lose_power(self):
        """Keep what is durable, and any part of the rest."""
        draw, total = self.simulation.random, len(self.pending)
        how = draw.randrange(4)
        if how == 0:
            chosen = range(total)
        elif how == 1:
            chosen = range(draw.randrange(total + 1))
        elif how == 2:
            chosen = [number for number in range(total) if draw.random() < 0.5]
        else:
            chosen = []
        self._settle(chosen)
        self.pending, self.open_files = [], {}
        share = draw.choice((0.0, 0.5, 1.0))
        self._free, self._next = [], 2
        seen = set()
        self._restore(self.root, share, seen)
        for _path, node in self.walk():
            node.links = sum(1 for _other, found in self.walk() if found is node)

    def _restore(self, node, share, seen):
        if node.serial in seen:
            return
        seen.add(node.serial)
        node.holder, node.opens = None, 0
        node.number, self._next = self._next, self._next + 1
        if node.names is None:
            data = bytearray(node.durable)
            for offset, written in node.dirty:
                if self.simulation.random.random() < share:
                    _apply(data, offset, written)
            node.data, node.durable, node.dirty = data, bytes(data), []
            return
        node.names = dict(node.durable)
        for name in sorted(node.names):
            self._restore(node.names[name], share, seen)


def _apply(data, offset, written):
    """Write bytes at an offset, or set the size."""
    if written is None:
        del data[offset:]
        data.extend(bytes(offset - len(data)))
        return
    if offset > len(data):
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(written)] = written


def _parts(path):
    return [part for part in os.fspath(path)[len(ROOT) :].split("/") if part]


# ---- the functions of Python -------------------------------------------------------------------------------------


class RawFile(io.RawIOBase):
    """An open file as `open` returns it."""

    def __init__(self, descriptor, *, reads, writes):
        super().__init__()
        self._descriptor, self._reads, self._writes = descriptor, reads, writes

    def fileno(self):
        return self._descriptor

    def readable(self):
        return self._reads

    def writable(self):
        return self._writes

    def readinto(self, buffer):
        data = os.read(self._descriptor, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data):
        return os.write(self._descriptor, data)

    def close(self):
        if not self.closed:
            super().close()
            if current() is not None:
                os.close(self._descriptor)


_MODES = {
    "r": os.O_RDONLY,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "x": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}


def _open_stream(file, mode="r", buffering=-1, *_rest, **_how):
    assert "b" in mode, "texts are not simulated"
    kind = mode.replace("b", "")
    descriptor = file if isinstance(file, int) else os.open(file, _MODES[kind])
    raw = RawFile(descriptor, reads=kind == "r", writes=kind != "r")
    if buffering == 0:
        return raw
    return io.BufferedReader(raw) if kind == "r" else io.BufferedWriter(raw)


_BY_PATH = (
    "open", "stat", "lstat", "mkdir", "rmdir", "unlink", "link", "rename", "replace", "listdir", "scandir", "chmod",
)  # fmt: skip
_BY_DESCRIPTOR = (
    "close", "read", "pread", "write", "pwrite", "ftruncate", "fsync", "fdatasync", "fstat", "lseek", "copy_file_range",
)  # fmt: skip


def _is_simulated(path):
    if isinstance(path, int):
        return path >= _FIRST
    text = os.fspath(path)
    return isinstance(text, str) and (text == ROOT or text.startswith("/sim/"))


def _by_path(real, name):
    def call(path=".", *rest, **how):
        thread = current()
        if thread is None or not _is_simulated(path):
            return real(path, *rest, **how)
        return getattr(thread.simulation.files, name)(
            path if isinstance(path, int) else os.fspath(path), *rest, **how
        )

    return call


def _by_descriptor(real, name):
    def call(descriptor, *rest, **how):
        thread = current()
        if thread is None or descriptor < _FIRST:
            return real(descriptor, *rest, **how)
        return getattr(thread.simulation.files, name)(descriptor, *rest, **how)

    return call


def _library(*_arguments, **_how):
    """What `ctypes.CDLL` returns in `wherry.store.folders`."""
    thread = current()

    def rename(_old, source, _new, target, _flags):
        try:
            thread.simulation.files.rename_no_replace(os.fsdecode(source), os.fsdecode(target))
        except OSError as error:
            found.code = error.errno
            return -1
        return 0

    found = SimpleNamespace(renameat2=rename, code=0)
    _library.last = found
    return found


Files.fdatasync = Files.fsync


@contextmanager
def simulated_files():
    """Let the functions of Python use the file system of the simulation, for its threads and paths only."""
    with ExitStack() as stack:
        for name in _BY_PATH:
            stack.enter_context(patch.object(os, name, _by_path(getattr(os, name), name)))
        for name in _BY_DESCRIPTOR:
            stack.enter_context(patch.object(os, name, _by_descriptor(getattr(os, name), name)))
        stack.enter_context(patch.object(fcntl, "flock", _by_descriptor(fcntl.flock, "flock")))
        stack.enter_context(patch.object(fcntl, "ioctl", _refused(fcntl.ioctl)))
        stack.enter_context(patch.object(io, "open", _opened(io.open)))
        stack.enter_context(patch.object(shutil, "rmtree", _by_path(shutil.rmtree, "remove_tree")))
        stack.enter_context(
            patch(
                "wherry.store.folders.ctypes",
                SimpleNamespace(CDLL=_library, get_errno=lambda: _library.last.code),
            )
        )
        yield


def _refused(real):
    def call(descriptor, *rest):
        if descriptor < _FIRST:
            return real(descriptor, *rest)
        raise _error(errno.EOPNOTSUPP)

    return call


def _opened(real):
    def call(file, *rest, **how):
        if current() is None or not _is_simulated(file):
            return real(file, *rest, **how)
        return _open_stream(file, *rest, **how)

    return call
