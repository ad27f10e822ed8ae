"""The MaxText tree: how to detect it, and whether its layers are scanned.

Facts (MaxText 0.2.5 and its Linen era): parameters are below `params/params` (`decoder`, `token_embedder`); the
optimizer repeats one `params` level (`opt_state/0/mu/params/decoder/…`, `adam_pax` without the `0`); `nnx_aux/model`
holds every variable that is not a parameter. Fine-tuned and RL states lack the wrappers: `decoder` is at the root, or
below `base`, `model_params` or a single `params`; T5X has such trees too, so then the item's name or the recorded
`scan_layers` must confirm MaxText.

Scanned layers share one node (`decoder/layers/…`, also `dense_layers`, `moe_layers`, `scanned_blocks`, and blocks such
as `layers/layers_0`) and have a layer axis, `param_scan_axis`, by default 1. Unscanned layers are `layers_<i>`,
`dense_layers_<i>`, `moe_layers_<j>`; releases with a faulty renaming wrote `layers/<i>` and `dense_layer_<i>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.formats.systems import TreeForm

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import TensorSpec

WRAPPED: KeyPath = ("params", "params")
_OTHER_ROOTS: tuple[KeyPath, ...] = (("params",), ("base",), ("model_params",), ())
_MODEL_PARTS = frozenset({"decoder", "token_embedder"})
_FOREIGN_PARTS = frozenset({"encoder", "target"})
_OF_TORCH = "weight"  # a name of PyTorch's modules; Flax has kernel, scale and embedding
_SCANNED = re.compile(r"layers|dense_layers|moe_layers|scanned_blocks")
_UNSCANNED = re.compile(r"(layers|dense_layers|dense_layer|moe_layers|moe_layer)_\d+")
_ALIASES = re.compile(r"(dense_layer|moe_layer)_\d+")
_DEFAULT_AXIS = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """Structure of a MaxText tree.

    Attributes:
        root: key path of the node that holds `decoder`.
        scanned: whether layers are scanned; None if the tree has no layers, or both forms.
        groups: scanned group → (axis of the layers or None if unknown, their number).
        aliases: names of layers that only faulty releases wrote.
        mixed: whether the tree has both forms.
        nnx_aux: whether the tree has variables that are not parameters.
    """

    root: KeyPath
    scanned: bool | None = None
    groups: Mapping[str, tuple[int | None, int | None]] = field(
        default_factory=dict[str, tuple[int | None, int | None]]
    )
    aliases: tuple[str, ...] = ()
    mixed: bool = False
    nnx_aux: bool = False

    def to_json(self) -> dict[str, Any]:
        """The JSON form for the manifest's `custom["maxtext"]`."""
        groups = {name: {"axis": axis, "layers": layers} for name, (axis, layers) in self.groups.items()}
        fields: dict[str, Any] = {"parameters": "/".join(self.root), "nnx_aux": self.nnx_aux}
        if self.scanned is not None:
            fields["scan_layers"] = self.scanned
        return (
            fields
            | ({"scanned": groups} if groups else {})
            | ({"aliases": list(self.aliases)} if self.aliases else {})
        )


def parameter_root(paths: Iterable[KeyPath], *, confirmed: bool) -> KeyPath | None:
    """The root of the model's parameters, if this is a MaxText tree.

    Args:
        paths: key paths of the arrays.
        confirmed: whether other evidence confirms MaxText, so that trees without its wrappers count too.
    """
    seen = list(paths)
    if _has_model(seen, WRAPPED):
        return WRAPPED
    if not confirmed or any(part in _FOREIGN_PARTS for path in seen for part in path[:2]):
        return None
    return next((root for root in _OTHER_ROOTS if _has_model(seen, root)), None)


def _is_train_state(manifest: Manifest) -> bool:
    """Whether this is a MaxText tree: its decoder below the wrappers, or without any, as other trees have them."""
    paths = [path for path in manifest.tensors if path]
    if any(path[0] == WRAPPED[0] for path in paths):
        return _has_model(paths, WRAPPED)
    foreign = any(path[-1] == _OF_TORCH for path in paths)
    return not foreign and parameter_root(paths, confirmed=True) is not None


FORM = TreeForm(_is_train_state, "a train state, with its `decoder` below `params/params`", flax=False)


def look(specs: Mapping[KeyPath, TensorSpec] | Iterable[KeyPath], root: KeyPath) -> Shape:
    """Determine the structure of a tree.

    Args:
        specs: the arrays; with only key paths, the axes of scanned layers remain unknown.
        root: the result of `parameter_root`.
    """
    paths = list(specs)
    decoder = (*root, "decoder")
    below = [path for path in paths if path[: len(decoder)] == decoder]
    groups: dict[KeyPath, list[KeyPath]] = {}
    unscanned: set[str] = set()
    aliases: set[str] = set()
    for path in below:
        group, single = _layer_node(path, len(decoder))
        if group is not None:
            groups.setdefault(group, []).append(path)
        if single is not None:
            unscanned.add(single)
            aliases |= {single} if "/" in single or _ALIASES.fullmatch(single) else set()
    known = specs if hasattr(specs, "items") else {}
    return Shape(
        root=root,
        scanned=None if bool(groups) == bool(unscanned) else bool(groups),
        groups={"/".join(group): _axis(members, known) for group, members in sorted(groups.items())},  # pyright: ignore[reportArgumentType]
        aliases=tuple(sorted(aliases)),
        mixed=bool(groups) and bool(unscanned),
        nnx_aux=any(path[0] == "nnx_aux" for path in paths if path),
    )


def _has_model(paths: list[KeyPath], root: KeyPath) -> bool:
    depth = len(root)
    return any(
        len(path) > depth + 1 and path[:depth] == root and path[depth] in _MODEL_PARTS for path in paths
    )


def _layer_node(path: KeyPath, depth: int) -> tuple[KeyPath | None, str | None]:
    """The scanned group of an array, or the name of its unscanned layer; neither for other arrays.

    A pipeline's node may be between the decoder and its layers; `layers_remainder` holds the remainder of scanned
    blocks.
    """
    for at in range(depth, len(path) - 1):
        part = path[at]
        if part == "layers_remainder":
            return None, None
        if _SCANNED.fullmatch(part):
            if path[at + 1].isdecimal():
                return None, f"{part}/{path[at + 1]}"
            return path[: at + 1], None
        if _UNSCANNED.fullmatch(part):
            return None, part
    return None, None


def _axis(members: list[KeyPath], specs: Mapping[KeyPath, TensorSpec]) -> tuple[int | None, int | None]:
    """The axis with one extent in all arrays of a group, and that extent; the default axis if several qualify."""
    shapes = [specs[path].shape for path in members if path in specs]
    rank = min((len(shape) for shape in shapes), default=0)
    fitting = [axis for axis in range(rank) if len({shape[axis] for shape in shapes}) == 1]
    if _DEFAULT_AXIS in fitting:
        return _DEFAULT_AXIS, shapes[0][_DEFAULT_AXIS]
    return (fitting[0], shapes[0][fitting[0]]) if len(fitting) == 1 else (None, None)
