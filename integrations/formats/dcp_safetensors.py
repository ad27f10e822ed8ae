"""PyTorch's distributed checkpoints in safetensors, as HuggingFaceStorageWriter saves them from every rank.

Detected by the names of the files. Consolidated output is an ordinary Hugging Face folder and belongs to that format;
these pieces are its input, or the only output. The format is read-only: write `huggingface` instead, which the same
reader of torch loads.

With `save_distributed` rank r writes `shard-<r>-model-<i>-of-<n>.safetensors` (in `sharded/` if it consolidates
afterwards), with no index and no `.metadata`. `DCP_SHARDING_INFO` in `__metadata__` is JSON {name: {saved_offsets}}.
A tensor's full shape is not stored; torch takes the largest end of any piece, so that a tensor is silently smaller if
the last files are missing, and silently has zeros if another file is missing. Here a region that no piece covers is
absent, and the evidence states that shapes are inferred. Source: torch/distributed/checkpoint/hf_storage.py of 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.limits import MOST_CHUNKS, beyond, exceeds, scale_limit
from wherry.core.manifest import Manifest
from wherry.core.steps import step_number
from wherry.core.tensorspec import TensorSpec, c_strides
from wherry.errors import CorruptError, IncompleteError, UnsupportedError
from wherry.formats.format import Format, Glimpse, Holds, Opened, Signs
from wherry.integrations.containers.flat.reader import PACKED
from wherry.integrations.containers.flat.strides import PlacedTensor
from wherry.integrations.containers.safetensors import header as safetensors
from wherry.integrations.containers.safetensors.header import TO_OURS, HeaderEntry
from wherry.integrations.formats.dcp.items import PlacedItems
from wherry.integrations.formats.dcp.metadata import Chunk, DcpIndex, DescribedTensor, StoredItem
from wherry.integrations.formats.dcp.reader import DcpReader
from wherry.integrations.formats.huggingface.folder import surroundings
from wherry.integrations.formats.huggingface.shards import saved_offsets
from wherry.layout.tree_reading import read_leaves
from wherry.store.location import Location
from wherry.store.store import Entry

_VERSION = "safetensors pieces"
_SHARD = re.compile(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors")


def _shard_names(names: Iterable[str]) -> list[str]:
    """The files among these names that ranks wrote."""
    return sorted(name for name in names if _SHARD.fullmatch(name))


def _missing_ranks(names: Iterable[str]) -> list[int]:
    """Ranks without a file that are below the last rank with one; a rank without tensors writes no file."""
    ranks = {int(found.group(1)) for name in names if (found := _SHARD.fullmatch(name))}
    return sorted(set(range(1, max(ranks, default=0))) - ranks)


def _read_shards(location: Location, files: Iterable[Entry]) -> tuple[DcpIndex, PlacedItems]:
    """Read the headers of all files: the tensors with their chunks, and where the pieces are.

    Raises:
        CorruptError: a header is invalid, or two pieces are inconsistent.
        UnsupportedError: an unsupported dtype.
    """
    index = DcpIndex(writer="torch HuggingFaceStorageWriter")
    placed: dict[StoredItem, PlacedTensor] = {}
    found: dict[str, _Pieces] = {}
    for entry in files:
        place = location.join(entry.name)
        header = safetensors.parse(place)
        offsets = saved_offsets(header.metadata or {}, place)
        for slot in header.slots:
            chunk = Chunk(offsets.get(slot.name, (0,) * len(slot.shape)), slot.shape)
            stored = StoredItem(entry.name, slot.start, slot.stop - slot.start)
            _add(found, slot, chunk, place)
            if index.stored.get(slot.name, chunk.offsets) is None:
                index.stored.put(slot.name, chunk.offsets, stored)
            placed[stored] = PlacedTensor(
                place,
                slot.start,
                stored.length,
                0,
                slot.shape,
                c_strides(slot.shape),
                TO_OURS[slot.dtype],
                big_endian=False,
            )
            if exceeds(len(placed), MOST_CHUNKS):
                raise beyond(location.name, scale_limit(MOST_CHUNKS), "pieces", uri=location.uri)
    for name, one in found.items():
        index.tensors[name] = DescribedTensor(one.dtype, tuple(one.shape), tuple(one.chunks))
    return index, PlacedItems(placed)


@dataclass(slots=True)
class _Pieces:
    """The pieces of a tensor that were found until now, in order, and the shape that they need."""

    dtype: str
    shape: list[int]
    chunks: dict[Chunk, None]


def _add(found: dict[str, _Pieces], slot: HeaderEntry, chunk: Chunk, place: Location) -> None:
    dtype = TO_OURS[slot.dtype]
    if dtype == PACKED:
        raise UnsupportedError(
            "unsupported piece of packed four-bit floats", uri=place.uri, path=render((slot.name,))
        )
    fits = len(chunk.offsets) == len(chunk.sizes)
    ends = [start + extent for start, extent in zip(*chunk, strict=True)] if fits else None
    known = found.setdefault(slot.name, _Pieces(dtype, ends or [], {}))
    if ends is None or known.dtype != dtype or len(known.shape) != len(ends):
        raise CorruptError(
            f"conflicting descriptions of the tensor in {place.name} and another file",
            uri=place.uri,
            path=render((slot.name,)),
        )
    known.shape = [*map(max, known.shape, ends)]
    known.chunks[chunk] = None


def _detect(glimpse: Glimpse) -> Detection | None:
    names = _shard_names(glimpse.entries)
    if not names:
        return None
    seen = Evidence(names[0], f"{len(names)} files named after ranks by torch's HuggingFaceStorageWriter")
    step = step_number(glimpse.location.name)
    return glimpse.detected("dcp-safetensors", _VERSION, "torch HuggingFaceStorageWriter", seen, step=step)


def _open(location: Location, detection: Detection) -> Opened:
    entries = {entry.name: entry for entry in location.entries()}
    files = [entries[name] for name in _shard_names(entries)]
    gone = next((entry.name for entry in files if entry.size < 0), None)
    if gone is not None:
        raise IncompleteError(f"broken link: {gone}", uri=location.uri, cure="download the file again")
    index, items = _read_shards(location, files)
    neighbours = surroundings(location, {entry.name for entry in files}, files[0].name)
    tensors = {(name,): TensorSpec((name,), one.shape, one.dtype) for name, one in index.tensors.items()}
    kind = read_leaves(tensors, specs=tensors).whole
    manifest = Manifest(
        tensors=tensors,
        step=detection.step,
        kind=kind,
        companions=neighbours.listed,
    )
    reader = DcpReader(location, index, items, (*files, *neighbours.companions), {}, neighbours.names)
    seen = [Evidence(files[0].name, "full shapes are not stored; they are inferred from the existing pieces")]
    ranks = _missing_ranks(entry.name for entry in files)
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
