"""Companions: the files that a system needs, in addition to the tensors, to load and use a checkpoint.

The config is derived from the source; tokenizer, chat template, generation config and licence are copied from the
source or from a folder that the user names. Configs of other systems are copied too, so that a conversion back finds
what the target's own config cannot state. A missing file is reported as a warning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Argument, Cure
from wherry.errors import MismatchError, NotFoundError, UsageError, WherryError
from wherry.families.config_files import complete_config, parse_config, render_config
from wherry.families.config_written import WrittenConfig, contradictions, written_config
from wherry.families.facts import assumed_facts, tell
from wherry.families.project import Projection
from wherry.families.schema import Family, System
from wherry.formats.companions import MemoryFiles
from wherry.formats.end_tokens import read_end_tokens
from wherry.formats.file_names import fsdp_item
from wherry.formats.format import ModelFiles
from wherry.layout.expr import evaluate, names_in
from wherry.store.local_store import locate
from wherry.store.location import MOST_CONFIG, Location

if TYPE_CHECKING:
    from wherry.formats.checkpoint import Checkpoint

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
)
_GENERATION = "generation_config.json"
_CARRIED = (
    *_TOKENIZERS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "chat_templates/*",
    "additional_chat_templates/*",
    _GENERATION,
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
    "README.md",
)
_OF_VERL = "huggingface"
_PARENT = "base_config"  # the file from which MaxText takes the other attributes
_MODEL = "tokenizer.model"
_MOST = 128 << 20  # a larger file in a folder of assets is not a tokenizer


@dataclass(frozen=True, slots=True)
class CompanionFiles:
    """The files that accompany the tensors of a target.

    Attributes:
        files: name → bytes, generated for the target or taken from the assets.
        carried: names of the source's companions that are copied unchanged.
        left: names of the source's companions that are not copied.
        warnings: what is missing or was assumed, as text.
        snippet: code that loads the result with the target's own software; DST stands for its location.
    """

    files: Mapping[str, bytes]
    carried: tuple[str, ...]
    left: tuple[str, ...]
    warnings: tuple[str, ...]
    snippet: str


def companion_files(
    projected: Projection,
    config: Mapping[str, Any] | None,
    checkpoint: Checkpoint,
    assets: str | None = None,
    token_ids: Mapping[str, Any] | None = None,
) -> CompanionFiles:
    """Create the files that a target needs in addition to its tensors.

    Args:
        projected: the conversion.
        config: a config of the target's system, or of the source's if both are the same; None takes the file next
            to the source that has the target's name for it (`companion_config`).
        checkpoint: the opened source.
        assets: a folder or URI with tokenizer and similar files; they replace the source's.
        token_ids: numbers of special tokens that the user states.

    Raises:
        MismatchError: a config of the target contradicts the tensors.
        UnrepresentableError: it has unknown attributes.
        UsageError: it cannot be read.
        NotFoundError: the folder of assets was not found, or has no usable file.
    """
    system, alike = projected.system, projected.system is projected.source.system
    _require_same_model(projected, checkpoint)
    from_source = config is None
    given, source = companion_config(checkpoint, system) if from_source else (config, "the config")
    names = [companion.name for companion in checkpoint.manifest.companions]
    made = model_files(checkpoint, assets)
    files = dict(made.files)
    more = {"tokenizer": _tokenizer(checkpoint, names, files)}
    whole = given is not None and (from_source or alike)
    written = written_config(projected, given, source, whole=whole, more=more, token_ids=token_ids)
    if system.write.file is not None:
        files[system.write.file] = render_config(system.write.file, written.config)
    configs = _agreeing(projected, checkpoint, written.names)
    every = system.write.file == projected.source.system.write.file  # these systems read the same files
    carried = tuple(
        name for name in names if name not in files and (every or name in configs or matches(name, _CARRIED))
    )
    there = [*files, *carried]
    warnings = [*_restated_warnings(projected), *projected.source.notes, *written.warnings, *made.notes]
    if not any(matches(name, _TOKENIZERS) for name in there):
        reason = made.missing or "no tokenizer found next to the source"
        warnings.append(f"{reason}: {system.name} needs one; pass its folder with --assets")
    if token_ids and _GENERATION in there:  # it is read before the config in which the stated token ids are
        warnings.append(
            f"{_GENERATION} is copied unchanged; transformers generates with its token ids, not those of --set"
        )
    return CompanionFiles(
        files=files,
        carried=carried,
        left=tuple(name for name in names if name not in files and name not in carried),
        warnings=(
            *warnings,
            *added_template(checkpoint, files, assets),
            *_padding(projected),
        ),
        snippet=_snippet(system, written),
    )


def _agreeing(projected: Projection, checkpoint: Checkpoint, names: Mapping[str, Any]) -> set[str]:
    """The configs of the family's systems next to a source that still describe the model, for the way back."""
    found: set[str] = set()
    for system in with_own_config(projected.source.family):
        config, name = companion_config(checkpoint, system)
        config_facts = tell(system, config, name)
        if all(
            names.get(fact, value) == value for fact, value in config_facts.facts.items() if fact != "tied"
        ):
            found.add(str(system.write.file))
    return found


def with_own_config(family: Family) -> list[System]:
    """The systems with a config of their own; the others read that of the system that they are like."""
    return [system for system in family.systems.values() if system.like is None]


def _restated_warnings(projected: Projection) -> Iterator[str]:
    """Warnings of facts for which the user states another value than the source's config or software."""
    config_facts, system = projected.source.config_facts, projected.source.system
    always = assumed_facts(system, {**projected.source.solved.sizes, **config_facts.facts})
    own = {
        name: evaluate(text, config_facts.config)
        for name, text in system.config.facts.items()
        if config_facts.config
    }
    for fact, value in config_facts.stated.items():
        if own.get(fact, value) not in (None, value):
            yield f"{fact} = {value!r} as stated, instead of {own[fact]!r} in {config_facts.source}"
        elif own.get(fact) is None and fact in always and always[fact] != value:
            yield f"{fact} = {value!r} as stated, instead of {always[fact]!r}, which {system.name} always uses"


def model_folder(checkpoint: Checkpoint) -> Location | None:
    """The folder in which a trainer keeps the files of the model; None if that is the checkpoint itself.

    Facts: accelerate and transformers' Trainer put an FSDP model into `pytorch_model_fsdp_<i>` below the step, whose
    config.json and tokenizer are in the step; verl puts them into `huggingface/` next to its rank files.
    """
    place = checkpoint.location
    if fsdp_item(place.name) == "model":
        return place.parent
    return place.join(_OF_VERL) if checkpoint.detection.format == "fsdp" else None


def companion_config(checkpoint: Checkpoint, system: System) -> tuple[dict[str, Any] | None, str]:
    """The config of a system next to a checkpoint or in its run, and its name; None and `no config` if there is none.

    Raises:
        UsageError: it cannot be read.
    """
    names = {companion.name for companion in checkpoint.manifest.companions}
    companions = {
        name: checkpoint.reader.companion(name) for name in [system.write.file] if name in names and name
    }
    above = {name: checkpoint.location.parent.join(name) for name in system.config.run}
    home = model_folder(checkpoint)
    if home is not None and system.write.file and system.write.file not in companions:
        above[system.write.file] = home.join(system.write.file)
    for name, location in {
        **companions,
        **{one: place for one, place in above.items() if place.exists()},
    }.items():
        found = complete_config(parse_config(name, location.read_whole(MOST_CONFIG)), name)
        if config_system(found, [system]):
            return found, name
    return None, "no config"


def companion_facts(
    checkpoint: Checkpoint, family: Family, source: System, path: str | None = None
) -> dict[str, Any]:
    """Facts from configs of the family's other systems: the file that the user names, and those next to a checkpoint.

    A source whose system has no config (Penzai), or an incomplete one, is completed by the configs that earlier
    conversions copied.

    Raises:
        UnrepresentableError: such a config has unknown attributes, or is of another family.
        UsageError: it cannot be read.
    """
    facts: dict[str, Any] = {}
    for system in with_own_config(family):
        config, name = companion_config(checkpoint, system)
        if config is not None and system is not source:
            facts = {**tell(system, config, name).facts, **facts}
    given, own = _stated_config([source, *family.systems.values()], path)
    if own is not None and own is not source:
        facts = {**facts, **tell(own, given, path or "").facts}
    return facts


def _stated_config(
    systems: Iterable[System], path: str | None
) -> tuple[dict[str, Any] | None, System | None]:
    """The file that the user names, and of which of the systems it is."""
    given = config_file(path) if path else None
    return given, config_system(given, systems) if given is not None else None


def sizes_stated(family: Family, path: str | None) -> dict[str, int]:
    """The sizes that a config of any system of a family states, for a source that has none.

    Raises:
        NotFoundError, UnrepresentableError, UsageError: the file cannot be read, or is of another family.
    """
    given, own = _stated_config(family.systems.values(), path)
    return dict(tell(own, given, path or "").sizes) if own is not None else {}


def _require_same_model(projected: Projection, checkpoint: Checkpoint) -> None:
    """Refuse a config of another model next to the source, which would complete this one wrongly."""
    sizes = projected.source.solved.sizes
    for system in with_own_config(projected.source.family):
        config, name = companion_config(checkpoint, system)
        wrong = contradictions(tell(system, config, name), system, sizes)
        if wrong:
            raise MismatchError(
                f"{name} next to the source contradicts it: {wrong[0]}",
                uri=checkpoint.uri,
                cure="remove the file, or replace it with the config of this model",
            )


def config_file(path: str) -> dict[str, Any]:
    """A config that the user names: JSON, YAML or gin, by its file name extension.

    A config of MaxText is completed by what the model that it names means.

    Raises:
        NotFoundError: the file was not found.
        UsageError: it cannot be read.
    """
    location = locate(path)
    return complete_config(parse_config(location.name, location.read_whole(MOST_CONFIG)), location.name)


def config_system(config: Mapping[str, Any], systems: Iterable[System]) -> System | None:
    """The system of a config: the one of which it states most sizes; None if it states no size of any system.

    Other systems share some of its attributes, and need not make sense of them: see `_states`.
    """
    scored = [(_count_stated(config, system), system) for system in systems]
    best = max(scored, key=lambda pair: pair[0], default=None)
    return best[1] if best and best[0] else None


def _count_stated(config: Mapping[str, Any], system: System) -> int:
    table = config.get(system.config.table) if system.config.table else None
    attributes = table if isinstance(table, dict) else config
    read = (text for text in system.config.sizes.values() if not names_in(text).isdisjoint(attributes))
    return sum(_states(attributes, text) for text in read)


def _states(attributes: Mapping[str, Any], size: str) -> bool:
    """Whether a config states a size; one that is no whole number is not stated, as if it were of another system."""
    try:
        return evaluate(size, attributes) is not None
    except WherryError:
        return False


def source_config(
    checkpoint: Checkpoint, family: Family, source: System, path: str | None
) -> tuple[dict[str, Any] | None, str]:
    """The source's config: the file that the user names if it is of the source's system, else that next to the source.

    Raises:
        NotFoundError, UsageError: the file cannot be read.
    """
    given, own = _stated_config([source, *family.systems.values()], path)
    if own is source and path:
        return given, path
    return companion_config(checkpoint, source)


def target_config(family: Family, target: System, path: str | None) -> dict[str, Any] | None:
    """The file that the user names, if it is a config of the target's system.

    Raises:
        NotFoundError, UsageError: it cannot be read.
    """
    given, own = _stated_config([target, *family.systems.values()], path)
    return given if own is target else None


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a companion's name matches one of the patterns; `*` stands for any characters except `/`."""
    return any(re.fullmatch(re.escape(one).replace(r"\*", "[^/]*"), name) for one in patterns)


def asset_files(folder: str | Location | None) -> dict[str, bytes]:
    """The files of a folder that belong to a model: tokenizer, chat template, generation config, licence.

    Args:
        folder: the URI that the user states, in which there must be some; or a folder of the trainer, or None.

    Raises:
        NotFoundError: a stated folder has none.
        UsageError: a file is too large.
    """
    place = locate(folder) if isinstance(folder, str) else folder
    if place is None or (place.entry is None and not isinstance(folder, str)):
        return {}
    entries = [entry for entry in place.walk() if matches(entry.name, _CARRIED)]
    for entry in entries:
        if entry.size > _MOST:
            raise UsageError(
                f"asset {entry.name} is too large: {entry.size} bytes exceed the limit of {_MOST}",
                uri=place.uri,
                cure="remove it from the folder",
            )
    if not entries and isinstance(folder, str):
        raise NotFoundError(
            "no tokenizer, chat template, generation config or licence found among the assets",
            uri=place.uri,
            cure=Cure(
                "pass a folder that contains them with {}, such as a Hugging Face model folder",
                Argument("assets"),
            ),
        )
    return {entry.name: place.member(entry.name).read_whole(_MOST) for entry in entries}


def added_template(checkpoint: Checkpoint, files: Mapping[str, bytes], assets: str | None) -> list[str]:
    """A warning where the assets have a chat template and the source has a tokenizer without one, as a base model has.

    Args:
        checkpoint: the opened source.
        files: the assets, by name.
        assets: the folder or URI that the user states; None if there is none.
    """
    names = {companion.name for companion in checkpoint.manifest.companions}
    if assets is None or not any(matches(name, _TOKENIZERS) for name in names):
        return []
    stated = read_end_tokens(files, lambda name: Location(MemoryFiles(files=files), name)).template
    if stated is None or read_end_tokens(names, checkpoint.reader.companion).template is not None:
        return []
    what = "the chat template is that of --assets, and the source has a tokenizer without one, as a base model has"
    return [f"{what}: leave the template out of that folder, unless the model was trained with it"]


def model_files(checkpoint: Checkpoint, assets: str | None) -> ModelFiles:
    """The files of a model that the user states, or that its trainer keeps.

    Without a tokenizer among them, those that the checkpoint states in its own form are added.

    Args:
        checkpoint: the opened source.
        assets: a folder or URI that the user states.

    Raises:
        NotFoundError, UsageError: see `asset_files`.
        CorruptError, HostileError: what the checkpoint states is invalid.
    """
    files = asset_files(assets) if assets is not None else asset_files(model_folder(checkpoint))
    if any(matches(name, _TOKENIZERS) for name in files):
        return ModelFiles(files)
    made = checkpoint.original.reader.model_files()
    return replace(made, files={**made.files, **files})


def _tokenizer(checkpoint: Checkpoint, names: list[str], files: Mapping[str, bytes]) -> str | None:
    """The kind of a `tokenizer.model`: SentencePiece's protocol buffer, or tiktoken's lines of text."""
    if _MODEL in files:
        head = files[_MODEL][:1]
    elif _MODEL in names:
        head = checkpoint.reader.companion(_MODEL).read(0, 1)
    else:
        return None
    return "sp" if head == b"\n" else "tiktoken"


def _padding(projected: Projection) -> list[str]:
    """Warnings of source tensors that are longer than their axes: the padding is not carried."""
    held = [one for one in projected.source.stored.values() if len(one.pieces) == 1]
    return [
        f"{one.spec.name} has {extent} entries, of which the last {extent - wanted} are padding beyond the "
        f"{' '.join(names)} of {wanted} and are left out"
        for one in held
        for extent, names in zip(one.spec.shape, one.pieces[0].groups, strict=True)
        if extent > (wanted := prod(projected.source.solved.sizes[name] for name in names))
    ]


def _snippet(system: System, written: WrittenConfig) -> str:
    words = {name: str(evaluate(text, written.names)) for name, text in system.write.words.items()}
    lines = " ".join(f"{name}={_shell(value)}" for name, value in written.table.items() if name != _PARENT)
    if written.config.get("architectures"):
        words["architecture"] = str(written.config["architectures"][0])
    words |= {"uri": "DST", "file": str(system.write.file), "lines": lines}
    return re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], found[0]), system.write.snippet.strip())


def _shell(value: object) -> str:
    """A value as an argument of a command line."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"'{text}'" if re.search(r"[^\w.+-]", text) else text
