"""Durability: what a power loss would leave of a folder, checked at every step of a run.

`Disk` watches a folder while its `with` block runs and keeps a model of the storage below it: the contents of each file
at its last sync, and the names in each folder at its last sync. A call of `os` that syncs updates the model; at every
call that changes the file system these rules are checked:

1. contents: a visible file (one whose path has no staging name) holds only contents that are durable;
2. commit: when a target becomes visible, everything in it is durable, names included;
3. sidecar: when a single file becomes visible, its sidecar is durable next to it;
4. names: when success is reported, every visible name is durable, from the watched folder downwards;
5. change: nothing in a target changes once it is visible.

At chosen moments the model also yields the trees that a power loss could leave (`Disk.losses`), from which a run can
be resumed. Contents are read from the files themselves, so it does not matter which call wrote them. Syncs that a
library makes outside of Python are not seen; what they made durable counts as lost.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

from wherry.core.lazy_dataclass import dataclass
from wherry.store.folders import is_staging
from wherry.store.sidecar import sidecar_name
from wherry.testing.faults import replace_value

_SYNCS = ("fsync", "fdatasync")
_REMOVALS = ("unlink", "remove", "rmdir")
_RENAMES = ("rename", "replace")
_OTHERS = ("open", "mkdir", "link", "symlink", "truncate", "ftruncate", "write", "pwrite", "posix_fallocate")
_LOST = b""  # the contents of a file that was never synced


class Broken(NamedTuple):
    """A rule that was broken.

    Attributes:
        rule: `contents`, `commit`, `sidecar`, `names` or `change`.
        path: relative to the watched folder.
        call: the call before which it was seen, or what was reported.
    """

    rule: str
    path: str
    call: str


class KeptEntry(NamedTuple):
    """A file or folder that survives: its mode, the time of its last change, and its contents or entries."""

    mode: int
    changed: int
    held: bytes | dict[str, KeptEntry]


Tree: TypeAlias = "dict[str, KeptEntry]"


@dataclass(slots=True)
class _FileNode:
    """A file or folder in the model.

    Attributes:
        contents: of a file, at its last sync.
        names: of a folder, at its last sync.
        mode, changed: current mode and modification time in nanoseconds.
    """

    contents: bytes = _LOST
    names: Mapping[str, _FileNode] = field(default_factory=dict[str, "_FileNode"])
    mode: int = 0
    changed: int = 0

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)

    def kept(self, entries: Tree | None = None) -> KeptEntry:
        return KeptEntry(stat.S_IMODE(self.mode), self.changed, self.contents if entries is None else entries)


@dataclass(frozen=True, slots=True)
class Loss:
    """The files that a power loss at one moment could leave.

    Attributes:
        call: the call after which it happens, and its path.
        tree: the entries of the watched folder.
    """

    call: str
    tree: Tree

    def restore(self, folder: Path) -> None:
        """Replace the contents of a folder by the tree."""
        for entry in folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        _restore(self.tree, folder)


class Disk:
    """Watches a folder; see the module docstring.

    Attributes:
        broken: rules that were broken, each once.
        losses: what a power loss could leave, at the moments that `keeps` chooses; without duplicates.
    """

    def __init__(
        self, root: Path, targets: Sequence[Path] = (), keeps: Callable[[str, Path], bool] | None = None
    ) -> None:
        """Choose what to watch.

        Args:
            root: the folder; its current contents are durable.
            targets: paths below it that appear in one step.
            keeps: called after each sync with the function's name and the path; true records the losses there.
        """
        self.broken: list[Broken] = []
        self.losses: list[Loss] = []
        self._root = root.resolve()
        self._targets = [root.resolve() / target.relative_to(root) for target in targets]
        self._keeps = keeps or _never
        self._nodes: dict[int, _FileNode] = {}
        self._interned: dict[bytes, bytes] = {}
        self._committed: dict[Path, dict[str, bytes]] = {}
        self._seen: set[object] = set()
        self._lock = threading.RLock()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._adopt(self._root)
        for name in (*_SYNCS, *_REMOVALS, *_RENAMES, *_OTHERS):
            self._stack.enter_context(
                replace_value(f"os:{name}", partial(self._call, name, getattr(os, name)))
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None:
            self.reported("the end")

    def reported(self, what: str) -> None:
        """State that success was reported: from now on everything that is visible must survive a power loss."""
        with self._lock:
            self._look(what)
            for path, status in self._all(self._root, self._root.stat(), visible=True):
                if stat.S_ISDIR(status.st_mode):
                    self._differing(path, self._node(status), "names", what)
            for target, before in self._committed.items():
                for name in sorted({*before, *(after := self._contents(target))}):
                    if before.get(name) != after.get(name):
                        self._break("change", target / name, what)

    # System calls.

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self._lock:
            self._look(name)
            if name in _SYNCS:
                return self._sync(name, function, arguments[0])
            if name in (*_REMOVALS, *_RENAMES):
                return self._remove(name, function, arguments, options)
        return function(*arguments, **options)

    def _sync(self, name: str, function: Callable[..., Any], file: Any) -> Any:
        """Record the state before the sync: data that is written while it runs may be lost."""
        descriptor = file if isinstance(file, int) else file.fileno()
        place = Path(f"/proc/self/fd/{descriptor}")
        path, status = place.readlink(), os.fstat(descriptor)
        if not path.is_relative_to(self._root):
            return function(file)
        names = self._list_nodes(path) if stat.S_ISDIR(status.st_mode) else {}
        contents = self._bytes(place) if stat.S_ISREG(status.st_mode) else _LOST
        done = function(file)
        node = self._node(status)
        node.names, node.contents = names, contents
        if self._keeps(name, path):
            self._keep(f"{name} {path.relative_to(self._root)}")
        return done

    def _remove(
        self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Forget the node of a removed file, since its inode number will be reused."""
        lost = arguments[1] if name in _RENAMES else arguments[0]
        folder = options.get("dst_dir_fd" if name in _RENAMES else "dir_fd")
        try:
            status = os.stat(lost, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            status = None
        done = function(*arguments, **options)
        if status is not None and (status.st_nlink == 1 or stat.S_ISDIR(status.st_mode)):
            self._nodes.pop(status.st_ino, None)
        return done

    # The rules.

    def _look(self, call: str) -> None:
        for path, status in self._all(self._root, self._root.stat(), visible=True):
            if stat.S_ISREG(status.st_mode) and self._node(status).contents != self._bytes(path):
                self._break("contents", path, call)
        for target in self._targets:
            if target not in self._committed and target.exists():
                self._committed[target] = self._contents(target)
                self._check_commit(target, call)

    def _check_commit(self, target: Path, call: str) -> None:
        status = target.stat()
        if stat.S_ISREG(status.st_mode):
            sidecar = target.with_name(sidecar_name(target.name))
            durable = self._node(target.parent.stat()).names.get(sidecar.name)
            if durable is None or durable is not self._node(sidecar.stat()):
                self._break("sidecar", sidecar, call)
        for path, found in self._all(target, status):
            node = self._node(found)
            if stat.S_ISDIR(found.st_mode):
                self._differing(path, node, "commit", call)
            elif node.contents != self._bytes(path):
                self._break("commit", path, call)
        if self._keeps("commit", target):
            self._keep(f"commit {target.name}")

    def _differing(self, folder: Path, node: _FileNode, rule: str, call: str) -> None:
        """Report names of a folder that are not durable, or whose removal is not durable."""
        now = self._list_nodes(folder)
        for name in {*now, *node.names}:
            if now.get(name) is not node.names.get(name) and not is_staging(name):
                self._break(rule, folder / name, call)

    def _break(self, rule: str, path: Path, call: str) -> None:
        row = Broken(rule, str(path.relative_to(self._root)), call)
        if (rule, row.path) not in self._seen:
            self._seen.add((rule, row.path))
            self.broken.append(row)

    # The current state.

    def _all(
        self, path: Path, status: os.stat_result, *, visible: bool = False
    ) -> Iterator[tuple[Path, os.stat_result]]:
        """A file, or a folder and everything below it; no links."""
        yield path, status
        if not stat.S_ISDIR(status.st_mode):
            return
        for entry in _scan(path):
            if not (visible and is_staging(entry.name)):
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                yield from self._all(Path(entry.path), found, visible=visible)

    def _node(self, status: os.stat_result) -> _FileNode:
        node = self._nodes.setdefault(status.st_ino, _FileNode())
        node.mode, node.changed = status.st_mode, status.st_mtime_ns
        return node

    def _adopt(self, path: Path) -> _FileNode:
        """Take the current state as durable."""
        status = path.lstat()
        node = self._node(status)
        if stat.S_ISDIR(status.st_mode):
            node.names = {entry.name: self._adopt(Path(entry.path)) for entry in _scan(path)}
        elif stat.S_ISREG(status.st_mode):
            node.contents = self._bytes(path)
        return node

    def _list_nodes(self, folder: Path) -> dict[str, _FileNode]:
        return {entry.name: self._node(entry.stat(follow_symlinks=False)) for entry in _scan(folder)}

    def _contents(self, target: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(target)): self._bytes(path)
            for path, status in self._all(target, target.stat())
            if stat.S_ISREG(status.st_mode)
        }

    def _bytes(self, path: Path) -> bytes:
        """Contents of a file; equal contents are one object."""
        data = path.read_bytes()
        return self._interned.setdefault(data, data)

    # What a power loss leaves.

    def _keep(self, call: str) -> None:
        for tree in self._trees():
            key = _identity(tree)
            if key not in self._seen:
                self._seen.add(key)
                self.losses.append(Loss(call, tree))

    def _trees(self) -> Iterator[Tree]:
        """The trees in which all, none, one, or all but one of the changed names of a target's folder are durable."""
        folders = {target.parent for target in self._targets} or {self._root}
        for folder in sorted(folder for folder in folders if folder.is_dir()):
            now, then = self._list_nodes(folder), self._node(folder.stat()).names
            changes = _changes(then, now)
            some = [changes, [], *([one] for one in changes)]
            some += [[other for other in changes if other is not one] for one in changes]
            for chosen in some:
                entries = {**then, **{name: node for change in chosen for name, node in change.items()}}
                found = {name: node for name, node in entries.items() if node is not None}
                for durable in (True, False):
                    yield self._tree(self._root, folder, found, durable=durable)

    def _tree(self, at: Path, folder: Path, entries: Mapping[str, _FileNode], *, durable: bool) -> Tree:
        """The tree in which `folder` has the given entries; other folders have their durable or current names."""
        now = {id(self._node(entry.stat(follow_symlinks=False))): Path(entry.path) for entry in _scan(at)}
        tree: Tree = {}
        for name, node in (entries if at == folder else self._list_nodes(at)).items():
            if node.is_folder and folder.is_relative_to(at / name):
                tree[name] = node.kept(self._tree(at / name, folder, entries, durable=durable))
            else:
                tree[name] = _durable(node) if durable or id(node) not in now else self._named(now[id(node)])
        return tree

    def _named(self, path: Path) -> KeptEntry:
        """A file or folder with its current names and its durable contents."""
        node = self._node(path.lstat())
        if not node.is_folder:
            return node.kept()
        return node.kept({entry.name: self._named(Path(entry.path)) for entry in _scan(path)})


def _never(_name: str, _path: Path) -> bool:
    return False


def _changes(
    then: Mapping[str, _FileNode], now: Mapping[str, _FileNode]
) -> list[dict[str, _FileNode | None]]:
    """The changes from some names to others, each a mapping of names; a rename is one change."""
    changed = {name for name in {*now, *then} if now.get(name) is not then.get(name)}
    moved = {id(then[name]): name for name in changed if name in then}
    found: list[dict[str, _FileNode | None]] = []
    for name in sorted(changed & {*now}):
        left = moved.pop(id(now[name]), name)
        moved = {key: other for key, other in moved.items() if other != name}
        found.append({left: now.get(left), name: now[name]})
    return [*found, *({name: None} for name in sorted(moved.values()) if name not in now)]


def _durable(node: _FileNode) -> KeptEntry:
    if not node.is_folder:
        return node.kept()
    return node.kept({name: _durable(inner) for name, inner in node.names.items()})


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as found:
        return list(found)


def _identity(tree: Tree) -> tuple[Any, ...]:
    """A key that is equal for equal trees; contents are compared by identity, since equal contents are one object."""
    return tuple(
        (name, _identity(kept.held) if isinstance(kept.held, dict) else id(kept.held))
        for name, kept in sorted(tree.items())
    )


def _restore(tree: Tree, folder: Path) -> None:
    for name, (mode, changed, held) in tree.items():
        place = folder / name
        if isinstance(held, dict):
            place.mkdir()
            _restore(held, place)
        else:
            place.write_bytes(held)
        place.chmod(mode)
        os.utime(place, ns=(changed, changed))
