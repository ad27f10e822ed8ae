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

Apart from plain tensors, DeepSpeed's pickles hold objects of its own classes, and tensors with attributes. ZeRO 3 marks
tensors with an attribute (`ds_id`), and torch pickles such a tensor as `_rebuild_from_type_v2(function, torch.Tensor,
arguments, attributes)`: it is the plain tensor.
Source: DeepSpeed 0.19, runtime/zero/stage3.py and partition_parameters.py; torch/_tensor.py of 2.13.

The files of single ranks that DeepSpeed saves: what is read of them for ZeRO and for universal checkpoints.

`mp_rank_XX_model_states.pt`, and with ZeRO 3 `zero_pp_rank_R_mp_rank_XX_model_states.pt`, have the shapes of the
trained parameters (`param_shapes`, a table for each group), what was not trained (`frozen_param_shapes` and
`frozen_param_fragments`), the names of the buffers, and second names of parameters (`shared_params`).
Source: DeepSpeed 0.19, runtime/engine.py and utils/zero_to_fp32.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from wherry.core.account import TRAINING_STATE, ignored_file
from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import CorruptError, IncompleteError, NotFoundError, UnsupportedError
from wherry.formats.file_names import is_deepspeed_shard
from wherry.formats.format import Extent, Glimpse, Opened
from wherry.integrations.containers.flat.reader import FlatReader
from wherry.integrations.containers.flat.strides import StridedReader
from wherry.integrations.containers.pickle.values import Global
from wherry.integrations.containers.torch.archive import Archive, read_archive
from wherry.integrations.containers.torch.values import DENSE, RULES
from wherry.layout.runs import cut
from wherry.store.location import Location

_OPAQUE = frozenset(
    {
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.utils.tensor_fragment.tensor_fragment",
    }
)
_PLAIN = ("torch", "Tensor")


def _without_attributes(args: tuple[Any, ...]) -> Any:
    """The plain tensor of one that has attributes."""
    function, kind, rest = args[:3] if len(args) > 3 else (None, None, None)  # noqa: PLR2004  as torch pickles it
    rebuild = DENSE.get(function) if isinstance(function, Global) else None
    if rebuild is None or kind != _PLAIN or type(rest) is not tuple:
        raise UnsupportedError(f"unsupported kind of tensor: {kind}", cure="save it as a dense tensor")
    return rebuild(rest)


_RULES = replace(
    RULES,
    allowed={**RULES.allowed, _PLAIN: None, ("torch._tensor", "_rebuild_from_type_v2"): _without_attributes},
)


def read_pickle(location: Location) -> Archive:
    """Interpret the pickle of a file, which may hold no tensor, and locate its tensors.

    Raises:
        HostileError: it has a forbidden global, or claims more than its size.
        WherryError: as of files of torch.
    """
    # The model states of stage 3 have no tensors.
    return read_archive(location, _RULES, opaque=_OPAQUE, bare=True)


CURE = "copy the whole folder of the step again, with the files of all ranks"
FLOAT = "float32"
STEP = re.compile(r"global_step(\d{1,18})")
WEIGHTS = re.compile(r".+\.(safetensors|bin)(\.index\.json)?")
_LONGEST_NAME = 256


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
        """The tensors below a key path, by the rest of their paths, in the order of the file."""
        size = len(root)
        rows = self.manifest.tensors.items()
        return {path[size:]: spec for path, spec in rows if path[:size] == root}

    def values(self, *root: str) -> dict[KeyPath, Any]:
        """The other values below a key path, by the rest of their paths."""
        size = len(root)
        rows = self.manifest.values.items()
        return {path[size:]: value for path, value in rows if path[:size] == root}


def newest_step(glimpse: Glimpse, pointer: str) -> tuple[Glimpse, str]:
    """The folder of a step, and how names in it begin relative to the checkpoint.

    Args:
        glimpse: the folder of a step, or of a run, whose file names a step.
        pointer: name of that file. Next to weights, as Hugging Face's trainer saves them, it says nothing; it may be a
            link to the folder, as others make it.
    """
    if pointer not in glimpse.entries or any(map(WEIGHTS.fullmatch, glimpse.entries)):
        return glimpse, ""
    try:
        name = glimpse.location.join(pointer).read(0, _LONGEST_NAME).decode(errors="replace").strip()
    except NotFoundError:
        return glimpse, ""
    return (Glimpse(glimpse.location.join(name)), f"{name}/") if name in glimpse.entries else (glimpse, "")


def files_by_rank(folder: Location, names: Iterable[str], pattern: re.Pattern[str]) -> list[RankFile]:
    """The files of a kind in the order of their ranks, which are contiguous from 0.

    Raises:
        IncompleteError: the file of a rank is missing.
        CorruptError: a rank has two files.
    """
    rows = ((int(match[1] or 0), name) for name in names if (match := pattern.fullmatch(name)))
    return open_ranks(folder, rows)


def open_ranks(folder: Location, rows: Iterable[tuple[int, str]]) -> list[RankFile]:
    """Open the file of each rank, in the order of the ranks, which are contiguous from 0.

    Args:
        folder: of the files.
        rows: rank and name of each file.

    Raises:
        IncompleteError: the file of a rank is missing.
        CorruptError: a rank has two files.
    """
    found: dict[int, str] = {}
    for rank, name in rows:
        if found.setdefault(rank, name) != name:
            raise CorruptError(
                f"rank {rank} has two files: {found[rank]} and {name}",
                uri=folder.uri, cure="remove the one that is not of this step",
            )  # fmt: skip
    missing = first_gap(found)
    if missing is not None:
        raise IncompleteError(f"the file of rank {missing} is missing", uri=folder.uri, cure=CURE)
    return [open_file(folder.join(found[rank])) for rank in sorted(found)]


def first_gap(ranks: Collection[int]) -> int | None:
    """The first number from 0 that is missing below the last rank; also 0 if there are none."""
    gap = next(rank for rank in range(len(ranks) + 1) if rank not in ranks)
    return gap if gap <= max(ranks, default=0) else None


def open_file(location: Location) -> RankFile:
    """Interpret the pickle of a file and locate its tensors."""
    archive = read_pickle(location)
    manifest = Manifest(archive.specs, values=archive.tree.values, empties=archive.tree.empties)
    reader = StridedReader(location, archive.placed, ())
    found = {path: reader.access(spec).extents for path, spec in archive.specs.items()}
    return RankFile(
        location, manifest, {path: extents for path, extents in found.items() if extents is not None}
    )


def shapes_of(model: RankFile, group: str | None = None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The trained parameters in the order of the vectors, with their shapes.

    Raises:
        UnsupportedError: a parameter has no dimensions.
        CorruptError: a shape is not one of non-negative integers.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for (one, name), extent in _extents(model, "param_shapes", 2):
        if group in (None, one):
            found.setdefault((one, name), []).append(extent)
    scalars = [path for path in model.manifest.empties if path[:1] == ("param_shapes",)]
    if scalars:
        raise UnsupportedError(
            f"{render(scalars[0])}: a parameter without dimensions, whose place in the vectors is not known",
            uri=model.location.uri, cure="merge the shards with zero_to_fp32.py",
        )  # fmt: skip
    yield from ((name, tuple(shape)) for (_one, name), shape in found.items())


def groups_of(model: RankFile) -> set[str]:
    """The groups of the trained parameters."""
    return {group for (group, _name), _extent in _extents(model, "param_shapes", 2)}


def _extents(model: RankFile, root: str, depth: int) -> Iterator[tuple[KeyPath, int]]:
    """The extents of a table of shapes, each with the key path of its parameter, which has `parts` parts."""
    for path, extent in model.values(root).items():
        if not path and extent is None:
            continue  # no table
        if len(path) != depth + 1 or type(extent) is not int or extent < 0:
            raise CorruptError(
                f"invalid shape in {root}: expected non-negative integers, got {extent!r}",
                uri=model.location.uri, path=render(path), cure=CURE,
            )  # fmt: skip
        yield path[:-1], extent


def frozen_parameters(
    models: Sequence[RankFile], *, in_parts: bool
) -> Iterator[tuple[TensorSpec, tuple[Extent, ...]]]:
    """Parameters that were not trained: whole in stages 1 and 2, cut into parts in stage 3.

    Raises:
        IncompleteError: one is missing in the file of a rank.
        CorruptError: its parts do not have the sizes that its shape needs.
    """
    shapes: dict[str, list[int]] = {}
    for (name,), extent in _extents(models[0], "frozen_param_shapes", 1):
        shapes.setdefault(name, []).append(extent)
    for name, shape in shapes.items():
        path = ("frozen_param_fragments", name)
        parts = models if in_parts else models[:1]
        if any(path not in one.extents for one in parts):
            raise IncompleteError(
                f"the frozen parameter {name} is missing", uri=models[0].location.uri, cure=CURE
            )
        held = [one.manifest.tensors[path] for one in parts]
        spec = TensorSpec((name,), tuple(shape), models[0].manifest.tensors[path].dtype)
        size = -(-spec.size // len(parts))  # of each rank's part; the last are padded
        wrong = next((one for one in held if (one.size, one.dtype) != (size, spec.dtype)), None)
        if wrong is not None:
            raise CorruptError(
                f"the frozen parameter {spec.name} of shape {list(spec.shape)} has a part of {wrong.size} elements "
                f"of {wrong.dtype}, expected {size} of {spec.dtype}",
                uri=models[0].location.uri, path=spec.name, cure=CURE,
            )  # fmt: skip
        pieces = tuple(extent for one in parts for extent in one.extents[path])
        yield spec, tuple(cut(pieces, Span(0, spec.nbytes)))


def buffers_of(model: RankFile) -> Iterator[tuple[TensorSpec, tuple[Extent, ...]]]:
    """Buffers, which every rank has whole."""
    for name in model.values("buffer_names").values():
        path = ("module", str(name))
        spec = model.manifest.tensors.get(path)
        if spec is not None and path in model.extents:
            yield replace(spec, path=(str(name),), chunks=None, tags=None), model.extents[path]


def others_of(model: RankFile, known: Container[KeyPath]) -> Iterator[tuple[TensorSpec, tuple[Extent, ...]]]:
    """Tensors of the module's state under names that nothing else has, whole in stages 1 and 2.

    ZeRO 1 does not list the parameters that were not trained: only the module's state has them.
    """
    for path, spec in model.below("module").items():
        place = model.extents.get(("module", *path))
        if len(path) == 1 and path not in known and place is not None:
            yield replace(spec, path=path, chunks=None, tags=None), place


def with_shared(
    model: RankFile, specs: dict[KeyPath, TensorSpec], places: dict[KeyPath, tuple[Extent, ...]]
) -> None:
    """Add the second names of parameters.

    Raises:
        CorruptError: the table has no names of parameters.
    """
    for path, source in model.values("shared_params").items():
        if not path and source is None:
            continue  # no table
        if len(path) != 1 or not isinstance(source, str):
            raise CorruptError(
                f"invalid shared_params: expected names of parameters, got {source!r}",
                uri=model.location.uri, path=render(path), cure=CURE,
            )  # fmt: skip
        if (source,) in specs:
            specs[path], places[path] = replace(specs[source,], path=path), places[source,]


LATEST = "latest"
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,9})_mp_rank_00_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_00_model_states\.pt")
_STATE, _WHOLE_STAGE = "optimizer_state_dict", 3
_PARTS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}


def detect(glimpse: Glimpse) -> Detection | None:
    """Detect the folder of a step, or the folder above it whose file `latest` names one."""
    folder, prefix = newest_step(glimpse, LATEST)
    ranks = sorted(filter(_OPTIMIZER.fullmatch, folder.entries))
    if not ranks or not any(map(_MODEL.fullmatch, folder.entries)):
        return None
    step = STEP.fullmatch(folder.location.name)
    evidence = [Evidence(LATEST, folder.location.name)] if prefix else []
    evidence.append(Evidence(f"{prefix}{ranks[0]}", f"the optimizer's partitions of {len(ranks)} ranks"))
    number = int(step[1]) if step else None
    return glimpse.detected("deepspeed", "ZeRO", "deepspeed", *evidence, step=number, kind="params")


def open_deepspeed(location: Location, detection: Detection) -> Opened:
    """Read the metadata of all ranks; see Format.

    Raises:
        IncompleteError: the file of a rank is missing.
        UnsupportedError: there are tensor-parallel ranks, experts or pipeline stages, or another stage.
        CorruptError: the partitions do not have the sizes that the shapes need.
        HostileError, WherryError: as of files of torch.
    """
    folder, prefix = newest_step(Glimpse(location), LATEST)
    shards = {name: one for name, one in folder.entries.items() if is_deepspeed_shard(name)}
    ranks = files_by_rank(folder.location, shards, _OPTIMIZER)
    models = files_by_rank(folder.location, shards, _MODEL)
    others = [name for name in shards if not (_OPTIMIZER.fullmatch(name) or _MODEL.fullmatch(name))]
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
    members = tuple(replace(one, name=f"{prefix}{name}") for name, one in shards.items())
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
