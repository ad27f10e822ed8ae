"""PaxML (Praxis): checkpoints of versions 0.0, 1.0, 1.1 and 1.2, and of its Flax type.

`paxml` has a zarr folder for each array (only their names show the structure) or, in version 1.2, OCDBT with Orbax's
tree; `paxml-flax` has one msgpack file whose structure is a text. Padded arrays are cut to the shape in the item
`metadata`. Written: versions 1.1 and 1.2. The modules `layout` and `flax` have the facts.
"""

from __future__ import annotations

from wherry.core.detection import Detection
from wherry.core.manifest import Manifest
from wherry.cures import Command, Cure
from wherry.errors import IncompleteError
from wherry.formats.format import Format, Glimpse, Holds, Opened, Option, Options
from wherry.integrations.containers.orbax import layout as orbax
from wherry.integrations.containers.orbax.write import CHUNK_HELP, FILE_OPTION
from wherry.integrations.containers.orbax.write import in_store as in_store_of_item
from wherry.integrations.containers.zarr.metadata import STORABLE
from wherry.integrations.formats.paxml import flax, layout, state
from wherry.integrations.formats.paxml.write import lay_out, prepare_grids
from wherry.store.location import Location


def detect(glimpse: Glimpse) -> Detection | None:
    """Detect a step folder with PaxML's items or arrays, or the folder of its state; None if it is neither."""
    place = layout.find(glimpse)
    return (
        state.describe(place) if place is not None and place.layout is not layout.StateLayout.FLAX else None
    )


def detect_flax(glimpse: Glimpse) -> Detection | None:
    """Detect a checkpoint of the Flax type, which may be one file."""
    place = layout.find(glimpse)
    if place is None or place.layout is not layout.StateLayout.FLAX:
        return None
    return flax.describe(place)


def open_paxml(location: Location, detection: Detection) -> Opened:
    """See Format; the reading is in `paxml.state`."""
    return state.open_place(_find_place(location), detection)


def open_flax(location: Location, detection: Detection) -> Opened:
    """See Format; the reading is in `paxml.flax`."""
    return flax.open_flax(_find_place(location), detection)


def in_store(options: Options) -> Options:
    """See Format; version 1.2 packs its chunks."""
    return options if options["version"] == "1.2" else in_store_of_item(options)


def version(_manifest: Manifest, options: Options) -> str:
    """The format version that these options give."""
    stored = layout.StateLayout.OCDBT if options["version"] == "1.2" else layout.StateLayout.ARRAYS
    return f"paxml {options['version']}, {stored.value}"


def _find_place(location: Location) -> layout.Place:
    place = layout.find(Glimpse(location))
    if place is None:
        raise IncompleteError(
            "PaxML state not found", uri=location.uri, cure=Cure("run {} on the folder", Command("detect"))
        )
    return place


FORMATS = (
    Format(
        name=state.NAME,
        title="PaxML (Praxis)",
        detect=detect,
        signs=layout.SIGNS,
        open=open_paxml,
        layout=lay_out,
        holds=Holds(dtypes=STORABLE, zero_size=False, values=True, empties=True, companions=True),
        refines=("orbax",),
        system=state.NAME,
        form=layout.FORM,
        aliases=("pax", "praxis"),
        companion_folder=f"{layout.STATE}/{orbax.ASSETS}/",
        commit_members=(layout.COMMITTED, layout.METADATA_FILE),
        options={
            "version": Option(
                "1.1", "checkpoint version: 1.1 (one folder per array) or 1.2 (OCDBT)", ("1.1", "1.2")
            ),
            "compression": Option("none", "compression of chunks", ("none", "zstd")),
            "chunks": Option("auto", CHUNK_HELP),
            "data_file_size": FILE_OPTION,
        },
        loaded_by="paxml 1.4.0 with orbax-checkpoint 0.5.9 (its PaxCheckpointHandler, called directly)",
        version=version,
        step_folder=lambda step: f"checkpoint_{step:08d}",
        in_store=in_store,
        prepare=prepare_grids,
    ),
    Format(
        name="paxml-flax",
        title="PaxML (Praxis), Flax type",
        detect=detect_flax,
        signs=layout.SIGNS,
        open=open_flax,
        holds=Holds(dtypes=STORABLE, values=True, empties=True),
        refines=("flax-msgpack", "orbax"),
        system=state.NAME,
    ),
)
