"""The files of single ranks that DeepSpeed saves: what is read of them for ZeRO and for universal checkpoints.

`mp_rank_XX_model_states.pt`, and with ZeRO 3 `zero_pp_rank_R_mp_rank_XX_model_states.pt`, have the shapes of the
trained parameters (`param_shapes`, a table for each group), what was not trained (`frozen_param_shapes` and
`frozen_param_fragments`), the names of the buffers, and second names of parameters (`shared_params`).
Source: DeepSpeed 0.19, runtime/engine.py and utils/zero_to_fp32.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wherry.core.keypath import KeyPath, render
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import CorruptError, IncompleteError, NotFoundError, UnsupportedError
from wherry.formats.file_names import is_deepspeed_shard
from wherry.integrations.containers.flat.strides import StridedReader
from wherry.integrations.formats.deepspeed.pickles import read_pickle
from wherry.layout.runs import cut

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence

    from wherry.formats.contents import Extent
    from wherry.storage.location import Location
    from wherry.store.store import Entry

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
        """The same of other values."""
        size = len(root)
        rows = self.manifest.values.items()
        return {path[size:]: value for path, value in rows if path[:size] == root}


def read_latest(location: Location, name: str) -> str:
    """The folder that a file of the run names; empty if it names none, or is a link to one, as others make it."""
    try:
        text = location.join(name).read(0, _LONGEST_NAME).decode(errors="replace").strip()
    except NotFoundError:
        return ""
    return text if text and "/" not in text and text not in (".", "..") else ""


def shard_entries(folder: Location, prefix: str) -> Iterator[Entry]:
    """The files of ranks in a folder, by their names relative to the checkpoint."""
    for one in folder.entries():
        if is_deepspeed_shard(one.name):
            yield replace(one, name=f"{prefix}{one.name}")


def files_by_rank(folder: Location, names: Sequence[str], pattern: re.Pattern[str]) -> list[RankFile]:
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
    """The extents of a table of shapes, each with the key path of its parameter, which has so many parts."""
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
