"""DeepSpeed ZeRO checkpoints: the float32 parameters, whole, from the partitions of all ranks.

`engine.save_checkpoint` makes `latest` (the name of a step's folder) and in the folder of the step

    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt     the partition of rank R
    mp_rank_00_model_states.pt                           names and shapes, stages 1 and 2
    zero_pp_rank_R_mp_rank_00_model_states.pt            the same, stage 3

Stages 1 and 2 store each group of parameters as one vector, cut into equal parts (`single_partition_of_fp32_groups`);
a parameter may lie in two of them. Stage 3 cuts each parameter into equal parts, of which the last are padded
(`fp32_flat_groups`). `param_shapes` has the names, in the order of the vectors; trained parameters alone are in them.
What is frozen, and the buffers, lie in the model states (`frozen_param_fragments`, `module`; what ZeRO 1 has of it, in
`module` alone); `shared_params` names second names. So every parameter is a few byte ranges of the ranks' files, and is
read as such.

The bytes are those of DeepSpeed's own `zero_to_fp32.py`, whose facts these are (DeepSpeed 0.19). Objects of DeepSpeed's
classes in the pickles (loss scalers, enumerations) are opaque: nothing is imported or called. Tensor-parallel ranks,
experts and pipeline stages are refused by name.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.core.account import TRAINING_STATE, ignored_file
from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import render
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import CorruptError, IncompleteError, UnsupportedError
from wherry.formats.file_names import is_deepspeed_shard
from wherry.formats.format import Opened
from wherry.integrations.containers.flat.reader import FlatReader
from wherry.integrations.formats.deepspeed.rank_files import (
    CURE,
    FLOAT,
    STEP,
    WEIGHTS,
    RankFile,
    buffers_of,
    files_by_rank,
    frozen_parameters,
    groups_of,
    others_of,
    read_latest,
    shapes_of,
    shard_entries,
    with_shared,
)
from wherry.layout.runs import cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.formats.contents import Extent
    from wherry.formats.format import Glimpse
    from wherry.storage.location import Location

LATEST = "latest"
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,9})_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_00_model_states\.pt")
_STATE, _WHOLE_STAGE = "optimizer_state_dict", 3
_PARTS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}


def detect(glimpse: Glimpse) -> Detection | None:
    """Detect the folder of a step, or the folder above it whose file `latest` names one."""
    folder, prefix = glimpse.location, ""
    if LATEST in glimpse.entries and not any(map(WEIGHTS.fullmatch, glimpse.entries)):
        prefix = read_latest(glimpse.location, LATEST)
        folder = glimpse.location.join(prefix) if prefix in glimpse.entries else folder
    names = [entry.name for entry in folder.entries()] if prefix else list(glimpse.entries)
    ranks = sorted(filter(_OPTIMIZER.fullmatch, names))
    if not ranks or not any(map(_MODEL.fullmatch, names)):
        return None
    step = STEP.fullmatch(folder.name)
    evidence = [
        Evidence(f"{prefix}/{ranks[0]}".lstrip("/"), f"the optimizer's partitions of {len(ranks)} ranks")
    ]
    if prefix:
        evidence.insert(0, Evidence(LATEST, prefix))
    return Detection(
        glimpse.location.uri, "deepspeed", format_version="ZeRO", writer="deepspeed",
        step=int(step[1]) if step else None, kind="params", evidence=tuple(evidence),
    )  # fmt: skip


def open_deepspeed(location: Location, detection: Detection) -> Opened:
    """Read the metadata of all ranks; see Format.

    Raises:
        IncompleteError: the file of a rank is missing.
        UnsupportedError: there are tensor-parallel ranks, experts or pipeline stages, or another stage.
        CorruptError: the partitions do not have the sizes that the shapes need.
        HostileError, WherryError: as of files of torch.
    """
    names = {entry.name for entry in location.entries()}
    prefix = read_latest(location, LATEST) if LATEST in names else ""
    folder = location.join(prefix) if prefix in names else location
    members = tuple(shard_entries(folder, f"{prefix}/" if folder is not location else ""))
    shards = [one for one in folder.entries() if is_deepspeed_shard(one.name)]
    ranks = files_by_rank(folder, [one.name for one in shards], _OPTIMIZER)
    models = files_by_rank(folder, [one.name for one in shards], _MODEL)
    others = [
        one.name for one in shards if not (_OPTIMIZER.fullmatch(one.name) or _MODEL.fullmatch(one.name))
    ]
    if others:
        raise UnsupportedError(
            f"{others[0]} is of tensor parallelism, experts or a pipeline", uri=location.uri,
            cure="merge its shards with DeepSpeed, or export the model with the framework that trained it",
        )  # fmt: skip
    stage = _stage(ranks, location)
    specs: dict[KeyPath, TensorSpec] = {}
    places: dict[KeyPath, tuple[Extent, ...]] = {}
    parameters = _cut_each(ranks, models[0]) if stage == _WHOLE_STAGE else _cut_groups(ranks, models[0])
    for spec, extents in (
        *parameters,
        *frozen_parameters(models, in_parts=stage == _WHOLE_STAGE),
        *_float_buffers(models[0]),
    ):
        specs[spec.path], places[spec.path] = spec, extents
    with_shared(models[0], specs, places)
    if stage != _WHOLE_STAGE:
        for spec, extents in list(others_of(models[0], specs)):
            specs[spec.path], places[spec.path] = spec, extents
    seen = Evidence(ranks[0].location.name, f"ZeRO stage {stage}, {len(specs)} whole tensors in float32")
    ignored = (
        ignored_file(
            f"*_optim_states.pt:{_STATE}",
            TRAINING_STATE,
            "moments of the optimizer",
            "only parameters are read",
        ),
    )
    version = f"ZeRO {stage}, {len(ranks)} ranks"
    manifest = Manifest(specs, step=detection.step, kind="params")
    found = replace(detection, format_version=version).seen(seen)
    return Opened(found, manifest, FlatReader(location, places, members), ignored)


def _stage(ranks: Sequence[RankFile], location: Location) -> int:
    first = ranks[0].manifest.values
    stage = _number(first.get((_STATE, "zero_stage")))
    if stage is None:
        stage = 3 if ranks[0].below(_STATE, "fp32_flat_groups") else 2
    if stage not in _PARTS:
        raise UnsupportedError(
            f"unsupported ZeRO stage {stage}", uri=location.uri, cure="read it with DeepSpeed"
        )
    counts = [first.get((_STATE, "partition_count")), *ranks[0].values(_STATE, "partition_count").values()]
    count = max((number for one in counts if (number := _number(one)) is not None), default=len(ranks))
    if count != len(ranks):
        raise IncompleteError(f"{len(ranks)} of the files of {count} ranks", uri=location.uri, cure=CURE)
    return stage


def _number(value: Any) -> int | None:
    """An integer; of an enumeration that was read as an opaque value, the number that it was made of."""
    if isinstance(value, dict):
        arguments: Any = value.get("arguments") or value.get("args") or value.get("state")
        value = arguments[0] if isinstance(arguments, list) and arguments else arguments
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _vector(ranks: Sequence[RankFile], path: KeyPath) -> tuple[Extent, ...]:
    """The byte ranges of a vector that the ranks store in parts."""
    for one in ranks:
        spec = one.manifest.tensors.get(path)
        if spec is None or path not in one.extents or spec.dtype != FLOAT or len(spec.shape) != 1:
            raise CorruptError(
                "expected a vector of float32", uri=one.location.uri, path=render(path), cure=CURE
            )
    return tuple(extent for one in ranks for extent in one.extents[path])


def _cut_groups(
    ranks: Sequence[RankFile], model: RankFile
) -> Iterator[tuple[TensorSpec, tuple[Extent, ...]]]:
    """Stages 1 and 2: each group is one vector over all ranks."""
    groups = [path[0] for path in ranks[0].below(_STATE, _PARTS[2]) if len(path) == 1]
    rest = groups_of(model).difference(groups)
    if rest:
        raise CorruptError(
            f"the optimizer has no vector of the parameters of group {min(rest)}", uri=model.location.uri, cure=CURE
        )  # fmt: skip
    for group in groups:
        vector, at = _vector(ranks, (_STATE, _PARTS[2], group)), 0
        for name, shape in shapes_of(model, group):
            spec = TensorSpec((name,), shape, FLOAT)
            yield spec, tuple(cut(vector, Span(at, at + spec.nbytes)))
            at += spec.nbytes
        step = 2 * len(ranks) * 4  # vectors are padded to a multiple of twice the number of ranks
        _require_used(sum(extent.length for extent in vector), at, ranks[0], step)


def _cut_each(ranks: Sequence[RankFile], model: RankFile) -> Iterator[tuple[TensorSpec, tuple[Extent, ...]]]:
    """Stage 3: each parameter is cut into equal parts, one in the vectors of each rank."""
    vectors = [
        tuple(
            extent
            for path in one.below(_STATE, _PARTS[3])
            for extent in _vector([one], (_STATE, _PARTS[3], *path))
        )
        for one in ranks
    ]
    at = 0
    for name, shape in shapes_of(model):
        spec, part = TensorSpec((name,), shape, FLOAT), 4 * -(-math.prod(shape) // len(ranks))
        ends = [max(0, min(part, spec.nbytes - rank * part)) for rank in range(len(ranks))]
        yield (
            spec,
            tuple(
                extent
                for vector, end in zip(vectors, ends, strict=True)
                for extent in cut(vector, Span(at, at + end))
            ),
        )
        at += part
    for vector, one in zip(vectors, ranks, strict=True):
        _require_used(sum(extent.length for extent in vector), at, one, 1)


def _require_used(there: int, used: int, rank: RankFile, step: int) -> None:
    """Compare the bytes of a vector with those of its parameters, both padded to a multiple of `step` bytes."""
    if -(-there // step) != -(-used // step):
        raise CorruptError(
            f"the shapes of the parameters need {used} bytes of a vector of {there}",
            uri=rank.location.uri,
            cure=CURE,
        )


def _float_buffers(model: RankFile) -> Iterator[tuple[TensorSpec, tuple[Extent, ...]]]:
    """Buffers, which zero_to_fp32 makes float32, so that others are refused."""
    for spec, extents in buffers_of(model):
        if spec.dtype != FLOAT:
            raise UnsupportedError(
                f"the buffer {spec.path[0]} is {spec.dtype}, which zero_to_fp32.py would make float32",
                uri=model.location.uri, cure="merge the shards with zero_to_fp32.py",
            )  # fmt: skip
        yield spec, extents
