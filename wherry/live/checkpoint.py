"""A live training state as a checkpoint, so that the engine can convert it without a saved file.

It has the manifest of the state and a reader of its snapshots, one for each process that holds a share. So an export is
a conversion like any other: same plan, journal, read-back, commit, receipt and ledger. The URI identifies the state
(`live://host/name@step`) but is not a file; the fingerprint is unique to this snapshot.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from wherry.core import dtypes
from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Region, TensorSpec, c_strides, region_shape, region_within, shared_region
from wherry.core.units import plural
from wherry.errors import IncompleteError, NotFoundError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.format import Absent, Access, Computed, Contents, Extent, Opened, Stored
from wherry.mover.output import as_array
from wherry.store.local_store import locate
from wherry.store.location import Location
from wherry.store.store import Entry

if TYPE_CHECKING:
    import numpy as np

    from wherry.live.snapshot import PlacedBox

FORMAT = "live"


class LiveReader(Contents):
    """Reads the boxes of snapshots."""

    def __init__(
        self, specs: Mapping[KeyPath, TensorSpec], placed: Mapping[KeyPath, tuple[PlacedBox, ...]], mark: str
    ) -> None:
        """Create a reader of the boxes of all processes.

        Args:
            specs: the tensors.
            placed: key path → its boxes, of all processes.
            mark: unique identifier of this snapshot.
        """
        self._specs = specs
        self._placed = placed
        self._mark = mark
        self._maps: dict[str, mmap.mmap] = {}
        self._places: dict[str, Location] = {}
        self._lock = threading.Lock()

    def access(self, spec: TensorSpec) -> Access:
        """Stored if the boxes are contiguous, otherwise gathered by region; boxes are mapped into memory."""
        extents = self._extents(spec)
        return Computed(partial(self._gather, spec)) if extents is None else Stored(extents)

    def _extents(self, spec: TensorSpec) -> tuple[Extent, ...] | None:
        """The boxes as extents, if they are contiguous in the order of the tensor's bytes; otherwise None."""
        boxes = sorted(self._placed.get(spec.path, ()))
        if not spec.size:
            return ()
        found, expected, strides = list[Extent](), 0, c_strides(spec.shape)
        for box in boxes:
            cut = next((axis for axis, size in enumerate(box.sizes) if size > 1), len(spec.shape))
            contiguous = box.sizes[cut + 1 :] == spec.shape[cut + 1 :]
            first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
            if not contiguous or first != expected:
                return None
            elements = math.prod(box.sizes)
            place = self._places.setdefault(box.file, locate(box.file))
            found.append(Extent(place, box.start, dtypes.canonical_size(spec.dtype, elements)))
            expected += elements
        return tuple(found) if expected == spec.size else None

    def absent(self) -> Iterator[Absent]:
        """Tensors of which no process provided some part, or two processes provided the same part."""
        for path, spec in self._specs.items():
            boxes = [box for box in self._placed.get(path, ()) if math.prod(box.sizes)]
            held = sum(math.prod(box.sizes) for box in boxes)
            if held != spec.size:
                yield Absent(path, "shards", f"the processes provided {held} of {spec.size} elements")
            elif len({box.offsets for box in boxes}) != len(boxes):
                yield Absent(path, "shards", "two processes provided the same part")

    def companion(self, name: str) -> Location:
        """A live state has no companion files."""
        raise NotFoundError(f"file not found: {name}: a live state has no companion files")

    def members(self) -> Iterator[Entry]:
        """One entry that stands for the memory, so that each snapshot has its own fingerprint."""
        yield Entry("state", sum(spec.nbytes for spec in self._specs.values()), is_dir=False, mark=self._mark)

    def close(self) -> None:
        """Drop the memory maps; the snapshots are closed by their owners."""
        with self._lock:
            self._maps.clear()

    def _gather(self, spec: TensorSpec, region: Region, buffer: memoryview) -> None:
        out, filled = as_array(buffer, spec.dtype, region_shape(region)), 0
        for box in self._placed.get(spec.path, ()):
            whole = tuple(slice(at, at + extent) for at, extent in zip(box.offsets, box.sizes, strict=True))
            shared = shared_region(region, whole)
            if shared is None:
                continue
            out[region_within(shared, region)] = self._view(spec, box)[region_within(shared, whole)]
            filled += math.prod(region_shape(shared))
        if filled != out.size:
            raise IncompleteError(
                f"the processes provided {filled} of {out.size} elements of a region", path=spec.name
            )

    def _view(self, spec: TensorSpec, box: PlacedBox) -> np.ndarray:
        """The elements of a box; no caller keeps them, as an error that is kept would then hold the snapshot."""
        import numpy as np

        dtype, elements = dtypes.numpy_dtype(spec.dtype), math.prod(box.sizes)
        return np.frombuffer(self._map_file(box.file), dtype, elements, box.start).reshape(box.sizes)

    def _map_file(self, file: str) -> mmap.mmap:
        with self._lock:
            if file not in self._maps:
                descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    self._maps[file] = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
                finally:
                    os.close(descriptor)
            return self._maps[file]


def live_checkpoint(
    manifest: Manifest,
    placed: Mapping[KeyPath, tuple[PlacedBox, ...]],
    *,
    name: str,
    mark: str,
    framework: str,
    system: str | None = None,
) -> Checkpoint:
    """A live state as a checkpoint.

    Args:
        manifest: of the state.
        placed: key path → its boxes; empty if only a plan is needed.
        name: the name of the run.
        mark: unique identifier of this snapshot.
        framework: for example `jax 0.10.2, 8 devices`.
        system: the format whose names and shapes the state has, for conversions between systems.
    """
    step = "" if manifest.step is None else f"@{manifest.step}"
    detection = Detection(
        uri=f"{FORMAT}://{socket.gethostname()}/{name.strip('/')}{step}",
        format=system or FORMAT,
        format_version=f"live {framework}" if system else framework,
        writer=framework,
        step=manifest.step,
        kind=cast("Any", manifest.kind),
        evidence=(
            Evidence(".", f"{plural(len(manifest.tensors), 'array')} in the memory of the training process"),
        ),
    )
    specs = manifest.tensors if placed else {}
    checkpoint = Checkpoint(Opened(detection, manifest, LiveReader(specs, placed, mark)))
    tied: Mapping[str, str] = manifest.origin.get("tied", {})
    checkpoint.notes = tuple(
        f"{name} and {first} are the same tensor; both are written" for name, first in tied.items()
    )
    return checkpoint
