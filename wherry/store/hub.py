"""hub: hf://, repositories of the Hugging Face Hub, and requests that the file system of its library does not make.

A branch can move while it is read. So it is resolved to its commit once, and everything is read of that commit. Bytes
are read by range with one request; the file system reads 5 MB ahead and asks for the file again for each read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from wherry.remote.addresses import require_named_address
from wherry.remote.checked_clients import configured_hosts, guard_httpx
from wherry.store.fsspec_store import FsspecStore

if TYPE_CHECKING:
    from wherry.remote.retries import RetryPolicy

PROTOCOL = "hf"
MAIN = "main"
_PATH = re.compile(
    r"(?:(models|datasets|spaces)/)?([^/@]+/[^/@]+)(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(.*))?"
)
_BEYOND_END = 416  # HTTP: the range begins behind the last byte


@dataclass(frozen=True, slots=True)
class HubPath:
    """A path in a repository.

    Attributes:
        kind: `model`, `dataset` or `space`.
        repo: `owner/name`.
        revision: a branch, a tag or a commit; empty if none is named.
        path: in the repository; empty for its root.
    """

    kind: str
    repo: str
    revision: str
    path: str

    @property
    def text(self) -> str:
        """The path as the file system takes it."""
        start = "" if self.kind == "model" else f"{self.kind}s/"
        revision = f"@{quote(self.revision, safe='')}" if self.revision else ""
        return f"{start}{self.repo}{revision}{'/' if self.path else ''}{self.path}"


def parse_hub_path(path: str) -> HubPath | None:
    """The parts of a path without its protocol; None if it names no repository."""
    found = _PATH.fullmatch(path.strip("/"))
    if found is None:
        return None
    kinds, repo, revision, inside = found.groups(default="")
    return HubPath(kinds.removesuffix("s") or "model", repo, unquote(revision), inside)


def api_of(fs: Any) -> Any:
    """The client with the endpoint and the token of a file system."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=fs.endpoint, token=fs.token)


def check_connections(fs: Any) -> None:
    """Have the client of the Hub check the address of each connection; it has one for the whole process.

    Args:
        fs: its file system, which has the endpoint that the configuration names.
    """
    from huggingface_hub.utils import get_session

    hosts = configured_hosts(fs.endpoint)
    guard_httpx(get_session(), lambda host, address: require_named_address(host, address, hosts))


def pin_revision(fs: Any, place: HubPath) -> HubPath:
    """A path in the commit at which its revision is now.

    Raises:
        FileNotFoundError: as the client says it: the repository or the revision does not exist.
    """
    found = api_of(fs).repo_info(place.repo, repo_type=place.kind, revision=place.revision or MAIN)
    return replace(place, revision=found.sha)


def read_range(fs: Any, path: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file; fewer where it ends earlier."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    headers = {**api_of(fs)._build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}  # noqa: SLF001  as its own calls
    answer: Any = get_session().get(fs.url(path), headers=headers)
    if answer.status_code == _BEYOND_END:
        return b""
    hf_raise_for_status(answer)
    return answer.content


class HubStore(FsspecStore):
    """Repositories of the Hub."""

    def __init__(self, protocol: str, policy: RetryPolicy) -> None:
        super().__init__(protocol, policy)
        self._commits: dict[HubPath, HubPath] = {}  # root of a revision → that of its commit

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store."""
        return self.run(path, partial(read_range, self.fs, self._full(path), start, stop), stop - start)

    def _full(self, path: str) -> str:
        """A path in the commit that was seen first."""
        place = parse_hub_path(path)
        if place is None:
            return path
        root = replace(place, path="")
        if root not in self._commits:
            self._commits[root] = self.run(path, partial(pin_revision, self.fs, root))
        return replace(self._commits[root], path=place.path).text

    def _prepare(self, seconds: float) -> None:  # noqa: ARG002  it has no login that expires
        check_connections(self.fs)
