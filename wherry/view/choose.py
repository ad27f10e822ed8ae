"""choose: decides whether a conversion changes the layout, between two systems of one family.

A system defines more than a container: Hugging Face, Lingua, MaxText, T5X, PaxML and Penzai use different names and
shapes for the same parameters. Between two systems the declarations of a family apply (`wherry.view.system`), or the
conversion is refused (`wherry.view.foreign`). The tree does not change within one system, to a plain container, and
from one that holds the target's own tree, unless a layout option, an element type or a family is given. Then the
families are not imported: that would take longer than copying 100 MB.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.request import CONTAINERS, SCAN
from wherry.errors import UsageError
from wherry.tree.mapping import TREE_OPTIONS
from wherry.tree.spelling import spelled
from wherry.view.foreign import RENAME, in_form, require_own

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.core.request import LayoutRequest
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.format import Format


def relaid(
    checkpoint: Checkpoint,
    row: Format,
    options: Mapping[str, Any],
    wish: LayoutRequest,
    only: str | None,
    *,
    files: bool = True,
) -> tuple[Checkpoint, dict[str, Any], str | None]:
    """The source in the layout of the target's system.

    Args:
        checkpoint: the opened source.
        row: the target format.
        options: the options of `--set`.
        wish: the other layout options.
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
    if SCAN in options:
        rest = {name: value for name, value in options.items() if name != SCAN}
        from wherry.view.scan import scanned_view

        return scanned_view(checkpoint, str(options[SCAN])), rest, only
    own = {name: value for name, value in options.items() if name in row.options or name in TREE_OPTIONS}
    asked = {name: _word(value) for name, value in options.items() if name not in own}
    if wish.dtype and (dtypes.opaque(wish.dtype) or not dtypes.known(wish.dtype)):
        raise UsageError(
            f"invalid value for --dtype: {wish.dtype!r}", cure="use for example bfloat16 or float32"
        )
    if not asked and _same_tree(checkpoint, row, wish, own):
        return checkpoint, own, only
    from wherry.view.system import view

    seen = view(checkpoint, row, asked, wish, only, renamed=bool(own.get(RENAME)), files=files)
    if seen is not None:
        return seen, own, None
    require_own(checkpoint, row, own, wish)
    return checkpoint, {**own, **asked}, only


def _same_tree(checkpoint: Checkpoint, row: Format, wish: LayoutRequest, own: Mapping[str, Any]) -> bool:
    """Whether the tree stays unchanged, decided without loading any family.

    A tree that options respell is judged under its new key paths, once the plan has made them.
    """
    source = checkpoint.detection.format
    if wish.explicit or wish.config:
        return False
    if row.name == source or row.name in CONTAINERS:
        return True
    return source in CONTAINERS and (spelled(own) or in_form(checkpoint, row))


def _word(value: Any) -> str:
    """A choice in the spelling of declarations and of JSON; library callers may pass True, numbers and tables."""
    return value if isinstance(value, str) else json.dumps(value)
