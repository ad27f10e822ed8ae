"""links: which symbolic links are followed when a checkpoint is read.

A checkpoint is data from elsewhere, and a link in it could name any file of this machine. A link is followed where its
final target lies

1. below the root: the folder or file that the user named (`/data/run` may itself be a link, or lie below one);
2. in `blobs/` of the Hugging Face cache whose `snapshots/` holds the root;
3. below a folder that the user's own configuration allows: `links = ["/data/models"]`, or `WHERRY_LINKS`.

Everything else is a HostileError that names the link, its target and the line that allows it. What is compared is the
real path of what was opened, so that nothing can be exchanged between the check and the use.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from wherry.core.services import service
from wherry.errors import HostileError

_CACHED = ("models--", "datasets--", "spaces--")
_DELETED = " (deleted)"  # what Linux adds to the path of a file that has no name any more


@dataclass(frozen=True, slots=True)
class Root:
    """What a user named, below which links may lead.

    Attributes:
        path: as it was named; absolute.
        real: where it lay when it was named, links resolved.
        configurable: whether the configuration may allow more; not while the configuration itself is being judged.
    """

    path: str
    real: str
    configurable: bool = True

    def admits(self, path: str, real: str) -> bool:
        """Whether a path below this root, or beside it, may lead to a place.

        Args:
            path: what is opened.
            real: where that lies, links resolved.
        """
        if path == real or _is_within(real, self.real):
            return True
        real = real.removesuffix(_DELETED)
        base = self if _is_within(path, self.path) else root_at(os.path.commonpath((self.path, path)))
        return (
            _is_within(real, base.real)
            or _is_within(real, _blobs_of(base.real))
            or (self.configurable and any(_is_within(real, folder) for folder in allowed_roots()))
        )


def root_at(path: str, *, configurable: bool = True) -> Root:
    """The root that a path is which the user named."""
    return Root(path, os.path.realpath(path), configurable)


def allowed_roots() -> tuple[str, ...]:
    """The folders, links resolved, below which the configuration lets links lead.

    Raises:
        UsageError: the configuration is faulty.
    """
    stated = os.environ.get("WHERRY_LINKS")
    folders = (
        [one for one in stated.split(os.pathsep) if one]
        if stated
        else service("settings").configured("links") or ()
    )
    return tuple(os.path.realpath(os.path.expanduser(folder)) for folder in folders)  # noqa: PTH111  text alone


def link_refusal(path: str, real: str) -> HostileError:
    """The error for a link that must not be followed.

    Args:
        path: what was to be opened.
        real: where it leads.
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
    """`blobs/` of the Hugging Face cache to whose snapshots a folder belongs; empty where it is in none."""
    parts = real.split("/")
    for number in range(len(parts) - 1, 0, -1):
        if parts[number] == "snapshots" and parts[number - 1].startswith(_CACHED):
            return "/".join((*parts[:number], "blobs"))
    return ""
