"""Staging for a repository of the Hub: a local folder, whose files appear there in one commit.

The Hub takes files by their SHA-256, so each must be whole before it is sent. Neither a lease nor a journal is there:
of two runs, the slower one is refused by the Hub, because the head of the branch is another one; and a run that follows
a killed one makes its files again, but does not send again what the Hub has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.errors import UsageError, storage_errors
from wherry.objects.hub_commit import BLANK, HubCommit
from wherry.remote.hub import PROTOCOL, parsed
from wherry.staging.copied_staging import CopiedStaging, require_same
from wherry.storage.fsspec_store import FsspecStore
from wherry.storage.location import Location
from wherry.storage.sidecar import read_sidecar, sidecar_name

if TYPE_CHECKING:
    from pathlib import Path

    from wherry.storage.sidecar import Sidecar

CARD = "README.md"
_CARD = """---
tags:
- wherry
---

# Checkpoint

Made by wherry, which read every byte back before it appeared; `wherry.json` has a digest of each tensor.

| | |
| --- | --- |"""


class HubStaging(CopiedStaging):
    """The staging of one target in a repository of the Hub; see Staging."""

    def __init__(self, target: Location, identity: str) -> None:
        """Choose the names.

        Args:
            target: what will be committed.
            identity: eight hex digits of the conversion.

        Raises:
            UsageError: the target names no repository.
        """
        place = parsed(target.path)
        if place is None:
            raise UsageError(
                "the target names no repository", uri=target.uri, cure="write hf://OWNER/NAME@BRANCH/PATH"
            )
        super().__init__(target, ())
        self._place, self._identity = place, identity

    def commit(self, beside: bytes | None = None) -> None:
        """Send the staged files, read them back, and let them appear in one commit; see Staging.

        Args:
            beside: contents of the sidecar of a single file.

        Raises:
            MismatchError: the Hub has other bytes.
            NotFoundError: the repository does not exist.
            TargetExistsError, StorageError: see Staging.
        """
        store = self.target.store
        assert isinstance(store, FsspecStore), "hf:// has no other"
        files = {_inside(path): file for path, file in self._files()}
        if beside is not None:
            files[_inside(self.target.parent.join(sidecar_name(self.target.name)).path)] = self._kept(beside)
        elif not self._place.path and not self.location.join(CARD).exists():
            self._add_card(files)
        with storage_errors(self.target.uri), HubCommit(store, self._place, files, self._identity) as commit:
            root = commit.stage()
            for name, file in files.items():
                require_same(Location(store, replace(root, path=name).text), file)
            commit.publish()

    def _add_card(self, files: dict[str, Path]) -> None:
        """Describe the checkpoint on the page of its repository, unless that has one."""
        if not self.target.join(CARD).exists():
            files[CARD] = self._kept(card(read_sidecar(self.location)).encode())

    def _kept(self, data: bytes) -> Path:
        """A file of the temporary folder with some bytes."""
        path = self.folder / f"wherry-{len(list(self.folder.iterdir()))}"
        path.write_bytes(data)
        return path


def is_blank(target: Location) -> bool:
    """Whether a target is the root of a repository that holds only what new repositories hold.

    Raises:
        StorageError: the storage failed.
    """
    place = parsed(target.path) if target.store.protocol == PROTOCOL else None
    if place is None or place.path:
        return False
    return all(entry.name in BLANK and not entry.is_dir for entry in target.entries())


def card(sidecar: Sidecar | None) -> str:
    """The page of a repository: where its checkpoint comes from, and its digests.

    Args:
        sidecar: of the checkpoint; None if it has none.
    """
    rows = [] if sidecar is None else _rows(sidecar)
    lines = [_CARD, *(f"| {name} | `{value}` |" for name, value in rows)]
    return "\n".join([*lines, ""])


def _rows(sidecar: Sidecar) -> list[tuple[str, str]]:
    checkpoint, receipt = sidecar.checkpoint, sidecar.receipt
    origin = [("source", receipt.source.uri), ("source format", receipt.source.format)] if receipt else []
    return [
        *origin,
        ("format", checkpoint.format),
        ("digest of the checkpoint", checkpoint.checkpoint_digest),
        ("digest of the weights", checkpoint.weights_digest),
    ]


def _inside(path: str) -> str:
    """The path in its repository of a path in the store."""
    found = parsed(path)
    assert found is not None, "the target is in a repository"
    return found.path
