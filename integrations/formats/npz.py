"""numpy's `.npz`: a zip archive whose members are `.npy` records.

Detected by content: a zip archive in which every member is named `*.npy` (in a truncated one, the first member). A
tensor's key path is one part, the member's name without `.npy`, slashes included. Single strings are values. Members
may be stored (`numpy.savez`) or deflated (`numpy.savez_compressed`); they are written stored. `containers/npz/npy.py`
has the facts of the records, and the types that numpy has no name for.
"""

from __future__ import annotations

from dataclasses import replace

from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import render
from wherry.core.manifest import Manifest, without_chunks
from wherry.cures import Argument, Cure
from wherry.errors import UnrepresentableError, WherryError
from wherry.formats.format import Format, Glimpse, Holds, Opened, Options, Signs
from wherry.integrations.containers.npz.npy import WRITABLE
from wherry.integrations.containers.npz.reader import (
    SUFFIX,
    NpzReader,
    holds_floats,
    lay_out,
    leaves_folder,
    read_contents,
)
from wherry.integrations.containers.zip.read import local_member, read_directory
from wherry.store.location import Location
from wherry.target.file_map import FileMap, Scene

_EMPTY_MAGIC = b"PK\x05\x06"  # the end record: an archive without members has nothing else
STORED, DEFLATED = "npz", "npz, compressed"


def _detect(glimpse: Glimpse) -> Detection | None:
    empty = glimpse.head.startswith(_EMPTY_MAGIC) and glimpse.location.name.endswith(".npz")
    if not empty and not local_member(glimpse.head)[0].endswith(SUFFIX):
        return None
    try:
        names = read_directory(glimpse.location).members
        seen = f"a zip archive of {len(names)} .npy records"
    except WherryError as error:
        names, seen = {}, f"a zip archive that starts with a .npy record; {error.what}"
    if not all(name.endswith(SUFFIX) for name in names):
        return None
    return glimpse.detected("npz", STORED, "numpy", seen)


def _open(location: Location, detection: Detection) -> Opened:
    contents = read_contents(location)
    kind = "params" if holds_floats(contents.specs) else "other"
    manifest = Manifest(tensors=contents.specs, values=contents.values, step=detection.step, kind=kind)
    seen = [
        f"{len(contents.placed)} stored and {len(contents.deflated)} deflated arrays",
        *sorted(contents.notes),
    ]
    precise = replace(detection, format_version=DEFLATED if contents.deflated else STORED, kind=kind)
    evidence = (Evidence(location.name, text) for text in seen)
    return Opened(precise.seen(*evidence), manifest, NpzReader(location, contents, (location.present(),)))


def _prepare(manifest: Manifest, _options: Options) -> Manifest:
    for path in manifest.tensors:
        if leaves_folder("/".join(path)):
            raise UnrepresentableError(
                "the name would leave the folder into which the archive is unpacked",
                path=render(path),
                cure=Cure("rename it with {}, or choose another target", Argument("rename")),
            )
    return without_chunks(manifest)


def _layout(manifest: Manifest, _options: Options, _scene: Scene) -> FileMap:
    return lay_out(manifest.tensors.values())


FORMATS = (
    Format(
        name="npz",
        title="NumPy .npz archive",
        detect=_detect,
        signs=Signs(head=rb"PK(\x03\x04|\x05\x06)"),
        open=_open,
        layout=_layout,
        prepare=_prepare,
        holds=Holds(dtypes=WRITABLE, depth=1),
        single_file=True,
        loaded_by="numpy 2.4 (bfloat16 as V2; view it as ml_dtypes.bfloat16)",
        version=lambda _manifest, _options: STORED,
    ),
)
