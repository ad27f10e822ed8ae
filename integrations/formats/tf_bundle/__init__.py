"""TensorFlow's tensor bundles (`tf.train.Checkpoint`, `variables/` of a SavedModel): read, never written.

A bundle is a prefix: `<prefix>.index` and `<prefix>.data-00000-of-0000N` in one folder. It is detected by the string
table in the index, given the index file, its prefix, or a folder that contains only one bundle. A key path is one part,
the stored name with its slashes; single strings are values, including the serialised object graph
(`_CHECKPOINTABLE_OBJECT_GRAPH`). `bundle.py` has the layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core.detection import Detection, Evidence
from wherry.core.manifest import Manifest
from wherry.core.steps import step_number
from wherry.errors import IncompleteError
from wherry.formats.format import Format, Holds, Opened
from wherry.formats.glimpse import Signs
from wherry.integrations.containers.flat.reader import FlatReader
from wherry.integrations.formats.tf_bundle.bundle import INDEX, read_bundle
from wherry.integrations.formats.tf_bundle.sstable import FOOTER, MAGIC
from wherry.storage.location import Location
from wherry.store.store import Entry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.formats.format import Glimpse

VERSION = "tensor bundle"
_FINGERPRINT = "fingerprint.pb"


def _detect(glimpse: Glimpse) -> Detection | None:
    index = _index(glimpse.location, glimpse.entries)
    entry = None if index is None else index.entry
    if index is None or entry is None or entry.size < FOOTER:
        return None
    if index.read(entry.size - len(MAGIC), entry.size) != MAGIC:
        return None
    return Detection(
        uri=glimpse.location.uri if glimpse.is_dir else index.uri,
        format="tf-bundle",
        format_version=VERSION,
        writer="TensorFlow",
        step=step_number(index.name.removesuffix(INDEX)),
        kind="params",
        evidence=(Evidence(index.name, "a sorted string table, the index of a tensor bundle"),),
    )


def _only_index(names: Mapping[str, Entry]) -> str | None:
    """The index of the one bundle that a folder consists of."""
    found = [name for name in names if name.endswith(INDEX)]
    if len(found) != 1 or any(entry.is_dir for entry in names.values()):
        return None
    data = found[0].removesuffix(INDEX) + ".data-"
    others = [name for name in names if name not in (found[0], _FINGERPRINT) and not name.startswith(data)]
    return None if others else found[0]


def _index(location: Location, names: Mapping[str, Entry]) -> Location | None:
    """The index for a location that may be a folder, an index, or a prefix."""
    if location.entry is None:
        return Location(location.store, location.path + INDEX)
    if not location.entry.is_dir:
        return location if location.name.endswith(INDEX) else None
    name = _only_index(names)
    return None if name is None else location.join(name)


def _open(location: Location, detection: Detection) -> Opened:
    index = _index(location, {one.name: one for one in location.entries()})
    if index is None:
        raise IncompleteError("index of the tensor bundle not found", uri=location.uri)
    bundle = read_bundle(index)
    manifest = Manifest(tensors=bundle.specs, values=bundle.values, step=detection.step, kind="params")
    seen = Evidence(
        index.name, f"{len(bundle.specs)} tensors in {len(bundle.files)} files, {len(bundle.values)} strings"
    )
    entry = index.present()
    members = (Entry(index.name, entry.size, is_dir=False, mark=entry.mark), *bundle.files.values())
    reader = FlatReader(location, bundle.places, members)
    return Opened(detection.seen(seen), manifest, reader)


FORMATS = (
    Format(
        name="tf-bundle",
        title="TensorFlow tensor bundle",
        detect=_detect,
        signs=Signs(files=(INDEX,), ends=(INDEX,)),
        open=_open,
        holds=Holds(dtypes=frozenset()),
        aliases=("tf",),
    ),
)
