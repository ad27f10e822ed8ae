"""Writers of T5X checkpoints: the legacy layout of version 3, and the step folder that T5X saves through Orbax.

Both use the writers of the containers: arrays are written like Orbax's, the msgpack file like flax's. The step in a
target's name must be that of the checkpoint: T5X trusts the name, so wherry checks it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.core.manifest import Manifest
from wherry.errors import UsageError
from wherry.formats.writer import Writer
from wherry.integrations.containers.msgpack.writer import MsgpackWriter
from wherry.integrations.containers.orbax import layout as orbax
from wherry.integrations.containers.orbax.small_files import WRITTEN, checkpoint_json
from wherry.integrations.containers.orbax.step import StepWriter
from wherry.integrations.containers.orbax.writer import OrbaxWriter
from wherry.integrations.containers.zarr.store import sync_everything
from wherry.integrations.formats.t5x import layout
from wherry.integrations.formats.t5x.item import HANDLER, ITEM
from wherry.integrations.formats.t5x.placement import array_names, below_envelope, pointers
from wherry.storage.stores import make_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, Span
    from wherry.formats.format import Options
    from wherry.formats.reader import EncodedChunk, Extent
    from wherry.storage.location import Location

_TREE_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


class _Arrays(OrbaxWriter):
    """Arrays in separate folders, without other files."""

    def _small_files(self) -> Iterator[tuple[str, str]]:
        return iter(())


class LegacyWriter(Writer):
    """Writes a folder with the msgpack file `checkpoint` and zarr arrays; see Writer."""

    def __init__(self, staging: Location, manifest: Manifest, options: Options) -> None:
        """Create the folder and the msgpack file without its tensors.

        Raises:
            UsageError: the target's name has another step.
            UnrepresentableError: T5X cannot represent a part of the manifest.
            StorageError: the storage is full or failed.
        """
        require_step_of_name(staging, manifest)
        self._staging = staging
        self._names = array_names(manifest, staging.uri)
        make_folder(staging)
        stored = {
            (name,): replace(manifest.tensors[path], path=(name,), tags=None)
            for path, name in self._names.items()
        }
        self._arrays = _Arrays(
            staging,
            Manifest(tensors=stored),
            {"zarr": "2", "ocdbt": False, "compression": options["compression"], "chunks": options["chunks"]},
        )
        encoded = pointers(manifest, self._names, options["compression"])
        self._file = MsgpackWriter(
            staging.join(layout.MSGPACK), below_envelope(manifest, staging.uri), encoded
        )

    def grid(self, path: KeyPath) -> tuple[int, ...] | None:
        """The chunk of an array, None for a tensor in the msgpack file."""
        return self._arrays.grid((self._names[path],)) if path in self._names else None

    def write(self, path: KeyPath, where: Region | Span, data: memoryview) -> None:
        """Write a chunk of an array, or a span of a tensor in the msgpack file.

        Raises:
            UsageError: the region is not one chunk of an array, or not a span of a tensor in the msgpack file.
            StorageError: this or an earlier write failed.
        """
        if path in self._names:
            self._arrays.write((self._names[path],), where, data)
        else:
            self._file.write((layout.OPTIMIZER, *path), where, data)

    def place(self, path: KeyPath, where: Region | Span) -> int | None:
        """The offset of a chunk or span in its file."""
        if path in self._names:
            return self._arrays.place((self._names[path],), where)
        return self._file.place((layout.OPTIMIZER, *path), where)

    def extents(self, path: KeyPath, where: Region | Span) -> tuple[Extent, ...] | None:
        """The byte ranges of a chunk or span."""
        if path in self._names:
            return self._arrays.extents((self._names[path],), where)
        return self._file.extents((layout.OPTIMIZER, *path), where)

    def home(self, path: KeyPath, where: Region | Span) -> Location | None:
        """The file of a chunk; of a span in the msgpack file, that file."""
        if path in self._names:
            return self._arrays.home((self._names[path],), where)
        return self._file.home((layout.OPTIMIZER, *path), where)

    def encoded(self, path: KeyPath, where: Region) -> EncodedChunk | None:
        """A compressed chunk of an array."""
        return self._arrays.encoded((self._names[path],), where) if path in self._names else None

    def stored(self, path: KeyPath, where: Region | Span) -> bool:
        """Whether a chunk or span is durable after a `sync`."""
        if path in self._names:
            return self._arrays.stored((self._names[path],), where)
        return self._file.stored((layout.OPTIMIZER, *path), where)

    def sync(self) -> None:
        """Make the written bytes of both durable."""
        self._arrays.sync()
        self._file.sync()

    def finish(self) -> None:
        """Write the metadata of the arrays, then the msgpack file, in T5X's order."""
        self._arrays.finish()
        self._file.finish()
        sync_everything(self._staging)

    def close(self) -> None:
        """Close both."""
        self._arrays.close()
        self._file.close()


class TrainStateWriter(StepWriter):
    """Writes a step folder with the Orbax item `state`."""

    def __init__(self, staging: Location, manifest: Manifest, options: Options) -> None:
        """Make the folders.

        Raises:
            UsageError: the target's name has another step.
            UnrepresentableError: T5X cannot represent a part of the manifest.
            StorageError: the storage is full or failed.
        """
        require_step_of_name(staging, manifest)
        super().__init__(staging, manifest)
        self._item = OrbaxWriter(staging.join(ITEM), manifest, {**options, "zarr": "2"})

    def _around(self) -> Iterator[tuple[str, bytes]]:
        """The folder of the dataset iterator, then the files of the step."""
        handlers = {layout.DATASET: HANDLER, ITEM: _TREE_HANDLER}
        yield f"{layout.DATASET}/{orbax.COMMITTED}", WRITTEN
        yield orbax.CHECKPOINT, checkpoint_json(handlers, self._started, self._manifest).encode()
        yield orbax.COMMITTED, WRITTEN


def require_step_of_name(staging: Location, manifest: Manifest) -> None:
    """Refuse a target whose name has another step than the manifest.

    Raises:
        UsageError: the steps differ.
    """
    stated = layout.stated_step(staging.name)
    if stated is not None and manifest.step is not None and stated != manifest.step:
        raise UsageError(
            f"step mismatch: {stated} in the target's name, {manifest.step} in the checkpoint",
            uri=staging.uri,
            cure=f"name the target {layout.step_folder(manifest.step)}, or pass the run with --into",
        )
