"""choose: decides whether a conversion changes the layout, between two systems of one family.

A system defines more than a container: Hugging Face, Lingua, MaxText, T5X, PaxML and Penzai use different names and
shapes for the same parameters. Between two systems the declarations of a family apply (`wherry.view.system`), or the
conversion is refused (`wherry.view.foreign`). The tree does not change within one system, to a plain container, and
from one that holds the target's own tree, unless a layout option, an element type or a family is given. Then the
families are not imported: that would take longer than copying 100 MB.

Layouts are declared for plain weights, so a quantised checkpoint is dequantised before a layout applies. Where the tree
does not change, codes and scales stay as they are, unless `--set dequantize=bfloat16` asks for plain weights. `--set
quantize=fp8` quantises what a Hugging Face folder gets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.keypath import render
from wherry.core.manifest import Manifest
from wherry.core.request import CONTAINERS, DEQUANTIZE, NONE, QUANTIZE, SCALES, SCAN, LayoutRequest
from wherry.errors import UnrepresentableError, UsageError, choose
from wherry.formats.registry import system_of
from wherry.tree.forms import rule_texts
from wherry.tree.mapping import TREE_OPTIONS
from wherry.tree.spelling import changes_key_paths
from wherry.tree.tree_reading import WRAPPERS, framework_words, share_first_word
from wherry.view.foreign import RENAME, in_form, is_copy_of, no_layout

if TYPE_CHECKING:
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.format import Format


_QUANTISED = "huggingface"


def plan_view(
    checkpoint: Checkpoint,
    row: Format,
    options: Mapping[str, Any],
    layout: LayoutRequest,
    only: str | None,
    *,
    files: bool = True,
) -> tuple[Checkpoint, dict[str, Any], str | None]:
    """The source in the layout of the target's system.

    Args:
        checkpoint: the opened source.
        row: the target format.
        options: the options of `--set`.
        layout: the other layout options.
        only: `params` or None.
        files: whether the target gets a config and other files; a live state has them already.

    Returns:
        The view (or the source itself, if the tree does not change), the remaining options for the format, and the
        rest of `only`.

    Raises:
        UsageError: a form or convention is missing or unknown.
        AmbiguousError: several families fit.
        UnrepresentableError: the family or the target does not support a tensor or a config attribute.
        MismatchError: config and shapes contradict each other.
        IncompleteError: a layer is missing.
    """
    if QUANTIZE in options or SCALES in options:
        return _quantised_view(checkpoint, row, options, layout, only, files=files)
    if DEQUANTIZE in options:
        rest = {name: value for name, value in options.items() if name != DEQUANTIZE}
        plain = _plain(checkpoint, layout, dtypes.full_name(str(options[DEQUANTIZE])))
        plain.uses = frozenset((DEQUANTIZE, "--config") if layout.config else (DEQUANTIZE,))
        return plan_view(plain, row, rest, layout, only, files=files)
    if SCAN in options:
        rest = {name: value for name, value in options.items() if name != SCAN}
        from wherry.view.scan import scanned_view

        scanned = scanned_view(checkpoint, str(options[SCAN]))
        scanned.uses |= {SCAN}
        return scanned, rest, only
    own = {name: value for name, value in options.items() if name in row.options or name in TREE_OPTIONS}
    requested = {  # in the spelling of declarations and of JSON; library callers may pass True, numbers and tables
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in options.items()
        if name not in own
    }
    if layout.dtype and (dtypes.opaque(layout.dtype) or not dtypes.is_known(layout.dtype)):
        raise UsageError(
            f"invalid value for --dtype: {layout.dtype!r}", cure=choose(layout.dtype, sorted(dtypes.NUMPY))
        )
    if not requested and _same_tree(checkpoint, row, layout, own):
        return _keep_names(checkpoint, row, layout, files=files), own, only
    from wherry.view.system import layout_view, refusal_of_config

    renames = rule_texts(own.get(RENAME) or ())
    seen = layout_view(checkpoint, row, requested, layout, only, renames=renames, files=files)
    if seen is not None:
        return seen, {name: value for name, value in own.items() if name != RENAME}, None
    try:
        require_own(checkpoint, row, own, layout)
    except UnrepresentableError as error:
        raise refusal_of_config(checkpoint, row, layout) or error from None
    require_unwrapped(checkpoint, row, own, layout)
    return _keep_names(checkpoint, row, layout, files=files), {**own, **requested}, only


def _keep_names(checkpoint: Checkpoint, row: Format, layout: LayoutRequest, *, files: bool) -> Checkpoint:
    """A source whose names are kept, with the files that a Hugging Face folder needs and that the user states."""
    foreign = system_of(checkpoint.detection.format) != row.system
    stated = bool(layout.config or layout.assets)
    if not (files and row.names_needed and (stated or (foreign and layout.family == NONE))):
        return checkpoint
    from wherry.view.companions_view import with_companions  # imports the families

    return with_companions(checkpoint, layout, proved=not foreign and layout.family != NONE)


def _quantised_view(
    checkpoint: Checkpoint, row: Format, options: Mapping[str, Any], layout: LayoutRequest, only: str | None,
    *, files: bool,
) -> tuple[Checkpoint, dict[str, Any], str | None]:  # fmt: skip
    """See `plan_view`, with the weights of the result quantised."""
    from wherry.quantized.coded_view import quantised_view

    if row.name != _QUANTISED or QUANTIZE not in options:
        raise UsageError(
            f"{QUANTIZE} and {SCALES} write quantised weights into a Hugging Face folder",
            cure=f"use --to {_QUANTISED} --set {QUANTIZE}=fp8",
        )
    rest = {name: value for name, value in options.items() if name not in (QUANTIZE, SCALES)}
    seen, own, only = plan_view(checkpoint, row, rest, layout, only, files=files)
    scales = None if options.get(SCALES) is None else str(options[SCALES])
    return quantised_view(seen, str(options[QUANTIZE]), scales, files=files), own, only


def _plain(checkpoint: Checkpoint, layout: LayoutRequest, dtype: str) -> Checkpoint:
    """The source with plain weights of an element type, as the user asks."""
    from wherry.quantized.ggml_view import without_blocks
    from wherry.quantized.view import dequantized_view
    from wherry.view.model import config_of

    found = dequantized_view(checkpoint, config_of(checkpoint, layout.config), dtype) or without_blocks(
        checkpoint, dtype
    )
    if found is None:
        raise UsageError(
            "nothing can be dequantised: no config next to the source states it, and it has no quantised blocks",
            uri=checkpoint.uri,
            cure=f"leave {DEQUANTIZE} out, or pass the model's config.json with --config",
        )
    return found


def _same_tree(checkpoint: Checkpoint, row: Format, layout: LayoutRequest, own: Mapping[str, Any]) -> bool:
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
        names = checkpoint.manifest.tensors
        return not (framework_words(names) or share_first_word(names))
    if row.name == source or row.name in CONTAINERS:
        return True
    if row.names_needed:
        return source in CONTAINERS and layout.family == NONE
    return source in CONTAINERS and (changes_key_paths(own) or in_form(checkpoint, row))


def require_own(
    checkpoint: Checkpoint, row: Format, options: Mapping[str, Any], layout: LayoutRequest
) -> None:
    """Refuse another system's checkpoint whose tree does not change, unless rules rename it.

    A format that makes the names itself (Lingua's) says which are missing, unless a config names the model.

    Raises:
        UnrepresentableError: the target is of another system than the source.
    """
    source = system_of(checkpoint.detection.format)
    if not source or not row.system or source == row.system or options.get(RENAME):
        return
    from wherry.view.model import model_words

    if row.adapt is None or model_words(checkpoint, layout.config):
        raise no_layout(checkpoint, row, layout)


def require_unwrapped(
    checkpoint: Checkpoint, row: Format, options: Mapping[str, Any], layout: LayoutRequest
) -> None:
    """Refuse a Hugging Face folder whose names have words of frameworks, if they are kept and not renamed.

    Raises:
        UnrepresentableError: transformers would load none of these tensors.
    """
    if not row.names_needed or layout.family == NONE or options.get(RENAME):
        return
    words = framework_words(checkpoint.manifest.tensors)
    if not words or system_of(checkpoint.detection.format) != row.system:
        return
    word = min(words)
    path = next(path for path in checkpoint.manifest.tensors if framework_words([path]))
    raise UnrepresentableError(
        f"names have `{word}`, which {WRAPPERS[word]} puts there and no model has: {render(path)}, …",
        uri=checkpoint.uri,
        path=render(path),
        cure=f"pass the model's --config to have it removed, or keep the names with --family {NONE}",
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
