"""inverse: read a converted checkpoint back through the inverse layout, and compare it with the digests of its source.

This proves that a conversion between systems lost nothing: the inverse uses the same declarations, but every byte is
read from the target in storage. If values were changed (a narrower type, norms stored as w or 1 + w), the differences
are measured, and must stay within the bound that the plan stated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.account import Bound
from wherry.core.keypath import KeyPath, render
from wherry.core.progress import OnProgress
from wherry.core.tensorspec import Region
from wherry.cures import Argument, Cure
from wherry.errors import AmbiguousError, UsageError
from wherry.families import (
    Projection,
    convert_layout,
    is_known,
    load_family,
    load_family_file,
    source_tree,
)
from wherry.families.adapters import adapter_family
from wherry.families.companions import companion_config, companion_facts
from wherry.families.schema import Family
from wherry.formats.checkpoint import Checkpoint
from wherry.layout.cuts import bands
from wherry.layout.spelling import read_renamed
from wherry.mover.hashing import Failure, Hashes, MeasuredError, compare, hash_checkpoint
from wherry.transform.view import LayoutView

if TYPE_CHECKING:
    import numpy as np


_BAND = 8 << 20


def roundtrip(
    converted: Checkpoint,
    source: Checkpoint,
    layout: Mapping[str, Any],
    algorithm: str,
    *,
    memory: int,
    progress: OnProgress | None = None,
    measured: MeasuredError | None = None,
) -> Iterator[Failure]:
    """Every tensor of the source that differs after the round trip, with the reason.

    Args:
        converted: the target of a conversion.
        source: its source.
        layout: the layout in the target's manifest: family, both systems, their forms and conventions; with
            `family_file`, if a file declares the family.
        algorithm: of the digests that are compared.
        memory: budget for reading.
        progress: called a few times a second.
        measured: updated with the differences within the bound.

    Raises:
        UsageError: the family was declared in a file, which is not given.
        WherryError: the target does not fit its own layout.
    """
    try:
        forward = _forward(source, layout)
    except AmbiguousError:  # the config of the conversion is not next to the source
        forward = _forward(source, layout, _target_sizes(converted, layout))
    back = _inverse(forward, converted)
    with LayoutView(converted, back) as view:
        carried = {*back.targets, *back.scalars}
        dropped = {row.path for row in forward.ignored}
        for path in source.manifest.tensors:
            if path not in carried and path not in dropped:
                yield Failure(render(path), "missing tensor: no target tensor holds it")
        overflow = layout.get("overflow", False)
        yield from _compare(
            view, source, forward, back, algorithm, memory, progress, measured=measured, overflow=overflow
        )


def there_and_back(
    converted: Checkpoint,
    start: Checkpoint,
    layout: Mapping[str, Any],
    algorithm: str,
    *,
    memory: int,
    progress: OnProgress | None = None,
    measured: MeasuredError | None = None,
) -> Iterator[Failure]:
    """Every tensor that differs after a conversion to another system and back.

    The values of both are compared, within the bound of the conversion to the other system.

    Args:
        converted: the target of the conversion back.
        start: the checkpoint of the same system, with the same key paths, that was converted first.
        layout: the layout in the target's manifest: from the other system to this one.
        algorithm: of the digests that are compared.
        memory: budget for reading.
        progress: called a few times a second.
        measured: updated with the differences within the bound.

    Raises:
        WherryError: the start does not fit the layout.
    """
    way_there = {**layout, "from": layout["to"], "to": layout["from"], "rename": ()}
    same = {**way_there, "to": layout["to"]}
    forward, itself = _forward(start, way_there), _forward(start, same)
    bound, overflow = _bound(forward), layout.get("overflow", False)
    expected, found = (
        hash_checkpoint(one, algorithm, memory=memory, progress=progress, stage="roundtrip")
        for one in (start, converted)
    )
    for failure in compare(found, expected.digests, expected.leaves):
        yield from _measure(failure, converted, start, itself, bound, measured or MeasuredError(), overflow)


def differences(
    source: Checkpoint,
    written: Checkpoint,
    pairs: Mapping[KeyPath, KeyPath],
    found: Hashes,
    known: Mapping[KeyPath, str] | None = None,
    *,
    memory: int,
    progress: OnProgress | None,
) -> list[Failure]:
    """The tensors of a newly written target that differ from their source.

    A source that can be hashed directly is compared digest by digest. For a source in another layout, the target is
    read back through the inverse layout.

    Args:
        source: the source of the conversion, or the view of it through the target's layout.
        written: the target, opened.
        pairs: key path in the target → in the source, of these tensors.
        found: their digests in the target.
        known: digests of the source's own tensors, if `source` is a view of it; unknown ones are computed again.
        memory: budget for reading.
        progress: called a few times a second.
    """
    if not isinstance(source, LayoutView):
        hashes = hash_checkpoint(
            source, found.algorithm, memory=memory, progress=progress, paths=list(pairs.values())
        )
        expected = {path: hashes.digests[taken] for path, taken in pairs.items()}
        return compare(found, expected, {path: hashes.leaves[taken] for path, taken in pairs.items()})
    forward = source.projected
    with inverse_view(source, written, pairs) as inverse:
        # `known` has the digests of the stored tensors, not of a view of them
        stored = known if source.source is source.original else None
        own = None if stored is None else Hashes(found.algorithm, stored)
        back, algorithm = inverse.projected, found.algorithm
        compared = _compare(
            inverse, source.source, forward, back, algorithm, memory, progress, own,
            overflow=source.overflow,
        )  # fmt: skip
        return list(compared)


def inverse_view(source: LayoutView, written: Checkpoint, pairs: Collection[KeyPath]) -> LayoutView:
    """The source's own tensors, as some tensors of a newly written target contain them.

    Args:
        source: the view of the source through the target's layout.
        written: the target.
        pairs: key paths in the target.
    """
    forward = source.projected
    wanted = {piece.parameter for path in pairs for piece in forward.targets[path].pieces}
    whole = _inverse(forward, written)
    held = {
        path: stored
        for path, stored in whole.targets.items()
        if any(piece.parameter in wanted for piece in stored.pieces)
    }
    return LayoutView(written, replace(whole, targets=held, scalars={}))


def _compare(
    view: Checkpoint,
    source: Checkpoint,
    forward: Projection,
    back: Projection,
    algorithm: str,
    memory: int,
    progress: OnProgress | None,
    known: Hashes | None = None,
    measured: MeasuredError | None = None,
    *,
    overflow: bool,
) -> Iterator[Failure]:
    wanted = [path for path in source.manifest.tensors if path in back.targets or path in back.scalars]
    if known is None:
        expected = hash_checkpoint(
            source, algorithm, memory=memory, progress=progress, stage="roundtrip", paths=wanted
        )
    else:
        expected = Hashes(algorithm, {path: known.digests[path] for path in wanted})
    found = hash_checkpoint(view, algorithm, memory=memory, progress=progress, stage="roundtrip")
    bound = _bound(forward)
    for failure in compare(found, expected.digests, expected.leaves):
        yield from _measure(failure, view, source, back, bound, measured or MeasuredError(), overflow)


def _family(layout: Mapping[str, Any]) -> Family:
    declared = layout.get("family_file")
    if declared is None and not is_known(layout["family"]):
        raise UsageError(
            f"family {layout['family']!r} was declared in a family file",
            cure=Cure("pass the same {}", Argument("family-file")),
        )
    if not declared:
        return load_family(layout["family"])
    found = load_family_file(declared)
    return found if found.name == layout["family"] else adapter_family(found) or found


def as_laid_out(source: Checkpoint, layout: Mapping[str, Any]) -> LayoutView:
    """The view of a source that a target was written from, reconstructed from the target's manifest."""
    return LayoutView(
        source, _forward(source, layout), dtype=layout.get("dtype"), only=layout.get("only"),
        overflow=layout.get("overflow", False), renames=layout.get("rename", ()),
    )  # fmt: skip


def _forward(
    source: Checkpoint, layout: Mapping[str, Any], sizes: Mapping[str, int] | None = None
) -> Projection:
    """The projection that made a target, reconstructed from its manifest."""
    family, source_options, options = _family(layout), dict(layout["from"]), dict(layout["to"])
    source_system = family.system(source_options.pop("system"))
    target_system = family.system(options.pop("system"))
    config, config_source_name = companion_config(source, source_system)
    reading = read_renamed(source.manifest, layout.get("rename", ()))
    found = source_tree(family, source.detection.format, source.manifest, reading, system=source_system.name)
    return convert_layout(
        source.manifest, family, source_system.name, target_system.name,
        config=config, config_source=config_source_name,
        source_options=source_options, options=options, sizes=sizes or layout.get("sizes"), only=layout.get("only"),
        dtype=layout.get("dtype"), facts=companion_facts(source, family, source_system), stated=layout.get("facts"),
        tree=found.tree if found else None,
        checkpoint=source,
    )  # fmt: skip


def _target_sizes(converted: Checkpoint, layout: Mapping[str, Any]) -> Mapping[str, int]:
    """The extents of the axes as the target and the config next to it state them."""
    family, forms = _family(layout), dict(layout["to"])
    system = family.system(forms.pop("system"))
    config, config_source_name = companion_config(converted, system)
    held = convert_layout(
        converted.manifest, family, system.name, system.name,
        config=config, config_source=config_source_name, source_options=forms,
    )  # fmt: skip
    return held.source.solved.sizes


def _inverse(forward: Projection, converted: Checkpoint) -> Projection:
    """The projection from the target back to the tensors of the source."""
    system = forward.system
    conventions = {name: text for name, text in forward.chosen.items() if name in system.conventions}
    held = convert_layout(
        converted.manifest, forward.source.family, system.name, system.name,
        source_options=conventions, sizes=forward.source.solved.sizes, facts=forward.source.config_facts.facts,
    )  # fmt: skip
    there = {piece.parameter for stored in forward.targets.values() for piece in stored.pieces}
    own = {  # the source's own tensors that some target tensor contains, in whole or in part
        path: stored
        for path, stored in forward.source.stored.items()
        if all(piece.parameter in there for piece in stored.pieces)
    }
    numbers = {source: target for target, source in forward.scalars.items()}
    return replace(held, targets=own, scalars=numbers, ignored=(), bounds={})


def _bound(forward: Projection) -> Bound | None:
    """The least bound that covers every tensor of a projection; None if no value changes."""
    return reduce(Bound.joined, forward.bounds.values()) if forward.bounds else None


def _measure(
    failure: Failure,
    view: Checkpoint,
    source: Checkpoint,
    back: Projection,
    bound: Bound | None,
    measured: MeasuredError,
    overflow: bool,
) -> Iterator[Failure]:
    """The failure, unless values may change and the difference is within the bound, or an overflow that is allowed."""
    path = next(path for path in source.manifest.tensors if render(path) == failure.path)
    spec, other = source.manifest.tensors[path], view.manifest.tensors.get(path)
    same = other is not None and (other.shape, other.dtype) == (spec.shape, spec.dtype)
    if bound is None or not same or path not in back.targets or dtypes.opaque(spec.dtype):
        yield failure
        return
    regions = [region for region, _span in bands(back.targets[path], _BAND, back.pieces)]
    found = [_error(source, view, path, region, bound, overflow=overflow) for region in regions]
    error, share = max(one for one, _share in found), max(share for _one, share in found)
    if share > 1:
        yield Failure(
            failure.path, f"its values differ by up to {error:.3g}, {share:.3g} times the bound |error| ≤ "
            f"{bound.relative:.2g} × |value| + {bound.absolute:.2g}",
        )  # fmt: skip
        return
    measured.tensors += 1
    measured.error, measured.share = max(measured.error, error), max(measured.share, share)


def _error(
    source: Checkpoint, view: Checkpoint, path: KeyPath, region: Region, bound: Bound, *, overflow: bool
) -> tuple[float, float]:
    """The largest difference in a region, and the largest difference as a fraction of its bound."""
    import numpy as np

    expected, found = _wide(source.read(path, region)), _wide(view.read(path, region))
    same = (expected == found) | (np.isnan(expected) & np.isnan(found))  # equal infinities have no difference
    if overflow:
        same |= np.isfinite(expected) & ~np.isfinite(found)
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(expected - found))
    allowed = bound.relative * np.abs(expected) + bound.absolute
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(error == 0, 0.0, error / allowed)
    if not np.isfinite(share).all():
        return float("inf"), float("inf")
    return float(error.max(initial=0.0)), float(share.max(initial=0.0))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype("complex128" if array.dtype.kind == "c" else "float64")
