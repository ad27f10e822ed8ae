"""PyTorch's distributed checkpoints in safetensors, as HuggingFaceStorageWriter saves them from every rank.

Detected by the names of the files. Consolidated output is an ordinary Hugging Face folder and belongs to that format;
these pieces are its input, or the only output. `dcp/shards.py` has the facts. The format is read-only: write
`huggingface` instead, which the same reader of torch loads.
"""

from __future__ import annotations

from dataclasses import replace

from wherry.core.detection import Detection, Evidence
from wherry.core.manifest import Companion, Manifest
from wherry.core.steps import step_number
from wherry.core.tensorspec import TensorSpec
from wherry.formats.format import Format, Glimpse, Holds, Opened
from wherry.formats.glimpse import Signs
from wherry.integrations.formats.dcp.reader import DcpReader
from wherry.integrations.formats.dcp.shards import missing_ranks, read_shards, require_files, shard_names
from wherry.integrations.formats.huggingface.folder import surroundings
from wherry.storage.location import Location
from wherry.tree.tree_reading import read_leaves

_VERSION = "safetensors pieces"


def _detect(glimpse: Glimpse) -> Detection | None:
    names = shard_names(glimpse.entries)
    if not names:
        return None
    return Detection(
        uri=glimpse.location.uri,
        format="dcp-safetensors",
        format_version=_VERSION,
        writer="torch HuggingFaceStorageWriter",
        step=step_number(glimpse.location.name),
        evidence=(
            Evidence(names[0], f"{len(names)} files named after ranks by torch's HuggingFaceStorageWriter"),
        ),
    )


def _open(location: Location, detection: Detection) -> Opened:
    entries = {entry.name: entry for entry in location.entries()}
    files = [entries[name] for name in shard_names(entries)]
    require_files(files, location)
    shards = read_shards(location, files)
    neighbours = surroundings(location, {entry.name for entry in files}, files[0].name)
    tensors = {
        (name,): TensorSpec((name,), one.shape, one.dtype) for name, one in shards.index.tensors.items()
    }
    kind = read_leaves(tensors, specs=tensors).whole
    manifest = Manifest(
        tensors=tensors,
        step=detection.step,
        kind=kind,
        companions=tuple(Companion(entry.name, entry.size) for entry in neighbours.companions),
    )
    names = frozenset(entry.name for entry in neighbours.companions)
    reader = DcpReader(location, shards.index, shards, (*files, *neighbours.companions), {}, names)
    seen = [Evidence(files[0].name, "full shapes are not stored; they are inferred from the existing pieces")]
    ranks = missing_ranks(entry.name for entry in files)
    if ranks:
        seen.append(
            Evidence(".", f"no file of rank {ranks[0]}: the rank held no tensors, or its file is missing")
        )
    return Opened(replace(detection, kind=kind).seen(*seen), manifest, reader, tuple(neighbours.ignored))


FORMATS = (
    Format(
        name="dcp-safetensors",
        title="PyTorch DCP, safetensors shards",
        detect=_detect,
        signs=Signs(ends=(".safetensors",)),
        open=_open,
        holds=Holds(dtypes=frozenset()),
        refines=("huggingface",),
        loaded_by="",
    ),
)
