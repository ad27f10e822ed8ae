"""choose: decides whether a conversion changes the layout, between two systems of one family.

A system defines more than a container: Hugging Face, Lingua, MaxText, T5X, PaxML and Penzai use different names and
shapes for the same parameters. Between two systems the declarations of a family apply (`system`), or the
conversion is refused (`foreign`). The tree does not change within one system, to a plain container, and
from one that holds the target's own tree, unless a layout option, an element type or a family is given. Then the
families are not imported: that would take longer than copying 100 MB.

Layouts are declared for plain weights, so a quantised checkpoint is dequantised before a layout applies. Where the tree
does not change, codes and scales stay as they are, unless `--set dequantize=bfloat16` asks for plain weights. `--set
quantize=fp8` quantises what a Hugging Face folder gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.keypath import render
from wherry.core.manifest import Manifest
from wherry.core.request import DEQUANTIZE, GROUP_SIZE, NONE, QUANTIZE, SCALES, SCAN, LayoutRequest
from wherry.cures import Argument, Arguments, Cure
from wherry.errors import UnrepresentableError, UsageError, choose
from wherry.formats.registry import find_format, formats, is_container, system_of
from wherry.layout.forms import rule_texts
from wherry.layout.spelling import changes_key_paths
from wherry.transform.foreign import RENAME, in_form, is_copy_of, no_layout
from wherry.transform.settings import TargetSettings, settle

if TYPE_CHECKING:
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.format import Format


_QUANTISED = "huggingface"
_OF_CODES = {QUANTIZE, SCALES, GROUP_SIZE}


def plan_view(
    checkpoint: Checkpoint,
    row: Format,
    options: Mapping[str, Any],
    layout: LayoutRequest,
    only: str | None,
    *,
    files: bool = True,
) -> tuple[Checkpoint, TargetSettings, str | None]:
    """The source in the layout of the target's system.

    Args:
        checkpoint: the opened source.
        row: the target format.
        options: the options of `--set`.
        layout: the other layout options.
        only: `params` or None.
        files: whether the target gets a config and other files; a live state has them already.

    Returns:
        The view (or the source itself, if the tree does not change), the options that it leaves to the plan, and the
        rest of `only`.

    Raises:
        UsageError: an option is unknown, or a form or convention is missing.
        AmbiguousError: several families fit.
        UnrepresentableError: the family or the target does not support a tensor or a config attribute.
        MismatchError: config and shapes contradict each other.
        IncompleteError: a layer is missing.
    """
    checkpoint = whole_source(checkpoint, row, layout.family)
    given = settle(row, options, layout.family_file)
    requested, changes = given.layout, given.transform
    if changes.keys() & _OF_CODES:
        return _quantised_view(checkpoint, row, options, layout, only, files=files)
    if DEQUANTIZE in changes:
        rest = {name: value for name, value in options.items() if name != DEQUANTIZE}
        plain = _plain(checkpoint, layout, dtypes.full_name(str(changes[DEQUANTIZE])))
        plain.uses = frozenset((DEQUANTIZE, "--config") if layout.config else (DEQUANTIZE,))
        return plan_view(plain, row, rest, layout, only, files=files)
    if SCAN in changes:
        from wherry.transform.scan import scanned_view

        scanned = scanned_view(checkpoint, str(changes[SCAN]))
        scanned.uses |= {SCAN}
        return scanned, replace(given, transform={}), only
    if layout.dtype and (dtypes.opaque(layout.dtype) or not dtypes.is_known(layout.dtype)):
        raise UsageError(
            f"invalid value for --dtype: {layout.dtype!r}", cure=choose(layout.dtype, sorted(dtypes.NUMPY))
        )
    if not requested and _same_tree(checkpoint, row, layout, given.tree):
        return _keep_names(checkpoint, row, layout, files=files), given, only
    from wherry.transform.system import layout_view, refusal_of_config

    renames = rule_texts(given.tree.get(RENAME) or ())
    seen = layout_view(checkpoint, row, requested, layout, only, renames=renames, files=files)
    if seen is not None:
        tree = {name: value for name, value in given.tree.items() if name != RENAME}
        return seen, replace(given, tree=tree, layout={}), None
    try:
        require_own(checkpoint, row, given.tree, layout)
    except UnrepresentableError as error:
        raise refusal_of_config(checkpoint, row, layout) or error from None
    require_unwrapped(checkpoint, row, given.tree, layout)
    return _keep_names(checkpoint, row, layout, files=files), given, only


def whole_source(checkpoint: Checkpoint, row: Format, family: str | None) -> Checkpoint:
    """A source in the layout of its own system, for a target of a system; a container gets the tree as it is.

    Args:
        checkpoint: the opened source, or a view of it.
        row: the target's format.
        family: of the layout; with NONE the tree is kept.
    """
    source = checkpoint.detection.format
    kept = checkpoint.is_view or not row.system or source == row.name or family == NONE
    if kept or source not in formats().facts:
        return checkpoint
    return find_format(source).whole(checkpoint)


def _keep_names(checkpoint: Checkpoint, row: Format, layout: LayoutRequest, *, files: bool) -> Checkpoint:
    """A source whose names are kept, with the files that a Hugging Face folder needs and that the user states."""
    foreign = system_of(checkpoint.detection.format) != row.system
    stated = bool(layout.config or layout.assets)
    if not (files and row.names_needed and (stated or (foreign and layout.family == NONE))):
        return checkpoint
    from wherry.transform.stated_config import with_companions  # imports the families

    return with_companions(checkpoint, layout, proved=not foreign and layout.family != NONE)


def _quantised_view(
    checkpoint: Checkpoint, row: Format, options: Mapping[str, Any], layout: LayoutRequest, only: str | None,
    *, files: bool,
) -> tuple[Checkpoint, TargetSettings, str | None]:  # fmt: skip
    """See `plan_view`, with the weights of the result quantised."""
    from wherry.transform.quantize import quantised_view

    if row.name != _QUANTISED or QUANTIZE not in options:
        raise UsageError(
            f"{QUANTIZE}, {SCALES} and {GROUP_SIZE} write quantised weights into a Hugging Face folder",
            cure=Cure("use {}", Arguments(Argument("to", _QUANTISED), Argument("set", f"{QUANTIZE}=fp8"))),
        )
    rest = {name: value for name, value in options.items() if name not in _OF_CODES}
    seen, left, only = plan_view(checkpoint, row, rest, layout, only, files=files)
    scales = None if options.get(SCALES) is None else str(options[SCALES])
    size = options.get(GROUP_SIZE)
    return quantised_view(seen, str(options[QUANTIZE]), scales, size, files=files), left, only


def _plain(checkpoint: Checkpoint, layout: LayoutRequest, dtype: str) -> Checkpoint:
    """The source with plain weights of an element type, as the user asks."""
    from wherry.transform.dequantize import dequantized_view
    from wherry.transform.ggml_view import without_blocks
    from wherry.transform.model import config_of

    found = dequantized_view(checkpoint, config_of(checkpoint, layout.config), dtype) or without_blocks(
        checkpoint, dtype
    )
    if found is None:
        raise UsageError(
            "nothing can be dequantised: no config next to the source states it, and it has no quantised blocks",
            uri=checkpoint.uri,
            cure=Cure(
                "leave {} out, or pass the model's config.json with {}", DEQUANTIZE, Argument("config")
            ),
        )
    return found


def _same_tree(checkpoint: Checkpoint, row: Format, layout: LayoutRequest, tree: Mapping[str, Any]) -> bool:
    """Whether the tree stays unchanged, decided without loading any family.

    A tree that options respell is judged under its new key paths, once the plan has made them. Names in a Hugging Face
    folder that may be wrapped are judged by a family.
    """
    source = checkpoint.detection.format
    if row.names_needed and row.name == source and layout.family == NONE:
        return True
    if layout.explicit or layout.config:
        return False
    if row.name == source and row.names_needed:
        from wherry.layout.tree_reading import framework_words, share_first_word

        names = checkpoint.manifest.tensors
        return not (framework_words(names) or share_first_word(names))
    if row.name == source or is_container(row.name):
        return True
    if row.names_needed:
        return is_container(source) and layout.family == NONE
    return is_container(source) and (changes_key_paths(tree) or in_form(checkpoint, row))


def require_own(checkpoint: Checkpoint, row: Format, tree: Mapping[str, Any], layout: LayoutRequest) -> None:
    """Refuse another system's checkpoint whose tree does not change, unless rules rename it.

    A format that makes the names itself (Lingua's) says which are missing, unless a config names the model.

    Raises:
        UnrepresentableError: the target is of another system than the source.
    """
    source = system_of(checkpoint.detection.format)
    if not source or not row.system or source == row.system or tree.get(RENAME):
        return
    from wherry.transform.model import model_words

    if row.adapt is None or model_words(checkpoint, layout.config):
        raise no_layout(checkpoint, row, layout)


def require_unwrapped(
    checkpoint: Checkpoint, row: Format, tree: Mapping[str, Any], layout: LayoutRequest
) -> None:
    """Refuse a Hugging Face folder whose names have words of frameworks, if they are kept and not renamed.

    Raises:
        UnrepresentableError: transformers would load none of these tensors.
    """
    if not row.names_needed or layout.family == NONE or tree.get(RENAME):
        return
    from wherry.layout.tree_reading import WRAPPERS, framework_words

    words = framework_words(checkpoint.manifest.tensors)
    if not words or system_of(checkpoint.detection.format) != row.system:
        return
    word = min(words)
    path = next(path for path in checkpoint.manifest.tensors if framework_words([path]))
    raise UnrepresentableError(
        f"names have `{word}`, which {WRAPPERS[word]} puts there and no model has: {render(path)}, …",
        uri=checkpoint.uri,
        path=render(path),
        cure=Cure(
            "pass the model's {} to have it removed, or keep the names with {}",
            Argument("config"),
            Argument("family", NONE),
        ),
    )


def require_form(checkpoint: Checkpoint, tree: Manifest, row: Format, layout: LayoutRequest) -> None:
    """Refuse a tree that is not in the form of the target's system.

    Args:
        checkpoint: the source; views in a system's layout, and checkpoints of the system itself, are in its form.
        tree: the source's tree with the key paths of the target.
        row: the target format.
        layout: the options of the layout, for the message.

    Raises:
        UnrepresentableError: the system could not restore it.
    """
    if checkpoint.laid_out or system_of(checkpoint.detection.format) == row.system:
        return
    named = not row.names_needed or layout.family == NONE or is_copy_of(checkpoint, row)
    if not named or (row.form is not None and not row.form.holds(tree)):
        raise no_layout(checkpoint, row, layout, tree)
