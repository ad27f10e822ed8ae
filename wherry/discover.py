"""discover: the checkpoints below a root, streamed.

A folder that a format claims is one checkpoint and is not entered, so data folders are never listed. Only names
and first bytes are read; `detect` says whether a checkpoint is whole. Staging areas and folders that another
tool is still writing are passed over, with the reason given to `on_skip`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wherry.detect import look
from wherry.errors import AmbiguousError, NotFoundError
from wherry.format import Glimpse
from wherry.registry import formats
from wherry.staging import is_staging
from wherry.store import locate

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    from wherry.detection import Detection
    from wherry.format import Format
    from wherry.location import Entry, Location


class Skipped(NamedTuple):
    """Something below the root that is not reported as a checkpoint, and why."""

    uri: str
    reason: str


def discover(
    root: str | os.PathLike[str], *, on_skip: Callable[[Skipped], None] | None = None
) -> Iterator[Detection]:
    """Find the checkpoints below a root.

    Args:
        root: a folder, or one checkpoint.
        on_skip: called for each staging area, unfinished folder, linked folder and ambiguous place passed over.

    Yields:
        A detection for each, as it is found, in the order of names. Verdicts are those of names and first bytes.

    Raises:
        NotFoundError: the root does not exist.
    """
    location = locate(root)
    if location.entry is None:
        raise NotFoundError("nothing is there", uri=location.uri)
    return _below(location, formats(), on_skip or _ignore)


def _below(
    location: Location, rows: Mapping[str, Format], on_skip: Callable[[Skipped], None]
) -> Iterator[Detection]:
    glimpse = Glimpse(location)
    try:
        found = look(glimpse, rows)
    except AmbiguousError as error:
        on_skip(Skipped(location.uri, error.what))
        return
    if found is not None and found.verdict != "ok":
        on_skip(Skipped(location.uri, found.reason or found.verdict))
    elif found is not None:
        yield found
    else:
        for entry in glimpse.entries.values():
            reason = _passed_over(location, entry)
            if reason:
                on_skip(Skipped(location.join(entry.name).uri, reason))
            elif entry.is_dir or entry.size > 0:
                yield from _below(location.join(entry.name), rows, on_skip)


def _passed_over(folder: Location, entry: Entry) -> str | None:
    if is_staging(entry.name):
        return "staging area of a conversion that has not finished"
    if folder.store.capabilities.local and entry.is_dir and Path(folder.join(entry.name).path).is_symlink():
        return "a link to a folder; its target is found where it lies"
    return None


def _ignore(_skipped: Skipped) -> None:
    """Nobody asked for what is passed over."""
