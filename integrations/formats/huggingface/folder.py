"""Files around the weights of a Hugging Face folder: config, trainer state, companions.

`config.json` states the version of transformers that wrote it and the model type, and so the expected number of
parameters; `trainer_state.json` states the step. Companions are the regular files down to three folders deep that are
not weights in any form: config, tokenizer, generation config, chat template, model card, code of the model. The
evidence lists files that are left out. Files of a hub cache are links to blobs and are followed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.core.detection import Evidence
from wherry.core.steps import step_number
from wherry.errors import CorruptError, IncompleteError
from wherry.integrations.formats.huggingface.weights import (
    ADAPTER_CONFIG,
    CONFIG,
    PIPELINE,
    find_weights,
    is_weights,
)
from wherry.storage.location import Entry
from wherry.storage.sidecar import OWN_NAMES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from wherry.storage.location import Location

_TRAINER = "trainer_state.json"
_LARGEST_CONFIG = 16 << 20
_DEEPEST = 3
_ORIGINAL = (
    "original"  # folder of hub repositories for the publisher's own files, such as Meta's consolidated.NN.pth
)

# model_type → family, if they differ; a type that starts with a row's key belongs to its family.
_FAMILIES = {"qwen": "qwen", "gemma": "gemma", "deepseek": "deepseek", "gpt_oss": "gpt-oss"}


def read_json(place: Location, most: int) -> dict[str, Any]:
    """Read a JSON object from a folder.

    Raises:
        NotFoundError: the file does not exist.
        CorruptError: the file is not a JSON object, or has duplicate keys.
        HostileError: the file is larger than `most` bytes.
    """
    data = place.read_whole(most)
    try:
        found = json.loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CorruptError(
            f"invalid JSON in {place.name}: {reason}", uri=place.uri, cure="restore the file"
        ) from error
    if not isinstance(found, dict):
        raise CorruptError(f"expected a JSON object in {place.name}", uri=place.uri, cure="restore the file")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def family_of(model_type: str) -> str:
    """The family of a model type: `qwen` of `qwen3_moe`, `llama` of `llama`."""
    return next((family for start, family in _FAMILIES.items() if model_type.startswith(start)), model_type)


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """Facts from the JSON files beside the weights.

    Attributes:
        writer: `transformers X`; None if the config does not state it.
        family: model family.
        step: from the folder's name, else from the trainer's state.
        origin: the facts that the manifest keeps.
        config: the contents of `config.json`.
        evidence: where each fact was found.
    """

    writer: str | None = None
    family: str | None = None
    step: int | None = None
    origin: dict[str, Any] = field(default_factory=dict[str, Any])
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    evidence: tuple[Evidence, ...] = ()


def read_facts(location: Location, names: Collection[str]) -> FolderFacts:
    """Read `config.json` and `trainer_state.json` of a folder, if they exist.

    Raises:
        CorruptError: one of them is not a JSON object.
    """
    config = read_json(location.join(CONFIG), _LARGEST_CONFIG) if CONFIG in names else {}
    step, evidence = _step(location, names)
    version, model_type = config.get("transformers_version"), config.get("model_type")
    origin = {
        "transformers_version": version,
        "model_type": model_type,
        "dtype": config.get("dtype", config.get("torch_dtype")),
        "architectures": config.get("architectures"),
        **_adapter(location, names),
    }
    if "peft_type" in origin:
        base = origin.get("base_model", "an unnamed model")
        evidence += (
            Evidence(ADAPTER_CONFIG, f"a {origin['peft_type']} adapter of {base}, not a whole model"),
        )
    if isinstance(model_type, str):
        evidence += (Evidence(CONFIG, f"model_type {model_type}"),)
    if isinstance(version, str):
        evidence += (Evidence(CONFIG, f"transformers_version {version}"),)
    return FolderFacts(
        writer=f"transformers {version}" if isinstance(version, str) else None,
        family=family_of(model_type) if isinstance(model_type, str) else None,
        step=step,
        origin={name: value for name, value in origin.items() if value is not None},
        config=config,
        evidence=evidence,
    )


def _adapter(location: Location, names: Collection[str]) -> dict[str, Any]:
    if ADAPTER_CONFIG not in names:
        return {}
    config = read_json(location.join(ADAPTER_CONFIG), _LARGEST_CONFIG)
    return {"base_model": config.get("base_model_name_or_path"), "peft_type": config.get("peft_type")}


def _step(location: Location, names: Collection[str]) -> tuple[int | None, tuple[Evidence, ...]]:
    step = step_number(location.name)
    if step is not None:
        return step, (Evidence(".", f"step {step} in the folder's name"),)
    if _TRAINER not in names:
        return None, ()
    step = read_json(location.join(_TRAINER), _LARGEST_CONFIG).get("global_step")
    return (step, (Evidence(_TRAINER, f"global_step {step}"),)) if type(step) is int else (None, ())


@dataclass(slots=True)
class Surroundings:
    """The files of a folder besides its weights: the companions, and why other files are left out."""

    companions: list[Entry] = field(default_factory=list[Entry])
    left: list[Evidence] = field(default_factory=list[Evidence])


def surroundings(location: Location, own: Collection[str]) -> Surroundings:
    """List the companions of a checkpoint.

    Args:
        location: its folder.
        own: names of the weights and of their index.

    Raises:
        IncompleteError: a companion is a broken link.
    """
    found = Surroundings()
    _collect(location, "", own, found)
    return found


def _collect(folder: Location, prefix: str, own: Collection[str], found: Surroundings) -> None:
    for entry in folder.entries():
        name = f"{prefix}{entry.name}"
        if entry.name.startswith(".") or name in own or name in OWN_NAMES:
            continue  # hidden files belong to tools (.git, .cache), sidecar and signature to wherry
        if entry.is_dir:
            _enter(folder.join(entry.name), name, own, found)
        elif is_weights(entry.name):
            found.left.append(Evidence(name, "weights in another form, or training state: not converted"))
        elif entry.size < 0:
            folder.require_open(entry)
            raise IncompleteError(f"broken link: {name}", uri=folder.uri, cure="download the file again")
        else:
            found.companions.append(Entry(name, entry.size, is_dir=False, mark=entry.mark))


def _enter(folder: Location, name: str, own: Collection[str], found: Surroundings) -> None:
    if name.count("/") + 1 >= _DEEPEST:
        found.left.append(Evidence(name, f"deeper than {_DEEPEST} folders: not converted"))
        return
    names = {entry.name: entry for entry in folder.entries()}
    if folder.name == _ORIGINAL and any(map(is_weights, names)):
        found.left.append(Evidence(name, "the same weights in the publisher's own form: not converted"))
    elif find_weights(names):
        found.left.append(Evidence(name, "a folder with other weights: not converted"))
    else:
        _collect(folder, f"{name}/", own, found)


def pipeline_parts(location: Location, names: Mapping[str, Entry]) -> list[str]:
    """The models of a diffusers pipeline: the folders with weights that its `model_index.json` names.

    Raises:
        CorruptError: `model_index.json` is not a JSON object.
    """
    if PIPELINE not in names:
        return []
    said = read_json(location.join(PIPELINE), _LARGEST_CONFIG)
    folders = [name for name, entry in names.items() if entry.is_dir and isinstance(said.get(name), list)]
    return [name for name in folders if find_weights({e.name: e for e in location.join(name).entries()})]
