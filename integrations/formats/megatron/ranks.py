"""Megatron's older checkpoints: a folder `mp_rank_TT[_PPP]` for each tensor- and pipeline-parallel rank.

    iter_0000010/mp_rank_00/model_optim_rng.pt          tensor-parallel rank 0
    iter_0000010/mp_rank_00_001/model_optim_rng.pt      the same of pipeline stage 1

Each file is a torch archive with `args`, `iteration` and `model`, the rank's part of the parameters. Whole parameters
are shown: layers are numbered through all stages, and the parts of tensor-parallel ranks are put together
(`partition.py`) as regions of the ranks' files, so that no rank is loaded. Grouped experts have their index behind the
name; they are shown under the names of sequential ones. Optimizers are not read. One rank is written.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wherry.core.account import TRAINING_STATE, IgnoredEntry, ignored_file
from wherry.core.detection import Detection, Evidence
from wherry.core.manifest import Companion, Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, IncompleteError, UnsupportedError
from wherry.formats.companions import MemoryFiles
from wherry.formats.format import Opened
from wherry.integrations.containers.torch.archive import read_object
from wherry.integrations.containers.zip.read import read_directory
from wherry.integrations.formats.dcp.metadata import DcpIndex, DescribedTensor, StoredItem
from wherry.integrations.formats.dcp.reader import DcpReader
from wherry.integrations.formats.megatron.arguments import record_of
from wherry.integrations.formats.megatron.names import ARGUMENTS, OPAQUE, STEP, left
from wherry.integrations.formats.megatron.partition import chunks_of
from wherry.storage.location import Location
from wherry.storage.sidecar import OWN_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.formats.format import Glimpse
    from wherry.integrations.containers.flat.strides import PlacedTensor
    from wherry.integrations.containers.torch.archive import Archive
    from wherry.storage.location import Entry

FILE = "model_optim_rng.pt"
ONE = f"mp_rank_00/{FILE}"
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(_\d{3})?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_GROUPED = re.compile(r"(.+\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")
_MODEL = "model"
_HEAD = "output_layer.weight"
_CURE = "copy the whole folder of the step again, with the files of all ranks"
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
        UnsupportedError: expert-parallel ranks, virtual stages, or a parameter of which no rule knows the division.
        CorruptError: the ranks do not fit one another.
        HostileError, WherryError: as of files of torch.
    """
    stages = _stages(location)
    first = stages[0][0].archive
    record = record_of(first.tree, location.uri)
    arguments = record.arguments
    _require_all(stages, arguments, location)
    index, items, specs = DcpIndex(writer="megatron"), RankItems(), dict[str, TensorSpec]()
    ignored = list(_beside(stages))
    gated = bool(arguments.get("swiglu") or arguments.get("quick_geglu"))
    for name, parts in _whole(stages, tied=arguments.get("untie_embeddings_and_output_weights") is False):
        if (entry := left(name)) is not None:
            ignored.append(entry)
            continue
        shape, chunks = chunks_of(name, parts, gated=gated, uri=location.uri)
        index.tensors[name] = DescribedTensor(parts[0].dtype, shape, tuple(chunk for chunk, _part in chunks))
        for chunk, part in chunks:
            index.stored[name, chunk.offsets] = items.add(part)
        specs[name] = TensorSpec((name,), shape, parts[0].dtype)
    beside = tuple(one for one in location.entries() if _is_companion(one))
    files = (*(one.entry for stage in stages for one in stage), *beside)
    names = frozenset(one.name for one in beside)
    reader = DcpReader(location, index, items, files, {}, names)  # pyright: ignore[reportArgumentType]  what it calls
    companions = tuple(Companion(one.name, one.size) for one in beside if one.name != ARGUMENTS)
    if arguments:
        reader.made[ARGUMENTS] = Location(MemoryFiles(files={ARGUMENTS: record.text}), ARGUMENTS)
        companions = (*companions, Companion(ARGUMENTS, len(record.text)))
    elif ARGUMENTS in names:
        companions = (
            *companions,
            *(Companion(one.name, one.size) for one in beside if one.name == ARGUMENTS),
        )
    step = record.step if detection.step is None else detection.step
    manifest = Manifest(
        {(name,): spec for name, spec in specs.items()}, step=step, kind="params", companions=companions
    )
    seen = Evidence(FILE, f"{len(specs)} parameters of {len(stages[0])} × {len(stages)} ranks")
    return Opened(replace(detection, step=step).seen(seen), manifest, reader, tuple(ignored))


def _is_companion(entry: Entry) -> bool:
    """Whether a file of the step's folder lies beside the ranks."""
    return not (entry.is_dir or entry.size < 0 or entry.name in OWN_NAMES or entry.name.startswith("."))


def _stages(location: Location) -> list[list[RankPart]]:
    """Pipeline stage → tensor-parallel rank → its file."""
    found: defaultdict[int, dict[int, RankPart]] = defaultdict(dict)
    for entry in location.entries():
        rank = _RANK.fullmatch(entry.name)
        if rank is None or not entry.is_dir:
            continue
        if rank[3]:
            raise UnsupportedError(
                f"unsupported expert-parallel rank: {entry.name}", uri=location.uri, cure=_OTHER
            )
        found[int(rank[2] or 0)][int(rank[1])] = _part(location, entry.name)
    width = max(len(stage) for stage in found.values())
    for number in range(max(found) + 1):
        lacking = next((rank for rank in range(width) if rank not in found.get(number, {})), None)
        if lacking is not None:
            raise IncompleteError(
                f"the file of tensor-parallel rank {lacking} of pipeline stage {number} is missing",
                uri=location.uri, cure=_CURE,
            )  # fmt: skip
    return [[found[number][rank] for rank in range(width)] for number in range(len(found))]


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
    stages: Sequence[Sequence[RankPart]], arguments: Mapping[str, object], location: Location
) -> None:
    """The number of ranks is what the arguments say, and each has a model of one part."""
    for name, count in (
        ("tensor_model_parallel_size", len(stages[0])),
        ("pipeline_model_parallel_size", len(stages)),
    ):
        said = arguments.get(name, count)
        if said != count:
            raise IncompleteError(
                f"{name} is {said}, but there are files of {count}", uri=location.uri, cure=_CURE
            )
    for one in (part for stage in stages for part in stage):
        if any(path[0] == "model0" for path in one.archive.placed if path):
            raise UnsupportedError("unsupported virtual pipeline stages", uri=one.location.uri, cure=_OTHER)
        if not any(True for _row in one.parameters()):
            raise UnsupportedError(
                "missing parameters of GPTModel below `model`", uri=one.location.uri, cure=_OTHER
            )


def _whole(stages: Sequence[Sequence[RankPart]], *, tied: bool) -> Iterator[tuple[str, list[PlacedTensor]]]:
    """Every parameter under the number that its layer has in the whole model, with the parts of all ranks."""
    before, last = 0, len(stages) - 1
    seen: set[str] = set()
    for number, stage in enumerate(stages):
        rows = [dict(one.parameters()) for one in stage]
        layers = {int(match[1]) for name in rows[0] if (match := _LAYER.fullmatch(name))}
        for name in rows[0]:
            parts = [row.get(name) for row in rows]
            if None in parts or any(row.keys() != rows[0].keys() for row in rows):
                raise CorruptError(
                    f"the ranks of pipeline stage {number} have different parameters",
                    uri=stage[0].location.uri, path=name, cure=_CURE,
                )  # fmt: skip
            full = _named(name, before)
            if full == _HEAD and tied and number == last and last:
                continue  # the embedding, which the last stage has a copy of
            if full in seen:
                raise CorruptError(
                    f"two pipeline stages contain {full}", uri=stage[0].location.uri, path=full, cure=_CURE
                )
            seen.add(full)
            yield full, [part for part in parts if part is not None]
        before += max(layers, default=-1) + 1


def _named(name: str, before: int) -> str:
    """The name in the whole model: layers are counted from the first stage, experts are sequential."""
    layer = _LAYER.fullmatch(name)
    if layer:
        name = f"decoder.layers.{int(layer[1]) + before}.{layer[2]}"
    return _GROUPED.sub(r"\1.local_experts.\4.\2.\3", name)


def _beside(stages: Sequence[Sequence[RankPart]]) -> Iterator[IgnoredEntry]:
    """What the files hold beside the model."""
    reason = "only parameters are read"
    yield ignored_file(f"*/{FILE}:optimizer", TRAINING_STATE, "moments, schedules and random numbers", reason)
    if len(stages) > 1:
        yield ignored_file(
            f"*/{FILE}:copies", TRAINING_STATE, "copies of tied embeddings", "the first is read"
        )
