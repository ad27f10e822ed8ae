"""The noun Plan: everything that a conversion will do, and the units of work that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from wherry.core.keypath import KeyPath, render
from wherry.mover.move import JointMoves, Move, largest_move
from wherry.runtime.threads import carrier_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.core.account import Bound, Ignored
    from wherry.core.detection import Detection
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import TensorSpec

BASE_BYTES = 64 << 20  # the interpreter, numpy and, for zarr and OCDBT, tensorstore


@dataclass(frozen=True, slots=True)
class Plan:
    """What a conversion will do.

    Attributes:
        source: what is read.
        target: URI of what will be written.
        to: target format.
        format_version: of the target.
        options: target options with defaults filled in.
        manifest: what the target will hold.
        pairs: target key path → source key path.
        ignored: source entries that are not carried, each with its rule.
        raw: source key paths of which any span can be read: bytes lie raw in files, or will in a spill file.
        regions: source key paths of which any region can be read without reading much more.
        free: those among these whose chunks need not be regarded.
        spilled: those among them that go through a spill file, because their chunks are too large to decode whole
            and do not come in order.
        parameters: elements of the source's tensors.
        expected_parameters: what the source's config says; None where it says nothing that we understand.
        memory: budget in bytes.
        verify: verification before the commit, `digest` or `none`.
        digest: identity of this conversion.
        lossy: target key path → what its values may lose there and back; empty where every move is exact.
        notes: what could not be carried or made, in words.
        snippet: how the target's own software loads the result, where that is known.
    """

    source: Detection
    target: str
    to: str
    format_version: str
    options: Mapping[str, Any]
    manifest: Manifest
    source_manifest: Manifest
    pairs: Mapping[KeyPath, KeyPath]
    ignored: tuple[Ignored, ...]
    raw: frozenset[KeyPath]
    spilled: frozenset[KeyPath]
    regions: frozenset[KeyPath]
    free: frozenset[KeyPath]
    parameters: int
    expected_parameters: int | None
    memory: int
    verify: str
    digest: str
    lossy: Mapping[KeyPath, Bound] = field(default_factory=dict[KeyPath, "Bound"])
    notes: tuple[str, ...] = ()
    snippet: str = ""

    @property
    def tensors(self) -> int:
        """Number of tensors that will be written."""
        return len(self.pairs)

    @property
    def nbytes_out(self) -> int:
        """Tensor bytes that will be written, in canonical form."""
        return self.manifest.nbytes

    @property
    def nbytes_in(self) -> int:
        """Tensor bytes that will be read, in canonical form."""
        return sum(self.source_manifest.tensors[path].nbytes for path in self.pairs.values())

    @property
    def peak_memory(self) -> int:
        """Most bytes resident at once: the base and what is in flight."""
        largest = max((self._largest(target, source) for target, source in self.pairs.items()), default=0)
        return BASE_BYTES + max(min(self.memory, carrier_count() * largest), largest)

    @property
    def spill(self) -> int:
        """Bytes that go through spill files; a band of chunks is removed once it has been read."""
        return sum(self.source_manifest.tensors[path].nbytes for path in self.spilled)

    def moves(self) -> Iterator[Move]:
        """The units of work, in the order of the source's tensors."""
        return iter(joint_moves([self]))

    def _largest(self, target: KeyPath, source: KeyPath) -> int:
        spec = self.source_manifest.tensors[source]
        held = 1 if source in self.raw else 2
        spec = replace(spec, chunks=None) if source in self.free else spec
        targets, regions = [self.manifest.tensors[target]], source in self.regions
        return held * largest_move(spec, targets, raw=source in self.raw, regions=regions)

    def to_json(self) -> dict[str, Any]:
        """The plan as `--json` prints it."""
        found = self.parameters
        expected = self.expected_parameters
        return {
            "source": self.source.to_json(),
            "target": self.target,
            "to": self.to,
            "format_version": self.format_version,
            "options": dict(self.options),
            "digest": self.digest,
            "tensors": self.tensors,
            "moves": sum(1 for _move in self.moves()),
            "bytes_in": self.nbytes_in,
            "bytes_out": self.nbytes_out,
            "parameters": {
                "found": found,
                "expected": expected,
                "agrees": None if expected is None else found == expected,
            },
            "peak_memory": self.peak_memory,
            "spill": self.spill,
            "unmatched": [],
            "ignored": [
                {"path": render(row.path), "rule": row.rule, "reason": row.reason} for row in self.ignored
            ],
            "renamed": {
                render(source): render(target) for target, source in self.pairs.items() if source != target
            },
            "companions": [companion.name for companion in self.manifest.companions],
            "lossless": not self.lossy,
            "lossy": {
                render(path): {"relative": bound.relative, "absolute": bound.absolute}
                for path, bound in self.lossy.items()
            },
            "layout": self.manifest.origin.get("layout"),
            "notes": list(self.notes),
            "snippet": self.snippet,
            "verify": self.verify,
        }


def joint_moves(plans: Sequence[Plan]) -> JointMoves:
    """The moves of several plans with one source, each part of which is read once."""
    targets: dict[KeyPath, list[TensorSpec]] = {}
    for one in plans:
        for target, source in one.pairs.items():
            targets.setdefault(source, []).append(one.manifest.tensors[target])
    free = frozenset[KeyPath]().union(*(one.free for one in plans))
    tensors = plans[0].source_manifest.tensors
    return JointMoves(
        {path: replace(tensors[path], chunks=None) if path in free else tensors[path] for path in targets},
        targets,
        frozenset[KeyPath]().union(*(one.raw for one in plans)),
        frozenset[KeyPath]().union(*(one.regions for one in plans)),
    )
