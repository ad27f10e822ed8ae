"""FSDP's rank files: whole tensors from the parts that each rank saved with `torch.save`.

verl, and others that save `model.state_dict()` on every rank, make `model_world_size_N_rank_R.pt` for R from 0 to
N - 1. Each holds the state dict with DTensors: a local tensor, and how the whole one is placed on the mesh
(`containers/torch/values.py`). `Shard(d)` cuts dimension d into equal parts of ceil(size / ranks), of which the
last may be smaller or empty, in the order of the mesh's dimensions; `Replicate` repeats. So a whole tensor is the
ranks' parts in order, and is read as byte ranges of their files; where an inner dimension is cut, as one range for
each row. Every rank that a mesh has must be there, and every part must have the shape that its place gives it: a
part that would overlap another, or leave a hole, is refused.

`optim_world_size_N_rank_R.pt` and `extra_state_…` are the state of the trainer and are not read. Element types
stay (verl's own merger makes everything bfloat16). Plain tensors are whole only where there is one rank: else
nothing says whether they are.
Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py and verl/model_merger/fsdp_model_merger.py,
torch/distributed/tensor/placement_types.py (2.13).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from wherry.core.account import TRAINING_STATE, ignored_file
from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.steps import step_number
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import HostileError, IncompleteError, UnsupportedError
from wherry.formats.format import Extent, Format, Glimpse, Holds, Opened, Signs
from wherry.integrations.containers.flat.reader import FlatReader, Surroundings
from wherry.integrations.containers.flat.strides import StridedReader
from wherry.integrations.containers.torch.archive import Archive, read_archive
from wherry.integrations.containers.torch.values import (
    COORDINATE,
    DTENSOR,
    LOCAL,
    PLACEMENTS,
    RANK_RULES,
    REPLICATE,
    SHAPE,
)
from wherry.layout.runs import cut
from wherry.store.location import Location

_FILE = re.compile(r"(?P<kind>model|optim|extra_state)_world_size_(?P<size>\d+)_rank_(?P<rank>\d+)\.pt")
_MODEL = "model"
_MOST_RANKS, _MOST_RANGES = 100_000, 1 << 20
_CURE = "copy the whole folder again, with the files of all ranks"


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One rank's part of a tensor.

    Attributes:
        rank: whose file it is in.
        shape: of the whole tensor.
        placements: for each dimension of the mesh, the dimension of the tensor that it cuts, or REPLICATE.
        coordinate: of the rank in the mesh.
        local: the part itself.
        extents: its bytes, in order; None if they are not in order.
    """

    rank: int
    shape: tuple[int, ...]
    placements: tuple[int | str, ...]
    coordinate: tuple[int, ...]
    local: TensorSpec
    extents: tuple[Extent, ...] | None


def detect(glimpse: Glimpse) -> Detection | None:
    """Detect a folder with the rank files of a model."""
    rows = [match for name in glimpse.entries if (match := _FILE.fullmatch(name)) and match["kind"] == _MODEL]
    if not rows:
        return None
    first = min(rows, key=lambda row: (int(row["size"]), int(row["rank"])))
    seen = Evidence(first[0], f"{len(rows)} of the files of {first['size']} ranks")
    step = step_number(glimpse.location.name)
    return glimpse.detected("fsdp", "DTensor", "torch.distributed.tensor", seen, step=step, kind="params")


def open_fsdp(location: Location, detection: Detection) -> Opened:
    """Read the pickles of all ranks; see Format.

    Raises:
        IncompleteError: the file of a rank is missing, or a part of a tensor.
        UnsupportedError: a placement that is not supported, or a plain tensor of several ranks.
        HostileError: parts that overlap, leave a hole, or contradict each other; a global that is not allowed.
        WherryError: as of files of torch.
    """
    names = {entry.name: entry for entry in location.entries()}
    files = _rank_files(location, names)
    archives = [read_archive(location.join(name), RANK_RULES, bare=True) for name in files]
    parts: dict[str, list[LocalTensor]] = {}
    for rank, archive in enumerate(archives):
        for name, part in _parts(rank, archive, location.join(files[rank]), len(files)):
            parts.setdefault(name, []).append(part)
    specs: dict[KeyPath, TensorSpec] = {}
    places: dict[KeyPath, tuple[Extent, ...]] = {}
    for name, rows in parts.items():
        spec, extents = _whole(name, rows, len(files), location)
        specs[spec.path], places[spec.path] = spec, extents
    own = tuple(names[name] for name in files)
    others = [name for name in names if (match := _FILE.fullmatch(name)) and match["kind"] != _MODEL]
    ignored = tuple(
        ignored_file(name, TRAINING_STATE, "state of the trainer", "only parameters are read")
        for name in sorted(others)
    )
    around = Surroundings(
        [one for one in names.values() if one.name.endswith(".json") and not one.is_dir and one.size >= 0]
    )
    manifest = Manifest(
        specs,
        step=detection.step,
        kind="params",
        companions=around.listed,
    )
    found = replace(detection, format_version=f"DTensor, {len(files)} ranks")
    reader = FlatReader(location, places, (*own, *around.companions), around.names)
    return Opened(found.seen(Evidence(files[0], f"{len(specs)} whole tensors")), manifest, reader, ignored)


def _rank_files(location: Location, names: Iterable[str]) -> list[str]:
    """The names of a model's files, by rank; refuses a missing file, and files of different numbers of ranks."""
    rows = [match for name in names if (match := _FILE.fullmatch(name)) and match["kind"] == _MODEL]
    sizes = {int(row["size"]) for row in rows}
    if len(sizes) != 1:
        raise UnsupportedError(
            f"files of different numbers of ranks: {', '.join(map(str, sorted(sizes)))}", uri=location.uri,
            cure="move the files of one run to a folder of their own",
        )  # fmt: skip
    (size,) = sizes
    found = {int(row["rank"]): row[0] for row in rows}
    missing = next((rank for rank in range(min(size, _MOST_RANKS)) if rank not in found), None)
    if missing is not None:
        raise IncompleteError(
            f"file not found: model_world_size_{size}_rank_{missing}.pt", uri=location.uri, cure=_CURE
        )
    if len(found) != size or not 0 < size <= _MOST_RANKS:
        raise HostileError(
            f"{len(found)} files of {size} ranks", uri=location.uri, cure="do not use this checkpoint"
        )
    return [found[rank] for rank in range(size)]


def _parts(rank: int, archive: Archive, place: Location, ranks: int) -> Iterator[tuple[str, LocalTensor]]:
    """The tensors of one rank's file, each with its place in the whole one."""
    reader = StridedReader(place, archive.placed, ())
    # Path of a DTensor → what is said of it: shape, placements and coordinate, whose entries are leaves in order.
    said: dict[KeyPath, dict[str, list[Any]]] = {}
    for path, value in archive.tree.values.items():
        if path[-3:-2] == (DTENSOR,):
            said.setdefault(path[:-3], {}).setdefault(path[-2], []).append(value)
    for path, spec in archive.specs.items():
        extents = reader.access(spec).extents
        if path[-2:] == (DTENSOR, LOCAL):
            about = {name: tuple(row) for name, row in said.get(path[:-2], {}).items()}
            shape, placements = about.get(SHAPE, ()), about.get(PLACEMENTS, ())
            yield (
                _name(path[:-2], place),
                LocalTensor(rank, shape, placements, about.get(COORDINATE, ()), spec, extents),
            )
        elif ranks == 1:
            yield _name(path, place), LocalTensor(rank, spec.shape, (), (), spec, extents)
        else:
            raise UnsupportedError(
                "unsupported plain tensor in the files of several ranks: the files do not state whether it is complete",
                uri=place.uri, path=render(path), cure="save DTensors (FSDP 2), or whole tensors in one file",
            )  # fmt: skip


def _name(path: KeyPath, place: Location) -> str:
    if len(path) != 1:
        raise UnsupportedError(
            "expected a flat state dict", uri=place.uri, path=render(path), cure="save model.state_dict()"
        )
    return path[0]


def _whole(
    name: str, parts: Sequence[LocalTensor], ranks: int, location: Location
) -> tuple[TensorSpec, tuple[Extent, ...]]:
    """A whole tensor and its bytes, from the parts of all ranks."""
    first = parts[0]
    if len(parts) != ranks:
        raise IncompleteError(
            f"{len(parts)} of {ranks} ranks have a part of {name}", uri=location.uri, path=name, cure=_CURE
        )
    mesh = tuple(max(column) + 1 for column in zip(*(one.coordinate for one in parts), strict=False))
    alike = all(
        (one.shape, one.placements, one.local.dtype, len(one.coordinate))
        == (first.shape, first.placements, first.local.dtype, len(first.placements))
        for one in parts
    )
    if not alike or math.prod(mesh) != ranks or len({one.coordinate for one in parts}) != ranks:
        raise _hostile("the ranks say different things of it, or have the same place", name, location)
    boxes = {one.rank: _box(one, mesh, name, location) for one in parts}
    used = [
        one
        for one in parts
        if not any(at for at, kind in zip(one.coordinate, one.placements, strict=True) if kind == REPLICATE)
    ]
    spec = TensorSpec((name,), first.shape, first.local.dtype)
    return spec, tuple(_in_order(spec, [(boxes[one.rank], one) for one in used], location))


def _hostile(what: str, name: str, location: Location) -> HostileError:
    return HostileError(
        f"invalid placement of {name}: {what}", uri=location.uri, path=name, cure="do not use this checkpoint"
    )


def _box(
    part: LocalTensor, mesh: tuple[int, ...], name: str, location: Location
) -> tuple[tuple[int, int], ...]:
    """Start and size of a part in each dimension, by torch's rule; its tensor has exactly this shape."""
    box = [(0, size) for size in part.shape]
    for kind, at, ranks in zip(part.placements, part.coordinate, mesh, strict=True):
        if kind == REPLICATE:
            continue
        if not isinstance(kind, int) or kind >= len(box):
            raise _hostile(f"it cuts dimension {kind} of {len(box)}", name, location)
        start, size = box[kind]
        step = -(-size // ranks)
        begin, end = min(size, at * step), min(size, (at + 1) * step)
        box[kind] = (start + begin, end - begin)
    wanted = tuple(size for _start, size in box)
    if part.local.shape != wanted:
        raise _hostile(
            f"rank {part.rank} has the shape {list(part.local.shape)}, not {list(wanted)}", name, location
        )
    return tuple(box)


def _in_order(
    spec: TensorSpec, parts: Sequence[tuple[tuple[tuple[int, int], ...], LocalTensor]], location: Location
) -> Iterator[Extent]:
    """The byte ranges of a tensor: runs of the parts, one after the other for each index of the outer dimensions."""
    full = [(box, part) for box, part in parts if part.local.nbytes]
    if sum(part.local.nbytes for _box, part in full) != spec.nbytes:
        raise _hostile("its parts overlap, or leave a hole", spec.path[0], location)
    inner = max(
        (at for box, _part in full for at, row in enumerate(box) if row != (0, spec.shape[at])), default=-1
    )
    width = spec.nbytes // max(1, math.prod(spec.shape))
    tail = math.prod(spec.shape[inner + 1 :]) * width
    runs: list[tuple[int, LocalTensor, Span]] = []
    for box, part in full:
        rows = box[: inner + 1]
        run = (rows[-1][1] if rows else 1) * tail
        if len(runs) + part.local.nbytes // run > _MOST_RANGES:
            raise UnsupportedError(
                f"{spec.path[0]} is cut within its rows into more than {_MOST_RANGES} ranges", uri=location.uri,
                path=spec.path[0], cure="merge the ranks with the framework that trained the model",
            )  # fmt: skip
        runs += [
            (start, part, Span(at * run, (at + 1) * run))
            for at, start in enumerate(_starts(rows, spec.shape[: inner + 1], tail))
        ]
    end = 0
    for start, part, span in sorted(runs, key=lambda run: run[0]):
        if start != end:
            raise _hostile("its parts overlap, or leave a hole", spec.path[0], location)
        if part.extents is None:
            raise UnsupportedError(
                "unsupported strides: a part is not stored in order", uri=location.uri, path=spec.path[0],
                cure="save it with .contiguous()",
            )  # fmt: skip
        yield from cut(part.extents, span)
        end = start + span.stop - span.start


def _starts(box: Sequence[tuple[int, int]], shape: Sequence[int], tail: int) -> Iterator[int]:
    """Where the runs of a part begin in the whole tensor, in bytes, in the order of the part's own bytes."""
    outer, strides = list(box[:-1]), [math.prod(shape[at + 1 :]) * tail for at in range(len(shape))]
    last = box[-1][0] * strides[-1] if box else 0
    for index in range(math.prod(size for _start, size in outer)):
        rest, begin = index, last
        for (start, size), stride in zip(reversed(outer), reversed(strides[:-1]), strict=True):
            begin += (start + rest % size) * stride
            rest //= size
        yield begin


FORMATS = (
    Format(
        name="fsdp",
        title="FSDP rank files",
        detect=detect,
        signs=Signs(ends=(".pt",)),
        open=open_fsdp,
        holds=Holds(dtypes=frozenset()),
    ),
)
