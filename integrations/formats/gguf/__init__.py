"""GGUF, the files of llama.cpp: read, never written.

Detected by its magic. Tensors have the names of llama.cpp and wherry's order of axes (the reverse of the file's);
quantised tensors are opaque blocks that no other container supports, so converting them is refused by dtype.
`header.py` has the facts of the header. `<name>-00001-of-0000N.gguf` is one of several files, each with some of the
tensors (`split.count` in its metadata); such parts are refused.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.core.account import IgnoredEntry
from wherry.core.detection import Detection, Evidence
from wherry.core.manifest import Manifest
from wherry.errors import UnsupportedError
from wherry.formats.format import Format, Holds, Opened
from wherry.integrations.containers.flat.reader import FlatReader
from wherry.integrations.formats.gguf.header import MAGIC, VERSIONS, read_header
from wherry.storage.location import Entry

if TYPE_CHECKING:
    from wherry.formats.format import Glimpse
    from wherry.storage.location import Location

_TOO_LONG = "manifests hold numbers and short texts"
_HEAD = struct.Struct("<4sI")


def _detect(glimpse: Glimpse) -> Detection | None:
    if not glimpse.head.startswith(MAGIC) or len(glimpse.head) < _HEAD.size:
        return None
    version = _HEAD.unpack_from(glimpse.head)[1]
    said = f"version {version}" if version in VERSIONS else f"unsupported version {version}"
    return Detection(
        uri=glimpse.location.uri,
        format="gguf",
        format_version=f"GGUF v{version}" if version in VERSIONS else None,
        writer="gguf",
        kind="params",
        evidence=(Evidence(glimpse.location.name, f"starts with GGUF, {said}"),),
    )


def _open(location: Location, detection: Detection) -> Opened:
    header = read_header(location)
    count = header.metadata.get("split.count", 1)
    if count not in (0, 1):
        raise UnsupportedError(
            f"unsupported split GGUF: one of {count} files of a model",
            uri=location.uri,
            cure="merge them with `llama-gguf-split --merge`",
        )
    entry = location.stat()
    assert entry is not None
    manifest = Manifest(tensors=header.specs, step=detection.step, kind="params", custom=header.metadata)
    family = header.metadata.get("general.architecture")
    precise = replace(
        detection,
        format_version=f"GGUF v{header.version}, {_list_types(header.types)}",
        family=family if isinstance(family, str) else None,
    )
    member = Entry(location.name, entry.size, is_dir=False, mark=entry.mark)
    reader = FlatReader(location, header.places, (member,))
    seen = Evidence(location.name, f"{len(header.specs)} tensors, {len(header.metadata)} metadata values")
    ignored = tuple(IgnoredEntry((key,), "values", _TOO_LONG, "list or long text") for key in header.left)
    return Opened(precise.seen(seen), manifest, reader, ignored)


def _list_types(types: list[str]) -> str:
    return " and ".join([", ".join(types[:-1]), types[-1]] if len(types) > 1 else types) or "no tensors"


FORMATS = (
    Format(
        name="gguf",
        title="GGUF (llama.cpp), plain and quantised",
        detect=_detect,
        open=_open,
        create=None,
        holds=Holds(dtypes=frozenset()),
        single_file=True,
        system="llama.cpp",
    ),
)
