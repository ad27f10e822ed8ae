"""DeepSpeed's universal checkpoints: whole parameters and moments, whatever parallelism saved them.

`ds_to_universal.py` makes `latest_universal` (the name of a step's folder) and in the folder of the step

    zero/PARAMETER/fp32.pt, exp_avg.pt, exp_avg_sq.pt     the parameter in float32, and its moments
    zero/PARAMETER/step.pt                                how often it was updated; not after ZeRO 3
    zero/optimizer_state.pt                               what else the optimizer has
    [zero_pp_rank_R_]mp_rank_XX_model_states.pt           copies of the ranks' own files

A file has a table whose `param` is the tensor; after ZeRO 3 it is the tensor itself, as a vector. The shapes are in the
model states, which also say which parameters there are: a folder that is missing or that they do not know is an error.
After ZeRO 1 and 2 there are folders with `fp32.pt` alone: float32 copies of what the optimizer does not have, from the
state of the module. Of a parameter that was never updated it is the parameter; of buffers, of what was not trained and
of second names the model states have the tensors themselves, which are read.
Moments are named as torch names them when it saves an optimizer by the names of parameters:
`optimizer.state.PARAMETER.exp_avg`.
Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py, universal_checkpoint.py and autoep_universal.py.

Parameters and moments are shown, what was not trained, and buffers.

A file of one parameter in a universal checkpoint: a table whose `param` is the tensor, the tensor, or a number.

Tensor-parallel parts were joined along a dimension (`cat_dim`); a vocabulary was cut to its size (`vocab_tensor`), and
experts of all ranks follow one another (`is_expert_param`). After ZeRO 3 a file has a vector without a shape.
Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py (`merge_tp_slices`, `merge_zero3_slices`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from wherry.core.account import FILES, TRAINING_STATE, IgnoredEntry, ignored_file
from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, IncompleteError, UnsupportedError
from wherry.formats.format import Extent, Glimpse, Opened
from wherry.integrations.containers.flat.reader import FlatReader
from wherry.integrations.containers.flat.strides import StridedReader
from wherry.integrations.formats.deepspeed.zero import (
    CURE,
    STEP,
    RankFile,
    buffers_of,
    first_gap,
    frozen_parameters,
    newest_step,
    open_ranks,
    others_of,
    read_pickle,
    shapes_of,
    with_shared,
)
from wherry.store.location import Location
from wherry.store.sidecar import OWN_NAMES
from wherry.store.store import Entry

WEIGHT, COUNT = "fp32.pt", "step.pt"
STATES = (WEIGHT, "exp_avg.pt", "exp_avg_sq.pt", COUNT)
AGAIN = "run ds_to_universal.py again"
_PARAM, _VOCABULARY, _EXPERTS, _MANY = "param", "vocab_tensor", "is_expert_param", "ep_num_experts"
_JOINED = "cat_dim"


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file of one parameter, opened.

    Attributes:
        location: the file.
        spec: its tensor; None if it holds a number.
        extents: the bytes of the tensor.
        values: what else it says.
    """

    location: Location
    spec: TensorSpec | None
    extents: tuple[Extent, ...]
    values: Mapping[KeyPath, Any]

    @property
    def joined(self) -> bool:
        """Whether the state was joined from parts of an optimizer's state."""
        return (_JOINED,) in self.values


def open_state(location: Location) -> StateFile:
    """A file of one parameter: a table with a tensor, a tensor, or a number."""
    archive = read_pickle(location)
    path = next((path for path in ((_PARAM,), ()) if path in archive.specs), None)
    if path is None and () not in archive.tree.values:
        raise CorruptError(f"expected a tensor, or a table with {_PARAM}", uri=location.uri, cure=AGAIN)
    spec = None if path is None else archive.specs[path]
    extents = StridedReader(location, archive.placed, ()).access(spec).extents if spec else ()
    if extents is None:
        raise UnsupportedError(
            "unsupported strides: the tensor is not stored in order", uri=location.uri, cure=AGAIN
        )
    return StateFile(location, spec, extents, archive.tree.values)


def whole_shape(name: str, file: StateFile, ranks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of a whole parameter, which fits those of the ranks' parts."""
    assert file.spec is not None
    stored, part, values = file.spec.shape, ranks[0], file.values
    if len(ranks) == 1 and math.prod(stored) == math.prod(part) and not values.get((_EXPERTS,)):
        return part  # also of a vector
    if len(stored) != len(part) and len(ranks) > 1:
        raise UnsupportedError(
            f"{name} was joined of {len(ranks)} ranks as sub-parameters of the shape {list(stored)}",
            uri=file.location.uri, path=name, cure="load the checkpoint with DeepSpeed, and save the whole model",
        )  # fmt: skip
    alike = stored[1:] == part[1:] and bool(stored)
    if values.get((_VOCABULARY,)) and alike and stored[0] <= sum(shape[0] for shape in ranks):
        return stored
    if values.get((_EXPERTS,)) and alike and stored[0] == values.get((_MANY,)):
        return stored
    if len(ranks) > 1 and _joins(stored, ranks):
        return stored
    raise CorruptError(
        f"the file has the shape {list(stored)}, the model states {list(part)}",
        uri=file.location.uri, path=name, cure=CURE,
    )  # fmt: skip


def _joins(stored: tuple[int, ...], ranks: Sequence[tuple[int, ...]]) -> bool:
    """Whether a shape is that of all ranks, or of their parts side by side; some may have copies of others' parts."""
    if all(shape == stored for shape in ranks):
        return True
    if any(len(shape) != len(stored) for shape in ranks):
        return False
    cuts = [at for at in range(len(stored)) if any(shape[at] != stored[at] for shape in ranks)]
    if len(cuts) != 1:
        return False
    total, size = sum(shape[cuts[0]] for shape in ranks), stored[cuts[0]]
    return size > 0 and total % size == 0 and len(ranks) % (total // size) == 0


_MODULE, _OF_ZERO_3 = "module", "zero_pp_rank_"


class UniversalTree:
    """The tensors and numbers, with their bytes."""

    def __init__(
        self, folder: Location, files: Mapping[str, Mapping[str, Location]], *, trained: bool
    ) -> None:
        """Begin an empty tree.

        Args:
            folder: of the step.
            files: parameter → its files by name.
            trained: whether any parameter has moments.
        """
        self.specs: dict[KeyPath, TensorSpec] = {}
        self.places: dict[KeyPath, tuple[Extent, ...]] = {}
        self.values: dict[KeyPath, Any] = {}
        self._folder, self._files, self._trained = folder, files, trained

    def add(self, name: str, ranks: Sequence[tuple[int, ...]]) -> None:
        """Add a parameter and its states.

        Args:
            name: of the parameter.
            ranks: its shape in each rank that has it.

        Raises:
            IncompleteError: an optimizer had it, and its moments are missing.
            CorruptError: a state is no tensor, or has another shape.
        """
        for file, place in self._files[name].items():
            one = open_state(place)
            if set(self._files[name]) == {WEIGHT} and self._trained and one.joined:
                raise IncompleteError(
                    f"the moments of {name} are missing", uri=self._folder.uri, path=name, cure=AGAIN
                )
            key = (name,) if file == WEIGHT else (f"optimizer.state.{name}.{file.removesuffix('.pt')}",)
            if one.spec is None:
                if file != COUNT:
                    raise CorruptError("expected a tensor", uri=one.location.uri, path=name, cure=AGAIN)
                self.values[key] = one.values[()]
                continue
            shape = one.spec.shape if file == COUNT else whole_shape(name, one, ranks)
            if file not in (COUNT, WEIGHT) and shape != self.specs[name,].shape:
                raise CorruptError(
                    f"{file} has the shape {list(shape)}, {WEIGHT} {list(self.specs[name,].shape)}",
                    uri=self._folder.uri, path=name, cure=AGAIN,
                )  # fmt: skip
            self.specs[key], self.places[key] = TensorSpec(key, shape, one.spec.dtype), one.extents

    def add_rest(self, models: Sequence[Sequence[RankFile]]) -> None:
        """Add parameters that were not trained, buffers and second names, from the files of the ranks.

        Raises:
            UnsupportedError: several tensor-parallel or pipeline ranks have them, each its own part.
        """
        first = models[0]
        rows = [*frozen_parameters(first, in_parts=len(first) > 1), *buffers_of(first[0])]
        if rows and len(models) > 1:
            raise self._in_parts(rows[0][0].path[0])
        for spec, extents in rows:
            self.specs[spec.path], self.places[spec.path] = spec, extents
        for ranks in models:
            with_shared(ranks[0], self.specs, self.places)
        if len(models) == 1 and not first[0].location.name.startswith(_OF_ZERO_3):
            for spec, extents in list(others_of(first[0], self.specs)):
                self.specs[spec.path], self.places[spec.path] = spec, extents

    def is_copy(self, name: str, models: Sequence[Sequence[RankFile]]) -> bool:
        """Whether a folder that no optimizer had is a copy of a tensor of the tree; if it is not, the copy is added.

        Raises:
            CorruptError: the model states do not have it, or it has moments.
            UnsupportedError: several ranks have it, of which DeepSpeed copies the first.
        """
        owners = [ranks[0] for ranks in models if (_MODULE, name) in ranks[0].manifest.tensors]
        if not owners or set(self._files[name]) != {WEIGHT}:
            raise CorruptError(
                f"zero/{name} is no parameter of the model states",
                uri=self._folder.uri, path=name, cure=AGAIN,
            )  # fmt: skip
        if len(owners) > 1:
            raise self._in_parts(name)
        there = (name,) in self.specs
        if not there:
            self.add(name, [owners[0].manifest.tensors[_MODULE, name].shape])
        return there

    def _in_parts(self, name: str) -> UnsupportedError:
        return UnsupportedError(
            f"{name} was not trained, and universal checkpoints have no joined form of what several ranks have of it",
            uri=self._folder.uri, path=name, cure="load the checkpoint with DeepSpeed, and save the whole model",
        )  # fmt: skip


LATEST, ZERO, _REST = "latest_universal", "zero", "optimizer_state.pt"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,9})_)?mp_rank_(\d{1,9})_model_states\.pt")
_STEPS = "global_steps"


def detect(glimpse: Glimpse) -> Detection | None:
    """Detect the folder of a step, or the folder above it whose file `latest_universal` names one."""
    folder, prefix = newest_step(glimpse, LATEST)
    zero = folder.location.join(ZERO)
    if ZERO not in folder.entries or not folder.entries[ZERO].is_dir:
        return None
    names = {entry.name: entry.is_dir for entry in zero.entries()}
    first = next((name for name, is_dir in names.items() if is_dir), None)
    if first is None or not (_REST in names or zero.join(first).join(WEIGHT).exists()):
        return None
    evidence = [Evidence(LATEST, folder.location.name)] if prefix else []
    evidence.append(Evidence(f"{prefix}{ZERO}", f"folders of {sum(names.values())} parameters"))
    step = STEP.match(folder.location.name)
    number = int(step[1]) if step else None
    return glimpse.detected(
        "deepspeed-universal", "universal", "deepspeed", *evidence, step=number, kind="params"
    )


def open_universal(location: Location, detection: Detection) -> Opened:
    """Read the metadata of all files; see Format.

    Raises:
        IncompleteError: the folder of a parameter, one of its files, or the file of a rank is missing.
        UnsupportedError: an unknown file, or a parameter whose parts were joined in a way that no shape tells.
        CorruptError: a tensor does not have the shape that the model states give, or nothing knows it.
        HostileError, WherryError: the errors of torch's files.
    """
    step_folder, prefix = newest_step(Glimpse(location), LATEST)
    folder, entries = step_folder.location, step_folder.entries.values()
    zero = folder.join(ZERO)
    models = _models(folder, step_folder.entries)
    files = dict(_state_files(zero))
    # Parameter → its shape in each tensor-parallel or pipeline rank that has it.
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for ranks in models:
        for name, shape in shapes_of(ranks[0]):
            shapes.setdefault(name, []).append(shape)
    _require_all(files, shapes, folder)
    moments = {state for states in files.values() for state in states} - {WEIGHT}
    tree = UniversalTree(folder, files, trained=bool(moments))
    for name in sorted(shapes):
        tree.add(name, shapes[name])
    tree.add_rest(models)
    others = [name for name in files if name not in shapes]
    copies = [name for name in others if tree.is_copy(name, models)]
    kind = "train-state" if moments - {COUNT} else "params"
    step = detection.step
    if step is None:
        saved = models[0][0].manifest.values.get((_STEPS,))
        step = saved if isinstance(saved, int) and not isinstance(saved, bool) else None
    manifest = Manifest(tree.specs, values=tree.values, step=step, kind=kind)
    members = [replace(one, name=f"{prefix}{one.name}") for one in entries if _MODEL.fullmatch(one.name)]
    members += [replace(one, name=f"{prefix}{ZERO}/{one.name}") for one in zero.entries() if not one.is_dir]
    for name in files:
        members += [
            replace(one, name=f"{prefix}{ZERO}/{name}/{one.name}") for one in zero.join(name).entries()
        ]
    bare = sum(set(files[name]) == {WEIGHT} for name in shapes) if moments else 0
    words = f"{len(shapes)} parameters with {len(moments)} states" + (
        f", {bare} never updated" if bare else ""
    )
    seen = Evidence(f"{prefix}{ZERO}", words)
    found = replace(detection, step=step, kind=kind).seen(seen)
    reader = FlatReader(location, tree.places, tuple(members))
    return Opened(found, manifest, reader, tuple(_ignored_entries(prefix, entries, copies)))


def _models(folder: Location, names: Iterable[str]) -> list[list[RankFile]]:
    """The model states of each tensor-parallel or pipeline rank; of ZeRO 3, those of all ranks of each."""
    found: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for name in names:
        if match := _MODEL.fullmatch(name):
            found[int(match[2])].append((int(match[1] or 0), name))
    missing = first_gap(found)
    if missing is not None:
        raise IncompleteError(
            f"file not found: mp_rank_{missing:02d}_model_states.pt, which has the shapes of the parameters",
            uri=folder.uri, cure=AGAIN,
        )  # fmt: skip
    return [open_ranks(folder, found[rank]) for rank in sorted(found)]


def _state_files(zero: Location) -> Iterator[tuple[str, dict[str, Location]]]:
    """Parameter → its files."""
    for entry in zero.entries():
        zero.require_open(entry)
        if not entry.is_dir:
            if entry.name != _REST:
                raise UnsupportedError(
                    f"unknown file {ZERO}/{entry.name}", uri=zero.uri, cure="move it out of the folder"
                )
            continue
        place = zero.join(entry.name)
        names = [one.name for one in place.entries()]
        unknown = next((name for name in names if name not in STATES), None)
        if unknown is not None:
            raise UnsupportedError(
                f"unknown state {unknown} of {entry.name}: expected {', '.join(STATES)}", uri=zero.uri,
                path=entry.name, cure="load the checkpoint with DeepSpeed, or move the file out of the folder",
            )  # fmt: skip
        yield entry.name, {name: place.join(name) for name in STATES if name in names}


def _require_all(
    files: Mapping[str, Mapping[str, Location]], shapes: Mapping[str, object], folder: Location
) -> None:
    """Every parameter of the model states has a folder, and all have the same files, or the parameter alone."""
    wanted = {WEIGHT, *(state for states in files.values() for state in states)}
    for name in (*shapes, *files):
        there = files.get(name, {}).keys()
        lacking = next((state for state in STATES if state in wanted - there), None)
        if lacking is not None and set(there) != {WEIGHT}:
            raise IncompleteError(
                f"file not found: {ZERO}/{name}/{lacking}", uri=folder.uri, path=name, cure=AGAIN
            )
    if not folder.join(ZERO).join(_REST).exists() or not shapes:
        raise IncompleteError(
            f"file not found: {ZERO}/{_REST}; the conversion was not completed", uri=folder.uri, cure=AGAIN
        )


def _ignored_entries(prefix: str, entries: Iterable[Entry], copies: Sequence[str]) -> Iterator[IgnoredEntry]:
    """What is not read."""
    for name in copies:
        reason = "its tensor is read from the model states"
        yield ignored_file(f"{prefix}{ZERO}/{name}", FILES, "a copy in float32", reason)
    yield ignored_file(
        f"{prefix}{ZERO}/{_REST}", TRAINING_STATE, "options of the optimizer, loss scales", "only tensors are read"
    )  # fmt: skip
    yield ignored_file(
        f"{prefix}*_model_states.pt:module", TRAINING_STATE, "copies of the parameters, and states of the run",
        f"the parameters are read from {ZERO}",
    )  # fmt: skip
    for one in entries:
        if one.name != ZERO and not _MODEL.fullmatch(one.name) and one.name not in OWN_NAMES:
            what = "a folder" if one.is_dir else "a file"
            reason = "it is no part of a universal checkpoint"
            yield ignored_file(f"{prefix}{one.name}", FILES, what, reason)
