"""DeepSpeed ZeRO checkpoints: the float32 parameters, whole, from the partitions of all ranks.

`engine.save_checkpoint` makes `latest` (the name of a step's folder) and in the folder of the step

    [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt     the partition of rank R
    mp_rank_00_model_states.pt                           names and shapes, stages 1 and 2
    zero_pp_rank_R_mp_rank_00_model_states.pt            the same, stage 3

Stages 1 and 2 store each group of parameters as one vector, cut into equal parts (`single_partition_of_fp32_groups`);
a parameter may lie in two of them. Stage 3 cuts each parameter into equal parts, of which the last are padded
(`fp32_flat_groups`). `param_shapes` has the names, in the order of the vectors; trained parameters alone are in them.
What is frozen, and the buffers, lie in the model states (`frozen_param_fragments`, `module`); `shared_params` names
second names. So every parameter is a few byte ranges of the ranks' files, and is read as such.

The bytes are those of DeepSpeed's own `zero_to_fp32.py`, whose facts these are (DeepSpeed 0.19). Objects of DeepSpeed's
classes in the pickles (loss scalers, enumerations) are opaque: nothing is imported or called. Tensor-parallel ranks,
experts and pipeline stages are refused by name.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wherry.core.account import TRAINING_STATE, ignored_file
from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, render
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import CorruptError, IncompleteError, NotFoundError, UnsupportedError
from wherry.formats.file_names import is_deepspeed_shard
from wherry.formats.format import Format, Holds, Opened
from wherry.integrations.containers.flat.reader import FlatReader
from wherry.integrations.containers.flat.strides import StridedReader
from wherry.integrations.containers.torch.archive import read_object, require_honest_size
from wherry.integrations.containers.zip.read import read_directory
from wherry.layout.runs import cut

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.formats.format import Glimpse
    from wherry.formats.reader import Extent
    from wherry.storage.location import Entry, Location

_LATEST = "latest"
_LONGEST_NAME = 256
_STEP = re.compile(r"global_step(\d+)")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_00_model_states\.pt")
_WEIGHTS = re.compile(r".+\.(safetensors|bin)(\.index\.json)?")
# Classes whose objects the pickles hold beside the tensors.
_OPAQUE = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.utils.tensor_fragment.tensor_fragment",
    }
)
_STATE, _WHOLE_STAGE, _FLOAT = "optimizer_state_dict", 3, "float32"
_PARTS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
_CURE = "copy the whole folder of the step again, with the files of all ranks"


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file of one rank, opened; its tensors are byte ranges.

    Attributes:
        location: the file.
        manifest: what it holds.
        extents: key path → byte ranges.
    """

    location: Location
    manifest: Manifest
    extents: Mapping[KeyPath, tuple[Extent, ...]]

    def below(self, *root: str) -> dict[KeyPath, TensorSpec]:
        """The tensors below a key path, by the rest of theirs, in the order of the file."""
        size = len(root)
        rows = self.manifest.tensors.items()
        return {path[size:]: spec for path, spec in rows if path[:size] == root}

    def values(self, *root: str) -> dict[KeyPath, Any]:
        """The same of other values."""
        size = len(root)
        rows = self.manifest.values.items()
        return {path[size:]: value for path, value in rows if path[:size] == root}


def detect(glimpse: Glimpse) -> Detection | None:
    """Detect the folder of a step, or the folder above it whose file `latest` names one."""
    folder, prefix = glimpse.location, ""
    if _LATEST in glimpse.entries and not any(map(_WEIGHTS.fullmatch, glimpse.entries)):
        prefix = _latest(glimpse.location)
        folder = glimpse.location.join(prefix) if prefix in glimpse.entries else folder
    names = [entry.name for entry in folder.entries()] if prefix else list(glimpse.entries)
    ranks = sorted(filter(_OPTIMIZER.fullmatch, names))
    if not ranks or not any(map(_MODEL.fullmatch, names)):
        return None
    step = _STEP.fullmatch(folder.name)
    evidence = [
        Evidence(f"{prefix}/{ranks[0]}".lstrip("/"), f"the optimizer's partitions of {len(ranks)} ranks")
    ]
    if prefix:
        evidence.insert(0, Evidence(_LATEST, prefix))
    return Detection(
        glimpse.location.uri, "deepspeed", format_version="ZeRO", writer="deepspeed",
        step=int(step[1]) if step else None, kind="params", evidence=tuple(evidence),
    )  # fmt: skip


def _latest(location: Location) -> str:
    """What the file `latest` says; empty if it names nothing, or is a link to a folder, as others make it."""
    try:
        text = location.join(_LATEST).read(0, _LONGEST_NAME).decode(errors="replace").strip()
    except NotFoundError:
        return ""
    return text if text and "/" not in text and text not in (".", "..") else ""


def open_deepspeed(location: Location, detection: Detection) -> Opened:
    """Read the metadata of all ranks; see Format.

    Raises:
        IncompleteError: the file of a rank is missing.
        UnsupportedError: there are tensor-parallel ranks, experts or pipeline stages, or another stage.
        CorruptError: the partitions do not have the sizes that the shapes need.
        HostileError, WherryError: as of files of torch.
    """
    names = {entry.name for entry in location.entries()}
    prefix = _latest(location) if _LATEST in names else ""
    folder = location.join(prefix) if prefix in names else location
    members = tuple(_members(folder, f"{prefix}/" if folder is not location else ""))
    shards = [one for one in folder.entries() if is_deepspeed_shard(one.name)]
    ranks = _by_rank(folder, [one.name for one in shards], _OPTIMIZER)
    models = _by_rank(folder, [one.name for one in shards], _MODEL)
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
    for spec, extents in (*parameters, *_frozen(models, stage), *_buffers(models[0])):
        specs[spec.path], places[spec.path] = spec, extents
    for (name,), source in models[0].values("shared_params").items():
        if (source,) in specs:
            specs[name,], places[name,] = replace(specs[source,], path=(name,)), places[source,]
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


def _members(folder: Location, prefix: str) -> Iterator[Entry]:
    for one in folder.entries():
        if is_deepspeed_shard(one.name):
            yield replace(one, name=f"{prefix}{one.name}")


def _by_rank(folder: Location, names: Sequence[str], pattern: re.Pattern[str]) -> list[RankFile]:
    """The files of a kind in the order of their ranks, which are contiguous from 0."""
    found = {int(match[1] or 0): name for name in names if (match := pattern.fullmatch(name))}
    missing = sorted(set(range(max(found, default=0) + 1)) - set(found))
    if missing:
        raise IncompleteError(f"the file of rank {missing[0]} is missing", uri=folder.uri, cure=_CURE)
    return [_opened(folder.join(found[rank])) for rank in sorted(found)]


def _opened(location: Location) -> RankFile:
    place = replace(location, opaque=location.opaque | _OPAQUE)
    archive = read_object(place, read_directory(place), {})
    if archive.placed:  # the model states of stage 3 have no tensors
        require_honest_size(archive.placed, place)
    manifest = Manifest(archive.specs, values=archive.tree.values, empties=archive.tree.empties)
    reader = StridedReader(place, archive.placed, ())
    found = {path: reader.extents(spec) for path, spec in archive.specs.items()}
    return RankFile(
        location, manifest, {path: extents for path, extents in found.items() if extents is not None}
    )


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
        raise IncompleteError(f"{len(ranks)} of the files of {count} ranks", uri=location.uri, cure=_CURE)
    return stage


def _number(value: Any) -> int | None:
    """An integer; of an enumeration that was read as an opaque value, the number that it was made of."""
    if isinstance(value, dict):
        arguments: Any = value.get("arguments") or value.get("args") or value.get("state")
        value = arguments[0] if isinstance(arguments, list) and arguments else arguments
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _shapes(model: RankFile, group: str | None = None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The trained parameters in the order of the vectors, with their shapes."""
    found: dict[tuple[str, str], list[int]] = {}
    for (one, name, _axis), extent in model.values("param_shapes").items():
        if group in (None, one):
            found.setdefault((one, name), []).append(int(extent))
    scalars = [path for path in model.manifest.empties if path[:1] == ("param_shapes",)]
    if scalars:
        raise UnsupportedError(
            f"{render(scalars[0])}: a parameter without dimensions, whose place in the vectors is not known",
            uri=model.location.uri, cure="merge the shards with zero_to_fp32.py",
        )  # fmt: skip
    yield from ((name, tuple(shape)) for (_one, name), shape in found.items())


def _vector(ranks: Sequence[RankFile], path: KeyPath) -> tuple[Extent, ...]:
    """The byte ranges of a vector that the ranks store in parts."""
    for one in ranks:
        spec = one.manifest.tensors.get(path)
        if spec is None or path not in one.extents or spec.dtype != _FLOAT or len(spec.shape) != 1:
            raise CorruptError(
                "expected a vector of float32", uri=one.location.uri, path=render(path), cure=_CURE
            )
    return tuple(extent for one in ranks for extent in one.extents[path])


def _cut_groups(
    ranks: Sequence[RankFile], model: RankFile
) -> Iterator[tuple[TensorSpec, tuple[Extent, ...]]]:
    """Stages 1 and 2: each group is one vector over all ranks."""
    for (group,) in ranks[0].below(_STATE, _PARTS[2]):
        vector, at = _vector(ranks, (_STATE, _PARTS[2], group)), 0
        for name, shape in _shapes(model, group):
            spec = TensorSpec((name,), shape, _FLOAT)
            yield spec, tuple(cut(vector, Span(at, at + spec.nbytes)))
            at += spec.nbytes
        step = 2 * len(ranks) * 4  # vectors are padded to a multiple of twice the number of ranks
        _require_used(sum(extent.length for extent in vector), -(-at // step) * step, ranks[0], step)


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
    for name, shape in _shapes(model):
        spec, part = TensorSpec((name,), shape, _FLOAT), 4 * -(-math.prod(shape) // len(ranks))
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
        _require_used(sum(extent.length for extent in vector), at, one, 0)


def _require_used(there: int, used: int, rank: RankFile, slack: int) -> None:
    if not used - slack <= there <= used + slack:
        raise CorruptError(
            f"the shapes of the parameters need {used} bytes of a vector of {there}",
            uri=rank.location.uri,
            cure=_CURE,
        )


def _frozen(models: Sequence[RankFile], stage: int) -> Iterator[tuple[TensorSpec, tuple[Extent, ...]]]:
    """Parameters that were not trained: whole in stages 1 and 2, cut into parts in stage 3."""
    shapes: dict[str, list[int]] = {}
    for (name, _axis), extent in models[0].values("frozen_param_shapes").items():
        shapes.setdefault(name, []).append(int(extent))
    for name, shape in shapes.items():
        path = ("frozen_param_fragments", name)
        parts = models if stage == _WHOLE_STAGE else models[:1]
        if any(path not in one.extents for one in parts):
            raise IncompleteError(
                f"the frozen parameter {name} is missing", uri=models[0].location.uri, cure=_CURE
            )
        spec = TensorSpec((name,), tuple(shape), models[0].manifest.tensors[path].dtype)
        pieces = tuple(extent for one in parts for extent in one.extents[path])
        yield spec, tuple(cut(pieces, Span(0, spec.nbytes)))


def _buffers(model: RankFile) -> Iterator[tuple[TensorSpec, tuple[Extent, ...]]]:
    """Buffers, which every rank has whole; zero_to_fp32 makes them float32, so others are refused."""
    for name in model.values("buffer_names").values():
        path = ("module", str(name))
        spec = model.manifest.tensors.get(path)
        if spec is None or path not in model.extents:
            continue
        if spec.dtype != _FLOAT:
            raise UnsupportedError(
                f"the buffer {name} is {spec.dtype}, which zero_to_fp32.py would make float32", uri=model.location.uri,
                cure="merge the shards with zero_to_fp32.py",
            )  # fmt: skip
        yield replace(spec, path=(str(name),), chunks=None), model.extents[path]


FORMATS = (
    Format(
        name="deepspeed",
        title="DeepSpeed ZeRO",
        detect=detect,
        open=open_deepspeed,
        create=None,
        holds=Holds(dtypes=frozenset()),
    ),
)
