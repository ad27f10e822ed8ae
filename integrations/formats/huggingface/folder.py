"""The JSON files next to the weights of a Hugging Face folder, and what they state.

`config.json` states the version of transformers that wrote it and the model type, and so the expected number of
parameters; `trainer_state.json` states the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.core.detection import Evidence
from wherry.core.steps import step_number
from wherry.errors import CorruptError
from wherry.integrations.formats.huggingface.weights import (
    ADAPTER_CONFIG,
    CONFIG,
    PIPELINE,
    find_weights,
)
from wherry.text.json_scan import DROPPED, scan_json
from wherry.text.limits import SMALL, JsonLimits, scale_limit

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from wherry.storage.location import Location
    from wherry.store.store import Entry
    from wherry.text.json_scan import Rows

_TRAINER = "trainer_state.json"
_HISTORY = JsonLimits(nbytes=256 << 20, rows=1 << 22)  # of a trainer, which grows with every step

# The model types of each family that is not named as its only type; a test compares them with the declarations, which
# take too long to be read for every folder. A type that only begins as another one is another model.
_TYPES = {
    "deepseek": ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"),
    "gemma3": ("gemma3", "gemma3_text"),
    "gemma4-small": ("gemma4", "gemma4_text"),
    "glm4-moe": ("glm4_moe",),
    "gpt-neox": ("gpt_neox",),
    "gpt-oss": ("gpt_oss",),
    "llama4": ("llama4", "llama4_text"),
    "qwen": ("qwen2", "qwen3", "qwen3_moe"),
    "qwen2-moe": ("qwen2_moe",),
    "qwen3-next": ("qwen3_next",),
    "t5": ("t5", "mt5", "umt5"),
}
_FAMILIES = {kind: family for family, kinds in _TYPES.items() for kind in kinds}


def read_json(place: Location, rows: Rows | None = None, limits: JsonLimits = SMALL) -> dict[str, Any]:
    """Read a JSON object from a folder.

    Args:
        place: the file.
        rows: how to read its large objects; see `scan_json`.
        limits: what it may become.

    Raises:
        NotFoundError: the file does not exist.
        CorruptError: the file is not a JSON object, or has duplicate keys.
        HostileError: the file exceeds a limit.
    """
    found = scan_json(
        place.metadata(scale_limit(limits.nbytes)),
        place.name,
        {} if rows is None else rows,
        uri=place.uri,
        limits=limits,
        unique=True,
        cure="restore the file",
    )
    if not isinstance(found, dict):
        raise CorruptError(f"expected a JSON object in {place.name}", uri=place.uri, cure="restore the file")
    return found


def family_of(model_type: str) -> str:
    """The family of a model type: `qwen` of `qwen3_moe`, `llama` of `llama`; of an unknown type the type itself."""
    return _FAMILIES.get(model_type, model_type)


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """Facts from the JSON files next to the weights.

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
    config = read_json(location.join(CONFIG)) if CONFIG in names else {}
    step, evidence = step_number(location.name), list[Evidence]()
    if step is not None:
        evidence.append(Evidence(".", f"step {step} in the folder's name"))
    elif _TRAINER in names:
        rows: Rows = {"log_history": lambda _number, _row: DROPPED}
        stated = read_json(location.join(_TRAINER), rows, _HISTORY).get("global_step")
        if type(stated) is int:
            step = stated
            evidence.append(Evidence(_TRAINER, f"global_step {step}"))
    version, model_type = config.get("transformers_version"), config.get("model_type")
    origin = {
        "transformers_version": version,
        "model_type": model_type,
        "dtype": config.get("dtype", config.get("torch_dtype")),
        "architectures": config.get("architectures"),
    }
    if ADAPTER_CONFIG in names:
        adapter = read_json(location.join(ADAPTER_CONFIG))
        base, kind = adapter.get("base_model_name_or_path"), adapter.get("peft_type")
        origin |= {"base_model": base, "peft_type": kind}
        evidence.append(Evidence(ADAPTER_CONFIG, f"a {kind} adapter of {base}, not a whole model"))
    if isinstance(model_type, str):
        evidence.append(Evidence(CONFIG, f"model_type {model_type}"))
    if isinstance(version, str):
        evidence.append(Evidence(CONFIG, f"transformers_version {version}"))
    return FolderFacts(
        writer=f"transformers {version}" if isinstance(version, str) else None,
        family=family_of(model_type) if isinstance(model_type, str) else None,
        step=step,
        origin={name: value for name, value in origin.items() if value is not None},
        config=config,
        evidence=tuple(evidence),
    )


def pipeline_parts(location: Location, names: Mapping[str, Entry]) -> list[str]:
    """The models of a diffusers pipeline: the folders with weights that its `model_index.json` names.

    Raises:
        CorruptError: `model_index.json` is not a JSON object.
    """
    if PIPELINE not in names:
        return []
    said = read_json(location.join(PIPELINE))
    folders = [name for name, entry in names.items() if entry.is_dir and isinstance(said.get(name), list)]
    return [name for name in folders if find_weights({e.name: e for e in location.join(name).entries()})]
