"""system: a view of the source in another system's layout, by the declarations of a model family.

The family is the one that the config names, or that wherry recorded; without either, the only one whose layouts fit
every tensor. A config that names a model of no family ends the search: names that resemble another model prove nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from wherry.core.request import CONTAINERS, DEQUANTIZE, NONE, QUANTIZE, SCALES, SCAN
from wherry.errors import AmbiguousError, UnrepresentableError, UsageError, WherryError, choose
from wherry.families import (
    adapter_families,
    convert_layout,
    families,
    family_of_config,
    is_known,
    load_family,
    load_family_file,
    system_of_format,
    system_of_tree,
)
from wherry.families.adapters import ALPHA, is_of_adapters
from wherry.families.companions import (
    facts_beside,
    outfit,
    sizes_stated,
    source_config,
    target_config,
)
from wherry.formats.registry import checked_options, system_of
from wherry.storage.sidecar import read_sidecar
from wherry.storage.stores import locate
from wherry.view.adapter import (
    adapter_facts,
    family_of_adapters,
    is_adapter,
    notes_of,
    require_rank,
    with_config,
)
from wherry.view.foreign import in_form, no_layout
from wherry.view.model import config_of, model_named
from wherry.view.view import LayoutView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wherry.core.request import LayoutRequest
    from wherry.families.schema import Family, System
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.format import Format


def layout_options() -> frozenset[str]:
    """All names that `--set` accepts for layouts: forms and conventions of all systems, facts, and those of values."""
    known = [load_family(name) for name in families()]
    systems = [system for family in known for system in family.systems.values()]
    facts = (name for family in known for name in family.facts)
    return frozenset(
        [
            SCAN,
            DEQUANTIZE,
            QUANTIZE,
            SCALES,
            ALPHA,
            *facts,
            *(name for one in systems for name in (*one.forms, *one.conventions)),
        ]
    )


def table(family: str | None = None, family_file: str | None = None) -> dict[str, Any]:
    """The layouts, facts and judges of a family, the output of `wherry layouts`; see `overview`.

    Raises:
        UsageError: the family is unknown, or the file does not declare a family.
    """
    from wherry.view.overview import overview

    found = load_family_file(family_file) if family_file else load_family(family or "")
    return overview(found, own=not family_file)


def laid_out(
    checkpoint: Checkpoint,
    row: Format,
    asked: Mapping[str, str],
    wish: LayoutRequest,
    only: str | None,
    *,
    renamed: bool = False,
    files: bool = True,
) -> LayoutView | None:
    """See `view`, of a checkpoint whose weights may be quantised: then of its dequantised weights.

    Raises:
        UnrepresentableError: the target needs a layout, and the quantisation is not supported.
        WherryError: see `relaid`.
    """
    from wherry.quantized.view import CHOICES, dequantized_view

    whole = not checkpoint.is_view and not is_adapter(checkpoint)
    config = config_of(checkpoint, wish.config) if whole else None
    seen = partial(view, row=row, asked=asked, wish=wish, only=only, renamed=renamed, files=files)
    try:
        plain = dequantized_view(checkpoint, config, wish.dtype if wish.dtype in CHOICES else None)
    except WherryError:
        if _keeps_tree(seen, checkpoint):
            return None
        raise
    return seen(plain or checkpoint)


def _keeps_tree(seen: Callable[[Checkpoint], LayoutView | None], checkpoint: Checkpoint) -> bool:
    """Whether no layout applies, so that codes and scales are kept."""
    try:
        return seen(checkpoint) is None
    except WherryError:
        return False


def view(
    checkpoint: Checkpoint,
    row: Format,
    asked: Mapping[str, str],
    wish: LayoutRequest,
    only: str | None,
    *,
    renamed: bool = False,
    files: bool = True,
) -> LayoutView | None:
    """The view that `wherry.view.choose.relaid` returns; None if the tree does not change.

    Args:
        checkpoint: the opened source.
        row: the target format.
        asked: forms and conventions.
        wish: the other layout options.
        only: `params` or None.
        files: whether the target gets a config and other files.
        renamed: whether the user's own rules spell the target's key paths, so that a tree without a layout can stay.

    Raises:
        WherryError: see `relaid`.
    """
    config = config_of(checkpoint, wish.config)
    layout = _recorded_layout(checkpoint)
    written = {"family": layout["family"], **layout["to"]} if layout else {}
    family = _family(checkpoint, row, wish, config, written, asked, renamed=renamed)
    if family is None and wish.dtype:
        raise no_layout(checkpoint, row, wish)
    pair = _systems(family, checkpoint, row, wish, renamed=renamed) if family else None
    if family is None or pair is None or not _is_needed(*pair, row, checkpoint, wish, asked=bool(asked)):
        return None
    source, target = pair
    theirs = {*target.forms, *target.conventions}
    _require_options(asked, family, source, target, row)
    stated = {name: family.facts[name].stated(text) for name, text in asked.items() if name in family.facts}
    known = {name: text for name, text in written.items() if name in source.conventions}
    mine = {name: text for name, text in asked.items() if name not in {*theirs, *stated}}
    config, told_by = source_config(checkpoint, family, source, wish.config)
    config = _of_plain_weights(config)
    of_adapter = is_of_adapters(family)
    noted = layout if of_adapter else {}  # of the base, whose config is not beside an adapter
    facts = {**noted.get("facts", {}), **facts_beside(checkpoint, family, source, wish.config)}
    projected = convert_layout(
        checkpoint.manifest, family, source.name, target.name, config=config, config_source=told_by,
        source_options={**known, **mine},
        options={name: text for name, text in asked.items() if name in theirs},
        only=only, dtype=wish.dtype, target_format=row.name, stated=stated,
        facts={**facts, **(adapter_facts(checkpoint, family) if of_adapter else {})},
        sizes=None if config else sizes_stated(family, wish.config) or noted.get("sizes"), checkpoint=checkpoint,
    )  # fmt: skip
    given = config if source is target else _of_plain_weights(target_config(family, target, wish.config))
    made = outfit(projected, given, checkpoint, wish.assets) if files else None
    if not of_adapter:
        return LayoutView(checkpoint, projected, made, wish.dtype, only)
    require_rank(checkpoint, projected)
    made = with_config(made, projected, checkpoint) if made else None
    return LayoutView(checkpoint, projected, made, wish.dtype, only, notes_of(projected, checkpoint))


def _of_plain_weights(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """A config without the quantisation that a file of the user's states: what is laid out is dequantised."""
    from wherry.quantized.schemes import without_quantization

    return without_quantization(config) if config else config


def _require_options(
    asked: Mapping[str, str], family: Family, source: System, target: System, row: Format
) -> None:
    """Refuse an option that neither of these two systems accepts, before one of them reports it as its own error."""
    known = [
        *row.options, *target.forms, *target.conventions, *source.forms, *source.conventions, *family.facts,
    ]  # fmt: skip
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise UsageError(
            f"unknown option {', '.join(map(repr, unknown))} for format {row.name} and its layout",
            cure=choose(unknown[0], known),
        )


def _is_needed(
    source: System, target: System, row: Format, checkpoint: Checkpoint, wish: LayoutRequest, *, asked: bool
) -> bool:
    return asked or wish.explicit or (source is not target and not _tree_stays(checkpoint, row, wish))


def _tree_stays(checkpoint: Checkpoint, row: Format, wish: LayoutRequest) -> bool:
    """Whether the tree is kept: a config that the user names for a system's target says what the tensors are."""
    return _plain(checkpoint, row) and not (wish.config and row.system)


def _plain(checkpoint: Checkpoint, row: Format) -> bool:
    """Whether the tree can be kept: in a container, within one system, or out of a container that holds its trees."""
    system = system_of(checkpoint.detection.format)
    kept = system == row.system if system else in_form(checkpoint, row)
    return row.name in CONTAINERS or kept


def _family(
    checkpoint: Checkpoint, row: Format, wish: LayoutRequest, config: Mapping[str, Any] | None,
    written: Mapping[str, str], asked: Mapping[str, str], *, renamed: bool,
) -> Family | None:  # fmt: skip
    """The family of a checkpoint, or of the adapters of its models if it is one."""
    found = _model_family(checkpoint, row, wish, config, written, asked, renamed=renamed)
    return (
        family_of_adapters(found, checkpoint, row) if found is not None and is_adapter(checkpoint) else found
    )


def _model_family(
    checkpoint: Checkpoint, row: Format, wish: LayoutRequest, config: Mapping[str, Any] | None,
    written: Mapping[str, str], asked: Mapping[str, str], *, renamed: bool,
) -> Family | None:  # fmt: skip
    if wish.family == NONE:
        return None
    if wish.family_file or wish.family:
        return load_family_file(wish.family_file) if wish.family_file else load_family(wish.family or "")
    name = written.get("family") or (family_of_config(config) if config else None)
    if name is not None and is_known(name):
        return load_family(name)
    if _tree_stays(checkpoint, row, wish) and not (asked or wish.explicit):
        return None
    if name is not None:
        raise UsageError(
            f"the checkpoint was written with family {name!r}, which a family file declares", uri=checkpoint.uri,
            cure=f"pass that --family-file, or keep the tree with --family {NONE} and a container: --to orbax",
        )  # fmt: skip
    if model_named(config):
        if renamed and not asked:
            return None
        checked_options(row, {name: asked[name] for name in asked if name not in layout_options()})
        raise no_layout(checkpoint, row, wish)
    return _fitting(checkpoint, row, wish, asked=bool(asked))


def _fitting(checkpoint: Checkpoint, row: Format, wish: LayoutRequest, *, asked: bool) -> Family | None:
    """The only family whose layouts fit every tensor and the config; None if none does."""
    names = (*families(), *(adapter_families() if is_adapter(checkpoint) else ()))
    fits = [one for one in map(load_family, names) if _fits(one, checkpoint, row, wish)]
    fitting = [one for one in fits if _yields_to(one, checkpoint) not in {other.name for other in fits}]
    if len(fitting) > 1 and not all(_same_system(one, checkpoint, row) for one in fitting):
        raise AmbiguousError(
            f"several families fit this checkpoint: {', '.join(one.name for one in fitting)}",
            uri=checkpoint.uri,
            cure=f"choose with --family {fitting[0].name} or another of them, pass the model's config with --config, "
            "or keep the tree in a container with --to orbax",
        )
    if not fitting and asked:
        raise UsageError(
            "no known model family fits every tensor", uri=checkpoint.uri,
            cure="pass --family, or declare one with --family-file; run `wherry layouts` to list the families",
        )  # fmt: skip
    return fitting[0] if fitting else None


def _yields_to(family: Family, checkpoint: Checkpoint) -> str | None:
    source = _source(family, checkpoint)
    return family.yields_in(source.name) if source else None


def _recorded_layout(checkpoint: Checkpoint) -> dict[str, Any]:
    """The layout that wherry recorded when it wrote the source: family, forms and conventions."""
    sidecar = read_sidecar(locate(checkpoint.uri))
    return (sidecar.manifest.origin.get("layout") or {}) if sidecar else {}


def _same_system(family: Family, checkpoint: Checkpoint, row: Format) -> bool:
    """Whether source and target are the same system: then any of several fitting families can be used."""
    return _source(family, checkpoint) is system_of_format(family, row.name)


def _source(family: Family, checkpoint: Checkpoint) -> System | None:
    return system_of_tree(family, checkpoint.detection.format, checkpoint.manifest)


def _fits(family: Family, checkpoint: Checkpoint, row: Format, wish: LayoutRequest) -> bool:
    """Whether both systems are declared and no tensor of the source is unknown."""
    source = _source(family, checkpoint)
    target = system_of_format(family, row.name)
    if source is None or target is None:
        return False
    try:
        config, told_by = source_config(checkpoint, family, source, wish.config)
        convert_layout(
            checkpoint.manifest, family, source.name, source.name, config=config, config_source=told_by
        )
    except UnrepresentableError:
        return False
    except WherryError:
        return _fits_names(family, checkpoint, source)  # other errors are reported when the family is used
    return True


def _fits_names(family: Family, checkpoint: Checkpoint, source: System) -> bool:
    """Whether no tensor of the source is unknown, whatever its config says: that of another family may be invalid."""
    try:
        convert_layout(checkpoint.manifest, family, source.name, source.name)
    except WherryError as error:
        return not isinstance(error, UnrepresentableError)
    return True


def _systems(
    family: Family, checkpoint: Checkpoint, row: Format, wish: LayoutRequest, *, renamed: bool
) -> tuple[System, System] | None:
    source = _source(family, checkpoint)
    target = _target(family, row, checkpoint, source)
    if source is not None and target is not None:
        return source, target
    foreign = system_of(checkpoint.detection.format) != row.system
    foreign = foreign and not (renamed or _plain(checkpoint, row))
    if target is None and row.system and (foreign or wish.explicit):
        raise no_layout(checkpoint, row, wish, family=family.name)
    if foreign or wish.explicit:
        lacking = row.name if target is None else checkpoint.detection.format
        raise UnrepresentableError(
            f"family {family.name} has no system with checkpoints of format {lacking}",
            uri=checkpoint.uri,
            cure=f"choose one of: {', '.join(sorted(family.systems))}, or declare others with --family-file",
        )
    return None


def _target(family: Family, row: Format, checkpoint: Checkpoint, source: System | None) -> System | None:
    """The target's system; a container keeps the source's if it is the same, or declared for that system."""
    formats = (checkpoint.detection.format, *(source.formats if source else ()))
    keeps = row.name in CONTAINERS and source is not None and row.name in formats
    return source if keeps else system_of_format(family, row.name)
