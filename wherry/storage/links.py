"""Defines which symbolic links are followed when a checkpoint is read.

A checkpoint is untrusted data, and a link in it could point to any file of this machine. A link is followed only if its
final target is

1. below the root: the folder or file that the user named (`/data/run` may itself be a link, or be below one);
2. in `blobs/` of the Hugging Face cache whose `snapshots/` holds the root;
3. below a folder that the user's own configuration allows: `links = ["/data/models"]`, or `WHERRY_LINKS`.

Any other link raises a HostileError that names the link, its target and the configuration line that allows it. The
check compares the real path of the open file, so that no file can be exchanged between the check and the use.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from wherry.core.services import service
from wherry.errors import HostileError

_CACHED = ("models--", "datasets--", "spaces--")
_DELETED = " (deleted)"  # what Linux appends to the path of a deleted file


@dataclass(frozen=True, slots=True)
class Root:
    """The path that a user named; links may point below it.

    Attributes:
        path: as the user named it; absolute.
        real: the same path when it was named, with links resolved.
        configurable: whether the configuration may allow further folders; False while the configuration itself is
            checked.
    """

    path: str
    real: str
    configurable: bool = True

    def holds(self, path: str) -> bool:
        """Whether a path is this root or lies below it."""
        return _is_within(path, self.path)

    def admits(self, path: str, real: str) -> bool:
        """Whether a path below this root, or beside it, may point to a real path.

        Args:
            path: the path that is opened.
            real: the same path with links resolved.
        """
        if path == real or _is_within(real, self.real):
            return True
        real = real.removesuffix(_DELETED)
        base = self if self.holds(path) else root_at(os.path.commonpath((self.path, path)))
        return (
            _is_within(real, base.real)
            or _is_within(real, _blobs_of(base.real))
            or (self.configurable and any(_is_within(real, folder) for folder in allowed_roots()))
        )


def root_at(path: str, *, configurable: bool = True) -> Root:
    """The root for a path that the user named."""
    return Root(path, os.path.realpath(path), configurable)


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
    return tuple(os.path.realpath(os.path.expanduser(folder)) for folder in folders)  # noqa: PTH111  text alone


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
