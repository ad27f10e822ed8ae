"""Orbax: the checkpoints of JAX, Flax, MaxText and others, read and written with only tensorstore and JSON.

Read: every generation from 0.1 to 0.12 and v1: arrays in the msgpack tree (aggregate), in one folder each or in
OCDBT, zarr 2 or 3, with `_METADATA` or with placeholders in the msgpack tree. Orbax's own API breaks often; its file
format does not. `containers/orbax` describes the files, and how a folder is detected.
"""

from __future__ import annotations

from dataclasses import replace

from wherry.core.detection import Detection
from wherry.formats.format import Format, Holds, Opened
from wherry.integrations.containers.orbax import item, layout
from wherry.integrations.containers.orbax.detection import SIGNS, detect, other_items
from wherry.integrations.containers.orbax.write import (
    OPTIONS,
    STEP_ITEM,
    finish_step,
    in_store,
    lay_out,
    prepare,
    version,
)
from wherry.integrations.containers.zarr.metadata import STORABLE
from wherry.integrations.formats.orbax.rewrite import REWRITES
from wherry.store.location import Location


def open_orbax(location: Location, detection: Detection) -> Opened:
    """See Format; the reading is in `item`."""
    return replace(item.open_item(location, detection), ignored=other_items(location, location))


FORMATS = (
    Format(
        name="orbax",
        title="Orbax (JAX, Flax)",
        detect=detect,
        signs=SIGNS,
        open=open_orbax,
        layout=lay_out,
        holds=Holds(dtypes=STORABLE, zero_size=False, values=True, empties=True, companions=True),
        aliases=("ocp",),
        companion_folder=f"{layout.ASSETS}/",
        commit_members=(layout.COMMITTED,),
        options=OPTIONS,
        loaded_by="orbax-checkpoint 0.12.8: StandardCheckpointer, PyTreeCheckpointer, CheckpointManager, v1",
        version=version,
        step_folder=lambda step: f"{step}/{STEP_ITEM}",
        finish_step=finish_step,
        in_store=in_store,
        prepare=prepare,
        rewrites=REWRITES,
    ),
)
