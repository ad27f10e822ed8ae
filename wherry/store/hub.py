"""hub: hf://, repositories of the Hugging Face Hub, and files that appear there in one commit.

A branch can move while it is read. So it is resolved to its commit once, and everything is read of that commit. Bytes
are read by range with one request; the file system of its library reads 5 MB ahead and asks for the file again for each
read.

Files are written in three steps (`HubCommit`), so that they appear after each was read back:

1. A branch `wherry-<id>` begins at the head of the target's branch and gets a commit with all files.
2. The caller reads every file back from that commit.
3. The target's branch gets the same files in one commit, on the condition that its head is still the one that was seen.
   What is large is in the Hub by then, so only names and digests are sent. A branch that does not exist begins at the
   commit of step 1 instead.

Files go the way of Git LFS, whose objects are named by their SHA-256: what an interrupted run has sent is not sent
again. Uploads by Xet, which the client prefers for files on a disk, are switched off.
"""

from __future__ import annotations

import re
import secrets
import shlex
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote, unquote

from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import logger
from wherry.errors import NotFoundError, TargetExistsError, TargetInUseError, WherryError
from wherry.store.addresses import configured_hosts, guard_httpx, require_named_address
from wherry.store.failures import status_of
from wherry.store.remote_store import FsspecStore, range_header
from wherry.store.waits import RetryPolicy

PROTOCOL = "hf"
MAIN = "main"
_PATH = re.compile(
    r"(?:(models|datasets|spaces)/)?([^/@]+/[^/@]+)(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(.*))?"
)
_BEYOND_END = 416  # HTTP: the range begins behind the last byte
_T = TypeVar("_T")
_log = logger(__name__)
# What the Hub itself puts into a new repository, or its owner on the Hub's pages.
BLANK = frozenset({".gitattributes", ".gitignore", "LICENSE", "README.md"})
_CONFLICT = 409  # HTTP: the branch exists
_MARK = "wherry-run: "  # in the message of a commit
_OWN = re.compile(r"wherry-[0-9a-f]{8}")
_ROUNDS = 5  # of a commit whose branch gets other commits


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


class HubStore(FsspecStore):
    """Repositories of the Hub."""

    def __init__(self, protocol: str, policy: RetryPolicy) -> None:
        super().__init__(protocol, policy)
        self._commits: dict[HubPath, HubPath] = {}  # root of a revision → that of its commit

    def read(self, path: str, start: int, stop: int) -> bytes:
        """See Store."""
        full = self._full(path)

        def get() -> bytes:
            from huggingface_hub.utils import get_session, hf_raise_for_status

            own: dict[str, str] = api_of(self.fs)._build_hf_headers()  # noqa: SLF001  as its own calls
            headers = {**own, "Range": range_header(start, stop - start)}
            answer: Any = get_session().get(self.fs.url(full), headers=headers)
            if answer.status_code == _BEYOND_END:
                return b""
            hf_raise_for_status(answer)
            return answer.content

        return self.run(path, get, stop - start)

    def _full(self, path: str) -> str:
        """A path in the commit that was seen first."""
        place = parse_hub_path(path)
        if place is None:
            return path
        root = replace(place, path="")
        if root not in self._commits:

            def pin() -> HubPath:
                how = {"repo_type": root.kind, "revision": root.revision or MAIN}
                return replace(root, revision=api_of(self.fs).repo_info(root.repo, **how).sha)

            self._commits[root] = self.run(path, pin)
        return replace(self._commits[root], path=place.path).text

    def _prepare(self, seconds: float) -> None:  # noqa: ARG002  it has no login that expires
        """Have the client of the Hub, which is one for the whole process, check the address of each connection."""
        from huggingface_hub.utils import get_session

        hosts = configured_hosts(self.fs.endpoint)  # which the configuration names
        guard_httpx(get_session(), partial(require_named_address, names=hosts))


class HubCommit:
    """Files on their way into a repository; use it in a `with` statement, which removes the branch of step 1."""

    def __init__(self, store: FsspecStore, target: HubPath, files: Mapping[str, Path], run: str) -> None:
        """Nothing is requested yet.

        Args:
            store: of hf://.
            target: the folder or the file.
            files: path in the repository → file on the local disk.
            run: eight hex digits, the same for the same conversion: it removes the branch that a killed run has left.
        """
        self._store, self._target, self._files = store, target, files
        self._branch = f"wherry-{run}"
        self._token = secrets.token_hex(8)  # in the message of a commit, by which this process knows its own
        self._revision = target.revision or MAIN
        self._api = api_of(store.fs)
        self._repo = {"repo_id": target.repo, "repo_type": target.kind}
        self._operations: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        try:
            self._drop()
        except WherryError as error:
            _log.warning("the branch %s of %s was not removed: %s", self._branch, self._target.repo, error)

    def stage(self) -> HubPath:
        """Commit the files to the branch of step 1; returns the root of that commit.

        Raises:
            NotFoundError: the repository does not exist.
            TargetExistsError: the target exists.
            TargetInUseError: another run of the same conversion has removed or changed the branch.
            StorageError: the Hub failed.
        """
        self._base = self._head(self._revision)
        start = self._base or self._origin()
        if start is None:
            raise no_repository(self._target)
        self._drop()
        with _quiet():  # what the Hub does not have of the large files is sent; nothing refers to it yet
            revision = MAIN if self._base is None else self._revision
            send = partial(self._api.preupload_lfs_files, **self._repo, revision=revision, free_memory=False)
            nbytes = sum(file.stat().st_size for file in self._files.values())
            self._call(lambda: send(additions=self._prepare()), nbytes)
        try:
            self._begin(self._branch, start)
            with _quiet():
                self._staged = self._commit(self._branch, start)
        except (FileExistsError, FileNotFoundError) as error:
            raise TargetInUseError(
                "another run of the same conversion writes this target",
                uri=f"hf://{self._target.text}",
                cure="run it again when the other one has ended",
            ) from error
        return HubPath(self._target.kind, self._target.repo, self._staged, "")

    def publish(self) -> str:
        """Let the files appear; returns the commit.

        Raises:
            TargetExistsError: the target exists.
            StorageError: the Hub failed.
        """
        for _round in range(_ROUNDS):
            with suppress(FileExistsError), _quiet():
                if self._base is None:
                    return self._begin(self._revision, self._staged)
                return self._commit(self._revision, self._base)
            self._base = self._head(self._revision)  # somebody has committed something else
        raise self._exists()

    def _begin(self, branch: str, commit: str) -> str:
        """Create a branch at a commit, which is returned.

        Raises:
            FileExistsError: another process has created it.
        """
        try:
            self._call(lambda: self._api.create_branch(**self._repo, branch=branch, revision=commit))
        except FileExistsError:
            found = self._info(branch)
            if found is None or found.sha != commit:  # else the answer to an earlier attempt was lost
                raise
        return commit

    def _commit(self, branch: str, parent: str) -> str:
        """Commit the files to a branch whose head is `parent`; returns the commit.

        Raises:
            FileExistsError: it is another one.
        """
        commit = partial(
            self._api.create_commit,
            **self._repo,
            operations=self._prepare(),
            commit_message=f"Add {self._target.path or 'a checkpoint'}",
            commit_description=f"{_MARK}{self._token}",
            revision=branch,
            parent_commit=parent,
        )
        try:
            return self._call(lambda: commit().oid)
        except FileExistsError:
            last, *before = self._call(lambda: self._api.list_repo_commits(**self._repo, revision=branch))[:2]
            ours = self._token in last.message and [one.commit_id for one in before] == [parent]
            if not ours:  # else the answer to an earlier attempt was lost
                raise
            return last.commit_id

    def _prepare(self) -> list[Any]:
        """The operations, with the digests that were computed for an earlier commit."""
        from huggingface_hub import CommitOperationAdd

        found = [CommitOperationAdd(name, str(file)) for name, file in self._files.items()]
        for new, old in zip(found, self._operations, strict=False):
            new.upload_info = old.upload_info
        self._operations = found
        return list(found)

    def _head(self, revision: str) -> str | None:
        """The commit of a revision, at which the target does not exist; None if there is no such revision.

        Raises:
            TargetExistsError: the target exists there.
        """
        found = self._info(revision)
        if found is None:
            return None
        if is_occupied([one.rfilename for one in found.siblings or ()], self._target.path):
            raise self._exists()
        return found.sha

    def _origin(self) -> str | None:
        """Where a new branch begins: at `main`, or at the first commit if the place of the target is taken there.

        Raises:
            TargetExistsError: the first commit has one too.
        """
        try:
            return self._head(MAIN)
        except TargetExistsError:
            first = self._call(lambda: self._api.list_repo_commits(**self._repo, revision=MAIN))[-1]
            return self._head(first.commit_id)

    def _info(self, revision: str) -> Any:
        """The commit of a revision and the names of its files; None if there is no such revision."""
        try:
            return self._call(lambda: self._api.repo_info(**self._repo, revision=revision))
        except FileNotFoundError:
            return None

    def _drop(self) -> None:
        with suppress(FileNotFoundError):
            remove_branch(self._store, self._target, self._branch)

    def _exists(self) -> TargetExistsError:
        return TargetExistsError(
            "target already exists; it was created during the conversion",
            uri=f"hf://{self._target.text}",
            cure="choose another target",
        )

    def _call(self, call: Callable[[], _T], nbytes: int = 0) -> _T:
        """Call the client, as often as the policy allows.

        Raises:
            FileNotFoundError, FileExistsError: as the Hub says it.
            WherryError: see `wherry.store.failures.translate_error`.
        """
        return self._store.run(self._target.text, partial(_call_client, call), nbytes)


def no_repository(place: HubPath) -> NotFoundError:
    """The error for a path in a repository that does not exist."""
    return NotFoundError(
        "repository not found",
        uri=f"hf://{replace(place, revision='', path='').text}",
        cure=f"create it: hf repos create {shlex.quote(place.repo)}",
    )


def leftover_branches(store: FsspecStore, place: HubPath) -> list[tuple[str, float | None]]:
    """Branches that runs of wherry have begun in a repository, with the seconds since their commit, if they have one.

    Raises:
        FileNotFoundError: the repository does not exist.
        StorageError: the Hub failed.
    """
    api, repo = api_of(store.fs), {"repo_id": place.repo, "repo_type": place.kind}
    found = store.run(place.text, lambda: api.list_repo_refs(**repo).branches)
    rows = list[tuple[str, float | None]]()
    for name in (one.name for one in found if _OWN.fullmatch(one.name)):
        last = store.run(place.text, partial(api.list_repo_commits, **repo, revision=name))[0]
        ours = _MARK in last.message
        rows.append((name, time.time() - last.created_at.timestamp() if ours else None))
    return rows


def remove_branch(store: FsspecStore, place: HubPath, name: str) -> None:
    """Remove a branch.

    Raises:
        FileNotFoundError: it does not exist.
        StorageError: the Hub failed.
    """
    api = api_of(store.fs)
    remove = partial(api.delete_branch, repo_id=place.repo, repo_type=place.kind, branch=name)
    store.run(place.text, remove)


def is_occupied(names: Collection[str], path: str) -> bool:
    """Whether a target exists among the files of a repository.

    Args:
        names: of the files.
        path: of the target; empty for the root, where what a new repository has does not count.
    """
    if not path:
        return any(name not in BLANK for name in names)
    return any(name == path or name.startswith(f"{path}/") for name in names)


def _call_client(call: Callable[[], _T]) -> _T:
    """The result of a call, or the exception that the client wraps or does not name.

    Raises:
        FileExistsError: a branch exists.
    """
    try:
        return call()
    except RuntimeError as error:
        raise error.__cause__ or error  # noqa: B904  the client hides which failure it was
    except OSError as error:
        if status_of(error) == _CONFLICT:
            raise FileExistsError(str(error)) from error
        raise


@contextmanager
def _quiet() -> Generator[None]:
    """The client without Xet and without its progress bars."""
    from huggingface_hub import constants, utils

    before = constants.HF_HUB_DISABLE_XET
    shown = not utils.are_progress_bars_disabled()
    constants.HF_HUB_DISABLE_XET = True
    utils.disable_progress_bars()
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before
        if shown:
            utils.enable_progress_bars()
