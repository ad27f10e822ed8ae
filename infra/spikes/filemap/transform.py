"""Where a target's bytes come from: the side of the engine that reads, computes and hashes.

A Transform gives a span or a region of a target tensor, hashes what it took of the source on the way, and chooses
batches. Its hints stand in the target's manifest: the grid of chunks, and the order of a grid's axes in a pack.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from infra.spikes.filemap.nouns import ORDER, Batch, Coded, Piece, joined_region
from wherry.converter.plan import Plan, plan_target
from wherry.core import dtypes
from wherry.core.request import TargetRequest, convert_request
from wherry.core.tensorspec import Span, region_shape, row_bands
from wherry.formats.checkpoint import open_source
from wherry.formats.registry import find_target_format
from wherry.layout.copies import copies
from wherry.layout.copy_parts import cut_copy
from wherry.ledger.open import resolve_named
from wherry.mover.parts import Parts
from wherry.mover.regions import read_span
from wherry.view.view import View

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from infra.spikes.filemap.hashed import Hashed
    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.formats.checkpoint import Checkpoint
    from wherry.layout.copies import Copy

RAW_BYTES = 8 << 20  # of a batch of spans
BOX_BYTES = 16 << 20  # of a batch of chunks
_COPY_BYTES = 8 << 20  # of the source that are read at a time for a batch of chunks


class Transform(Protocol):
    """What the engine asks of a source.

    Attributes:
        manifest: of the target, with hints.
        sources: the source tensors that are read.
        same: target key path → key path of the source tensor that has the same bytes, and so the same digest.
    """

    @property
    def manifest(self) -> Manifest: ...

    @property
    def sources(self) -> Mapping[KeyPath, TensorSpec]: ...

    @property
    def same(self) -> Mapping[KeyPath, KeyPath]: ...

    def fill_span(self, path: KeyPath, span: Span, out: memoryview, hashed: Hashed | None) -> None:
        """Compute a span of a target tensor; what is taken of the source is hashed."""
        ...

    def fill_region(self, path: KeyPath, region: Region, out: memoryview, hashed: Hashed | None) -> None:
        """Compute a region of a target tensor; what is taken of the source is hashed."""
        ...

    def read_source(self, path: KeyPath, span: Span, out: memoryview) -> None:
        """Read a span of a source tensor."""
        ...

    def read_member(self, name: str, span: Span) -> bytes:
        """Read a span of a companion."""
        ...


def batches(found: Iterable[Piece], box_bytes: int = BOX_BYTES) -> Iterator[Batch]:
    """Put together pieces that follow one another: spans up to 8 MiB, chunks as long as together they are a box.

    A box of chunks along the axis on which the source's bytes lie side by side reads the source in runs as many times
    longer. This is the default; a transform that knows better gives batches of its own.
    """
    held: list[Piece] = []
    region: Region | None = None
    filled = 0
    for piece in found:
        joined = _joined(held, region, piece)
        most = RAW_BYTES if region is None else box_bytes
        if held and (joined is None or filled + piece.within.nbytes > most):
            yield _batch(held, region, filled)
            held, region, filled, joined = [], None, 0, None
        held.append(piece)
        filled += piece.within.nbytes
        if isinstance(piece.segment, Coded):
            region = joined or piece.segment.region
    if held:
        yield _batch(held, region, filled)


def _joined(held: list[Piece], region: Region | None, piece: Piece) -> Region | tuple[()] | None:
    """The region of a batch with one more piece, empty if it has none; None if the piece begins another batch."""
    if not held:
        return None
    last, new = held[-1].segment, piece.segment
    if not isinstance(new, Coded):
        return None if isinstance(last, Coded) else ()
    follows = (held[-1].range.file, held[-1].range.stop) == piece.range[:2]
    if not isinstance(last, Coded) or region is None or last.tensor != new.tensor or not follows:
        return None
    return joined_region(region, new.region)


def _batch(held: list[Piece], region: Region | None, nbytes: int) -> Batch:
    extra = min(nbytes, _COPY_BYTES) if region is not None else 0
    return Batch(tuple(held), region, nbytes + extra)


@dataclass(slots=True)
class FromArrays:
    """A target of arrays in memory, for tests: source and target are the same.

    Attributes:
        manifest: of the target.
        arrays: its tensors.
        members: its companions.
        taken: bytes that were read, in all.
    """

    manifest: Manifest
    arrays: Mapping[KeyPath, np.ndarray]
    members: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    taken: int = 0

    @property
    def sources(self) -> Mapping[KeyPath, TensorSpec]:
        return self.manifest.tensors

    @property
    def same(self) -> Mapping[KeyPath, KeyPath]:
        return {path: path for path in self.manifest.tensors}

    def fill_span(self, path: KeyPath, span: Span, out: memoryview, hashed: Hashed | None) -> None:  # noqa: ARG002
        self.read_source(path, span, out)

    def fill_region(self, path: KeyPath, region: Region, out: memoryview, hashed: Hashed | None) -> None:  # noqa: ARG002
        data = np.ascontiguousarray(self.arrays[path][region]).tobytes()
        self.taken += len(data)
        out[:] = data

    def read_source(self, path: KeyPath, span: Span, out: memoryview) -> None:
        self.taken += span.nbytes
        out[:] = self.arrays[path].tobytes()[slice(*span)]

    def read_member(self, name: str, span: Span) -> bytes:
        return self.members[name][slice(*span)]


@dataclass(slots=True)
class FromCheckpoint:
    """A target that is made of a checkpoint, perhaps through the layouts of two systems.

    Attributes:
        checkpoint: the stored source.
        view: the source in the layout of the target's system; the source itself if that is the same.
        plan: of today's wherry: what `accepts` will be.
        manifest: of the target, with hints.
        taken: bytes of the source that were asked for, and runs of bytes that they were.
    """

    checkpoint: Checkpoint
    view: Checkpoint
    plan: Plan
    manifest: Manifest
    taken: list[int] = field(default_factory=lambda: [0, 0])
    _parts: Parts = field(init=False)

    def __post_init__(self) -> None:
        self._parts = Parts(self.checkpoint.reader, self.checkpoint.manifest.tensors)

    @property
    def sources(self) -> Mapping[KeyPath, TensorSpec]:
        return self.checkpoint.manifest.tensors

    @property
    def same(self) -> Mapping[KeyPath, KeyPath]:
        return {} if isinstance(self.view, View) else self.plan.pairs

    def fill_span(self, path: KeyPath, span: Span, out: memoryview, hashed: Hashed | None) -> None:  # noqa: ARG002
        assert not isinstance(self.view, View), "a layout gives regions"
        self.read_source(self.plan.pairs[path], span, out)

    def fill_region(self, path: KeyPath, region: Region, out: memoryview, hashed: Hashed | None) -> None:
        assert isinstance(self.view, View), "the spike's chunks come through a layout"
        spec = self.manifest.tensors[path]
        array = np.frombuffer(out, dtypes.numpy_dtype(spec.dtype)).reshape(region_shape(region))

        def read(source: KeyPath, part: Region) -> np.ndarray:
            found = self._parts.read(source, part)
            extents = self.sources[source].shape
            self.taken[0] += found.nbytes
            self.taken[1] += found.size // max(_run(region_shape(part), extents), 1)
            if hashed is not None:
                hashed.box("source", source, part, memoryview(found.reshape(-1).view("u1")))
            return found

        try:
            self.view.projected.gather(
                path, region, read, array, cut=lambda copy: cut_copy(copy, _COPY_BYTES)
            )
        finally:
            self._parts.release()

    def read_source(self, path: KeyPath, span: Span, out: memoryview) -> None:
        spec = self.sources[path]
        extents = self.checkpoint.reader.access(spec).extents
        assert extents is not None, "the spike's sources are stored as they are"
        self.taken[0] += span.nbytes
        self.taken[1] += 1
        read_span(extents, span, out, spec)

    def read_member(self, name: str, span: Span) -> bytes:
        return self.view.reader.companion(name).read(*span)


def _run(part: tuple[int, ...], extents: tuple[int, ...]) -> int:
    """Elements of a part of a tensor that lie side by side."""
    run = 1
    for size, extent in zip(reversed(part), reversed(extents), strict=True):
        run *= size
        if size != extent:
            break
    return run


@contextmanager
def from_checkpoint(
    source: str, target: str, to: str, options: Mapping[str, str], *, ordered: bool = True, **common: str
) -> Iterator[FromCheckpoint]:
    """Open a source for a target.

    Args:
        source: URI of the checkpoint.
        target: URI of the target.
        to: its format.
        options: of `--set`.
        ordered: whether packs follow the source; in C order otherwise.
        common: other options of `wherry.convert`.
    """
    request = convert_request(source, [TargetRequest(target, to, dict(options))], **common)
    with open_source(resolve_named(request.source)) as checkpoint:
        view, plan = plan_target(checkpoint, find_target_format(to), request.targets[0], request)
        manifest = plan.manifest
        if ordered and isinstance(view, View):
            specs = {path: _with_order(spec, view) for path, spec in manifest.tensors.items()}
            manifest = replace(manifest, tensors=specs)
        yield FromCheckpoint(checkpoint, view, plan, manifest)


def _with_order(spec: TensorSpec, view: View) -> TensorSpec:
    """A tensor with the order of its chunks in a pack: along the axis on which the source's bytes lie side by side."""
    stored = view.projected.targets.get(spec.path)
    if stored is None or spec.chunks is None or len(spec.shape) < 2:
        return spec
    region = tuple(slice(0, size) for size in spec.chunks)
    copy = next(copies(stored, region, view.projected.pieces), None)
    axis = None if copy is None else _fastest(copy, spec.chunks)
    if axis is None or axis == len(spec.shape) - 1:
        return spec
    order = [*(at for at in range(len(spec.shape)) if at != axis), axis]
    return replace(spec, tags={**(spec.tags or {}), ORDER: "x".join(map(str, order))})


def _fastest(copy: Copy, shape: tuple[int, ...]) -> int | None:
    """The axis of a target region along which the elements of the source lie side by side."""
    for extent, source, target in zip(copy.extents, copy.source_strides, copy.target_strides, strict=True):
        if source == 1 and extent > 1:
            return next(at for at in range(len(shape)) if target >= math.prod(shape[at + 1 :]))
    return None


def bands(spec: TensorSpec) -> Iterator[tuple[Region, Span]]:
    """A tensor in order, in regions of 8 MiB that are runs of its bytes, for what is hashed again."""
    yield from row_bands(replace(spec, chunks=None), RAW_BYTES)
