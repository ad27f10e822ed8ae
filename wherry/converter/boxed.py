"""boxed: the proof for tensors that were carried in boxes.

A box is a chunk that is no run of the tensor's bytes (a layer of a stack, a shard of a mesh), so the leaves of the
tensor cannot be hashed on the way. What was written is therefore read again from storage and compared with the
source: as it is where the source has the same tensor, else through the inverse layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core.keypath import render
from wherry.errors import MismatchError
from wherry.mover.hashing import compare, hash_checkpoint
from wherry.view.inverse import came_back
from wherry.view.view import Relaid

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.progress import OnProgress
    from wherry.formats.checkpoint import Checkpoint
    from wherry.mover.hashing import Hashes


def prove(
    source: Checkpoint,
    written: Checkpoint,
    pairs: Mapping[KeyPath, KeyPath],
    found: Hashes,
    known: Mapping[KeyPath, str] | None,
    *,
    memory: int,
    progress: OnProgress | None,
) -> None:
    """Compare what was written in boxes with what it was made of.

    Args:
        source: the source of the conversion, or the view of it through the target's layout.
        written: the target, opened.
        pairs: key path in the target → in the source, of the tensors in question.
        found: their digests as the target has them.
        known: digests of the source's own tensors, where `source` is a view of it.
        memory: budget for reading.
        progress: called a few times a second.

    Raises:
        MismatchError: they differ; the tensor is named.
    """
    if isinstance(source, Relaid):
        failed = list(came_back(written, source, set(pairs), known, memory=memory, progress=progress))
    else:
        paths: Collection[KeyPath] = list(pairs.values())
        theirs = hash_checkpoint(source, memory=memory, progress=progress, paths=paths)
        expected = {path: theirs.digests[taken] for path, taken in pairs.items()}
        failed = compare(found, expected, {path: theirs.leaves[taken] for path, taken in pairs.items()})
    if failed:
        raise MismatchError(
            f"what was written differs from the source: {failed[0].reason}",
            uri=written.uri,
            path=failed[0].path or render(next(iter(pairs))),
            cure="check the storage; nothing was committed",
        )
