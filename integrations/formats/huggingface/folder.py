"""The JSON files next to the weights of a Hugging Face folder, and what they state.

`config.json` states the version of transformers that wrote it and the model type, and so the expected number of
parameters; `trainer_state.json` states the step.

The files around the weights of a folder: its companions, and what is not converted, each with the reason.

Companions are the regular files down to three folders deep that are not weights in any form: config, tokenizer,
generation config, chat template, model card, code of the model. Files of a hub cache are links to blobs and are
followed. The modules that sentence-transformers runs after the model lie in folders that `modules.json` names
(`1_Pooling`, `2_Dense`); they belong to the checkpoint, so every file in them is a companion, weights included.
Source: sentence_transformers/SentenceTransformer.py of 5.1 (`_load_sbert_model`, `save`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field, replace
from itertools import islice
from typing import Any

from wherry.core.account import FILES, OTHERS, TRAINING_STATE, IgnoredEntry, ignored_file
from wherry.core.detection import Evidence
from wherry.core.json_document import DROPPED, Rows, parse_json, scan_json
from wherry.core.lazy_dataclass import dataclass
from wherry.core.limits import SMALL, JsonLimits, scale_limit
from wherry.core.steps import step_number
from wherry.errors import CorruptError, IncompleteError, WherryError
from wherry.formats.file_names import fsdp_item, is_deepspeed_shard, is_weights, trainer_file, weights_words
from wherry.integrations.containers.flat.reader import Surroundings
from wherry.integrations.formats.huggingface.weights import (
    ADAPTER_CONFIG,
    CONFIG,
    PIPELINE,
    find_weights,
    variant_of,
)
from wherry.store.location import Location
from wherry.store.sidecar import OWN_NAMES
from wherry.store.store import Entry

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


_DEEPEST = 3
_MOST_NAMES = 10_000  # files that are looked at below a folder that is too deep to be entered
_LARGEST_MODULES = 1 << 20
_MODULES = "modules.json"
_DCP = ".distcp"
_ORIGINAL = (
    "original"  # folder of hub repositories for the publisher's own files, such as Meta's consolidated.NN.pth
)
_STATE = "the state of a trainer is not part of the weights that are read"


@dataclass(frozen=True, slots=True)
class FolderWalk:
    """Sorts the other files in the folder of a checkpoint into companions and ignored files.

    Attributes:
        own: names of the checkpoint's own files.
        reason: why other weights are not read.
        leave: the entry of a file that is no companion, by its name in the folder; None for a companion.
        is_apart: whether a folder with files of these names is a checkpoint or model itself, so that its files are no
            companions.
        modules: folders of which every file is a companion.
    """

    own: Collection[str]
    reason: str
    leave: Callable[[str, Entry], IgnoredEntry | None]
    is_apart: Callable[[Location, Mapping[str, Entry]], bool]
    modules: frozenset[str] = frozenset()

    def sort(self, folder: Location, entries: Iterable[Entry] | None = None) -> Surroundings:
        """Sort the files of a folder, and of folders in it that hold no other checkpoint.

        Args:
            folder: the folder.
            entries: what it holds; listed by default.

        Raises:
            IncompleteError: a companion is a broken link.
        """
        found = Surroundings()
        self._sort(folder, "", folder.entries() if entries is None else entries, found)
        return found

    def _sort(self, folder: Location, prefix: str, entries: Iterable[Entry], found: Surroundings) -> None:
        for entry in entries:
            name = f"{prefix}{entry.name}"
            if entry.name.startswith(".") or name in self.own or name in OWN_NAMES:
                continue  # hidden files belong to tools (.git, .cache), sidecar and signature to wherry
            if entry.is_dir:
                self._enter(folder.join(entry.name), name, found)
            elif left := self.leave(name, entry):
                found.ignored.append(left)
            else:
                found.companions.append(_companion(folder, entry, name))

    def _enter(self, folder: Location, name: str, found: Surroundings) -> None:
        if name in self.modules:
            for entry in folder.walk():
                if not any(part.startswith(".") for part in entry.name.split("/")):
                    found.companions.append(_companion(folder, entry, f"{name}/{entry.name}"))
            return
        if name.count("/") + 1 >= _DEEPEST:
            found.ignored.append(too_deep(folder, name))
            return
        names = {entry.name: entry for entry in folder.entries()}
        if self.is_apart(folder, names):
            found.ignored.append(folder_of_weights(name, names, self.reason))
        else:
            self._sort(folder, f"{name}/", names.values(), found)


def surroundings(location: Location, own: Collection[str], read: str) -> Surroundings:
    """List the files around the weights of a checkpoint: companions, and what is not converted.

    Args:
        location: its folder.
        own: names of the weights and of their index.
        read: the name of the file that is read, for the reasons.

    Raises:
        IncompleteError: a companion is a broken link.
    """
    reason = f"the tensors are read from {read}"
    modules = _module_folders(location)
    walk = FolderWalk(own, reason, lambda name, _entry: ignored_companion(name, reason), _is_apart, modules)
    return walk.sort(location)


def ignored_companion(name: str, reason: str) -> IgnoredEntry | None:
    """The entry of a file that is no companion, by its name; None for a companion.

    Args:
        name: relative to the checkpoint.
        reason: why weights of this name are not read.
    """
    last = name.rsplit("/", 1)[-1]
    trainers = trainer_file(last)
    if trainers:
        return ignored_file(name, TRAINING_STATE, trainers.what, _STATE)
    if not is_weights(last):
        return None
    variant = variant_of(last)
    what = f"weights, variant {variant}" if variant else weights_words(last)
    return ignored_file(name, OTHERS, what, reason, weights=not last.endswith(".json"))


def folder_of_weights(name: str, inside: Iterable[str], reason: str) -> IgnoredEntry:
    """The entry of a folder that holds weights.

    Args:
        name: relative to the checkpoint.
        inside: names of its files.
        reason: why it is not read.
    """
    last = name.rsplit("/", 1)[-1]
    if fsdp_item(last) == "optimizer":
        return ignored_file(name, TRAINING_STATE, "optimizer state", _STATE)
    if any(map(is_deepspeed_shard, inside)):
        what = "a folder with DeepSpeed shards of weights and optimizer state"
        return ignored_file(name, OTHERS, what, reason, weights=True)
    if step_number(last) is not None:
        return ignored_file(name, FILES, "a step of the run", "it is a checkpoint of its own")
    what = "weights in the publisher's own form" if last == _ORIGINAL else "a folder with other weights"
    return ignored_file(name, OTHERS, what, reason, weights=True)


def too_deep(folder: Location, name: str) -> IgnoredEntry:
    """The entry of a folder that is too deep to be entered, by the names below it."""
    try:
        below = islice((entry.name for entry in folder.walk()), _MOST_NAMES)
        holds = any(is_weights(one) and not trainer_file(one.rsplit("/", 1)[-1]) for one in below)
    except WherryError:
        holds = True  # a folder that cannot be listed may hold weights
    what = "a folder with other weights" if holds else "a folder"
    reason = f"it is deeper than {_DEEPEST} folders"
    return ignored_file(name, OTHERS if holds else FILES, what, reason, weights=holds)


def _companion(folder: Location, entry: Entry, name: str) -> Entry:
    if entry.size < 0:
        folder.require_open(entry)
        raise IncompleteError(f"broken link: {name}", uri=folder.uri, cure="download the file again")
    return replace(entry, name=name)


def _is_apart(folder: Location, names: Mapping[str, Entry]) -> bool:
    """Whether a folder holds other weights, or a checkpoint of torch or DeepSpeed, which is named as a whole."""
    return bool(
        find_weights(names)
        or any(one.endswith(_DCP) or is_deepspeed_shard(one) for one in names)
        or (folder.name == _ORIGINAL and any(map(is_weights, names)))
    )


def _module_folders(location: Location) -> frozenset[str]:
    """The folders that `modules.json` names; none if there is no such file, or if it is not sentence-transformers'."""
    place = location.join(_MODULES)
    if not place.exists():
        return frozenset()
    try:
        rows: Any = parse_json(place.read_whole(_LARGEST_MODULES), _MODULES, limits=SMALL)
        return frozenset(str(row["path"]).strip("/") for row in rows) - {""}
    except (ValueError, TypeError, KeyError):
        return frozenset()
