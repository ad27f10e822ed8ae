"""Megatron's older checkpoints: a folder `mp_rank_TT[_PPP][_EEE]` for each tensor-, pipeline- and expert-parallel rank.

    iter_0000010/mp_rank_00/model_optim_rng.pt          tensor-parallel rank 0
    iter_0000010/mp_rank_00_001/model_optim_rng.pt      the same of pipeline stage 1, or of expert-parallel rank 1

Each file is a torch archive with `args`, `iteration` and `model`, the rank's part of the parameters. Whole parameters
are shown: layers are numbered through all stages, and the parts of tensor-parallel ranks are put together
as regions of the ranks' files, so that no rank is loaded. Experts are numbered through all ranks, and
shown under the names of sequential ones. The arguments say what a single further number counts. Optimizers are not
read. One rank is written.

How tensor-parallel ranks divide each parameter: by its name, as GPTModel's modules do.

A projection `out of` the residual stream is cut along its outputs (dimension 0), one `into` it along its inputs
(dimension 1). Gate and up are one tensor of each rank, so the whole one is all gates, then all ups. What is equal
on all ranks is taken from the first. Source: the classes of megatron/core/tensor_parallel/layers.py that each module
uses.

The names of Megatron's files, and of what its checkpoints hold apart from parameters.

Source: megatron/core/dist_checkpointing and megatron/training/checkpointing.py of Megatron-Core 0.16, and its files.

The parts of expert-parallel ranks: each has some of the experts, and a copy of everything else.

Rank R of N has experts R·n to R·n + n - 1, which it counts from 0: as modules (`local_experts.0.linear_fc1.weight`), or
grouped, with the index behind the name (`linear_fc1.weight0`). Experts that are one tensor (`experts.weight1`) are
refused, since no name tells which they are.
Source: megatron/core/transformer/moe/moe_layer.py and experts.py, megatron/training/checkpointing.py (0.16).

The arguments of a run, which are the config of its model: a Namespace within `common.pt`.

They are shown as the companion `megatron_args.json`, and a target's file of this name becomes the Namespace of its
`common.pt`. Numbers, texts, and lists and tables of such are shown; objects of classes (dtypes, enumerations) say how a
run computes, not what. Nothing is unpickled: the inert machine reads the file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import product
from typing import Any

from wherry.core.account import TRAINING_STATE, IgnoredEntry, ignored_file
from wherry.core.detection import Detection, Evidence
from wherry.core.json_document import parse_json
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.limits import SMALL
from wherry.core.manifest import Companion, Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, IncompleteError, UnsupportedError
from wherry.formats.companions import MemoryFiles
from wherry.formats.format import Glimpse, Opened
from wherry.integrations.containers.flat.reader import Surroundings
from wherry.integrations.containers.flat.strides import PlacedTensor
from wherry.integrations.containers.pickle.tree import PickleTree
from wherry.integrations.containers.torch.archive import Archive, read_archive
from wherry.integrations.containers.torch.layout import TypedObject, pickle_object
from wherry.integrations.formats.dcp.items import PlacedItems
from wherry.integrations.formats.dcp.metadata import Chunk, DcpIndex, DescribedTensor, StoredItem
from wherry.integrations.formats.dcp.reader import DcpReader
from wherry.store.location import Location
from wherry.store.sidecar import OWN_NAMES
from wherry.store.store import Entry

COMMON, BACKEND, LATEST = "common.pt", "metadata.json", "latest_checkpointed_iteration.txt"
ARGUMENTS = "megatron_args.json"  # the arguments of `common.pt` as wherry shows them, and as it takes them
ARGS, ITERATION = "args", "iteration"
EMBEDDING = "embedding.word_embeddings.weight"
SHARDED, VERSION = "torch_dist", 1
STEP = re.compile(r"iter_(\d{7,18})|release")
LEFT: tuple[tuple[str, str, str], ...] = (
    (
        r".*\._extra_state(/.*)?",
        "state of fp8 recipes",
        "Transformer Engine makes it anew; it holds no weights",
    ),
    (r"(.*\.)?rng_state(/.*)?", "state of random numbers", "a run draws new ones"),
    (r"rerun_state_machine_state(/.*)?", "state of the checks of a run", "only a run that resumes reads it"),
)
# Classes whose objects `common.pt` holds: enumerations and records of a run.
OPAQUE = frozenset(
    {
        "megatron.core.enums.ModelType",
        "megatron.core.enums.Fp8Recipe",
        "megatron.core.enums.Fp4Recipe",
        "megatron.core.enums.CudaGraphScope",
        "megatron.core.transformer.enums.AttnBackend",
        "megatron.core.transformer.enums.AttnMaskType",
        "megatron.core.transformer.enums.AttnType",
        "megatron.core.transformer.enums.CudaGraphScope",
        "megatron.core.transformer.enums.LayerType",
        "megatron.core.rerun_state_machine.RerunDiagnostic",
        "megatron.core.rerun_state_machine.RerunMode",
        "megatron.core.rerun_state_machine.RerunState",
        "megatron.core.rerun_state_machine.RerunValidationStatus",
        "megatron.core.dist_checkpointing.mapping.ShardedObject",
        "megatron.training.arguments.ModelType",
        "signal.Signals",
    }
)


def left_entry(name: str) -> IgnoredEntry | None:
    """The entry of an object of a run that no model needs; None for any other."""
    for pattern, what, reason in LEFT:
        if re.fullmatch(pattern, name):
            return IgnoredEntry((name,), TRAINING_STATE, reason, what)
    return None


def step_name(step: int) -> str:
    """The folder name of a step."""
    return f"iter_{step:07d}"


_GROUPED = re.compile(r"(.+\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d{1,18})")
_LOCAL = re.compile(r"(.+\.mlp\.experts\.local_experts)\.(\d{1,18})\.(.+)")
_EXPERTS = ".mlp.experts."
_CURE = "copy the whole folder of the step again, with the files of all ranks"


def sequential(name: str) -> str:
    """The name of an expert's parameter as that of a sequential one; other names stay."""
    return _GROUPED.sub(r"\1.local_experts.\4.\2.\3", name)


def join_ranks(ranks: Sequence[Mapping[str, PlacedTensor]], uri: str) -> dict[str, PlacedTensor]:
    """The parameters of all expert-parallel ranks, experts under the numbers that they have in the whole model.

    Args:
        ranks: the parameters of each by name, all of one tensor-parallel rank and pipeline stage.
        uri: the checkpoint, for errors.

    Raises:
        UnsupportedError: experts that are one tensor.
        CorruptError: the ranks have different parameters.
    """
    if len(ranks) == 1:
        return {sequential(name): part for name, part in ranks[0].items()}
    named = [{sequential(name): part for name, part in rank.items()} for rank in ranks]
    counts = {_count(rank) for rank in named}
    first = named[0]
    for rank in named:
        other = next((name for name in first.keys() ^ rank.keys()), None)
        other = other or next(
            (
                name
                for name, part in first.items()
                if (part.shape, part.dtype) != (rank[name].shape, rank[name].dtype)
            ),
            None,
        )
        if other is not None or len(counts) > 1:
            raise CorruptError(
                "the expert-parallel ranks have different parameters", uri=uri, path=other, cure=_CURE
            )
    (count,) = counts
    whole: dict[str, PlacedTensor] = {}
    for number, rank in enumerate(named):
        for name, part in rank.items():
            expert = _LOCAL.fullmatch(name)
            if expert:
                whole[f"{expert[1]}.{number * count + int(expert[2])}.{expert[3]}"] = part
            elif _EXPERTS in name:
                raise UnsupportedError(
                    f"unsupported form of experts in the files of expert-parallel ranks: {name}", uri=uri, path=name,
                    cure="merge the ranks with Megatron's tools/checkpoint/convert.py, or save as torch_dist",
                )  # fmt: skip
            else:
                whole.setdefault(name, part)
    return whole


def _count(rank: Mapping[str, PlacedTensor]) -> int:
    """How many experts a rank has in each layer."""
    return 1 + max((int(found[2]) for name in rank if (found := _LOCAL.fullmatch(name))), default=-1)


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
        """The rank's part of the parameters, by name."""
        for path, placed in self.archive.placed.items():
            if len(path) == 2 and path[0] == _MODEL:  # noqa: PLR2004  `model` and the name
                yield path[1], placed


def detect(glimpse: Glimpse) -> Detection | None:
    """Detect the folder of a step by those of its ranks."""
    ranks = sorted(name for name, entry in glimpse.entries.items() if entry.is_dir and _RANK.fullmatch(name))
    if not ranks or glimpse.location.join(ranks[0]).join(FILE).stat() is None:
        return None
    step = STEP.fullmatch(glimpse.location.name)
    number = int(step[1]) if step and step[1] else None
    seen = Evidence(f"{ranks[0]}/{FILE}", f"the files of {len(ranks)} ranks")
    return glimpse.detected("megatron-ranks", "mp_rank", "megatron", seen, step=number, kind="params")


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
    index, placed, specs = (
        DcpIndex(writer="megatron"),
        dict[StoredItem, PlacedTensor](),
        dict[str, TensorSpec](),
    )
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
            item = StoredItem("", len(placed), 0)  # stands for the part
            placed[item] = part
            index.stored.put(name, chunk.offsets, item)
        specs[name] = TensorSpec((name,), shape, parts[0].dtype)
    around = Surroundings(
        [
            one
            for one in location.entries()
            if not (one.is_dir or one.size < 0 or one.name in OWN_NAMES or one.name.startswith("."))
        ]
    )
    files = (*(one.entry for one in files_of_ranks.values()), *around.companions)
    reader = DcpReader(location, index, PlacedItems(placed), files, {}, around.names)
    companions = record.show(reader, around.listed)
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
    archive = read_archive(place, opaque=OPAQUE, bare=True)
    return RankPart(place, replace(entry, name=f"{folder}/{FILE}"), archive)


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


_NAMESPACE = "argparse.Namespace"
_TUPLE = "tuple"
_FORM = 3.0  # of checkpoints since 2021: query, key and value of each group follow one another


@dataclass(frozen=True, slots=True)
class MegatronRun:
    """The facts in the `common.pt` of a run.

    Attributes:
        arguments: of the run; empty if it has none.
        step: the iteration; None if it states none.
    """

    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    step: int | None = None

    def show(self, reader: DcpReader, companions: tuple[Companion, ...]) -> tuple[Companion, ...]:
        """The companions with the arguments as a file of that name, if there are any; the reader gets the file."""
        if not self.arguments:
            return companions
        text = (json.dumps(self.arguments, indent=2) + "\n").encode()
        reader.made[ARGUMENTS] = Location(MemoryFiles(files={ARGUMENTS: text}), ARGUMENTS)
        others = (one for one in companions if one.name != ARGUMENTS)
        return (*others, Companion(ARGUMENTS, len(text)))


def read_record(file: Location) -> MegatronRun:
    """Read `common.pt`.

    Raises:
        CorruptError, HostileError, UnsupportedError: as of files of torch.
    """
    return record_of(read_archive(file, opaque=OPAQUE, bare=True).tree, file.uri)


def record_of(tree: PickleTree, uri: str) -> MegatronRun:
    """The record in the leaves of a pickle.

    Raises:
        CorruptError: the step is not a number.
    """
    step = tree.values.get((ITERATION,))
    if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
        raise CorruptError(
            f"{COMMON}: {ITERATION} is not a number", uri=uri, cure="restore the file from a backup"
        )
    return MegatronRun(_arguments(tree), step)


def _arguments(tree: PickleTree) -> dict[str, Any]:
    """The plain arguments, nested."""
    odd = {
        path[1]
        for path, kind in tree.types.items()
        if path[:1] == (ARGS,) and len(path) > 1 and not kind.endswith(_TUPLE)
    }
    found: dict[str, Any] = {}
    for path, value in tree.values.items():
        if path[:1] == (ARGS,) and len(path) > 1 and path[1] not in odd:
            _put(found, path[1:], value)
    for path, kind in tree.empties.items():
        if path[:1] == (ARGS,) and len(path) > 1 and path[1] not in odd:
            _put(found, path[1:], {"none": None, "dict": {}}.get(kind, []))
    lists = sorted((path for path in tree.lists if path[:1] == (ARGS,) and path[1:]), key=len, reverse=True)
    for path in lists:
        if path[1] not in odd:
            table = found
            for part in path[1:-1]:
                table = table[part]
            node = table.get(path[-1])
            if isinstance(node, dict):
                table[path[-1]] = [node[at] for at in sorted(node, key=int)]
    return found


def _put(table: dict[str, Any], path: KeyPath, value: Any) -> None:
    for part in path[:-1]:
        table = table.setdefault(part, {})
    table[path[-1]] = value


def parse_arguments(file: Location) -> dict[str, Any]:
    """The arguments of a file `megatron_args.json`.

    Raises:
        CorruptError: it is not a table.
    """
    found = parse_json(file.read_whole(1 << 24), ARGUMENTS, uri=file.uri, limits=SMALL)
    if not isinstance(found, dict):
        raise CorruptError(f"{ARGUMENTS} is not a table of arguments", uri=file.uri, cure="correct the file")
    return found


def common_pickle(
    arguments: Mapping[str, Any], step: int | None, model: Mapping[str, TensorSpec] | None = None
) -> tuple[bytes, list[TensorSpec]]:
    """The object of a new `common.pt`, or with a model that of a rank's file."""
    args = {ARGS: TypedObject(_NAMESPACE, dict(arguments))} if arguments else {}
    own = {_MODEL: dict(model)} if model is not None else {}
    return pickle_object({**args, ITERATION: step or 0, "checkpoint_version": _FORM, **own})
