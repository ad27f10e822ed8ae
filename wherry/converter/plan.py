"""plan: everything that a conversion will do, resolved before any byte is moved.

A plan lists which source tensor becomes which target tensor, what is ignored and by which named rule, the bytes
in and out, the peak memory, the parameter count compared with the config, and the target's own
manifest. Making a plan reads metadata only and writes nothing. Its digest identifies the conversion: the same
source structure, target format, options and rules give the same digest on any machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from wherry.converter.ignored_entries import require_requested, unprepared_companions, within_source
from wherry.converter.keywords import spelled_out
from wherry.converter.traffic import NO_TRAFFIC, Traffic, traffic_of
from wherry.converter.unused_options import UnusedOption, require_used, unused_options
from wherry.core.account import bound_to_json
from wherry.core.digest import sha256_of_rows
from wherry.core.keypath import KeyPath, render
from wherry.core.option import options_of
from wherry.core.request import (
    ConvertKeywords,
    ConvertRequest,
    SourceRequest,
    TargetRequest,
    convert_request,
)
from wherry.core.tensorspec import GRID, bytes_of
from wherry.core.units import parse_budget, plural, show_size
from wherry.errors import IncompleteError, UsageError
from wherry.formats.checkpoint import open_source
from wherry.formats.detect import absence
from wherry.formats.registry import checked_options, find_target_format
from wherry.ledger.open import resolve_named
from wherry.mover.move import JointMoves, Move
from wherry.mover.pool import Pool
from wherry.mover.source import Source, ways_of
from wherry.runtime.threads import carrier_count, without_collection
from wherry.storage.stores import locate
from wherry.text.html import html_table
from wherry.tree.axes import settle_options
from wherry.tree.mapping import TREE_OPTIONS, MappedTree, map_tree, require_held
from wherry.view.choose import plan_view
from wherry.view.foreign import require_form

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Unpack

    from wherry.core.account import Bound, IgnoredEntry
    from wherry.core.detection import Detection
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.format import Format, Options
    from wherry.formats.shortage import Shortage
    from wherry.mover.move import Way, Ways


@spelled_out(ConvertKeywords, options_of(SourceRequest, TargetRequest, ConvertRequest))
def plan(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    options: Options | None = None,
    **common: Unpack[ConvertKeywords],
) -> Plan:
    """Resolve a conversion without writing anything.

    Args:
        source: URI of a checkpoint, step or run.
        target: URI of the checkpoint that will be committed.
        to: target format, a name or alias.
        options: format-specific options and `split` / `join`.
        common: the other options, as for `wherry.convert`. Those that only the work itself uses change no plan:
            `if_exists`, `sign`, `lineage`, `meta` and `progress`.

    Raises:
        UsageError, NotFoundError, NotACheckpointError, DamagedError, HostileError: the request or the source is
            invalid, or a chunk of the source cannot be decoded within the memory budget.
        UnrepresentableError: the target cannot hold the source; every reason is listed.
    """
    common.pop("progress", None)
    return plan_request(
        convert_request(source, [TargetRequest(os.fspath(target), to, options or {})], **common)
    )


def plan_request(request: ConvertRequest) -> Plan:
    """The plan of a request with one target; see `plan`."""
    (found,) = plan_targets(request)
    return found


def plan_targets(request: ConvertRequest) -> list[Plan]:
    """The plans of a request's targets; see `plan`."""
    with without_collection(), open_source(resolve_named(request.source)) as checkpoint:
        made = [plan_target(checkpoint, find_target_format(one.to), one, request) for one in request.targets]
        require_used(checkpoint.uri, request.targets, [found.unused for _seen, found in made])
        return [replace(found, traffic=traffic_of(seen, found)) for seen, found in made]


def plan_target(
    checkpoint: Checkpoint, row: Format, target: TargetRequest, request: ConvertRequest
) -> tuple[Checkpoint, Plan]:
    """The source in the layout of the target's system, and the plan that makes the target from it."""
    shortages = checkpoint.shortages
    _require_whole([row for row in shortages if row[1].parts])  # before any layout looks at their shapes
    seen, options, only = plan_view(checkpoint, row, target.settings, target.layout, target.only)
    _require_whole(shortages)  # unless a layout has named what is missing
    own = {name: value for name, value in options.items() if name in row.options}
    seen: Checkpoint = row.values(seen, checked_options(row, own))
    made = _make(seen, row, replace(target, options=options, only=only, rename=()), request)
    return seen, replace(made, unused=tuple(unused_options(seen, row, target, request.ignore, options)))


def _make(checkpoint: Checkpoint, row: Format, target: TargetRequest, request: ConvertRequest) -> Plan:
    only, as_step, verify = target.only, request.as_step, request.verify
    if verify not in ("digest", "store", "none"):
        raise UsageError(f"invalid value for verify: {verify!r}", cure="choose digest, store or none")
    place = locate(target.uri)
    if verify == "store" and not place.store.capabilities.parts:
        raise UsageError(
            f"no store computes checksums of a {row.name} target as it is written",
            uri=target.uri,
            cure="choose --verify digest, which reads the target back",
        )
    if only is None:
        _require_present(checkpoint)
    given = dict(target.options)
    tree = settle_options({name: given.pop(name) for name in TREE_OPTIONS if name in given})
    checked = checked_options(row, given)
    if place.store.capabilities.parts:
        checked = row.in_store(checked)
    mapped = map_tree(checkpoint.manifest, row, tree, only=only, ignore=request.ignore, uri=target.uri)
    if only is not None:
        _require_present(checkpoint, left=_left_by(mapped, checkpoint.manifest))
    require_form(checkpoint, mapped.manifest, row, target.layout)
    require_held(mapped.manifest, row, target.uri)
    manifest = mapped.manifest if as_step is None else replace(mapped.manifest, step=as_step)
    prepared = _without_hints(row.prepare(manifest, checked))
    found = (*checkpoint.ignored, *mapped.ignored, *unprepared_companions(mapped.manifest, prepared, row))
    ignored = within_source(found, request.source.uri, checkpoint.uri)
    require_requested(ignored, request, checkpoint.uri)
    version = row.version(prepared, checked)
    notes, can = checkpoint.notes, place.store.capabilities
    if not (can.local or can.parts):
        what = f"{place.store.protocol}:// takes whole files, so the target is staged on the local disk first"
        notes = (*notes, what)
    budget = parse_budget(request.memory)
    source = Source(checkpoint.reader, Pool(budget))
    return Plan(
        source=checkpoint.detection,
        target=place.uri,
        to=row.name,
        format_version=version,
        options={**checked, **tree},
        manifest=prepared,
        source_manifest=checkpoint.manifest,
        pairs=mapped.pairs,
        ignored=ignored,
        ways=ways_of(source, checkpoint.manifest.tensors, mapped.pairs.values()),
        parameters=checkpoint.parameters,
        expected_parameters=checkpoint.manifest.origin.get("expected_parameters"),
        memory=budget,
        verify=verify,
        digest=_digest(checkpoint, [row.name, version], {**checked, **tree}, prepared, mapped),
        lossy=checkpoint.lossy,
        overflow=target.layout.allow_overflow,
        notes=notes,
        snippet=checkpoint.snippet,
    )


def _without_hints(manifest: Manifest) -> Manifest:
    """A target's manifest without the chunk hints for its format."""
    hinted = {
        path: replace(spec, tags={name: text for name, text in spec.tags.items() if name != GRID} or None)
        for path, spec in manifest.tensors.items()
        if spec.tags and GRID in spec.tags
    }
    return replace(manifest, tensors={**manifest.tensors, **hinted}) if hinted else manifest


def _left_by(mapped: MappedTree, source: Manifest) -> Callable[[KeyPath], bool]:
    """Whether a leaf is not carried, and so may be missing; includes leaves without a known shape."""
    carried = set(mapped.pairs.values())
    roots = {path[:1] for path in carried}
    return lambda path: path not in carried and (path in source.tensors or path[:1] not in roots)


def _require_present(checkpoint: Checkpoint, *, left: Callable[[KeyPath], bool] | None = None) -> None:
    reason = absence(checkpoint.reader, left=left)
    if reason is not None:
        choice = (
            "or use another step"
            if left
            else "use another step, or pass --only params if the parameters are complete"
        )
        raise IncompleteError(reason, uri=checkpoint.uri, cure=f"restore the missing files, {choice}")


def _require_whole(shortages: list[tuple[str, Shortage]]) -> None:
    for uri, found in shortages:
        raise IncompleteError(found.reason, uri=uri, cure=found.cure)


def _digest(
    checkpoint: Checkpoint, to: list[str], options: Mapping[str, Any], prepared: Manifest, mapped: MappedTree
) -> str:
    source = checkpoint.detection
    layout, merge = prepared.origin.get("layout"), prepared.origin.get("merge")
    if merge:  # the places of its sources do not decide its values
        sources = [
            {name: one for name, one in row.items() if name != "uri"} for row in merge.get("sources", ())
        ]
        merge = {**merge, "sources": sources}
    rows = (
        (path, mapped.pairs[path], spec.shape, spec.dtype, spec.chunks or ())
        for path, spec in ((path, prepared.tensors[path]) for path in sorted(prepared.tensors))
    )
    return sha256_of_rows(
        "plan",
        {
            "from": [source.format, source.format_version],
            "to": to,
            "options": {name: value for name, value in sorted(options.items()) if value is not None},
            "ignored": sorted((render(entry.path), entry.rule) for entry in mapped.ignored),
            "companions": sorted((companion.name, companion.size) for companion in prepared.companions),
            **({"layout": layout} if layout else {}),
            **({"merge": merge} if merge else {}),
        },
        "tensors",
        rows,
    )


BASE_BYTES = 64 << 20  # the interpreter, numpy and, for zarr and OCDBT, tensorstore


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a conversion will do, and the units of work that follow from it.

    Attributes:
        source: the detected source.
        target: URI of the target.
        to: target format.
        format_version: of the target.
        options: target options with defaults filled in.
        manifest: the contents of the target.
        pairs: target key path → source key path.
        ignored: entries of the source that are not carried and what lies next to it, each with its rule.
        ways: source key path → how the tensor is read.
        parameters: elements of the source's tensors.
        expected_parameters: the number according to the source's config; None if that is unknown.
        memory: budget in bytes.
        verify: verification before the commit, `digest`, `store` or `none`.
        digest: identity of this conversion.
        lossy: target key path → bound of the error after a round trip; empty if every move is exact. A plan reads no
            values: what under- or overflows is counted when they are moved, and stated in the receipt.
        overflow: whether finite values may become infinite.
        notes: messages about content that could not be carried or made.
        snippet: code that loads the result with the target's own software, if that is known.
        traffic: the requests to stores and the disk space that is needed; empty in the plan of a conversion that is
            carried out.
        unused: options that change nothing in this target.
    """

    source: Detection
    target: str
    to: str
    format_version: str
    options: Mapping[str, Any]
    manifest: Manifest
    source_manifest: Manifest
    pairs: Mapping[KeyPath, KeyPath]
    ignored: tuple[IgnoredEntry, ...]
    ways: Ways
    parameters: int
    expected_parameters: int | None
    memory: int
    verify: str
    digest: str
    lossy: Mapping[KeyPath, Bound] = field(default_factory=dict[KeyPath, "Bound"])
    overflow: bool = False
    notes: tuple[str, ...] = ()
    snippet: str = ""
    traffic: Traffic = NO_TRAFFIC
    unused: tuple[UnusedOption, ...] = ()

    def __repr__(self) -> str:
        size = f"{plural(self.tensors, 'tensor')}, {show_size(self.nbytes_out)}"
        return f"<Plan: {self.source.uri} ({self.source.format}) → {self.target} ({self.to}), {size}>"

    def _repr_html_(self) -> str:
        rows = ((render(source), render(target)) for target, source in sorted(self.pairs.items()))
        return html_table(repr(self), ("source", "target"), rows)

    @property
    def tensors(self) -> int:
        """Number of tensors that will be written."""
        return len(self.pairs)

    @property
    def nbytes_out(self) -> int:
        """Tensor bytes that will be written, in canonical form."""
        return self.manifest.nbytes

    @property
    def nbytes_in(self) -> int:
        """Tensor bytes that will be read, in canonical form."""
        return bytes_of(map(self.source_manifest.tensors.__getitem__, self.pairs.values()))

    @property
    def peak_memory(self) -> int:
        """Peak memory in bytes: the base and the data in flight."""
        largest = max(
            (way.largest(spec, targets) for way, spec, targets in self._carried_tensors()), default=0
        )
        return BASE_BYTES + max(min(self.memory, carrier_count() * largest), largest)

    @property
    def raw(self) -> frozenset[KeyPath]:
        """Source key paths of which any span can be read: their bytes are raw in files or in a spill file."""
        return self._paths(lambda way: way.spans)

    @property
    def regions(self) -> frozenset[KeyPath]:
        """Source key paths of which any region can be read without reading much more."""
        return self._paths(lambda way: way.regions)

    @property
    def free(self) -> frozenset[KeyPath]:
        """The key paths among `regions` whose chunks need not be considered."""
        return self._paths(lambda way: way.extents is None and way.regions and not way.gridded)

    @property
    def spilled(self) -> frozenset[KeyPath]:
        """Source key paths that are decoded into spill files: their chunks are too large, and not in order."""
        return self._paths(lambda way: way.spilled)

    @property
    def spill(self) -> int:
        """Bytes that are written to spill files; a band of chunks is removed once it has been read."""
        spilled = [path for path, way in self.ways.kept.items() if way.spilled]
        return sum(self.source_manifest.tensors[path].nbytes for path in spilled)

    def _paths(self, holds: Callable[[Way], bool]) -> frozenset[KeyPath]:
        return frozenset(path for path, way in self.ways.items() if holds(way))

    def _carried_tensors(self) -> Iterator[tuple[Way, TensorSpec, list[TensorSpec]]]:
        """Each source tensor that is carried, how it is read, and what it becomes."""
        for target, source in self.pairs.items():
            yield self.ways.how(source), self.source_manifest.tensors[source], [self.manifest.tensors[target]]

    def moves(self) -> Iterator[Move]:
        """The units of work, in the order of the source's tensors."""
        return iter(joint_moves([self]))

    def to_json(self) -> dict[str, Any]:
        """The plan in the form of `--json`."""
        found = self.parameters
        expected = self.expected_parameters
        return {
            "source": self.source.to_json(),
            "target": self.target,
            "to": self.to,
            "format_version": self.format_version,
            "options": dict(self.options),
            "digest": self.digest,
            "tensors": self.tensors,
            "moves": sum(way.count(spec, targets) for way, spec, targets in self._carried_tensors()),
            "bytes_in": self.nbytes_in,
            "bytes_out": self.nbytes_out,
            "parameters": {
                "found": found,
                "expected": expected,
                "agrees": None if expected is None else found == expected,
            },
            "peak_memory": self.peak_memory,
            "spill": self.spill,
            "unmatched": [],
            "ignored": [row.to_json() for row in self.ignored],
            "renamed": {
                render(source): render(target) for target, source in self.pairs.items() if source != target
            },
            "companions": [companion.name for companion in self.manifest.companions],
            "lossless": not self.lossy,
            "lossy": {render(path): bound_to_json(bound) for path, bound in self.lossy.items()},
            "layout": self.manifest.origin.get("layout"),
            "notes": list(self.notes),
            "snippet": self.snippet,
            "verify": self.verify,
            **self.traffic.to_json(),
        }


def joint_moves(plans: Sequence[Plan]) -> JointMoves:
    """The moves of several plans with one source; each part of the source is read once."""
    targets: dict[KeyPath, tuple[TensorSpec, ...]] = {}
    for one in plans:
        for target, source in one.pairs.items():
            targets[source] = (*targets.get(source, ()), one.manifest.tensors[target])
    ways = plans[0].ways if len(plans) == 1 else plans[0].ways.joined([one.ways for one in plans[1:]])
    return JointMoves(plans[0].source_manifest.tensors, targets, ways)
