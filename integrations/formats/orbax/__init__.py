"""Orbax: the checkpoints of JAX, Flax, MaxText and their kin, read and written through tensorstore and JSON alone.

Read: every generation from 0.1 to 0.12 and v1: arrays in the msgpack tree (aggregate), in one folder each or in
OCDBT, zarr 2 or 3, with `_METADATA` or with placeholders in the msgpack tree. Orbax's own API breaks often; its files
do not. What the files are is told in `layout`, `tree` and `aggregate`, how a folder is recognised in `detecting`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.formats.format import Format, Holds, Opened, Option
from wherry.integrations.containers.zarr.metadata import STORABLE
from wherry.integrations.formats.orbax import detection as detecting
from wherry.integrations.formats.orbax import item, layout, partition
from wherry.integrations.formats.orbax.partitioning import ruled
from wherry.integrations.formats.orbax.rewrite import REWRITES

if TYPE_CHECKING:
    from wherry.core.detection import Detection
    from wherry.core.manifest import Manifest
    from wherry.formats.format import Glimpse, Options, Writer
    from wherry.storage.location import Location

_STEP_ITEM = "default"
OPTIONS = {
    "zarr": Option("2", "version of zarr", ("2", "3")),
    "ocdbt": Option(default=True, help="one OCDBT database rather than one folder per array"),
    "compression": Option("none", "how chunks are compressed", ("none", "zstd")),
    "chunks": Option("auto", partition.HELP),
}


def detect(glimpse: Glimpse) -> Detection | None:
    """An item folder, a step folder with an item in it, or the remains of a save; None where it is none of these.

    Raises:
        AmbiguousError: a step has several items with arrays and none has a usual name.
    """
    found = detecting.look(glimpse)
    return found and found.detection


def open_orbax(location: Location, detection: Detection) -> Opened:
    """See Format; the reading is in `opening`."""
    return item.open_item(location, detection)


def create(staging: Location, manifest: Manifest, options: Options) -> Writer:
    """See Format; the writing is in `writer`."""
    from wherry.integrations.formats.orbax.writer import OrbaxWriter  # tensorstore

    return OrbaxWriter(staging, manifest, options)


def prepare(manifest: Manifest, options: Options) -> Manifest:
    """The manifest with the chunk grid that the writer will use.

    Raises:
        UnrepresentableError: something in it cannot be held by Orbax.
    """
    from wherry.integrations.formats.orbax.representable import chunks_of, refuse_unrepresentable

    refuse_unrepresentable(manifest, options)
    specs = {
        path: replace(spec, chunks=chunks_of(spec, options["chunks"]), sharding=ruled(spec.sharding))
        for path, spec in manifest.tensors.items()
    }
    return replace(manifest, tensors=specs)


def version(_manifest: Manifest, options: Options) -> str:
    """The format version that these options give."""
    return f"{'ocdbt' if options['ocdbt'] else 'per-array directories'} zarr{options['zarr']}"


def finish_step(folder: Location, manifest: Manifest) -> None:
    """Complete the step folder that a CheckpointManager reads."""
    from wherry.integrations.formats.orbax.small_files import finish_step as finish

    finish(folder, manifest, _STEP_ITEM)


FORMATS = (
    Format(
        name="orbax",
        title="Orbax (JAX, Flax)",
        detect=detect,
        open=open_orbax,
        create=create,
        holds=Holds(dtypes=STORABLE, zero_size=False, values=True, empties=True, companions=True),
        aliases=("ocp",),
        companion_folder=f"{layout.ASSETS}/",
        commit_members=(layout.COMMITTED,),
        options=OPTIONS,
        loaded_by="orbax-checkpoint 0.12.8: StandardCheckpointer, PyTreeCheckpointer, CheckpointManager, v1",
        version=version,
        step_folder=lambda step: f"{step}/{_STEP_ITEM}",
        finish_step=finish_step,
        prepare=prepare,
        rewrites=REWRITES,
    ),
)
