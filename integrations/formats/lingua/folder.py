"""What lies around the tensors in Lingua's folders, and when a step counts.

A step folder is named by ten digits and holds DCP files, `params.json` (the whole configuration: `model`, `data`,
`distributed`, …) and, written last, `train_state_<rank>.json` for each rank of data parallelism. Lingua resumes from
the newest step whose `train_state_<rank>.json` is there, each rank on its own; for initialising a model
(`init_ckpt_path`) the DCP files are enough, and whoever builds that model needs `params.json`. So a step with
optimizer state but not all train states is a save that was cut short. Lingua takes every folder whose name begins
with ten digits for a step, and its clean-up fails on folders inside a step other than `consolidated`.
Source: lingua/checkpoint.py, apps/main/train.py, apps/main/generate.py at 437d680.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.core.keypath import render
from wherry.errors import CorruptError, IncompleteError, UnrepresentableError, UsageError
from wherry.integrations.formats.huggingface.folder import read_json
from wherry.integrations.formats.lingua.names import EMBEDDINGS, MODEL, MOMENTS, OPTIM, TIED

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import TensorSpec
    from wherry.storage.location import Location

PARAMS = "params.json"
CONSOLIDATED, CONSOLIDATED_FOLDER = "consolidated.pth", "consolidated"
LEAST_PARAMS = (
    b'{"model": {"dim": 8}, "data": {"tokenizer": {"name": "bytes", "path": null}},'
    b' "distributed": {"model_dtype": "bf16"}}'
)
_LARGEST = 16 << 20
_TRAIN_STATE = re.compile(r"train_state_(\d{5})\.json")
_STEP = re.compile(r"\d{10}")
_MOST_RANKS = 100_000
# What load_consolidated_model_and_tokenizer asks of params.json.
_ASKED = (("model",), ("distributed", "model_dtype"), ("data", "tokenizer", "name"))


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"{step:010d}"


def is_step(name: str) -> bool:
    """Whether Lingua takes a folder of this name for a step."""
    return _STEP.match(name) is not None


def train_states(names: Collection[str]) -> list[str]:
    """The train states among these names, by rank."""
    return sorted(name for name in names if _TRAIN_STATE.fullmatch(name))


def peek_params(location: Location) -> dict[str, Any]:
    """The configuration of a folder; empty where it has none that is Lingua's."""
    try:
        found = read_json(location.join(PARAMS), _LARGEST)
    except CorruptError:
        return {}  # `open` reads it again and says what is wrong
    return found if isinstance(found.get("model"), dict) else {}


def read_params(location: Location, names: Collection[str]) -> dict[str, Any]:
    """The configuration of a folder.

    Raises:
        IncompleteError: it is not there.
        CorruptError: it is no configuration of Lingua's.
    """
    if PARAMS not in names:
        raise IncompleteError(
            f"{PARAMS} is missing: Lingua cannot build the model",
            uri=location.uri,
            cure=f"restore {PARAMS}; the arrays alone are read as `--from dcp`",
        )
    found = read_json(location.join(PARAMS), _LARGEST)
    if not isinstance(found.get("model"), dict):
        raise CorruptError(f"{PARAMS} has no `model`", uri=location.uri, cure="restore it")
    return found


def require_params(location: Location) -> None:
    """Refuse to write beside a configuration from which Lingua cannot build the model.

    Raises:
        UnrepresentableError: naming what it lacks.
    """
    found = read_json(location.join(PARAMS), _LARGEST)
    lacking = [".".join(keys) for keys in _ASKED if _at(found, keys) is None]
    if lacking:
        raise UnrepresentableError(
            f"{PARAMS} of the source is not Lingua's: it has no {', '.join(lacking)}",
            uri=location.uri,
            cure=f"put Lingua's {PARAMS} (from the run, or written for this model) beside the source's tensors",
        )


def _at(found: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def read_step(location: Location, names: Collection[str]) -> int | None:
    """The step that the train states tell; None where there are none.

    Raises:
        IncompleteError: one of them was cut short.
    """
    steps: set[Any] = set()
    for name in train_states(names):
        try:
            steps.add(read_json(location.join(name), _LARGEST).get("step"))
        except CorruptError as error:
            raise IncompleteError(
                f"{name} was cut short: {error.what}", uri=location.uri, cure="take an earlier step"
            ) from error
    if len(steps) > 1:
        raise CorruptError(
            f"train states of different steps: {sorted(map(str, steps))}",
            uri=location.uri,
            cure="take another step",
        )
    step = next(iter(steps), None)
    return step if type(step) is int else None


def require_train_states(location: Location, names: Collection[str], params: Mapping[str, Any]) -> None:
    """Refuse a step with optimizer state whose train states are not all there.

    Raises:
        IncompleteError: naming those that are missing.
    """
    sizes = [_at(params, ("distributed", key)) for key in ("dp_replicate", "dp_shard")]
    said = math.prod(sizes) if all(type(size) is int for size in sizes) else 1
    there = train_states(names)
    last = int(there[-1][-10:-5]) + 1 if there else 1
    wanted = [f"train_state_{rank:05d}.json" for rank in range(max(last, min(said, _MOST_RANKS)))]
    missing = [name for name in wanted if name not in there]
    if missing:
        raise IncompleteError(
            f"{missing[0]} is missing ({len(missing)} of {len(wanted)} train states): the save was cut short",
            uri=location.uri,
            cure="take an earlier step; the arrays alone are read as `--from dcp`",
        )


def with_ties(tensors: Mapping[KeyPath, TensorSpec]) -> dict[KeyPath, TensorSpec]:
    """The tensors with the second copy of tied embeddings marked: Lingua stores them twice in full."""
    found = dict(tensors)
    for path, spec in tensors.items():
        if path and path[-1].endswith(TIED):
            first = (*path[:-1], path[-1].removesuffix(TIED) + EMBEDDINGS)
            other = tensors.get(first)
            if other is not None and (other.shape, other.dtype) == (spec.shape, spec.dtype):
                found[path] = replace(spec, tags={**(spec.tags or {}), "tied": render(first)})
    return found


def has_optimizer(manifest: Manifest) -> bool:
    """Whether a step holds optimizer state."""
    return any(path[0].startswith(f"{OPTIM}.") for path in manifest.tensors if path)


def require_no_optimizer(manifest: Manifest) -> None:
    """Refuse optimizer state in a step that Lingua is not meant to resume from.

    Raises:
        UnrepresentableError: it would look like a save that was cut short.
    """
    if has_optimizer(manifest):
        raise UnrepresentableError(
            "the source holds optimizer state, which Lingua only reads when it resumes",
            cure="write the weights for init_ckpt_path with `--only params`, or a step to resume from with "
            "`--set resume=true`",
        )


def require_moments(manifest: Manifest) -> None:
    """Refuse a target that Lingua should resume from unless everything for that is there.

    Raises:
        UnrepresentableError: naming what is missing.
    """
    cure = (
        "leave `--set resume` away: init_ckpt_path needs the weights only; or give a source with its moments"
    )
    names = {path[0] for path in manifest.tensors if path}
    own = (name for name in names if name.startswith(f"{MODEL}.") and not name.endswith(TIED))
    parameters = [name.removeprefix(f"{MODEL}.") for name in own]
    lacking = [
        f"{OPTIM}.state.{name}.{moment}"
        for name in sorted(parameters)
        for moment in (*MOMENTS, "step")
        if f"{OPTIM}.state.{name}.{moment}" not in names
    ]
    if lacking:
        raise UnrepresentableError(
            f"Lingua cannot resume without {lacking[0]} ({len(lacking)} missing)", cure=cure
        )
    if not train_states([companion.name for companion in manifest.companions]):
        raise UnrepresentableError("Lingua cannot resume without train_state_00000.json", cure=cure)


def refuse_live(target: Location, *, into: bool) -> None:
    """Refuse to put a step among those of a run unless that was asked for.

    Raises:
        UsageError: Lingua would take it for a step of its own.
    """
    if into or not is_step(target.name):
        return
    siblings = [entry.name for entry in target.parent.entries() if entry.is_dir and entry.name != target.name]
    live = target.parent.name == "checkpoints" and target.parent.exists()
    if live or any(is_step(name) for name in siblings):
        raise UsageError(
            "Lingua would take this for a step of the run in that folder, and may resume from it or clean it up",
            uri=target.uri,
            cure="write elsewhere, or say `--into` to mean it",
        )
