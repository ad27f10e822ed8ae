"""Model families: declarations of layouts, and the conversion of one system's checkpoint to another system's layout.

    family = load_family("llama")
    projected = convert_layout(manifest, family, "huggingface", "maxtext", config=config)
    projected.targets                                  # key path → tensor and what it holds
    projected.gather(path, region, checkpoint.read)    # any region of any of them

`wherry layouts FAMILY` prints `side_by_side`. The TOML files in this folder and a user's `--family-file` have the same
form, which `wherry.families.schema` describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.core.config_text import parse_toml, read_config
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Manifest
from wherry.cures import Argument, Cure, either
from wherry.errors import UnrepresentableError, UsageError, choose
from wherry.families.adapters import SUFFIX, adapter_family
from wherry.families.bind import BoundFamily, bind
from wherry.families.fact_checks import (
    different,
    known_names,
    require_assumed,
    require_computed,
    require_fitting,
)
from wherry.families.facts import (
    assumed_facts,
    conventions_of,
    require_accepted,
    stated_forms,
    tell,
    with_defaults,
)
from wherry.families.parse import family_of, merge_tables
from wherry.families.project import Projection, check_forms, project, target_manifest
from wherry.families.roots import named_manifest, source_tree, under_stored_names
from wherry.families.templates import form_choices, templates
from wherry.families.ties import settle_copies
from wherry.families.trees import tree_family
from wherry.layout.expr import evaluate
from wherry.layout.kinds import LeafKind
from wherry.layout.tree_reading import ModelTree, read_tree

if TYPE_CHECKING:
    from wherry.families.facts import ConfigFacts
    from wherry.families.schema import Family, System
    from wherry.formats.checkpoint import Checkpoint

__all__ = [
    "BoundFamily",
    "Projection",
    "adapter_families",
    "convert_layout",
    "families",
    "families_of_system",
    "family_of_config",
    "is_known",
    "load_family",
    "load_family_file",
    "model_types",
    "side_by_side",
    "source_tree",
    "system_of_format",
    "target_manifest",
    "tree_family",
]

_FOLDER = Path(__file__).parent
_HUGGINGFACE = "huggingface"


@cache
def families() -> tuple[str, ...]:
    """The names of all families that come with wherry."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


@cache
def adapter_families() -> tuple[str, ...]:
    """The names of the families of LoRA adapters, which are derived from those of their models."""
    found = [adapter_family(load_family(name)) for name in families()]
    return tuple(one.name for one in found if one is not None)


@cache
def load_family(name: str) -> Family:
    """One of the families that come with wherry, or of the adapters of one (`llama-lora`).

    Raises:
        UsageError: the name is unknown.
    """
    adapters = adapter_family(load_family(name.removesuffix(SUFFIX))) if _has_adapters(name) else None
    if adapters is not None:
        return adapters
    if name not in families():
        raise UsageError(f"unknown family {name!r}", cure=choose(name, families()))
    return family_of(_extend(_parse_own(name)), f"family {name}")


def is_known(name: str) -> bool:
    """Whether a family comes with wherry, or is derived from one."""
    return name in families() or _has_adapters(name)


def _has_adapters(name: str) -> bool:
    return name.endswith(SUFFIX) and name.removesuffix(SUFFIX) in families()


def load_family_file(path: str) -> Family:
    """A user's family, or changes to a family that comes with wherry (`extends = "llama"`).

    Raises:
        NotFoundError, StorageError: the file cannot be read.
        UsageError: it is not a family file.
    """
    return family_of(_extend(_parse(Path(path))), f"family file {path}")


def _parse(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_config(path), "the family file", uri=str(path))
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {error}", cure="pass a TOML file") from error


@cache
def _parse_own(name: str) -> Mapping[str, Any]:
    """The file of a family that comes with wherry, or of a system (`systems/NAME`): each is parsed once."""
    return _parse(_FOLDER / f"{name}.toml")


def _extend(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """A family with what it extends, and what holds for its systems in every family (`systems/NAME.toml`)."""
    base = data.get("extends")
    if base is not None:
        if base not in families():
            raise UsageError(f"unknown family {base!r}", cure=f"extend one of {', '.join(families())}")
        extended = _extend(_parse_own(base))
        changes = {name: value for name, value in data.items() if name != "extends"}
        return merge_tables(extended, _over_shared(changes, set(extended.get("systems", {}))))
    return _over_shared(data, set())


def _over_shared(data: Mapping[str, Any], known: set[str]) -> Mapping[str, Any]:
    """A family file with what holds for its systems, except for systems that the extended family has."""
    rows = data.get("systems", {})
    added = {
        name: merge_tables(
            _parse_own(f"systems/{name}") if (_FOLDER / f"systems/{name}.toml").is_file() else {}, row
        )
        for name, row in rows.items()
        if row and name not in known
    }
    return {**data, "systems": {**rows, **added}} if added else data


def family_of_config(config: Mapping[str, Any]) -> str | None:
    """The family with the model type of a Hugging Face config, or without one with its class; None if there is none."""
    kind, classes = config.get("model_type"), config.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else None
    named = (
        name
        for name in families()
        if (kind in model_types(name) if kind is not None else first in _classes(load_family(name)))
    )
    return next((name for name in named if _is_distinct(load_family(name), config)), None)


@cache
def model_types(name: str) -> tuple[str, ...]:
    """The model types of a family that comes with wherry, from the lines before the first table of its file.

    Whole families take ten milliseconds each, and a config names one of thirty.
    """
    lines = read_config(_FOLDER / f"{name}.toml").partition(b"\n[")[0]
    head = parse_toml(lines, "the first lines of a family file")
    return tuple(head["model_types"]) if "model_types" in head else model_types(head["extends"])


def _is_distinct(family: Family, config: Mapping[str, Any]) -> bool:
    """Whether a config of its model type or class is the family's, and not that of another with the same ones."""
    if family.distinction is None:
        return True
    return evaluate(family.distinction, with_defaults(family.systems[_HUGGINGFACE], config)) is True


def _classes(family: Family) -> set[str]:
    """The classes of transformers that a family's configs name."""
    system = family.systems.get(_HUGGINGFACE)
    cases = system.write.attributes.get("architectures", ()) if system else ()
    return {name for row in cases if not isinstance(row, str) for name in row[1]}


def families_of_system(system: str) -> tuple[str, ...]:
    """The names of the families that have layouts for a system."""
    return tuple(name for name in families() if system in load_family(name).systems)


def system_of_format(family: Family, format: str) -> System | None:
    """The first system of a family whose checkpoints are in a format."""
    return next((one for one in family.systems.values() if format in one.formats), None)


def convert_layout(
    manifest: Manifest,
    family: Family,
    source: str,
    target: str,
    *,
    config: Mapping[str, Any] | None = None,
    config_source: str = "the config",
    source_options: Mapping[str, str | int | bool] | None = None,
    recorded: Mapping[str, str] | None = None,
    options: Mapping[str, str | int | bool] | None = None,
    sizes: Mapping[str, int] | None = None,
    only: str | None = None,
    dtype: str | None = None,
    target_format: str | None = None,
    pads: Mapping[str, int] | None = None,
    facts: Mapping[str, Any] | None = None,
    stated: Mapping[str, Any] | None = None,
    tree: ModelTree | None = None,
    checkpoint: Checkpoint | None = None,
) -> Projection:
    """Convert one system's layout to another's, from metadata, and from the tensors that may be second copies.

    Args:
        manifest: the manifest of the source.
        family: the model family.
        source, target: names of systems of the family.
        config: the source's config, if there is one.
        config_source: the name of the config in messages.
        source_options: forms and conventions of the source that the user states.
        recorded: conventions of the source that wherry recorded when it wrote it; statements must agree with them.
        options: forms and conventions of the target. A convention that only one side has may be stated in either.
        sizes: extents of axes that the user states.
        only: `params` omits the optimizer's state.
        dtype: element type of the parameters.
        target_format: chooses the target's forms if they depend on the format.
        pads: axis → multiple to which the target pads.
        facts: facts that the config does not state; see `companions.companion_facts`.
        stated: facts that the user states, which replace those of the config.
        tree: the tree that holds the model, from `roots.source_tree`; by default the one without removals.
        checkpoint: the source, to compare second copies; see `ties.settle_copies`.

    Raises:
        WherryError: see `bind` and `project`; every error names the parameter and the cure.
    """
    one, other = family.system(source), family.system(target)
    source_choices, target_choices = _texts(source_options or {}), _texts(options or {})
    _require_known(one, other, source_choices, target_choices)
    alike = source == target
    config_facts = _facts_of(one, tell(one, config, config_source), facts or {}, stated or {})
    require_fitting(family, config_facts, {**family.constants, **config_facts.sizes})
    if not alike:
        stated_names = {**config_facts.sizes, **config_facts.facts}
        require_computed(family, one, config_facts, stated_names)
        _require_held(family, one, other, config_facts, stated_names)
    own = _conventions(one, target_choices)
    source_conventions, notes = conventions_of(
        one, source_choices if alike else {**own, **source_choices}, config_facts, config_facts.facts,
        recorded=recorded,
        otherwise={**{name: row.usual for name, row in one.conventions.items()}, **own} if alike else None,
    )  # fmt: skip
    form = check_forms(one, {**stated_forms(one, config_facts), **_forms(one, source_choices)})
    tree = tree or read_tree(manifest).trees[0]
    outside: dict[KeyPath, LeafKind] = {tree.name(path): kind for path, kind in tree.outside.items()}

    def bind_with(model_facts: ConfigFacts) -> BoundFamily:
        named = bind(
            family, one, named_manifest(manifest, tree), config_facts=model_facts, conventions=source_conventions,
            forms=form, sizes=sizes, outside=outside,
        )  # fmt: skip
        return under_stored_names(named, manifest, tree)

    bound = settle_copies(bind_with(config_facts), checkpoint, keep=alike, again=bind_with)
    require_fitting(family, config_facts, bound.solved.sizes, bound.present["params"])
    bound = bound if alike else replace(bound, notes=(*notes, *bound.notes))
    of_target = {**(source_conventions if alike else {}), **_conventions(other, target_choices)}
    target_conventions, _ = conventions_of(other, of_target, tell(other, None), config_facts.facts)
    forms = {
        **_keep(bound, other),
        **other.by_format.get(target_format or "", {}),
        **_forms(other, target_choices),
    }
    projected = project(
        bound, other, conventions=target_conventions, forms=forms, only=only, dtype=dtype, pads=pads
    )
    return projected if alike else _complete(projected)


def _facts_of(
    system: System, config_facts: ConfigFacts, facts: Mapping[str, Any], stated: Mapping[str, Any]
) -> ConfigFacts:
    """What is known of a source: what the user states, its config, its software, and the files next to it."""
    always = assumed_facts(system, {**config_facts.sizes, **config_facts.facts})
    return replace(
        config_facts, facts={**facts, **always, **config_facts.facts, **stated}, stated=dict(stated)
    )


def _complete(projected: Projection) -> Projection:
    """The projection with the facts that follow from sizes and parameters, checked against the target's software."""
    bound, target = projected.source, projected.system
    names = known_names(projected)
    own = {**names, "there": dict.fromkeys(bound.present["params"], True)}
    config_facts = replace(
        bound.config_facts, facts={**assumed_facts(bound.system, own), **bound.config_facts.facts}
    )
    projected = replace(projected, source=replace(bound, config_facts=config_facts))
    require_computed(bound.family, bound.system, config_facts, {**own, **config_facts.facts})
    _require_held(bound.family, bound.system, target, config_facts, {**names, **known_names(projected)})
    return projected


def _require_held(
    family: Family, source: System, target: System, config_facts: ConfigFacts, names: Mapping[str, Any]
) -> None:
    """The target's software can be the model, as far as these names tell."""
    try:
        require_assumed(family, source, target, config_facts, names)
    except UnrepresentableError as error:
        # the families with which a checkpoint that names none could be read as well
        same = (one for one in map(load_family, families()) if one.yields_in(source.name) == family.name)
        others = [
            one.name
            for one in same
            if target.name in one.systems
            and not any(different(one, names, assumed_facts(one.systems[target.name], names)))
        ]
        if others:
            first, *rest = others
            family_of = either([Argument("family", first), *rest])
            error.cure = Cure("choose a family that holds it: {}; or {}", family_of, error.cure or "")
        raise
    require_accepted(target, names)


def _texts(options: Mapping[str, str | int | bool]) -> dict[str, str]:
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()
    }


def _conventions(system: System, options: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in options.items() if name in system.conventions}


def _forms(system: System, options: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in options.items() if name in system.forms}


def _keep(bound: BoundFamily, system: System) -> dict[str, str]:
    """The forms of a target that are those of the source."""
    return {
        name: bound.chosen[name] for name, form in system.forms.items() if form.kept and name in bound.chosen
    }


def _require_known(
    one: System, other: System, source_choices: Mapping[str, str], target_choices: Mapping[str, str]
) -> None:
    for name in source_choices:
        if name not in one.forms and name not in one.conventions:
            raise UsageError(f"unknown option {name!r} for system {one.name}", cure=_require(name, one))
    for name in target_choices:
        if name not in other.forms and name not in other.conventions and name not in one.conventions:
            raise UsageError(f"unknown option {name!r} for system {other.name}", cure=_require(name, other))


def _require(name: str, system: System) -> str:
    return choose(name, [*system.forms, *system.conventions])


def side_by_side(family: Family) -> dict[str, dict[str, list[str]]]:
    """Parameter → system → key path and axes in each form, as `wherry layouts` prints them."""
    table: dict[str, dict[str, list[str]]] = {name: {} for name in family.parameters}
    for system in family.systems.values():
        conventions = {name: one.usual for name, one in system.conventions.items()}
        for forms in form_choices(system, {}):
            slots = {"params": system.slots["params"][:1]}
            for template in templates(family, system, {**forms, **conventions}, slots):
                for name, layout in zip(template.parameters, template.layouts, strict=True):
                    texts = table[name].setdefault(system.name, [])
                    text = " · ".join([layout.text, *template.words])
                    if text not in texts:
                        texts.append(text)
    return table
