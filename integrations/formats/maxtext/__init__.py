"""MaxText: an Orbax checkpoint whose tree, item and scan form are MaxText's.

Read: `<step>/items` and the files around it, a separate item, and the emergency managers' `state`; OCDBT or one folder
per array, zarr 2 or 3, parameters or train state, `nnx_aux`. Written: the step folder as its CheckpointManager writes
it. `maxtext.shape` describes how the tree is detected; the arrays are Orbax's.

The checkpoint is the step folder. `<step>/items` resolves to the step folder too, so that sidecar and lineage have one
place. If the hosts of a run wrote to their own disks, missing parts are reported in hosts and bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.errors import IncompleteError
from wherry.formats.format import Format, Glimpse, Holds, Opened, Option, Options
from wherry.integrations.containers.orbax import layout
from wherry.integrations.containers.orbax import row as orbax
from wherry.integrations.containers.zarr.metadata import STORABLE
from wherry.integrations.formats.maxtext import step

if TYPE_CHECKING:
    from wherry.core.detection import Detection
    from wherry.core.manifest import Manifest
    from wherry.storage.location import Location
    from wherry.target.file_map import FileMap, Scene


def detect(glimpse: Glimpse) -> Detection | None:
    """Detect a step folder around an item with a MaxText tree, or such an item; None if it is neither.

    Raises:
        AmbiguousError: a step has several items with arrays and none has a usual name.
    """
    found = step.find(glimpse)
    return found and step.describe_step(found)


def open_maxtext(location: Location, detection: Detection) -> Opened:
    """See Format.

    Raises: the errors of opening an Orbax item.
    """
    found = step.find(Glimpse(location))
    if found is None:
        raise IncompleteError(
            "MaxText item not found", uri=detection.uri, cure="run `wherry detect` on the folder"
        )
    opened = step.open_found(found)
    known = {*step.describe_step(found).evidence, *opened.detection.evidence}
    chosen = tuple(
        row for row in detection.evidence if row not in known
    )  # why this step of the run was selected
    precise = replace(opened.detection, evidence=(*chosen, *opened.detection.evidence))
    return replace(opened, detection=precise)


def lay_out(manifest: Manifest, options: Options, scene: Scene) -> FileMap:
    """See Format; the layout is in `maxtext.step_map`."""
    from wherry.integrations.formats.maxtext.step_map import lay_out as lay_out_step  # zstandard

    return lay_out_step(manifest, options, scene)


def version(manifest: Manifest, options: Options) -> str:
    """The format version that these options give."""
    from wherry.integrations.formats.maxtext.step_map import scan_form

    return step.version_words(orbax.version(manifest, options), scan_form(manifest))


FORMATS = (
    Format(
        name=step.NAME,
        title="MaxText",
        detect=detect,
        signs=orbax.SIGNS,
        open=open_maxtext,
        layout=lay_out,
        holds=Holds(dtypes=STORABLE, zero_size=False, values=True, empties=True, companions=True),
        refines=("orbax",),
        system=step.NAME,
        form=step.FORM,
        companion_folder=f"{step.ITEM}/{layout.ASSETS}/",
        commit_members=(layout.COMMITTED,),
        options={
            "zarr": Option("3", "zarr version", ("2", "3")),
            "ocdbt": Option(default=True, help="write one OCDBT database instead of one folder per array"),
            "compression": Option("none", "compression of chunks", ("none", "zstd")),
            "chunks": Option("auto", orbax.CHUNK_HELP),
            "data_file_size": orbax.FILE_OPTION,
        },
        loaded_by="orbax-checkpoint 0.12.8 as MaxText calls it: CheckpointManager and v1, item `items`",
        version=version,
        step_folder=str,
        in_store=orbax.in_store,
        prepare=orbax.prepare,
    ),
)
