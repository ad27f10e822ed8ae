"""Defines which symbolic links are followed when a checkpoint is read.

A checkpoint is untrusted data, and a link in it could point to any file of this machine. A link is followed only if its
final target is

1. below the root: the folder or file that the user named (`/data/run` may itself be a link, or be below one);
2. in `blobs/` of the Hugging Face cache whose `snapshots/` holds the root;
3. below a folder that the user's own configuration allows: `links = ["/data/models"]`, or `WHERRY_LINKS`.

Any other link raises a HostileError that names the link, its target and the configuration line that allows it. The
check compares the real path of the open file, so that no file can be exchanged between the check and the use.

The folder of a checkpoint is opened once, and everything below it from its descriptor: a folder that is exchanged for a
link later is not followed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from wherry.core.services import service
from wherry.errors import HostileError
from wherry.storage.local_paths import local_path

_CACHED = ("models--", "datasets--", "spaces--")
_ATTEMPTS = 100
_DELETED = " (deleted)"  # what Linux appends to the path of a deleted file


class Folder:
    """An open folder, from which what is below it is opened.

    Attributes:
        path: the path by which it was opened.
        descriptor: of the folder; -1 once it is closed.
    """

    __slots__ = ("descriptor", "path")

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    def relative(self, path: str) -> str | None:
        """A path relative to the folder; None if it is not below it, and once the folder is closed."""
        if self.descriptor < 0:
            return None
        head = self.path.rstrip("/")
        if path == self.path or path.rstrip("/") == head:
            return "."
        return path[len(head) + 1 :].lstrip("/") if path.startswith(f"{head}/") else None

    def __reduce__(self) -> str:
        raise TypeError("an open folder belongs to its process")

    def close(self) -> None:
        """Close the folder; what is read later is opened by its path, under the same rules for links."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Root:
    """The path that a user named; links may point below it.

    Attributes:
        path: as the user named it; absolute.
        real: the same path when it was named, with links resolved.
        above: the real path of the folder that holds it, at that time too.
        configurable: whether the configuration may allow further folders; False while the configuration itself is
            checked.
        folder: the root itself, opened, or the folder that holds it if it is a file; None before it is opened.
    """

    path: str
    real: str
    above: str = ""
    configurable: bool = True
    folder: Folder | None = field(default=None, compare=False, repr=False)

    def holds(self, path: str) -> bool:
        """Whether a path is this root or lies below it."""
        return _is_within(path, self.path)

    def admits(self, path: str, real: str) -> bool:
        """Whether a path below this root, or next to it, may point to a real path.

        Args:
            path: the path that is opened.
            real: the same path with links resolved.
        """
        if path == real or _is_within(real, self.real):
            return True
        real = real.removesuffix(_DELETED)
        base = self.real if self.holds(path) else self._real_above(os.path.commonpath((self.path, path)))
        return (
            _is_within(real, base)
            or _is_within(real, _blobs_of(base))
            or (self.configurable and any(_is_within(real, folder) for folder in allowed_roots()))
        )

    def _real_above(self, folder: str) -> str:
        """The real path that a folder above the root had when the root was named."""
        rest = os.path.dirname(self.path).rstrip("/")[len(folder.rstrip("/")) :]  # noqa: PTH120  text alone
        return (self.above.removesuffix(rest) or "/") if self.above.endswith(rest) else real_path(folder)


def real_path(path: str) -> str:
    """A path with links resolved.

    Raises:
        HostileError: each time that it is resolved, a link in it becomes something else.
    """
    for _attempt in range(_ATTEMPTS):
        try:
            return os.path.realpath(path)
        except OSError:  # a link between two looks, and no link in the second one
            continue
    raise HostileError("links in the path change all the time", uri=path, cure="find what changes them")


def root_at(path: str, *, configurable: bool = True) -> Root:
    """The root for a path that the user named."""
    head, name = os.path.split(path)
    above = real_path(head)
    plain = name not in ("", "..") and not os.path.islink(path)  # noqa: PTH114  a string
    return Root(path, os.path.join(above, name) if plain else real_path(path), above, configurable)  # noqa: PTH118


def allowed_roots() -> tuple[str, ...]:
    """The folders below which the configuration allows targets of links; with links resolved.

    Raises:
        UsageError: the configuration is invalid.
    """
    stated = os.environ.get("WHERRY_LINKS")
    folders = (
        [one for one in stated.split(os.pathsep) if one]
        if stated
        else service("settings").configured_value("links") or ()
    )
    return tuple(real_path(path) for folder in folders if (path := local_path(folder)) is not None)


def link_refusal(path: str, real: str) -> HostileError:
    """The error for a link that must not be followed.

    Args:
        path: the path that was opened.
        real: the target of the link.
    """
    folder = os.path.dirname(real.removesuffix(_DELETED))  # noqa: PTH120
    return HostileError(
        f"symbolic link points outside the checkpoint: {real}",
        uri=path,
        cure=f'replace the link with the file, or allow the folder in your wherry.toml: links = ["{folder}"]',
    )


def _is_within(path: str, folder: str) -> bool:
    return bool(folder) and (path == folder or path.startswith(f"{folder.rstrip('/')}/"))


def _blobs_of(real: str) -> str:
    """`blobs/` of the Hugging Face cache whose snapshots contain a folder; empty if the folder is in no cache."""
    parts = real.split("/")
    for number in range(len(parts) - 1, 0, -1):
        if parts[number] == "snapshots" and parts[number - 1].startswith(_CACHED):
            return "/".join((*parts[:number], "blobs"))
    return ""
