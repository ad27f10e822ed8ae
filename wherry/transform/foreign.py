"""foreign: refuses a tree of another system at a system's format.

A system is not a container: what it restores has its own key paths and shapes, which only a family's layout makes. A
tree that is already in the system's form needs no layout: from another format of the same system, from a live state, or
from a container that holds one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core.keypath import render
from wherry.core.manifest import Manifest
from wherry.core.request import NONE, LayoutRequest
from wherry.cures import Argument, Cure
from wherry.errors import UnrepresentableError
from wherry.formats.registry import system_of
from wherry.layout.spelling import NAMES
from wherry.store.sidecar import read_sidecar

if TYPE_CHECKING:
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.format import Format

RENAME = "rename"  # rules by which a user spells the system's own key paths
_SHOWN = 2
_CONTAIN = Cure("keep the tree in a container with {}", Argument("to", "orbax"))
_DECLARE = Cure("declare the family's layouts with {}", Argument("family-file"))


def in_form(checkpoint: Checkpoint, row: Format) -> bool:
    """Whether a checkpoint's tree can become a checkpoint of this format without a layout."""
    if row.names_needed:
        return False
    if row.form is not None:
        return row.form.holds(checkpoint.manifest)
    depth = row.holds.depth if row.system and row.adapt is None else None
    return depth is None or all(len(path) <= depth for path in checkpoint.manifest.tensors)


def is_copy_of(checkpoint: Checkpoint, row: Format) -> bool:
    """Whether wherry made a checkpoint from one of the target's system, and kept its key paths and config."""
    from wherry.transform.model import CONFIG

    if CONFIG not in {one.name for one in checkpoint.manifest.companions}:
        return False
    sidecar = read_sidecar(checkpoint.location)
    if sidecar is None or sidecar.receipt is None:
        return False
    origin = sidecar.manifest.origin
    return system_of(sidecar.receipt.source.format) == row.system and not {"layout", NAMES} & origin.keys()


def no_layout(
    checkpoint: Checkpoint,
    row: Format,
    layout: LayoutRequest,
    tree: Manifest | None = None,
    *,
    family: str = "",
) -> UnrepresentableError:
    """The refusal: the family that was seen, those of the target's system, and the cure.

    Args:
        checkpoint: the source.
        row: the target format.
        layout: the options of the layout.
        tree: the source's tree with the key paths of the target, if they were judged.
        family: the family that applies, if one does.
    """
    from wherry.families import families_of_system
    from wherry.transform.model import config_of
    from wherry.transform.overview import without_layouts

    seen = (
        f"family {family}"
        if family
        else _describe_source(checkpoint, tree or checkpoint.manifest, layout.config)
    )
    form = f"; {row.name} restores {row.form.words}" if row.form else ""
    if not row.system:
        what = f"no family declares layouts for {seen}: a data type or an option of a layout needs them"
        cure = Cure("leave the options out to keep the tree, or {}", _DECLARE)
    elif layout.family == NONE:
        what = f"{row.name} is no container: without a layout it cannot hold {seen}{form}"
        cure = Cure("remove {} to convert between the systems, or {}", Argument("family", NONE), _CONTAIN)
    else:
        known = ", ".join(families_of_system(row.system)) or "no family"
        kind = (config_of(checkpoint, layout.config) or {}).get("model_type")
        reason = without_layouts().get(str(kind))  # why no family declares the model, of those that are known
        why = f" ({reason})" if reason else ""
        what = f"{row.name} has no layout for {seen}{why}{form}"
        cure = Cure("{}, or {}", _CONTAIN, _DECLARE)
        if row.names_needed and not system_of(checkpoint.detection.format):
            cure = Cure(
                "pass the model's {}, {}, or keep the names with {}",
                Argument("config"),
                _DECLARE,
                Argument("family", NONE),
            )
        cure = Cure("{}; {} has layouts for {}", cure, row.name, known)
    return UnrepresentableError(what, uri=checkpoint.uri, cure=cure)


def _describe_source(checkpoint: Checkpoint, tree: Manifest, config: str | None) -> str:
    """What the source is, by its config, else by the system that wrote it and its first key paths."""
    from wherry.transform.model import model_words

    said = model_words(checkpoint, config)
    if said:
        return said
    if not tree.tensors:
        return "a tree without tensors"
    names = ", ".join(render(path) for path in sorted(tree.tensors)[:_SHOWN])
    system = system_of(checkpoint.detection.format)
    if checkpoint.laid_out or not system:
        return f"a tree with the names {names}, …"
    return f"this tree of {system} ({names}, …)"
