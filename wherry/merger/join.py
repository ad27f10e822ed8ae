"""Joined checkpoints: several opened checkpoints as one, so that one pass reads and hashes all of them.

The tensor `a/b` of the checkpoint at place 1 is `1/a/b`. Its companions and its files are those of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from wherry.core.keypath import KeyPath
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.formats.checkpoint import Checkpoint, JoinedPart
from wherry.formats.contents import Absent, Contents, ContentsOver
from wherry.formats.format import Opened


def at(place: int, path: KeyPath) -> KeyPath:
    """The key path of a tensor of the checkpoint at a place."""
    return (str(place), *path)


class JoinedCheckpoint(Checkpoint):
    """Several checkpoints, which must stay open while this one is used; their owner closes them."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Join checkpoints; nothing is read."""
        first = checkpoints[0]
        self.parts = tuple(JoinedPart((str(place),), one) for place, one in enumerate(checkpoints))
        tensors = {
            at(place, path): replace(spec, path=at(place, path))
            for place, one in enumerate(checkpoints)
            for path, spec in one.manifest.tensors.items()
        }
        manifest = Manifest(tensors, step=first.manifest.step, kind=first.manifest.kind)
        ignored = tuple(entry for one in checkpoints for entry in one.ignored)
        super().__init__(Opened(first.detection, manifest, JoinedReader(checkpoints), ignored))
        self.opaque = first.opaque

    @property
    def parameters(self) -> int:
        """The number of elements of the first checkpoint: a target holds the model of it."""
        return self.parts[0].checkpoint.parameters


class JoinedReader(ContentsOver):
    """Reads each tensor from the checkpoint that has it; companions and files are those of the first."""

    def __init__(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Nothing is read yet."""
        self._checkpoints = tuple(checkpoints)
        self.base = checkpoints[0].reader

    def inner(self, spec: TensorSpec) -> tuple[Contents, TensorSpec]:
        """The reader at the place in front of the key path, and the spec without it."""
        place, *path = spec.path
        return self._checkpoints[int(place)].reader, replace(spec, path=tuple(path))

    def absent(self) -> Iterator[Absent]:
        """The missing chunks of all checkpoints."""
        for place, one in enumerate(self._checkpoints):
            yield from (replace(piece, path=at(place, piece.path)) for piece in one.reader.absent())

    def shortfall(self) -> str | None:
        """What is missing in the first checkpoint that lacks something."""
        return next(filter(None, (one.reader.shortfall() for one in self._checkpoints)), None)

    def close(self) -> None:
        """Nothing: the owner of the checkpoints closes them."""
