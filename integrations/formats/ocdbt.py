"""An OCDBT database of zarr arrays that Orbax did not write: of Levanter, or of jax.experimental.array_serialization.

The names of the arrays are in the keys of the database, `model/embeddings/weight/zarr.json`, so that no other file is
needed: a key path is such a name, cut at its slashes. Read, never written: Orbax's form of it is.

Facts (jax 0.4.30 to 0.9, Levanter 2025; files written by tensorstore): the database is in the folder that holds the
arrays by name, or in that of each innermost node. Chunks are compressed, and tensorstore leaves out chunks that equal
the fill value unless it is configured to store them; a chunk that is absent is never read as zeros here.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from wherry.core.account import FILES, ignored_file
from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, render
from wherry.core.manifest import Manifest
from wherry.core.steps import step_number
from wherry.errors import CorruptError, IncompleteError, NotACheckpointError
from wherry.formats.format import Format, Glimpse, Holds, Opened, Signs
from wherry.integrations.containers.orbax import layout
from wherry.integrations.containers.zarr.listing import Listing
from wherry.integrations.containers.zarr.metadata import METADATA_NAMES
from wherry.store.location import Location
from wherry.store.sidecar import OWN_NAMES

NAME = "ocdbt"
_DATA = "d"
_OWN = frozenset({layout.MANIFEST, _DATA, *OWN_NAMES})


def detect(glimpse: Glimpse) -> Detection | None:
    """A folder with a database and no file of Orbax, in it or around it; None for every other folder."""
    entries = glimpse.entries
    if layout.MANIFEST not in entries or _DATA not in entries or layout.look_at_item(glimpse) is not None:
        return None
    writer = "tensorstore (Levanter or jax.experimental.array_serialization)"
    seen = Evidence(layout.MANIFEST, "an OCDBT database without any file of Orbax")
    return glimpse.detected(NAME, "ocdbt", writer, seen, step=step_number(glimpse.location.name))


def open_database(location: Location, detection: Detection) -> Opened:
    """See Format.

    Raises:
        NotACheckpointError: it has no arrays.
        CorruptError: an array is inside of another one, or metadata is invalid.
        IncompleteError: it may be an unfinished save of Orbax; and as the arrays of an Orbax item.
        UnsupportedError, HostileError: as the arrays of an Orbax item.
    """
    from wherry.integrations.containers.zarr.listing import list_ocdbt
    from wherry.integrations.containers.zarr.reader import ArrayReader, open_arrays

    listing = list_ocdbt(location)
    names = _names(listing)
    if not names:
        raise NotACheckpointError("an OCDBT database without zarr arrays", uri=location.uri)
    if _may_be_of_orbax(names, location):
        raise IncompleteError(
            f"file not found: {layout.TREE}; the arrays have names as Orbax writes them", uri=location.uri,
            cure="use another step; if the folder was copied, copy it again with all its files",
        )  # fmt: skip
    arrays = open_arrays(location, names, ocdbt=True, listed=listing)
    paths = arrays.found.keys()
    inside = next((path for path in paths if any(path[:depth] in paths for depth in range(len(path)))), None)
    if inside is not None:
        raise CorruptError(
            "an array is stored inside of another array", uri=location.uri, path=render(inside)
        )
    specs = {path: array.spec(path) for path, array in arrays.found.items()}
    versions = sorted({array.zarr.version for array in arrays.found.values()})
    ignored = tuple(
        ignored_file(name, FILES, "a folder" if entry.is_dir else "a file", "it is not in the database")
        for name, entry in Glimpse(location).entries.items()
        if name not in _OWN and not name.startswith(".")
    )
    reader = ArrayReader(location, arrays.found, listing, None, ocdbt=True, zeros_stored=False)
    seen = detection.seen(Evidence(layout.MANIFEST, f"{len(specs)} arrays by the names in the database"))
    words = "ocdbt " + " and ".join(f"zarr{version}" for version in versions)
    return Opened(
        replace(seen, format_version=words), Manifest(tensors=specs, step=detection.step), reader, ignored
    )


def _names(listing: Listing) -> dict[KeyPath, str]:
    """The arrays of a database: key path → stored name."""
    found: dict[KeyPath, str] = {}
    for key in listing.values:
        name, _, file = key.rpartition("/")
        if file in METADATA_NAMES.values():
            found[tuple(name.split("/")) if name else ()] = name
    return found


def _may_be_of_orbax(names: Collection[KeyPath], location: Location) -> bool:
    """Whether this may be a save of Orbax that was never finished, before its other files were written.

    Orbax joins the parts of a key path with dots; only a part itself may have a slash. Names without dots and slashes
    fit both: where nothing is renamed, an unfinished save has its final name, and such names prove no other writer.
    """
    joined = ["." in path[0] for path in names]
    if any(len(path) > 1 and not dotted for path, dotted in zip(names, joined, strict=True)):
        return False
    return location.store.protocol in layout.RENAMELESS or any(joined)


FORMATS = (
    Format(
        name=NAME,
        title="OCDBT arrays (Levanter, JAX)",
        detect=detect,
        signs=Signs(entries=frozenset({layout.MANIFEST})),
        open=open_database,
        holds=Holds(dtypes=frozenset()),
        aliases=("levanter",),
    ),
)
