"""stated_config: the config that a user states (`--config`), compared with what is known of the source without it.

The file must name a model. Where it replaces a config next to the source, each fact that differs is a warning, as it is
for a fact of `--set`; where it does not, and where it contradicts the source's record, a difference is refused. The
tensors are compared with it when the layout is bound.

A tree without a family keeps its names in a Hugging Face folder. What the user states of the model (`--config`,
`--assets`) is put next to it, so that the result can be loaded. Whether the names are those of the model is not proved.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from wherry.core.request import LayoutRequest
from wherry.cures import Argument, Cure
from wherry.errors import MismatchError, UsageError
from wherry.families import families, load_family
from wherry.families.companions import (
    added_template,
    asset_files,
    companion_config,
    config_file,
    config_system,
    model_folder,
    with_own_config,
)
from wherry.families.facts import ConfigFacts, tell, word
from wherry.families.schema import Family, System
from wherry.formats.checkpoint import Checkpoint
from wherry.layout.expr import evaluate
from wherry.transform.model import CONFIG, config_of, json_companion, model_named
from wherry.transform.schemes import without_quantization
from wherry.transform.view import View, with_files

_NO_CONFIG = "no config.json: transformers cannot load the folder; pass the model's with --config"
_NOT_PROVED = "no family: the names of the tensors are kept, and were not compared with those of the model"


def require_model(path: str, family: Family | None = None) -> dict[str, Any]:
    """The config that a user states, which must name a model.

    Args:
        path: the file.
        family: the family of the source; a config of it states a size. Without a family, a name of the model is enough.

    Raises:
        NotFoundError: the file was not found.
        UsageError: it cannot be read, or names no model.
    """
    config = config_file(path)
    known = [family] if family else [load_family(name) for name in families()]
    systems = [system for one in known for system in one.systems.values()]
    if config_system(config, systems) is None and (family or model_named(config) is None):
        of = f" of family {family.name}" if family else ""
        raise UsageError(
            f"--config {shlex.quote(str(path))} is not the config of a model{of}: it states none of its sizes",
            cure=Cure(
                "pass the model's config.json, MaxText's YAML, params.json or gin with {}", Argument("config")
            ),
        )
    return config


def compared_config(
    checkpoint: Checkpoint,
    family: Family,
    source: System,
    path: str,
    recorded: Mapping[str, Any],
    stated: Collection[str],
) -> tuple[str, ...]:
    """Compare a stated config with the configs next to the source and with its record.

    Args:
        checkpoint: the source.
        family, source: its family and its system.
        path: the file that the user states.
        recorded: the layout that wherry recorded for the source; empty if there is none.
        stated: facts that the user states with `--set`, which no config decides.

    Returns:
        A warning for each fact that differs in a config that the stated one replaces.

    Raises:
        MismatchError: it contradicts the source's own config, which it does not replace, or the record.
        UnrepresentableError: a config has unknown attributes.
        UsageError: the file names no model of the family, or a config cannot be read.
    """
    if not any(one.config.sizes for one in family.systems.values()):
        require_model(path)  # adapters whose systems have no config: it names the model that they belong to
        return ()
    config = without_quantization(require_model(path, family))
    system = config_system(config, [source, *family.systems.values()])
    assert system is not None
    config_facts = tell(system, config, path)
    for what, value, other in _recorded_otherwise(source, config_facts, recorded) if system is source else ():
        raise _mismatch(checkpoint, path, what, value, other, "the record of the source (wherry.json)")
    warnings: list[str] = []
    for one in with_own_config(family):
        found, name = companion_config(checkpoint, one)
        other_facts = tell(one, without_quantization(found), name) if found is not None else None
        if other_facts is None:
            continue
        pairs = [row for row in _different(system, config_facts, one, other_facts) if row[0] not in stated]
        if pairs and _config_of(source) == one.name != _config_of(system):
            raise _mismatch(checkpoint, path, *pairs[0], f"{name} next to the source")
        warnings += [_replacement(fact, value, path, other, name) for fact, value, other in pairs]
    return tuple(warnings)


def replaced_attributes(checkpoint: Checkpoint, path: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """A warning for each attribute of `config.json` that a stated config replaces, for a tree that keeps its names."""
    own = json_companion(checkpoint, CONFIG)
    names = [] if own is None else [one for one in {**own, **config} if own.get(one) != config.get(one)]
    return tuple(_replacement(name, config.get(name), path, (own or {}).get(name), CONFIG) for name in names)


def _replacement(name: str, value: Any, source: str, other: Any, place: str) -> str:
    return f"{name} = {value!r} as stated in {source}, instead of {other!r} in {place}"


def _different(
    system: System, config_facts: ConfigFacts, other: System, other_facts: ConfigFacts
) -> Iterator[tuple[str, Any, Any]]:
    """The facts that two configs state differently, with both values.

    A fact that only one of them states differs if both are of one system, whose software then takes another value. Of
    two systems, a tie is not compared, which the tensors show, nor what one of them folds into its tensors.
    """
    if _config_of(system) == other.name:
        names = [*config_facts.facts, *(name for name in other_facts.facts if name not in config_facts.facts)]
    else:
        apart = {"tied", *system.absorbs, *other.absorbs}
        names = [name for name in config_facts.facts if name in other_facts.facts and name not in apart]
    for name in names:
        if config_facts.facts.get(name) != other_facts.facts.get(name):
            yield name, config_facts.facts.get(name), other_facts.facts.get(name)


def _recorded_otherwise(
    source: System, config_facts: ConfigFacts, recorded: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """The differences between the record of a source and its config: facts and conventions, with both values."""
    for name, value in recorded.get("facts", {}).items():
        if config_facts.facts.get(name, value) != value:
            yield name, config_facts.facts[name], value
    layout = recorded.get("to", {})
    for name, text in layout.items() if layout.get("system") == source.name else ():
        one = source.conventions.get(name)
        value = evaluate(one.config, config_facts.config) if one and one.config else None
        if value is not None and word(value) != text:
            yield name, word(value), text


def _config_of(system: System) -> str:
    """The name of the system whose config a system has."""
    return system.like or system.name


def _mismatch(
    checkpoint: Checkpoint, path: str, what: str, value: Any, other: Any, place: str
) -> MismatchError:
    return MismatchError(
        f"{path}: {what} is {value!r}, but {other!r} in {place}",
        uri=checkpoint.uri,
        cure=Cure("pass the config of this model, or remove {}", Argument("config")),
    )


def with_companions(checkpoint: Checkpoint, layout: LayoutRequest, *, proved: bool = False) -> Checkpoint:
    """A source whose names are kept, with the config and the files that the user states or that the trainer saved.

    Args:
        checkpoint: the source.
        layout: the config and the assets.
        proved: whether the names are those of the target's system.

    Raises:
        NotFoundError, UsageError: a stated file cannot be read.
    """
    carried = CONFIG in {one.name for one in checkpoint.manifest.companions} and not layout.config
    config = require_model(layout.config) if layout.config else config_of(checkpoint)
    files = asset_files(layout.assets) if layout.assets else asset_files(model_folder(checkpoint))
    template = added_template(checkpoint, files, layout.assets)
    if config is not None and not carried:
        files[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    differences = replaced_attributes(checkpoint, layout.config, config) if layout.config and config else ()
    notes = (*differences, *template, *(() if proved else (_NOT_PROVED,)), *(() if config else (_NO_CONFIG,)))
    stated = {"--config": layout.config, "--assets": layout.assets}
    uses = frozenset(name for name, value in stated.items() if value)
    view = View(checkpoint, None, with_files(checkpoint.manifest, files), files, notes)
    view.uses_in_files |= uses
    return view
