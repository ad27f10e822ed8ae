"""choose: what may be asked for of a conversion's layout, and whether it goes between two systems of one family.

A system is where a format says more than a container does: Hugging Face, Lingua, MaxText, T5X, PaxML and Penzai name
and shape the same parameters differently. Between two of them a family's declarations decide (`wherry.view.system`);
within one, and from or to a plain container, the tree stays as it is unless a layout option, an element type or a
family is asked for. Then nothing of the families is imported: they take longer to start than to copy 100 MB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.request import CONTAINERS, SCAN
from wherry.errors import UsageError
from wherry.tree.mapping import TREE_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.core.request import LayoutRequest
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.format import Format


def relaid(
    checkpoint: Checkpoint, row: Format, options: Mapping[str, Any], wish: LayoutRequest, only: str | None
) -> tuple[Checkpoint, dict[str, Any], str | None]:
    """The source as the target's system would have written it.

    Args:
        checkpoint: the opened source.
        row: the target format.
        options: as given with `--set`.
        wish: what else the user says.
        only: `params` or None.

    Returns:
        The view (or the source itself, where the tree stays), the options that are left for the format, and what of
        `only` is left to do.

    Raises:
        UsageError: a form or convention that nobody states, or one that is not known.
        AmbiguousError: several families fit.
        UnrepresentableError: a tensor or config attribute that the family does not know, or that the target lacks.
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
    if not asked and _same_tree(checkpoint, row, wish):
        return checkpoint, own, only
    from wherry.view.system import view

    seen = view(checkpoint, row, asked, wish, only)
    return (checkpoint, {**own, **asked}, only) if seen is None else (seen, own, None)


def _same_tree(checkpoint: Checkpoint, row: Format, wish: LayoutRequest) -> bool:
    """Whether it is clear without any family that the tree stays as it is."""
    pair = {row.name, checkpoint.detection.format}
    return not wish.explicit and not wish.config and (len(pair) == 1 or bool(pair & CONTAINERS))


def _word(value: Any) -> str:
    """A choice as declarations write it; who calls the library may say True."""
    return str(value).lower() if isinstance(value, bool) else str(value)
