"""A single safetensors file.

Detected by content: a plausible header length and `{` at byte 8. A file that is named `.safetensors` and is not empty
counts too, so that opening it reports its fault, unless its first bytes are those of a torch file under a wrong name.
Names are one part of a key path, exactly as stored; `__metadata__` is the manifest's `custom`.
`containers/safetensors/header.py` has the facts of the header.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core.detection import Detection, Evidence
from wherry.core.manifest import Manifest
from wherry.formats.format import Format, Holds, Opened
from wherry.integrations.containers.flat.places import Places
from wherry.integrations.containers.flat.reader import FlatReader
from wherry.integrations.containers.safetensors import header as safetensors
from wherry.integrations.containers.safetensors.header import DTYPES, placed_tensors
from wherry.integrations.containers.safetensors.writer import (
    METADATA_FORMAT,
    SafetensorsWriter,
    kept_metadata,
)
from wherry.runtime.threads import without_collection
from wherry.storage.location import Entry

if TYPE_CHECKING:
    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.format import Glimpse, Options
    from wherry.storage.location import Location

SUFFIX = ".safetensors"
VERSION = "single file"
# A torch archive (zip) and a torch stream (pickle of protocol 2 with torch's magic number).
_TORCH_MAGIC = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")


def _detect(glimpse: Glimpse) -> Detection | None:
    if not glimpse.is_file:
        return None
    seen = _evidence(glimpse)
    if seen is None:
        return None
    return Detection(
        uri=glimpse.location.uri,
        format="safetensors",
        format_version=VERSION,
        writer="safetensors",
        kind="params",
        evidence=(Evidence(glimpse.location.name, seen),),
    )


def _evidence(glimpse: Glimpse) -> str | None:
    if safetensors.plausible(glimpse.head, glimpse.size):
        return "starts with a length and a JSON header, as in safetensors"
    named = glimpse.location.name.endswith(SUFFIX) and glimpse.size > 0
    if named and not glimpse.head.startswith(_TORCH_MAGIC):
        return f"its name ends in {SUFFIX}; its first bytes are not a safetensors header"
    return None


def _open(location: Location, detection: Detection) -> Opened:
    header = safetensors.parse(location)
    tensors: dict[KeyPath, TensorSpec] = {}
    places = Places()
    places.begin(location)
    with without_collection():
        for spec, start, length in placed_tensors(header):
            tensors[spec.path] = spec
            places.add(spec.path, start, length)
    entry = location.present()
    manifest = Manifest(
        tensors=tensors,
        step=detection.step,
        kind="params",
        custom=header.metadata or {},
    )
    member = Entry(location.name, entry.size, is_dir=False, mark=entry.mark)
    reader = FlatReader(location, places, (member,))
    seen = Evidence(location.name, f"{len(tensors)} tensors that fill the file without gap or overlap")
    return Opened(detection.seen(seen), manifest, reader)


def _create(staging: Location, manifest: Manifest, options: Options) -> SafetensorsWriter:
    metadata = kept_metadata(manifest.custom, options["metadata_format"])
    return SafetensorsWriter(staging.parent, {staging.name: list(manifest.tensors.values())}, metadata)


FORMATS = (
    Format(
        name="safetensors",
        title="safetensors file",
        detect=_detect,
        open=_open,
        create=_create,
        holds=Holds(dtypes=DTYPES, depth=1),
        aliases=("st",),
        single_file=True,
        streams=True,
        options={"metadata_format": METADATA_FORMAT},
        loaded_by="safetensors 0.8",
        version=lambda _manifest, _options: VERSION,
    ),
)
