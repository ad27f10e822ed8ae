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
from wherry.formats.format import Format, Glimpse, Holds, Opened, Options, Signs
from wherry.integrations.containers.flat.one_file import open_one
from wherry.integrations.containers.safetensors import header as safetensors
from wherry.integrations.containers.safetensors.header import DTYPES, METADATA_FORMAT, placed_tensors
from wherry.store.location import Location

if TYPE_CHECKING:
    from wherry.target.file_map import FileMap, Scene

SUFFIX = ".safetensors"
VERSION = "single file"
# A torch archive (zip) and a torch stream (pickle of protocol 2 with torch's magic number).
_TORCH_MAGIC = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")


def _detect(glimpse: Glimpse) -> Detection | None:
    if not glimpse.is_file:
        return None
    of_torch = glimpse.head.startswith(_TORCH_MAGIC)
    if safetensors.plausible(glimpse.head, glimpse.size):
        seen = "starts with a length and a JSON header, as in safetensors"
    elif glimpse.location.name.endswith(SUFFIX) and glimpse.size > 0 and not of_torch:
        seen = f"its name ends in {SUFFIX}; its first bytes are not a safetensors header"
    else:
        return None
    return glimpse.detected("safetensors", VERSION, "safetensors", seen, kind="params")


def _open(location: Location, detection: Detection) -> Opened:
    header = safetensors.parse(location)
    tensors = f"{len(header.slots)} tensors that fill the file without gap or overlap"
    seen = detection.seen(Evidence(location.name, tensors))
    return open_one(location, seen, placed_tensors(header), header.metadata)


def _layout(manifest: Manifest, options: Options, _scene: Scene) -> FileMap:
    from wherry.integrations.containers.safetensors.layout import kept_metadata, lay_out

    metadata = kept_metadata(manifest.custom, options["metadata_format"])
    return lay_out({".": list(manifest.tensors.values())}, metadata)


FORMATS = (
    Format(
        name="safetensors",
        title="safetensors file",
        detect=_detect,
        signs=Signs(head=rb".{8}\{", files=(SUFFIX,)),
        open=_open,
        layout=_layout,
        holds=Holds(dtypes=DTYPES, depth=1),
        aliases=("st",),
        single_file=True,
        options={"metadata_format": METADATA_FORMAT},
        loaded_by="safetensors 0.8",
        version=lambda _manifest, _options: VERSION,
    ),
)
