"""Megatron's older checkpoints: a folder `mp_rank_TT[_PPP][_EEE]` for each tensor-, pipeline- and expert-parallel rank.

    iter_0000010/mp_rank_00/model_optim_rng.pt          tensor-parallel rank 0
    iter_0000010/mp_rank_00_001/model_optim_rng.pt      the same of pipeline stage 1, or of expert-parallel rank 1

Each file is a torch archive with `args`, `iteration` and `model`, the rank's part of the parameters. Whole parameters
are shown: layers are numbered through all stages, and the parts of tensor-parallel ranks are put together
(`partition.py`) as regions of the ranks' files, so that no rank is loaded. Experts are numbered through all ranks, and
shown under the names of sequential ones (`experts.py`). What one number behind the first counts, the arguments tell.
Optimizers are not read. One rank is written.

How tensor-parallel ranks divide each parameter: by its name, as GPTModel's modules do.

A projection `out of` the residual stream is cut along its outputs (dimension 0), one `into` it along its inputs
(dimension 1). Gate and up are one tensor of each rank, so the whole one is all gates, then all ups. What is equal
on all ranks is taken from the first. Source: the classes of megatron/core/tensor_parallel/layers.py that each module
uses.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from wherry.core.account import TRAINING_STATE, ignored_file
from wherry.core.detection import Detection, Evidence
from wherry.core.manifest import Companion, Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, IncompleteError, UnsupportedError
from wherry.formats.companions import MemoryFiles
from wherry.formats.format import Glimpse, Opened
from wherry.integrations.containers.torch.archive import Archive, read_object
from wherry.integrations.containers.zip.read import read_directory
from wherry.integrations.formats.dcp.metadata import Chunk, DcpIndex, DescribedTensor, StoredItem
from wherry.integrations.formats.dcp.reader import DcpReader
from wherry.integrations.formats.megatron.arguments import record_of
from wherry.integrations.formats.megatron.names import ARGUMENTS, OPAQUE, STEP, join_ranks, left_entry
from wherry.storage.location import Location
from wherry.storage.sidecar import OWN_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.integrations.containers.flat.strides import PlacedTensor
    from wherry.store.store import Entry


OUTPUTS, INPUTS, GATED, EQUAL = "outputs", "inputs", "gated", "equal"
_MODULES: tuple[tuple[str, str], ...] = (
    (r"embedding\.word_embeddings\.weight|output_layer\.weight", OUTPUTS),
    (r".*\.self_attention\.(linear_qkv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj)\.(weight|bias)", OUTPUTS),
    (r".*\.self_attention\.core_attention\.softmax_offset", OUTPUTS),
    (r".*\.self_attention\.linear_proj\.weight", INPUTS),
    (r".*\.linear_fc1\.(weight|bias)", GATED),
    (r".*\.linear_fc2\.weight", INPUTS),
    (r".*norm\.(weight|bias)|.*\.layer_norm_(weight|bias)|.*\.router\.(weight|bias|expert_bias)", EQUAL),
    (r"embedding\.position_embeddings\.weight|.*\.shared_experts\.gate_weight", EQUAL),
    (r".*\.self_attention\.(linear_q_down_proj|linear_kv_down_proj)\.weight", EQUAL),
    (r".*\.(linear_proj|linear_fc2)\.bias", EQUAL),
)  # fmt: skip


def division(name: str, uri: str) -> str:
    """How ranks divide a parameter.

    Raises:
        UnsupportedError: no rule knows its name.
    """
    found = next((how for pattern, how in _MODULES if re.fullmatch(pattern, name)), None)
    if found is None:
        raise UnsupportedError(
            f"unknown parameter {name}: how tensor-parallel ranks divide it is not known", uri=uri, path=name,
            cure="merge the ranks with Megatron's tools/checkpoint/convert.py",
        )  # fmt: skip
    return found


def chunks_of(
    name: str, parts: Sequence[PlacedTensor], *, gated: bool, uri: str
) -> tuple[tuple[int, ...], list[tuple[Chunk, PlacedTensor]]]:
    """The shape of a whole parameter, and its chunks.

    Args:
        name: of the parameter.
        parts: that of each tensor-parallel rank.
        gated: whether the first projection of the feed-forward layers is gate and up.
        uri: the checkpoint, for errors.

    Raises:
        CorruptError: the parts do not fit one another.
        UnsupportedError: see `division`.
    """
    first = parts[0]
    if any((one.shape, one.dtype) != (first.shape, first.dtype) for one in parts):
        raise CorruptError(
            f"the ranks have different shapes of {name}", uri=uri, path=name, cure="copy all ranks again"
        )
    how = division(name, uri) if len(parts) > 1 else EQUAL
    if how == EQUAL:
        return first.shape, [(Chunk((0,) * len(first.shape), first.shape), first)]
    axis = 1 if how == INPUTS else 0
    if len(first.shape) <= axis:
        raise CorruptError(
            f"{name} of shape {list(first.shape)} has no axis {axis}, which the ranks divide", uri=uri, path=name,
            cure="copy all ranks again",
        )  # fmt: skip
    if how == GATED and gated:
        return _one_chunk(first.shape, 0, len(parts)), list(_gates_and_ups(parts))
    return _one_chunk(first.shape, axis, len(parts)), list(_along(parts, axis, 0, first.shape[axis]))


def _one_chunk(shape: tuple[int, ...], axis: int, count: int) -> tuple[int, ...]:
    return tuple(extent * count if place == axis else extent for place, extent in enumerate(shape))


def _along(
    parts: Sequence[PlacedTensor], axis: int, first: int, step: int
) -> Iterator[tuple[Chunk, PlacedTensor]]:
    for number, one in enumerate(parts):
        offsets = tuple(first + number * step if place == axis else 0 for place in range(len(one.shape)))
        yield Chunk(offsets, one.shape), one


def _gates_and_ups(parts: Sequence[PlacedTensor]) -> Iterator[tuple[Chunk, PlacedTensor]]:
    rows = parts[0].shape[0] // 2
    for half in (0, 1):
        halves = [_rows(one, half * rows, rows) for one in parts]
        yield from _along(halves, 0, half * rows * len(parts), rows)


def _rows(one: PlacedTensor, first: int, count: int) -> PlacedTensor:
    """Some rows of a tensor."""
    offset = one.offset + first * (one.strides[0] if one.strides else math.prod(one.shape[1:]))
    return replace(one, offset=offset, shape=(count, *one.shape[1:]))


FILE = "model_optim_rng.pt"
ONE = f"mp_rank_00/{FILE}"
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_LAYER = re.compile(r"decoder\.layers\.(\d{1,18})\.(.+)")
_MODEL = "model"
_HEAD = "output_layer.weight"
_CURE = "copy the whole folder of the step again, with the files of all ranks"
_TENSOR, _PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_EXPERT, _EXPERT_TENSOR = "expert_model_parallel_size", "expert_tensor_parallel_size"
_OTHER = "merge the ranks with Megatron's tools/checkpoint/convert.py, or save in the format torch_dist"


@dataclass(frozen=True, slots=True)
class RankPart:
    """The file of one rank.

    Attributes:
        location: the file.
        entry: the file, named relative to the checkpoint.
        archive: its contents.
    """

    location: Location
    entry: Entry
    archive: Archive

    def parameters(self) -> Iterator[tuple[str, PlacedTensor]]:
        """Its part of the parameters, by name."""
        for path, placed in self.archive.placed.items():
            if len(path) == 2 and path[0] == _MODEL:  # noqa: PLR2004  `model` and the name
                yield path[1], placed


class RankItems:
    """The parts of all parameters, as the items of a DcpReader."""

    def __init__(self) -> None:
        self._parts: list[PlacedTensor] = []

    def add(self, part: PlacedTensor) -> StoredItem:
        """Take a part; the item that stands for it."""
        self._parts.append(part)
        return StoredItem("", len(self._parts) - 1, 0)

    def tensor(self, stored: StoredItem, name: str, nbytes: int) -> PlacedTensor:
        """See Items."""
        del name, nbytes
        return self._parts[stored.offset]

    def there(self, stored: StoredItem) -> bool:
        """See Items; a rank without a file is an error before."""
        return stored.offset < len(self._parts)


def detect(glimpse: Glimpse) -> Detection | None:
    """Detect the folder of a step by those of its ranks."""
    ranks = sorted(name for name, entry in glimpse.entries.items() if entry.is_dir and _RANK.fullmatch(name))
    if not ranks or glimpse.location.join(ranks[0]).join(FILE).stat() is None:
        return None
    step = STEP.fullmatch(glimpse.location.name)
    return Detection(
        glimpse.location.uri, "megatron-ranks", format_version="mp_rank", writer="megatron",
        step=int(step[1]) if step and step[1] else None, kind="params",
        evidence=(Evidence(f"{ranks[0]}/{FILE}", f"the files of {len(ranks)} ranks"),),
    )  # fmt: skip


def open_ranks(location: Location, detection: Detection) -> Opened:
    """Read the metadata of all ranks; see Format.

    Raises:
        IncompleteError: the file of a rank is missing.
        UnsupportedError: virtual stages, experts that are divided otherwise, or a parameter of which no rule knows the
            division.
        CorruptError: the ranks do not fit one another.
        HostileError, WherryError: as of files of torch.
    """
    folders = sorted(one.name for one in location.entries() if one.is_dir and _RANK.fullmatch(one.name))
    files_of_ranks = {name: _part(location, name) for name in folders}
    record = record_of(next(iter(files_of_ranks.values())).archive.tree, location.uri)
    arguments = record.arguments
    stages = _stages(files_of_ranks, arguments, location)
    _require_all(stages, arguments, location)
    index, items, specs = DcpIndex(writer="megatron"), RankItems(), dict[str, TensorSpec]()
    moments, reason = "moments, schedules and random numbers", "only parameters are read"
    ignored = [ignored_file(f"*/{FILE}:optimizer", TRAINING_STATE, moments, reason)]
    if len(stages) > 1:
        copies = "copies of tied embeddings"
        ignored.append(ignored_file(f"*/{FILE}:copies", TRAINING_STATE, copies, "the first is read"))
    gated = bool(arguments.get("swiglu") or arguments.get("quick_geglu"))
    for name, parts in _whole(stages, tied=arguments.get("untie_embeddings_and_output_weights") is False):
        if (entry := left_entry(name)) is not None:
            ignored.append(entry)
            continue
        shape, chunks = chunks_of(name, parts, gated=gated, uri=location.uri)
        index.tensors[name] = DescribedTensor(parts[0].dtype, shape, tuple(chunk for chunk, _part in chunks))
        for chunk, part in chunks:
            index.stored.put(name, chunk.offsets, items.add(part))
        specs[name] = TensorSpec((name,), shape, parts[0].dtype)
    companion_entries = tuple(
        one
        for one in location.entries()
        if not (one.is_dir or one.size < 0 or one.name in OWN_NAMES or one.name.startswith("."))
    )
    files = (*(one.entry for one in files_of_ranks.values()), *companion_entries)
    names = frozenset(one.name for one in companion_entries)
    reader = DcpReader(location, index, items, files, {}, names)  # pyright: ignore[reportArgumentType]  what it calls
    companions = tuple(Companion(one.name, one.size) for one in companion_entries if one.name != ARGUMENTS)
    if arguments:
        reader.made[ARGUMENTS] = Location(MemoryFiles(files={ARGUMENTS: record.text}), ARGUMENTS)
        companions = (*companions, Companion(ARGUMENTS, len(record.text)))
    elif ARGUMENTS in names:
        companions = (
            *companions,
            *(Companion(one.name, one.size) for one in companion_entries if one.name == ARGUMENTS),
        )
    step = record.step if detection.step is None else detection.step
    manifest = Manifest(
        {(name,): spec for name, spec in specs.items()}, step=step, kind="params", companions=companions
    )
    experts = len(stages[0][0])
    words = f"{len(stages[0])} × {len(stages)}" + (f" × {experts}" if experts > 1 else "")
    seen = Evidence(FILE, f"{len(specs)} parameters of {words} ranks")
    return Opened(replace(detection, step=step).seen(seen), manifest, reader, tuple(ignored))


def _stages(
    files: Mapping[str, RankPart], arguments: Mapping[str, object], location: Location
) -> list[list[list[RankPart]]]:
    """Pipeline stage → tensor-parallel rank → the files of its expert-parallel ranks."""
    found: dict[tuple[int, int, int], RankPart] = {}
    for name, part in files.items():
        tensor, stage, expert = _numbers(name, arguments)
        if found.setdefault((stage, tensor, expert), part) is not part:
            raise CorruptError(f"two folders of one rank: {name}", uri=location.uri, cure=_CURE)
    counts = [max(column) + 1 for column in zip(*found, strict=True)]
    for stage, tensor, expert in product(*map(range, counts)):
        if (stage, tensor, expert) not in found:
            of_experts = f" and expert-parallel rank {expert}" if counts[2] > 1 else ""
            raise IncompleteError(
                f"the file of tensor-parallel rank {tensor}{of_experts} of pipeline stage {stage} is missing",
                uri=location.uri, cure=_CURE,
            )  # fmt: skip
    return [
        [[found[stage, tensor, expert] for expert in range(counts[2])] for tensor in range(counts[1])]
        for stage in range(counts[0])
    ]


def _numbers(name: str, arguments: Mapping[str, object]) -> tuple[int, int, int]:
    """The tensor-parallel rank, pipeline stage and expert-parallel rank of a folder."""
    rank = _RANK.fullmatch(name)
    assert rank is not None
    first, second = int(rank[2] or 0), int(rank[3] or 0)
    experts = arguments.get(_EXPERT)
    alone = rank[3] is None and isinstance(experts, int) and experts > 1 and arguments.get(_PIPELINE, 1) == 1
    return (int(rank[1]), 0, first) if alone else (int(rank[1]), first, second)


def _part(location: Location, folder: str) -> RankPart:
    place = location.join(folder).join(FILE)
    entry = place.stat()
    if entry is None:
        raise IncompleteError(f"file not found: {folder}/{FILE}", uri=location.uri, cure=_CURE)
    place = replace(place, opaque=place.opaque | OPAQUE)
    return RankPart(
        place, replace(entry, name=f"{folder}/{FILE}"), read_object(place, read_directory(place), {})
    )


def _require_all(
    stages: Sequence[Sequence[Sequence[RankPart]]], arguments: Mapping[str, object], location: Location
) -> None:
    """The number of ranks is what the arguments say, and each has a model of one part."""
    for name, count in (
        (_TENSOR, len(stages[0])), (_PIPELINE, len(stages)), (_EXPERT, len(stages[0][0])),
    ):  # fmt: skip
        said = arguments.get(name, count)
        if said != count:
            raise IncompleteError(
                f"{name} is {said}, but there are files of {count}", uri=location.uri, cure=_CURE
            )
    experts = arguments.get(_EXPERT_TENSOR) or len(stages[0])
    if experts != len(stages[0]) and arguments.get("num_experts"):
        raise UnsupportedError(
            f"{_EXPERT_TENSOR} is {experts}, and {_TENSOR} {len(stages[0])}: experts are divided otherwise",
            uri=location.uri, cure=_OTHER,
        )  # fmt: skip
    for one in (part for stage in stages for parts in stage for part in parts):
        if any(path[0] == "model0" for path in one.archive.placed if path):
            raise UnsupportedError("unsupported virtual pipeline stages", uri=one.location.uri, cure=_OTHER)
        if not any(True for _row in one.parameters()):
            raise UnsupportedError(
                "missing parameters of GPTModel below `model`", uri=one.location.uri, cure=_OTHER
            )


def _whole(
    stages: Sequence[Sequence[Sequence[RankPart]]], *, tied: bool
) -> Iterator[tuple[str, list[PlacedTensor]]]:
    """Every parameter under the number that its layer has in the whole model, with the parts of all ranks."""
    before, last = 0, len(stages) - 1
    seen: set[str] = set()
    for number, stage in enumerate(stages):
        uri = stage[0][0].location.uri
        rows = [join_ranks([dict(one.parameters()) for one in parts], uri) for parts in stage]
        layers = {int(match[1]) for name in rows[0] if (match := _LAYER.fullmatch(name))}
        for name in rows[0]:
            parts = [row.get(name) for row in rows]
            if None in parts or any(row.keys() != rows[0].keys() for row in rows):
                raise CorruptError(
                    f"the ranks of pipeline stage {number} have different parameters",
                    uri=uri,
                    path=name,
                    cure=_CURE,
                )
            layer = _LAYER.fullmatch(name)  # layers are counted from the first stage
            full = f"decoder.layers.{int(layer[1]) + before}.{layer[2]}" if layer else name
            if full == _HEAD and tied and number == last and last:
                continue  # the embedding, which the last stage has a copy of
            if full in seen:
                raise CorruptError(f"two pipeline stages contain {full}", uri=uri, path=full, cure=_CURE)
            seen.add(full)
            yield full, [part for part in parts if part is not None]
        before += max(layers, default=-1) + 1
