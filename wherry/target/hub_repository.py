"""hub_repository: a target and its repository on the Hub: where it is, its page, and what killed runs leave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from wherry.errors import UsageError
from wherry.store.hub import (
    BLANK,
    PROTOCOL,
    HubPath,
    leftover_branches,
    no_repository,
    parse_hub_path,
    remove_branch,
)
from wherry.store.location import Location
from wherry.store.remote_store import FsspecStore
from wherry.target.leftovers import YOUNG, CleanReport

if TYPE_CHECKING:
    from wherry.store.sidecar import Sidecar

CARD = "README.md"
_CARD = """---
tags:
- wherry
---

# Checkpoint

Made by wherry, which read every byte back before it appeared; `wherry.json` has a digest of each tensor.

| | |
| --- | --- |"""


def clean_repository(root: Location, *, dry_run: bool, min_age: float) -> Iterator[CleanReport]:
    """Remove the branches that killed runs have left in a repository.

    Args:
        root: the repository, or a path in it.
        dry_run: remove nothing.
        min_age: seconds since the commit of a branch; younger ones are left, as they may be in use.

    Raises:
        NotFoundError: the repository does not exist.
        StorageError: the Hub failed.
    """
    store, place = root.store, require_path(root)
    assert isinstance(store, FsspecStore), "hf:// has no other"
    try:
        found = leftover_branches(store, place)
    except FileNotFoundError as error:
        raise no_repository(place) from error
    for name, age in found:
        uri = f"{PROTOCOL}://{HubPath(place.kind, place.repo, name, '').text}"
        if age is None:
            yield CleanReport(uri, 0, removed=False, reason="it has no commit yet; may be in use")
        elif age < min_age:
            yield CleanReport(uri, 0, removed=False, reason=YOUNG)
        elif dry_run:
            yield CleanReport(uri, 0, removed=False, reason="dry run")
        else:
            remove_branch(store, place, name)
            yield CleanReport(uri, 0, removed=True, reason="stale")


def require_path(target: Location) -> HubPath:
    """The repository and the path of a target.

    Raises:
        UsageError: it names no repository.
    """
    place = parse_hub_path(target.path)
    if place is None:
        raise UsageError(
            "the URI names no repository", uri=target.uri, cure="write hf://OWNER/NAME@BRANCH/PATH"
        )
    return place


def is_blank(target: Location) -> bool:
    """Whether a target is the root of a repository that holds only what new repositories hold.

    Raises:
        StorageError: the storage failed.
    """
    place = parse_hub_path(target.path) if target.store.protocol == PROTOCOL else None
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


def inside(path: str) -> str:
    """The path in its repository of a path in the store."""
    found = parse_hub_path(path)
    assert found is not None, "the target is in a repository"
    return found.path
