"""The shared parts of formats that store an Orbax item: options, detection, chunk grids, the layout, the step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.formats.format import Glimpse, Option, Options
from wherry.formats.glimpse import Signs
from wherry.integrations.containers.ocdbt.read import PROCESS_PREFIX
from wherry.integrations.containers.orbax import partition
from wherry.integrations.containers.orbax.detection import look
from wherry.integrations.containers.orbax.layout import (
    CHECKPOINT,
    DATA_FILE_SIZE,
    MANIFEST,
    MSGPACK,
    PREFERRED_ITEMS,
    SHARDING,
    TREE,
    V1_MARKER,
)
from wherry.integrations.containers.orbax.partitioning import rules_only
from wherry.integrations.containers.zarr.new import IN_STORE

if TYPE_CHECKING:
    from wherry.core.detection import Detection
    from wherry.core.manifest import Manifest
    from wherry.storage.location import Location
    from wherry.target.file_map import FileMap, Scene

STEP_ITEM = "default"
CHUNK_HELP = "chunk size: auto (4 to 8 MiB), store (up to 32 MiB), whole, or a number of MiB"
FILE_OPTION = Option(DATA_FILE_SIZE, "maximum size of a data file of an OCDBT database, for example 256MiB")
OPTIONS = {
    "zarr": Option("2", "zarr version", ("2", "3")),
    "ocdbt": Option(default=True, help="write one OCDBT database instead of one folder per array"),
    "compression": Option("none", "compression of chunks", ("none", "zstd")),
    "chunks": Option("auto", partition.HELP),
    "data_file_size": FILE_OPTION,
}


# An item or a step; the folder of a step that is empty, or was never committed, has only its name.
SIGNS = Signs(
    entries=frozenset({TREE, CHECKPOINT, MSGPACK, SHARDING, MANIFEST, V1_MARKER, *PREFERRED_ITEMS}),
    starts=(PROCESS_PREFIX,),
    folders=True,
    named=r".*\.(orbax-checkpoint-tmp|partial_save).*|(?i:([a-z_]+[-_]?)?\d{1,18})",
)


def detect(glimpse: Glimpse) -> Detection | None:
    """An item folder, a step folder with an item in it, or the remains of a save; None for other folders.

    Raises:
        AmbiguousError: a step has several items with arrays and none has a usual name.
    """
    found = look(glimpse)
    return found and found.detection


def lay_out(manifest: Manifest, options: Options, scene: Scene) -> FileMap:
    """See Format; the layout is in `item_map`."""
    from wherry.integrations.containers.orbax.item_map import lay_out as lay_out_item  # zstandard

    return lay_out_item(manifest, options, scene)


def prepare(manifest: Manifest, options: Options) -> Manifest:
    """The manifest with the chunk grid that the writer will use.

    Raises:
        UnrepresentableError: Orbax cannot hold part of it.
    """
    from wherry.integrations.containers.orbax.representable import chunks_of, refuse_unrepresentable

    refuse_unrepresentable(manifest, options)
    specs = {
        path: replace(spec, chunks=chunks_of(spec, options["chunks"]), sharding=rules_only(spec.sharding))
        for path, spec in manifest.tensors.items()
    }
    return replace(manifest, tensors=specs)


def in_store(options: Options) -> Options:
    """See Format: where each chunk is an object, there are fewer and larger ones; OCDBT packs them."""
    packed = options.get("ocdbt", False)
    return options if packed or options["chunks"] != "auto" else {**options, "chunks": IN_STORE}


def version(_manifest: Manifest, options: Options) -> str:
    """The format version that these options give."""
    return f"{'ocdbt' if options['ocdbt'] else 'per-array directories'} zarr{options['zarr']}"


def finish_step(folder: Location, manifest: Manifest) -> None:
    """Complete the step folder that a CheckpointManager reads."""
    from wherry.integrations.containers.orbax.small_files import finish_step as finish

    finish(folder, manifest, STEP_ITEM)
