"""Scan: stacks the layers of any tree into one tensor, or unstacks them, by a pattern instead of a family.

    layers_{layers} -> layers:0       one tensor for all layers, the layers along axis 0
    layers:1 -> layers_{layers}       a tensor for each layer, taken out of axis 1

The arrow points from the source to the target. The name in braces is the logical name of the axis that is added or
removed, if the tensors' axes have names. The result is a `Projection`, as for a conversion between two systems of a
family, so that the same plan, moves and checks apply; the reversed text is its inverse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from wherry.core.keypath import KeyPath, parse, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import AxisName, TensorSpec
from wherry.cures import Argument, Cure
from wherry.errors import MismatchError, UnrepresentableError, UsageError
from wherry.families import Projection, convert_layout, tree_family
from wherry.families.trees import SYSTEM
from wherry.formats.checkpoint import Checkpoint
from wherry.layout.copies import StoredTensor
from wherry.layout.layout import parse_layout
from wherry.transform.view import ChangeLayout, View, view_manifest

ARROW = "->"
HELP = "rule that stacks or unstacks layers: `layers_{layers} -> layers:0` or `layers:0 -> layers_{layers}`"
_BRACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_STACKED = re.compile(r"([^{}]+):([01])")
_LAYER = "layer"  # name of the axis in the family of a tree
_AXIS = f"{{{_LAYER}}}"
_CURE = Cure(
    "write `{}` to stack, `{}` to unstack; the axis is 0 or 1",
    Argument("set", "scan=layers_{layers} -> layers:0"),
    Argument("set", "scan=layers:0 -> layers_{layers}"),
)


@dataclass(frozen=True, slots=True)
class Scan:
    """A parsed scan option.

    Attributes:
        stacked: part of the key path where all layers are one tensor.
        unrolled: part of the key path where each layer is a tensor, with `{layer}`.
        axis: the axis along which layers are stacked; a tensor of lower rank is stacked along its last possible axis.
        name: logical name of that axis.
        stacks: whether the target is stacked; otherwise the source is.
    """

    stacked: str
    unrolled: str
    axis: int
    name: str
    stacks: bool

    @property
    def inverse(self) -> Scan:
        """The other direction."""
        return replace(self, stacks=not self.stacks)

    @property
    def text(self) -> str:
        """The text of the option."""
        sides = (self.unrolled.replace(_AXIS, f"{{{self.name}}}"), f"{self.stacked}:{self.axis}")
        return f" {ARROW} ".join(sides if self.stacks else reversed(sides))


def parse_scan(text: str) -> Scan:
    """Parse a scan option.

    Raises:
        UsageError: it has neither of the two forms.
    """
    sides = [side.strip() for side in text.split(ARROW)]
    stacks = len(sides) == 2 and "{" in sides[0]  # noqa: PLR2004  the two sides of the arrow
    unrolled, stacked = (sides[0], sides[-1]) if stacks else (sides[-1], sides[0])
    place, names = _STACKED.fullmatch(stacked), _BRACE.findall(unrolled)
    if len(sides) != 2 or place is None or len(names) != 1:  # noqa: PLR2004
        raise UsageError(f"invalid value for scan: {text!r}", cure=_CURE)
    return Scan(place[1], _BRACE.sub(_AXIS, unrolled), int(place[2]), names[0], stacks)


def scan_projection(manifest: Manifest, scan: Scan) -> Projection:
    """The projection of a checkpoint with its layers stacked or unstacked.

    Args:
        manifest: of the source.
        scan: the parsed option.

    Raises:
        UsageError: no key path of the source matches.
        IncompleteError: a layer is missing.
        MismatchError: layers differ in shapes or axis names.
        UnrepresentableError: a key path contains a character that patterns reserve.
    """
    source = {"scan_layers": not scan.stacks, "param_scan_axis": scan.axis}
    target = {"scan_layers": scan.stacks, "param_scan_axis": scan.axis}
    family = tree_family(manifest, scan.stacked, scan.unrolled)
    if not fits(manifest, scan):  # the family of a tree accepts both forms, so it would not report that
        wanted = scan.unrolled.replace(_AXIS, f"{{{scan.name}}}") if scan.stacks else scan.stacked
        raise UsageError(f"scan {scan.text!r}: no key path matches {wanted}", cure=_CURE)
    projected = convert_layout(manifest, family, SYSTEM, SYSTEM, source_options=source, options=target)
    named = _AxisNames(manifest, scan, projected)
    targets = {path: replace(one, spec=named.given(one)) for path, one in projected.targets.items()}
    return replace(projected, targets=targets)


def scanned_view(checkpoint: Checkpoint, text: str) -> Checkpoint:
    """A view of a checkpoint with its layers stacked or unstacked, to be converted like any other checkpoint.

    Numbers and text outside the layers are kept, and so are empty nodes and sequences, including those in each layer.

    Args:
        checkpoint: the source; it must stay open as long as the view.
        text: the scan option; see the module.

    Raises:
        WherryError: see `scan_projection`.
        UnrepresentableError: a leaf within the layers is not a tensor, or the layers have different empty nodes.
    """
    scan, source = parse_scan(text), checkpoint.manifest
    projected = scan_projection(source, scan)
    manifest = view_manifest(checkpoint, projected)
    moves = _Moves(scan, projected.source.solved.sizes[_LAYER])
    for path in source.values:
        if moves.place(path) is not None:
            raise UnrepresentableError(
                "a leaf within the layers is not a tensor, so it cannot be stacked",
                path=render(path),
                cure=Cure("pass {} to leave it out", Argument("ignore", "values")),
            )
    manifest = replace(
        manifest,
        values=source.values,
        empties=moves.empties(source.empties),
        lists=frozenset(new for path in source.lists for new in moves.moved(path)),
        kind=source.kind,
        custom=source.custom,
        origin={**source.origin, "scan": {"requested": scan.text, "inverse": scan.inverse.text}},
    )
    return View(checkpoint, ChangeLayout(source.tensors, projected), manifest)


def fits(manifest: Manifest, scan: Scan) -> bool:
    """Whether a checkpoint has layers in the form of a scan's source."""
    moves = _Moves(scan, 0)
    return any(moves.place(path) is not None for path in manifest.tensors)


class _Moves:
    """The new key paths of nodes that are not tensors."""

    def __init__(self, scan: Scan, layers: int) -> None:
        self._unrolled = parse_layout(scan.unrolled, "")
        self._stacked = parse(scan.stacked)
        self._stacks = scan.stacks
        self._layers = layers

    def place(self, path: KeyPath) -> tuple[int, int] | None:
        """Start and end of the part of a key path that matches the pattern; None if it does not match."""
        alone, together = len(self._unrolled.key), len(self._stacked)
        for start in range(len(path)):
            if self._unrolled.match(path[start : start + alone]) is not None:
                return (start, start + alone) if self._stacks else None
            if path[start : start + together] == self._stacked:
                return None if self._stacks else (start, start + together)
        return None

    def moved(self, path: KeyPath) -> list[KeyPath]:
        """The node's key paths in the target; empty for a sequence whose items were the layers."""
        place = self.place(path)
        if place is None:
            above = self._stacks and any(
                path[start:] == self._head() for start in range(len(path)) if len(self._head())
            )
            return [] if above else [path]
        start, end = place
        parts = [self._stacked]
        if not self._stacks:
            sizes = {_LAYER: self._layers}
            parts = [self._unrolled.path({_LAYER: layer}, sizes) for layer in range(self._layers)]
        return [(*path[:start], *part, *path[end:]) for part in parts]

    def empties(self, held: Mapping[KeyPath, str]) -> dict[KeyPath, str]:
        """Empty nodes under their new key paths; those within the layers must be the same in each."""
        found: dict[KeyPath, list[str]] = {}
        for path, kind in held.items():
            for new in self.moved(path):
                found.setdefault(new, []).append(kind)
        inside = {new for path in held if self.place(path) is not None for new in self.moved(path)}
        for path, kinds in found.items():
            if len(set(kinds)) > 1 or (self._stacks and path in inside and len(kinds) != self._layers):
                raise UnrepresentableError("the layers have different empty nodes", path=render(path))
        return {path: kinds[0] for path, kinds in found.items()}

    def _head(self) -> KeyPath:
        """The parts of the pattern before the layer's number, if that is a separate part."""
        sizes, at = {_LAYER: self._layers}, {_LAYER: 0}
        return self._unrolled.path(at, sizes)[:-1]


class _AxisNames:
    """Logical axis names, without shardings, for targets made of tensors with axis names."""

    def __init__(self, manifest: Manifest, scan: Scan, projected: Projection) -> None:
        self._scan = scan
        self._held: dict[str, list[TensorSpec]] = {}
        for path, stored in projected.source.stored.items():
            for piece in stored.pieces:
                self._held.setdefault(piece.parameter[1], []).append(manifest.tensors[path])

    def given(self, stored: StoredTensor) -> TensorSpec:
        """The tensor's spec with the axis names of its sources."""
        sources = self._held[stored.pieces[0].parameter[1]]
        axes, tags = {one.axes for one in sources}, [one.tags for one in sources]
        if len(axes) > 1 or any(one != tags[0] for one in tags):
            raise MismatchError(
                f"the layers have different axis names: {sorted(map(str, axes))}", path=stored.spec.name
            )
        names = axes.pop()
        rank = len(stored.spec.shape)
        return replace(stored.spec, axes=self._change_names(names, rank, sources[0]), tags=tags[0])

    def _change_names(
        self, names: tuple[AxisName, ...] | None, rank: int, source: TensorSpec
    ) -> tuple[AxisName, ...] | None:
        if names is None or rank == len(source.shape):
            return names
        place = min(self._scan.axis, max(rank, len(source.shape)) - 1)
        if self._scan.stacks:
            return (*names[:place], self._scan.name, *names[place:])
        if names[place] not in (None, self._scan.name):
            raise MismatchError(
                f"wrong name of axis {place}: expected {self._scan.name}, got {names[place]}",
                path=source.name,
                cure="put the name in the braces, or choose the other axis",
            )
        return (*names[:place], *names[place + 1 :])
