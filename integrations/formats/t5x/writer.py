"""Writers of T5X checkpoints: the legacy layout of version 3, and the step folder that T5X saves through Orbax.

Both stand on the writers of the containers: arrays are written as Orbax's are, the msgpack file as flax's is. The
step that a target's name states must be the checkpoint's own: T5X takes the name's word for it, we do not.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.core.manifest import Manifest
from wherry.errors import UsageError, storage_error
from wherry.formats.writer import BaseWriter, WriterOver
from wherry.integrations.containers.msgpack.writer import MsgpackWriter
from wherry.integrations.containers.orbax import layout as orbax
from wherry.integrations.containers.orbax.small_files import WRITTEN, checkpoint_json
from wherry.integrations.containers.orbax.writer import OrbaxWriter
from wherry.integrations.containers.zarr.store import sync_everything
from wherry.integrations.formats.t5x import layout
from wherry.integrations.formats.t5x.item import HANDLER, ITEM
from wherry.integrations.formats.t5x.placement import array_names, enveloped, pointers
from wherry.storage.stores import make_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, Span
    from wherry.formats.format import Options
    from wherry.storage.location import Location

_TREE_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


class _Arrays(OrbaxWriter):
    """Arrays in folders of their own, with nothing beside them."""

    def _small_files(self) -> Iterator[tuple[str, str]]:
        return iter(())


class LegacyWriter(BaseWriter):
    """Writes a folder with the msgpack file `checkpoint` and zarr arrays; see Writer."""

    def __init__(self, staging: Location, manifest: Manifest, options: Options) -> None:
        """Make the folder and everything of the msgpack file but tensors.

        Raises:
            UsageError: the target's name states another step.
            UnrepresentableError: something of the manifest cannot be held.
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
        self._file = MsgpackWriter(staging.join(layout.MSGPACK), enveloped(manifest, staging.uri), encoded)

    def grid(self, path: KeyPath) -> tuple[int, ...] | None:
        """The chunk of an array, None for a tensor in the msgpack file."""
        return self._arrays.grid((self._names[path],)) if path in self._names else None

    def write(self, path: KeyPath, where: Region | Span, data: memoryview) -> None:
        """Write a chunk of an array, or a span of a tensor in the msgpack file.

        Raises:
            UsageError: the region is not one chunk of an array, or no span of a tensor in the msgpack file.
            StorageError: this or an earlier write failed.
        """
        if path in self._names:
            self._arrays.write((self._names[path],), where, data)
        else:
            self._file.write((layout.OPTIMIZER, *path), where, data)

    def sync(self) -> None:
        """Make durable what was written of both."""
        self._arrays.sync()
        self._file.sync()

    def finish(self) -> None:
        """Write the metadata of the arrays, then the msgpack file, as T5X does."""
        self._arrays.finish()
        self._file.finish()
        _sync(self._staging)

    def close(self) -> None:
        """Close both."""
        self._arrays.close()
        self._file.close()


class TrainStateWriter(WriterOver):
    """Writes a step folder with the Orbax item `state`."""

    def __init__(self, staging: Location, manifest: Manifest, options: Options) -> None:
        """Make the folders.

        Raises:
            UsageError: the target's name states another step.
            UnrepresentableError: something of the manifest cannot be held.
            StorageError: the storage is full or failed.
        """
        require_step_of_name(staging, manifest)
        self._staging = staging
        self._manifest = manifest
        self._started = time.time_ns()
        self._finished = False
        make_folder(staging)
        self._item = OrbaxWriter(staging.join(ITEM), manifest, {**options, "zarr": "2"})

    def finish(self) -> None:
        """Complete the item, then the step folder with the folder of the dataset iterator."""
        if self._finished:
            return
        self._item.finish()
        handlers = {layout.DATASET: HANDLER, ITEM: _TREE_HANDLER}
        dataset = self._staging.join(layout.DATASET)
        make_folder(dataset)
        dataset.join(orbax.COMMITTED).put(WRITTEN)
        text = checkpoint_json(handlers, self._started, self._manifest)
        self._staging.join(orbax.CHECKPOINT).put(text.encode())
        self._staging.join(orbax.COMMITTED).put(WRITTEN)
        _sync(self._staging)
        self._finished = True


def require_step_of_name(staging: Location, manifest: Manifest) -> None:
    """Refuse a target whose name states another step than the manifest.

    Raises:
        UsageError: it does.
    """
    stated = layout.stated_step(staging.name)
    if stated is not None and manifest.step is not None and stated != manifest.step:
        raise UsageError(
            f"the target's name says step {stated}, the checkpoint is of step {manifest.step}",
            uri=staging.uri,
            cure=f"call it {layout.step_folder(manifest.step)}, or write --into RUN",
        )


def _sync(folder: Location) -> None:
    try:
        sync_everything(Path(folder.path))
    except OSError as error:
        raise storage_error(error, folder.uri) from error
