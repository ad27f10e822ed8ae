"""Safetensors files that torch's HuggingFaceStorageWriter saves from every rank: pieces of tensors.

With `save_distributed` rank r writes `shard-<r>-model-<i>-of-<n>.safetensors` (in `sharded/` if it consolidates
afterwards), with no index and no `.metadata`. `DCP_SHARDING_INFO` in `__metadata__` is JSON {name: {saved_offsets}}.
A tensor's full shape is not stored; torch takes the largest end of any piece, so that a tensor is silently smaller if
the last files are missing, and silently has zeros if another file is missing. Here a region that no piece covers is
absent, and the evidence states that shapes are inferred. Source: torch/distributed/checkpoint/hf_storage.py of 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from wherry.core.keypath import render
from wherry.core.tensorspec import c_strides
from wherry.errors import CorruptError, IncompleteError, UnsupportedError
from wherry.integrations.containers.flat.reader import PACKED
from wherry.integrations.containers.flat.strides import PlacedTensor
from wherry.integrations.containers.safetensors import header as safetensors
from wherry.integrations.containers.safetensors.header import TO_OURS, HeaderEntry
from wherry.integrations.formats.dcp.metadata import Chunk, DcpIndex, DescribedTensor, StoredItem
from wherry.storage.location import Location
from wherry.store.store import Entry
from wherry.text.json_document import parse_json
from wherry.text.limits import MOST_CHUNKS, beyond, exceeds, scale_limit

_SHARD = re.compile(r"shard-(\d{5})-model-\d{5}-of-\d{5}\.safetensors")
_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


@dataclass(frozen=True, slots=True)
class SavedShards:
    """The pieces of a folder, with the interface of `items.Items`.

    Attributes:
        location: the folder.
        index: the tensors and their chunks.
        placed: the location of each piece.
    """

    location: Location
    index: DcpIndex
    placed: Mapping[StoredItem, PlacedTensor]

    def tensor(self, stored: StoredItem, name: str, nbytes: int) -> PlacedTensor:
        """The tensor of a piece; opening has located all pieces."""
        del name, nbytes
        return self.placed[stored]

    def there(self, stored: StoredItem) -> bool:
        """Whether a piece exists."""
        return stored in self.placed


def shard_names(names: Iterable[str]) -> list[str]:
    """The files among these names that ranks wrote."""
    return sorted(name for name in names if _SHARD.fullmatch(name))


def missing_ranks(names: Iterable[str]) -> list[int]:
    """Ranks without a file that are below the last rank with one; a rank without tensors writes no file."""
    ranks = {int(found.group(1)) for name in names if (found := _SHARD.fullmatch(name))}
    return sorted(set(range(1, max(ranks, default=0))) - ranks)


def read_shards(location: Location, files: Iterable[Entry]) -> SavedShards:
    """Read the headers of all files.

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
        offsets = _offsets(header.metadata or {}, place)
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
    return SavedShards(location, index, placed)


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


def _offsets(metadata: Mapping[str, str], place: Location) -> dict[str, tuple[int, ...]]:
    """Offsets of the pieces of a file in their tensors; empty if the file does not state them."""
    if _INFO not in metadata:
        return {}
    try:
        found: dict[str, Any] = parse_json(metadata[_INFO].encode(), _INFO, uri=place.uri)
        offsets = {name: tuple(info[_OFFSETS]) for name, info in found.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptError(f"invalid {_INFO} in {place.name}: unexpected form", uri=place.uri) from error
    if any(type(one) is not int or one < 0 for offset in offsets.values() for one in offset):
        raise CorruptError(
            f"invalid {_INFO} in {place.name}: offsets must be non-negative integers", uri=place.uri
        )
    return offsets


def require_files(files: list[Entry], location: Location) -> None:
    """Refuse files that are broken links.

    Raises:
        IncompleteError: a file is a broken link; the error names the first.
    """
    gone = next((entry.name for entry in files if entry.size < 0), None)
    if gone is not None:
        raise IncompleteError(f"broken link: {gone}", uri=location.uri, cure="download the file again")
