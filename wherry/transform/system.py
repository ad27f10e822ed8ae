"""system: a view of the source in another system's layout, by the declarations of a model family.

The family is the one that the config names, or that wherry recorded; without either, the only one whose layouts fit
every tensor. A config that names a model of no family ends the search: names that resemble another model prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from wherry.core.request import NONE, LayoutRequest
from wherry.cures import Argument, Command, Cure
from wherry.errors import AmbiguousError, MismatchError, UnrepresentableError, UsageError, WherryError, choose
from wherry.families import (
    Projection,
    adapter_families,
    convert_layout,
    families,
    family_of_config,
    is_known,
    load_family,
    load_family_file,
    source_tree,
    system_of_format,
)
from wherry.families.adapters import is_of_adapters
from wherry.families.companions import (
    companion_facts,
    companion_files,
    sizes_stated,
    source_config,
    target_config,
)
from wherry.families.dependence import deciding_options, written_options
from wherry.families.roots import SourceTree, removal_rule
from wherry.families.schema import Family, System
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.format import Format
from wherry.formats.registry import is_container, system_of
from wherry.layout.spelling import read_renamed
from wherry.store.sidecar import read_sidecar
from wherry.transform.adapter import (
    adapter_facts,
    family_of_adapters,
    is_adapter,
    notes_of,
    require_rank,
    with_config,
)
from wherry.transform.foreign import in_form, is_copy_of, no_layout
from wherry.transform.model import config_of, model_named
from wherry.transform.stated_config import compared_config
from wherry.transform.view import LayoutView


def table(family: str | None = None, family_file: str | None = None) -> dict[str, Any]:
    """The layouts, facts and judges of a family, the output of `wherry layouts`; see `overview`.

    Raises:
        UsageError: the family is unknown, or the file does not declare a family.
    """
    from wherry.transform.overview import overview

    found = load_family_file(family_file) if family_file else load_family(family or "")
    return overview(found, own=not family_file)


def layout_view(
    checkpoint: Checkpoint,
    row: Format,
    requested: Mapping[str, str],
    layout: LayoutRequest,
    only: str | None,
    *,
    renames: Sequence[str] = (),
    files: bool = True,
) -> LayoutView | None:
    """See `view`, of a checkpoint whose weights may be quantised: then of its dequantised weights.

    Raises:
        UnrepresentableError: the target needs a layout, and the quantisation is not supported.
        WherryError: see `plan_view`.
    """
    from wherry.transform.dequantize import CHOICES, dequantized_view
    from wherry.transform.ggml_view import without_blocks
    from wherry.transform.quantized_tensors import require_stated

    whole = not checkpoint.is_view and not is_adapter(checkpoint)
    config = config_of(checkpoint, layout.config) if whole else None
    seen = partial(view, row=row, requested=requested, layout=layout, only=only, renames=renames, files=files)
    try:
        kind = layout.dtype if layout.dtype in CHOICES else None
        plain = dequantized_view(checkpoint, config, kind)
        if whole and plain is None:
            require_stated(checkpoint)
            plain = without_blocks(checkpoint, kind or "float32")
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
    requested: Mapping[str, str],
    layout: LayoutRequest,
    only: str | None,
    *,
    renames: Sequence[str] = (),
    files: bool = True,
) -> LayoutView | None:
    """The view that `wherry.transform.choose.plan_view` returns; None if the tree does not change.

    Args:
        checkpoint: the opened source.
        row: the target format.
        requested: options of `--set` for the layout: forms, conventions, facts and token ids.
        layout: the other layout options.
        only: `params` or None.
        files: whether the target gets a config and other files.
        renames: the user's rules, which spell key paths before any layout is bound. A tree without a layout can stay if
            they spell the target's.

    Raises:
        WherryError: see `plan_view`.
    """
    config = config_of(checkpoint, layout.config)
    recorded = _recorded_layout(checkpoint)
    written = {"family": recorded["family"], **recorded["to"]} if recorded else {}
    named = NamedSource(checkpoint, renames)
    family = _family(named, row, layout, config, written, requested)
    if family is None and layout.dtype:
        raise no_layout(checkpoint, row, layout)
    pair = _systems(family, named, row, layout) if family else None
    if family is None or pair is None:
        return None
    found, target = pair
    source = found.system
    needed = _is_needed(found, target, row, checkpoint, layout, requested=bool(requested))
    if not needed and not _is_compared(named, found, family, target, row, layout):
        return None
    of_target = {*target.forms, *target.conventions}
    _require_options(requested, family, source, target, row)
    token_ids = {
        name: _token_id(name, text) for name, text in requested.items() if name in target.write.token_ids
    }
    stated = {
        name: family.facts[name].stated(text) for name, text in requested.items() if name in family.facts
    }
    known = {name: text for name, text in written.items() if name in source.conventions}
    source_options = {
        name: text for name, text in requested.items() if name not in {*of_target, *stated, *token_ids}
    }
    differences = (
        compared_config(checkpoint, family, source, layout.config, recorded, stated) if layout.config else ()
    )
    config, config_source_name = source_config(checkpoint, family, source, layout.config)
    config = _of_plain_weights(config)
    of_adapter = is_of_adapters(family)
    noted = recorded if of_adapter else {}  # of the base, whose config is not in the folder of an adapter
    facts = {**noted.get("facts", {}), **companion_facts(checkpoint, family, source, layout.config)}
    projected = _convert(
        named, found, family, source.name, target.name, config=config, config_source=config_source_name,
        source_options=source_options, recorded=known,
        options={name: text for name, text in requested.items() if name in of_target},
        only=only, dtype=layout.dtype, target_format=row.name, stated=stated,
        facts={**facts, **(adapter_facts(checkpoint, family) if of_adapter else {})},
        sizes=None if config else sizes_stated(family, layout.config) or noted.get("sizes"), checkpoint=checkpoint,
    )  # fmt: skip
    if not needed:
        return None  # the config that the user states is that of the tensors, which keep their names
    given = config if source is target else _of_plain_weights(target_config(family, target, layout.config))
    made = companion_files(projected, given, checkpoint, layout.assets, token_ids) if files else None
    made = replace(made, warnings=(*differences, *made.warnings)) if made else None
    notes: Mapping[str, Any] | None = None
    if of_adapter:
        require_rank(checkpoint, projected)
        made = with_config(made, projected, checkpoint) if made else None
        notes = notes_of(projected, checkpoint)
    laid = LayoutView(
        checkpoint, projected, made, layout.dtype, only, notes, tree=found.tree, renames=renames,
        overflow=layout.allow_overflow,
    )  # fmt: skip
    laid.uses |= {"--family", "--family-file", "--config", "--dtype", *deciding_options(projected)}
    laid.uses_in_files = frozenset({"--assets", *token_ids, *written_options(projected)} if made else ())
    return laid


def _convert(
    named: NamedSource, found: SourceTree, family: Family, source: str, target: str, **how: Any
) -> Projection:
    """The projection of a source; if its names do not fit, the cure says which prefix hides a model of the family."""
    checkpoint = named.checkpoint
    convert = partial(convert_layout, checkpoint.manifest, family, source, target, tree=found.tree)
    forms = {name: text for name, text in how["source_options"].items() if name in found.system.forms}
    try:
        return convert(**how)
    except (UnrepresentableError, MismatchError) as error:
        shown = _shown_forms(convert, how, forms) if forms else {}
        for name in (name for name in forms if shown.get(name, forms[name]) != forms[name]):
            raise MismatchError(
                f"{name} = {forms[name]} is stated, but the tensors show {name} = {shown[name]}", uri=checkpoint.uri,
                cure=Cure("leave {} out", Argument("set", f"{name}={forms[name]}")),
            ) from error  # fmt: skip
        hidden = _hidden_model(named, found, family)
        raise (hidden or error) from (error if hidden else None)


def _shown_forms(
    convert: Callable[..., Projection], how: Mapping[str, Any], forms: Mapping[str, str]
) -> Mapping[str, str]:
    """The forms of a source as its tensors show them; empty if it does not fit without these statements either."""
    kept = {name: text for name, text in how["source_options"].items() if name not in forms}
    try:
        return convert(**{**how, "source_options": kept}).source.chosen
    except WherryError:
        return {}


def _hidden_model(named: NamedSource, found: SourceTree, family: Family) -> UnrepresentableError | None:
    """The refusal of a tree in which a prefix that no table knows hides a model of a family; None if none does."""
    checkpoint = named.checkpoint
    rule = found.unknown and removal_rule(
        family, checkpoint.detection.format, checkpoint.manifest, named.reading
    )
    if not rule:
        return None
    return UnrepresentableError(
        f"all names of the model begin with `{rule.partition('{')[0]}`, which no system of family {family.name} has",
        uri=checkpoint.uri,
        cure=Cure("remove it with {}", Argument("rename", rule)),
    )


def _is_compared(
    named: NamedSource, found: SourceTree, family: Family, target: System, row: Format, layout: LayoutRequest
) -> bool:
    """Whether the names stay and a config that the user states is compared with the tensors.

    Raises:
        UnrepresentableError: the names stay, but a prefix hides the model.
    """
    if not row.names_needed or found.system is not target:
        return False
    hidden = None if named.renames else _hidden_model(named, found, family)
    if hidden is not None:
        raise hidden
    return bool(layout.config) and not found.unknown


class NamedSource:
    """A source, the reading of its tree under the user's own renames, and the tree that each family sees in it.

    Attributes:
        checkpoint: the source.
        renames: the user's rules.
    """

    def __init__(self, checkpoint: Checkpoint, renames: Sequence[str] = ()) -> None:
        """Read the tree; nothing else is read.

        Raises:
            UsageError: a rule is invalid, or matches no key path.
        """
        self.checkpoint, self.renames = checkpoint, renames
        self.reading = read_renamed(checkpoint.manifest, renames)
        self._trees: dict[tuple[str, bool], SourceTree | None] = {}

    def tree(self, family: Family, *, peel: bool = True) -> SourceTree | None:
        """The system and the tree that a family sees in it; see `roots.source_tree`."""
        key = family.name, peel
        if key not in self._trees:
            self._trees[key] = source_tree(
                family, self.checkpoint.detection.format, self.checkpoint.manifest, self.reading, peel=peel
            )
        return self._trees[key]


def _of_plain_weights(config: dict[str, Any] | None) -> dict[str, Any] | None:
    """A config without the quantisation that a file of the user's states: what is laid out is dequantised."""
    from wherry.transform.schemes import without_quantization

    return without_quantization(config) if config else config


def _require_options(
    requested: Mapping[str, str], family: Family, source: System, target: System, row: Format
) -> None:
    """Refuse an option that neither of these two systems accepts, before one of them reports it as its own error."""
    known = [
        *row.options, *target.forms, *target.conventions, *source.forms, *source.conventions, *family.facts,
        *(target.write.token_ids if target is not source else ()),
    ]  # fmt: skip
    unknown = [name for name in requested if name not in known]
    if unknown:
        raise UsageError(
            f"unknown option {', '.join(map(repr, unknown))} for format {row.name} and its layout",
            cure=choose(unknown[0], known),
        )


def _token_id(name: str, text: str) -> int | list[int]:
    """The number of a special token, or the numbers of several, as a user states them.

    Raises:
        UsageError: it is neither.
    """
    parts = text.strip("[]").split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise UsageError(
            f"invalid value for {name}: {text!r}; expected the number of a token",
            cure=Cure(
                "state it as a number, `{}`, or as a list, `{}`",
                Argument("set", f"{name}=1"),
                Argument("set", f"{name}=[1,2]"),
            ),
        )
    numbers = [int(part) for part in parts]
    return numbers if text.startswith("[") else numbers[0]


def _is_needed(
    found: SourceTree,
    target: System,
    row: Format,
    checkpoint: Checkpoint,
    layout: LayoutRequest,
    *,
    requested: bool,
) -> bool:
    if requested or layout.explicit or _lacks_names(checkpoint, row):
        return True
    if found.system is target:
        own = row.system and not in_form(checkpoint, row) and row.adapt is None
        return bool(own) and found.tree.is_other and not found.unknown
    return not _tree_stays(checkpoint, row, layout)


def _lacks_names(checkpoint: Checkpoint, row: Format) -> bool:
    """Whether the target needs the names of a model, and nothing but a layout shows that the source has them."""
    return row.names_needed and system_of(checkpoint.detection.format) != row.system


def _tree_stays(checkpoint: Checkpoint, row: Format, layout: LayoutRequest) -> bool:
    """Whether the tree is kept: a config that the user names for a system's target says what the tensors are."""
    stated = layout.config and row.system and system_of(checkpoint.detection.format) != row.system
    return _plain(checkpoint, row) and not stated


def _plain(checkpoint: Checkpoint, row: Format) -> bool:
    """Whether the tree can be kept: in a container, within one system, or out of a container that holds its trees."""
    system = system_of(checkpoint.detection.format)
    kept = system == row.system if system else in_form(checkpoint, row)
    return is_container(row.name) or kept


def _family(
    named: NamedSource, row: Format, layout: LayoutRequest, config: Mapping[str, Any] | None,
    written: Mapping[str, str], requested: Mapping[str, str],
) -> Family | None:  # fmt: skip
    """The family of a checkpoint, or of the adapters of its models if it is one."""
    checkpoint = named.checkpoint
    found = _model_family(named, row, layout, config, written, requested)
    return (
        family_of_adapters(found, checkpoint, row) if found is not None and is_adapter(checkpoint) else found
    )


def _model_family(
    named: NamedSource, row: Format, layout: LayoutRequest, config: Mapping[str, Any] | None,
    written: Mapping[str, str], requested: Mapping[str, str],
) -> Family | None:  # fmt: skip
    checkpoint = named.checkpoint
    if layout.family == NONE:
        return None
    if layout.family_file or layout.family:
        found = (
            load_family_file(layout.family_file) if layout.family_file else load_family(layout.family or "")
        )
        if layout.family not in (None, found.name):
            raise UsageError(
                f"--family-file declares family {found.name}, but --family states {layout.family}",
                cure="remove one of the two options",
            )
        return found
    name = written.get("family") or (family_of_config(config) if config else None)
    if name is not None and is_known(name):
        return load_family(name)
    if _tree_stays(checkpoint, row, layout) and not (requested or layout.explicit):
        return None
    if name is not None:
        raise UsageError(
            f"the checkpoint was written with family {name!r}, which a family file declares",
            uri=checkpoint.uri,
            cure=Cure(
                "pass that {}, or keep the tree with {} and a container: {}",
                Argument("family-file"),
                Argument("family", NONE),
                Argument("to", "orbax"),
            ),
        )
    if model_named(config):
        if not requested and (named.renames or (row.names_needed and is_copy_of(checkpoint, row))):
            return None
        raise no_layout(checkpoint, row, layout)
    return _fitting(named, row, layout, required=bool(requested))


def _fitting(named: NamedSource, row: Format, layout: LayoutRequest, *, required: bool) -> Family | None:
    """The only family whose layouts fit every tensor and the config; None if none does.

    Trees without wrappers come first: only if no family fits them, wrappers are removed.
    """
    checkpoint = named.checkpoint
    names = (*families(), *(adapter_families() if is_adapter(checkpoint) else ()))
    every = list(map(load_family, names))
    fits: list[Family] = []
    for peel in (False, True):
        fits = fits or [one for one in every if _fits(one, named, row, layout, peel=peel)]
    fitting = [one for one in fits if _yields_to(one, named) not in {other.name for other in fits}]
    if len(fitting) > 1 and not all(_same_system(one, named, row) for one in fitting):
        raise AmbiguousError(
            f"several families fit this checkpoint: {', '.join(one.name for one in fitting)}",
            uri=checkpoint.uri,
            cure=Cure(
                "choose with {} or another of them, pass the model's config with {}, or keep the tree "
                "in a container with {}",
                Argument("family", fitting[0].name),
                Argument("config"),
                Argument("to", "orbax"),
            ),
        )
    if not fitting and required:
        raise UsageError(
            "no known model family fits every tensor",
            uri=checkpoint.uri,
            cure=Cure(
                "pass {}, or declare one with {}; run {} to list the families",
                Argument("family"),
                Argument("family-file"),
                Command("layouts"),
            ),
        )
    return fitting[0] if fitting else None


def _yields_to(family: Family, named: NamedSource) -> str | None:
    source = named.tree(family)
    return family.yields_in(source.system.name) if source else None


def _recorded_layout(checkpoint: Checkpoint) -> dict[str, Any]:
    """The layout that wherry recorded when it wrote the source: family, forms and conventions."""
    sidecar = read_sidecar(checkpoint.location)
    return (sidecar.manifest.origin.get("layout") or {}) if sidecar else {}


def _same_system(family: Family, named: NamedSource, row: Format) -> bool:
    """Whether source and target are the same system: then any of several fitting families can be used.

    Not for a tree in a container that needs the names of a model: its config depends on the family.
    """
    source = named.tree(family)
    same = source is not None and source.system is system_of_format(family, row.name)
    return same and not _lacks_names(named.checkpoint, row)


def _fits(family: Family, named: NamedSource, row: Format, layout: LayoutRequest, *, peel: bool) -> bool:
    """Whether both systems are declared and no tensor of the source is unknown."""
    target = system_of_format(family, row.name)
    found = named.tree(family, peel=peel) if target is not None else None
    if found is None or target is None:
        return False
    error = _refusal(family, named, found, layout)
    if error is None or isinstance(error, UnrepresentableError):
        return error is None
    return _fits_names(family, named, found)  # other errors are reported when the family is used


def _refusal(
    family: Family, named: NamedSource, found: SourceTree, layout: LayoutRequest
) -> WherryError | None:
    """Why a source is not a model of a family; None if it is one."""
    try:
        config, config_source_name = source_config(named.checkpoint, family, found.system, layout.config)
        convert_layout(
            named.checkpoint.manifest, family, found.system.name, found.system.name,
            config=config, config_source=config_source_name, tree=found.tree,
        )  # fmt: skip
    except WherryError as error:
        return error
    return None


def refusal_of_config(checkpoint: Checkpoint, row: Format, layout: LayoutRequest) -> WherryError | None:
    """The refusal of a config that states what no layout supports, although every tensor fits a family; else None.

    None too if the config or the user names the model. If several families refuse it, the most frequent refusal is
    returned.

    Args:
        checkpoint: the source, to which no family applies.
        row: the target format.
        layout: the options of the layout.
    """
    if layout.family or layout.explicit or model_named(config_of(checkpoint, layout.config)):
        return None
    named = NamedSource(checkpoint, ())
    refusals = [
        error
        for family in map(load_family, families())
        if system_of_format(family, row.name) is not None
        and (found := named.tree(family)) is not None
        and _fits_names(family, named, found)
        and (error := _refusal(family, named, found, layout)) is not None
    ]
    words = [error.what for error in refusals]
    return max(refusals, key=lambda error: words.count(error.what), default=None)


def _fits_names(family: Family, named: NamedSource, found: SourceTree) -> bool:
    """Whether no tensor of the source is unknown, whatever its config says: that of another family may be invalid."""
    try:
        name = found.system.name
        convert_layout(named.checkpoint.manifest, family, name, name, tree=found.tree)
    except WherryError as error:
        return not isinstance(error, UnrepresentableError)
    return True


def _systems(
    family: Family, named: NamedSource, row: Format, layout: LayoutRequest
) -> tuple[SourceTree, System] | None:
    checkpoint, found = named.checkpoint, named.tree(family)
    target = system_of_format(family, row.name)
    if (
        found is not None
        and is_container(row.name)
        and row.name in (checkpoint.detection.format, *found.system.formats)
    ):
        target = found.system  # a container keeps the source's if it is the same, or declared for that system
    if found is not None and target is not None:
        return found, target
    foreign = system_of(checkpoint.detection.format) != row.system
    foreign = foreign and not (named.renames or _plain(checkpoint, row))
    if target is None and row.system and (foreign or layout.explicit):
        raise no_layout(checkpoint, row, layout, family=family.name)
    if foreign or layout.explicit:
        lacking = row.name if target is None else checkpoint.detection.format
        raise UnrepresentableError(
            f"family {family.name} has no system with checkpoints of format {lacking}",
            uri=checkpoint.uri,
            cure=Cure(
                "choose one of: {}, or declare others with {}",
                ", ".join(sorted(family.systems)),
                Argument("family-file"),
            ),
        )
    return None
