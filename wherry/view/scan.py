"""Scan: layers of any tree stacked into one tensor, or taken apart, by a pattern instead of a family.

    layers_{layers} -> layers:0       one tensor for all layers, the layers along axis 0
    layers:1 -> layers_{layers}       a tensor for each layer, taken out of axis 1

The arrow goes from what the source has to what the target gets. The name in braces is the logical name of the axis that
comes or goes, where the tensors' axes have names. What comes of it is a `Projection`, as for a conversion between two
systems of a family, so that the same plan, moves and checks carry it; the opposite text is its inverse.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wherry.core.keypath import KeyPath, parse, render
from wherry.errors import MismatchError, UnrepresentableError, UsageError
from wherry.families import convert_layout, tree_family
from wherry.families.trees import SYSTEM
from wherry.layout.layout import parse_layout
from wherry.view.view import View, view_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import AxisName, TensorSpec
    from wherry.families import Projection
    from wherry.formats.checkpoint import Checkpoint
    from wherry.layout.copies import StoredTensor

ARROW = "->"
HELP = "rule that stacks or unstacks layers: `layers_{layers} -> layers:0` or `layers:0 -> layers_{layers}`"
_BRACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_STACKED = re.compile(r"([^{}]+):([01])")
_LAYER = "layer"  # what the family of a tree calls the axis
_AXIS = f"{{{_LAYER}}}"
_CURE = "write `layers_{layers} -> layers:0` to stack, `layers:0 -> layers_{layers}` to take apart; the axis is 0 or 1"


@dataclass(frozen=True, slots=True)
class Scan:
    """A parsed text.

    Attributes:
        stacked: parts of a key path at which layers are one tensor.
        unrolled: the same where each layer has its own, with `{layer}`.
        axis: along which they are stacked; a tensor of too low rank is stacked along its last possible one.
        name: logical name of that axis.
        stacks: whether the target is stacked; else the source is.
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
        """As it is written."""
        sides = (self.unrolled.replace(_AXIS, f"{{{self.name}}}"), f"{self.stacked}:{self.axis}")
        return f" {ARROW} ".join(sides if self.stacks else reversed(sides))


def parse_scan(text: str) -> Scan:
    """Read a text.

    Raises:
        UsageError: it is not of either form.
    """
    sides = [side.strip() for side in text.split(ARROW)]
    stacks = len(sides) == 2 and "{" in sides[0]  # noqa: PLR2004  the two sides of the arrow
    unrolled, stacked = (sides[0], sides[-1]) if stacks else (sides[-1], sides[0])
    place, names = _STACKED.fullmatch(stacked), _BRACE.findall(unrolled)
    if len(sides) != 2 or place is None or len(names) != 1:  # noqa: PLR2004
        raise UsageError(f"scan={text!r} is not possible", cure=_CURE)
    return Scan(place[1], _BRACE.sub(_AXIS, unrolled), int(place[2]), names[0], stacks)


def scanned(manifest: Manifest, scan: Scan) -> Projection:
    """A checkpoint with its layers stacked or taken apart.

    Args:
        manifest: of the source.
        scan: what becomes what.

    Raises:
        UsageError: the source has nothing of the kind.
        IncompleteError: a layer is missing.
        MismatchError: layers have other shapes, or other names for their axes.
        UnrepresentableError: a key path holds a sign that patterns reserve.
    """
    source = {"scan_layers": not scan.stacks, "param_scan_axis": scan.axis}
    target = {"scan_layers": scan.stacks, "param_scan_axis": scan.axis}
    family = tree_family(manifest, scan.stacked, scan.unrolled)
    _require_source(manifest, scan)
    projected = convert_layout(manifest, family, SYSTEM, SYSTEM, source_options=source, options=target)
    named = _AxisNames(manifest, scan, projected)
    targets = {path: replace(one, spec=named.given(one)) for path, one in projected.targets.items()}
    return replace(projected, targets=targets)


def scanned_view(checkpoint: Checkpoint, text: str) -> Checkpoint:
    """A checkpoint seen with its layers stacked or taken apart, to be planned and carried as any other.

    Numbers and text outside the layers stay, and so do empty nodes and sequences, also those within each layer.

    Args:
        checkpoint: the source; it must stay open as long as the view.
        text: see the module.

    Raises:
        WherryError: see `scanned`.
        UnrepresentableError: a leaf within the layers is no tensor, or the layers hold different empty nodes.
    """
    scan, source = parse_scan(text), checkpoint.manifest
    projected = scanned(source, scan)
    manifest = view_manifest(checkpoint, projected)
    moves = _Moves(scan, projected.source.solved.sizes[_LAYER])
    for path in source.values:
        if moves.place(path) is not None:
            raise UnrepresentableError(
                "a leaf within the layers is no tensor, so it cannot be stacked",
                path=render(path),
                cure="leave it behind: --ignore values",
            )
    manifest = replace(
        manifest,
        values=source.values,
        empties=moves.empties(source.empties),
        lists=frozenset(new for path in source.lists for new in moves.moved(path)),
        kind=source.kind,
        custom=source.custom,
        origin={**source.origin, "scan": {"asked": scan.text, "inverse": scan.inverse.text}},
    )
    return View(checkpoint, projected, manifest)


def fits(manifest: Manifest, scan: Scan) -> bool:
    """Whether a checkpoint has layers as the source of a scan has them."""
    moves = _Moves(scan, 0)
    return any(moves.place(path) is not None for path in manifest.tensors)


class _Moves:
    """Where nodes of the tree go that are no tensors."""

    def __init__(self, scan: Scan, layers: int) -> None:
        self._unrolled = parse_layout(scan.unrolled, "")
        self._stacked = parse(scan.stacked)
        self._stacks = scan.stacks
        self._layers = layers

    def place(self, path: KeyPath) -> tuple[int, int] | None:
        """Start and end of the parts that the pattern is about; None where it is about none."""
        alone, together = len(self._unrolled.key), len(self._stacked)
        for start in range(len(path)):
            if self._unrolled.match(path[start : start + alone]) is not None:
                return (start, start + alone) if self._stacks else None
            if path[start : start + together] == self._stacked:
                return None if self._stacks else (start, start + together)
        return None

    def moved(self, path: KeyPath) -> list[KeyPath]:
        """The node's key paths in the target; none for a sequence whose items were the layers."""
        place = self.place(path)
        if place is None:
            above = self._stacks and any(
                path[start:] == self._head() for start in range(len(path)) if len(self._head())
            )
            return [] if above else [path]
        start, end = place
        return [(*path[:start], *part, *path[end:]) for part in self._parts()]

    def empties(self, held: Mapping[KeyPath, str]) -> dict[KeyPath, str]:
        """Empty nodes under their new key paths; those within the layers must be the same in each."""
        found: dict[KeyPath, list[str]] = {}
        for path, kind in held.items():
            for new in self.moved(path):
                found.setdefault(new, []).append(kind)
        inside = {new for path in held if self.place(path) is not None for new in self.moved(path)}
        for path, kinds in found.items():
            if len(set(kinds)) > 1 or (self._stacks and path in inside and len(kinds) != self._layers):
                raise UnrepresentableError("the layers do not hold the same empty nodes", path=render(path))
        return {path: kinds[0] for path, kinds in found.items()}

    def _head(self) -> KeyPath:
        """The parts of the pattern before the layer's number, where that is a part of its own."""
        sizes, at = {_LAYER: self._layers}, {_LAYER: 0}
        return self._unrolled.path(at, sizes)[:-1]

    def _parts(self) -> list[KeyPath]:
        sizes = {_LAYER: self._layers}
        if self._stacks:
            return [self._stacked]
        return [self._unrolled.path({_LAYER: layer}, sizes) for layer in range(self._layers)]


def _require_source(manifest: Manifest, scan: Scan) -> None:
    """The family of a tree takes both forms; a source that is in the target's already is a mistake in the text."""
    if not fits(manifest, scan):
        wanted = scan.unrolled.replace(_AXIS, f"{{{scan.name}}}") if scan.stacks else scan.stacked
        raise UsageError(f"scan={scan.text!r}: no key path has {wanted}", cure=_CURE)


class _AxisNames:
    """Logical names, shardings aside, of what is made of tensors with names."""

    def __init__(self, manifest: Manifest, scan: Scan, projected: Projection) -> None:
        self._scan = scan
        self._held: dict[str, list[TensorSpec]] = {}
        for path, stored in projected.source.stored.items():
            for piece in stored.pieces:
                self._held.setdefault(piece.parameter[1], []).append(manifest.tensors[path])

    def given(self, stored: StoredTensor) -> TensorSpec:
        """The tensor's spec with the names that its sources give it."""
        sources = self._held[stored.pieces[0].parameter[1]]
        axes, tags = {one.axes for one in sources}, [one.tags for one in sources]
        if len(axes) > 1 or any(one != tags[0] for one in tags):
            raise MismatchError(
                f"the layers name their axes differently: {sorted(map(str, axes))}", path=stored.spec.name
            )
        names = axes.pop()
        rank = len(stored.spec.shape)
        return replace(stored.spec, axes=self._changed(names, rank, sources[0]), tags=tags[0])

    def _changed(
        self, names: tuple[AxisName, ...] | None, rank: int, source: TensorSpec
    ) -> tuple[AxisName, ...] | None:
        if names is None or rank == len(source.shape):
            return names
        place = min(self._scan.axis, max(rank, len(source.shape)) - 1)
        if self._scan.stacks:
            return (*names[:place], self._scan.name, *names[place:])
        if names[place] not in (None, self._scan.name):
            raise MismatchError(
                f"axis {place} is called {names[place]}, not {self._scan.name}",
                path=source.name,
                cure="put the name in the braces, or choose the other axis",
            )
        return (*names[:place], *names[place + 1 :])
