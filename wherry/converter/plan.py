"""plan: everything that a conversion will do, resolved before any byte is moved.

A plan lists which source tensor becomes which target tensor, what is ignored and by which named rule, the bytes
in and out, the peak memory, the parameter count compared with the config, and the target's own
manifest. Making a plan reads metadata only and writes nothing. Its digest identifies the conversion: the same
source structure, target format, options and rules give the same digest on any machine.

**What is left out.** A plan lists everything of a source that its target does not get: what the format found next to
the tensors, what the target cannot hold, what the rules of the request name. Weights are left out only if the request
says so. State of a trainer and files without weights are only named, and so is what is next to the source: a user who
names an item of a step by its own location names nothing else of the step.

**Unused options.** An option that changes nothing in a conversion is refused. Each option of a target, each config,
folder of companions and fact decides something of the result or is compared with the source. Whatever reads an option
declares it: a view of the source names the options that it depends on (`Checkpoint.uses`), a format takes its own by
name, and forms and rules of a tree must change the tree. The remaining options were not read by anything, and are
refused. A value that would have been taken without the option is used all the same. `--ignore` and `--allow-opaque`
are permissions, not statements: what they permit need not occur. `--only`, `--family none`, `split` and `join` state
what the target is, and the source may be that already. Of several targets with the same statement, one must use it.

**Traffic.** What a conversion asks of stores and disks, requests, bytes in and out, and room, follows from metadata
alone. Reads of raw tensors are counted as the mover makes them; reads of encoded chunks, writes and lists are
estimates, which leave out retries. Bytes that leave a store are what its provider bills as egress: those of the source,
and those of the target that are read back.
"""

from __future__ import annotations

import math
import os
import posixpath
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from wherry import kernels
from wherry.converter.keywords import spelled_out
from wherry.core.account import (
    COMPANIONS,
    FILES,
    ITEMS,
    OTHERS,
    Bound,
    IgnoredEntry,
    bound_to_json,
    fold_entries,
    ignored_file,
)
from wherry.core.detection import Detection
from wherry.core.digest import sha256_of_rows
from wherry.core.html import html_table
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.request import (
    NONE,
    SCAN,
    ConvertKeywords,
    ConvertRequest,
    LayoutRequest,
    RewriteRequest,
    SourceRequest,
    TargetRequest,
    convert_request,
    options_of,
)
from wherry.core.tensorspec import GRID, TensorSpec, bytes_of
from wherry.core.threads import carrier_count, without_collection
from wherry.core.units import parse_budget, plural, show_size
from wherry.cures import Argument, Cure
from wherry.errors import IncompleteError, StorageError, UnrepresentableError, UsageError
from wherry.formats.checkpoint import Checkpoint, open_source
from wherry.formats.companions import ignored_companion
from wherry.formats.detect import absence
from wherry.formats.end_tokens import read_end_tokens
from wherry.formats.format import Change, Chunked, Computed, Contents, Format, Options, Stored
from wherry.formats.registry import checked_options, find_target_format
from wherry.formats.shortage import Shortage
from wherry.layout.axes import settle_options
from wherry.layout.mapping import MappedTree, map_tree, require_held
from wherry.ledger.resolve import resolve_named
from wherry.mover.carrier import RangeWindow, ranged_move, request_sizes
from wherry.mover.move import JointMoves, Move, Way, Ways, cells, chunk_count
from wherry.mover.pool import Pool
from wherry.mover.source import Source, ways_of
from wherry.store.folders import staging_stem
from wherry.store.local_store import is_live, locate
from wherry.store.location import Location
from wherry.store.open_file import local_path
from wherry.store.ranges import LARGEST, STEP
from wherry.transform.choose import plan_view, require_form
from wherry.transform.settings import TargetSettings

BASE_BYTES = 64 << 20  # the interpreter, numpy and, for zarr and OCDBT, tensorstore
_SHOWN = 3
_OUTSIDE = "it is not part of the source, which is one item of the step"
_OVERFLOW = "--allow-overflow"
_PAGE = 1000  # entries of one answer to a list request
_METADATA_READS = 4  # names and headers, when a checkpoint is opened
_SMALL_WRITES = 6  # lease, journal, sidecar, commit member, and beginning and end of an upload
_LISTINGS = 2  # of each folder: when it is opened, and before the commit


@dataclass(frozen=True, slots=True)
class UnusedOption:
    """An option that changes nothing in a target.

    Attributes:
        name: `--config`, or the name of a `--set`.
        value: its value.
        reason: why nothing reads it.
    """

    name: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class StoreTraffic:
    """The requests to one store, and the bytes that they move.

    Attributes:
        store: protocol and bucket.
        reads, writes, lists: number of requests.
        egress: bytes that leave the store.
        ingress: bytes that are written to it.
    """

    store: str
    reads: int = 0
    writes: int = 0
    lists: int = 0
    egress: int = 0
    ingress: int = 0

    @property
    def text(self) -> str:
        """The text that `wherry plan` prints."""
        return (
            f"about {self.reads:,} reads, {self.writes:,} writes, {self.lists:,} lists; "
            f"{show_size(self.egress)} leave it, {show_size(self.ingress)} are written"
        )


@dataclass(frozen=True)
class DiskSpace:
    """The disk on which a target is, or on which it is staged; a target that streams needs one for spill files alone.

    The disk is measured once, when its space is first needed.

    Attributes:
        path: what is written: the target, or its name in the folder of temporary files.
        needed: bytes of the target, and of spill files next to it.
        compressed: whether the target is compressed, so that it needs fewer bytes.
        resumed: whether an interrupted run may have staged a part of the target next to it.
    """

    path: str
    needed: int
    compressed: bool
    resumed: bool

    @cached_property
    def folder(self) -> str:
        """The nearest folder around it that exists."""
        return str(next(one for one in Path(self.path).parents if one.is_dir()))

    @cached_property
    def empty(self) -> int:
        """Bytes that are free."""
        return shutil.disk_usage(self.folder).free

    @cached_property
    def held(self) -> int:
        """Bytes that an interrupted run holds for the same target."""
        return _held_by_staging(Path(self.path)) if self.resumed else 0

    @property
    def free(self) -> int:
        """Bytes that are free, and those that an interrupted run holds for the same target."""
        return self.empty + self.held

    @property
    def fits(self) -> bool:
        """Whether it is not certain that the disk is too small."""
        return self.compressed or self.needed <= self.empty or self.needed <= self.free

    def to_json(self) -> dict[str, Any]:
        """The form of `wherry plan --json`."""
        names = ("folder", "needed", "free", "compressed", "fits")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Traffic:
    """The stores and the disk of one conversion.

    Attributes:
        stores: remote stores, the source's first.
        space: the disk that is written; None if none is.
    """

    stores: tuple[StoreTraffic, ...] = ()
    space: DiskSpace | None = None

    def to_json(self) -> dict[str, Any]:
        """The form of `wherry plan --json`."""
        return {
            "stores": [asdict(one) for one in self.stores],
            "space": self.space and self.space.to_json(),
        }


NO_TRAFFIC = Traffic()


@dataclass(frozen=True, slots=True)
class SharedTraffic:
    """The traffic of several workers, where it differs from the traffic of one process.

    Attributes:
        workers: their number; each opens the source.
        times: how many times as many bytes of the source they read as one process does.
        read_back: bytes of the target that are read back; None for each byte once, where it is read back at all.
        records: number of records that they write next to the target; each is also read once.
    """

    workers: int = 1
    times: float = 1.0
    read_back: int | None = None
    records: int = 0


ONE_PROCESS = SharedTraffic()


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
    request = convert_request(source, [TargetRequest(os.fspath(target), to, options or {})], **common)
    return plan_targets(request)[0]


def plan_targets(
    request: ConvertRequest, opened: Callable[[], AbstractContextManager[Checkpoint]] | None = None
) -> list[Plan]:
    """The plans of a request's targets; see `plan`.

    Args:
        request: the request.
        opened: opens the source, if it is not the one checkpoint that the request names.
    """
    with (
        without_collection(),
        opened() if opened else open_source(resolve_named(request.source)) as checkpoint,
    ):
        made = [plan_target(checkpoint, find_target_format(one.to), one, request) for one in request.targets]
        require_used(checkpoint.uri, request.targets, [found.unused for _seen, found in made])
        return [replace(found, traffic=traffic_of(seen, found)) for seen, found in made]


def plan_target(
    checkpoint: Checkpoint, row: Format, target: TargetRequest, request: ConvertRequest
) -> tuple[Checkpoint, Plan]:
    """The source in the layout of the target's system, and the plan that makes the target from it."""
    shortages = checkpoint.shortages
    _require_whole([row for row in shortages if row[1].parts])  # before any layout looks at their shapes
    seen, left, only = plan_view(checkpoint, row, target.settings, target.layout, target.only)
    _require_whole(shortages)  # unless a layout has named what is missing
    options = checked_options(row, left.format)
    seen = row.divided(seen, options) if target.layout.family != NONE else seen
    seen: Checkpoint = row.values(seen, options)
    made = _make(seen, row, replace(target, only=only), left, request)
    return seen, replace(made, unused=tuple(unused_options(seen, row, target, request.ignore, left.names)))


def _make(
    checkpoint: Checkpoint,
    row: Format,
    target: TargetRequest,
    settings: TargetSettings,
    request: ConvertRequest,
) -> Plan:
    only, as_step, verify = target.only, request.as_step, request.verify
    if verify not in ("digest", "store", "none"):
        raise UsageError(f"invalid value for verify: {verify!r}", cure="choose digest, store or none")
    place = locate(target.uri)
    if verify == "store" and not place.store.capabilities.parts:
        raise UsageError(
            f"no store computes checksums of a {row.name} target as it is written",
            uri=target.uri,
            cure=Cure("choose {}, which reads the target back", Argument("verify", "digest")),
        )
    if only is None:
        _require_present(checkpoint)
    tree = settle_options(settings.tree)
    checked = checked_options(row, {**settings.format, **settings.layout})
    if place.store.capabilities.parts:
        checked = row.in_store(checked)
    mapped = map_tree(checkpoint.manifest, row, tree, only=only, ignore=request.ignore, uri=target.uri)
    if only is not None:
        _require_present(checkpoint, left=_left_by(mapped, checkpoint.manifest))
    require_form(checkpoint, mapped.manifest, row, target.layout)
    require_held(mapped.manifest, row, target.uri)
    manifest = mapped.manifest if as_step is None else replace(mapped.manifest, step=as_step)
    prepared = row.prepare(manifest, checked)
    unhinted = {  # hints for the chunks are the format's own
        path: replace(spec, tags={name: text for name, text in spec.tags.items() if name != GRID} or None)
        for path, spec in prepared.tensors.items()
        if spec.tags and GRID in spec.tags
    }
    if unhinted:
        prepared = replace(prepared, tensors={**prepared.tensors, **unhinted})
    found = (*checkpoint.ignored, *mapped.ignored, *unprepared_companions(mapped.manifest, prepared, row))
    ignored = within_source(found, request.source.uri, checkpoint.uri)
    require_requested(ignored, request, checkpoint.uri)
    version = row.version(prepared, checked)
    notes, can = checkpoint.notes, place.store.capabilities
    if not (can.local or can.parts):
        what = f"{place.store.protocol}:// takes whole files, so the target is staged on the local disk first"
        notes = (*notes, what)
    if row.served:
        names = {one.name for one in prepared.companions}
        notes = (*notes, *(one.text for one in read_end_tokens(names, checkpoint.reader.companion).faults))
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
            else Cure(
                "use another step, or pass {} if the parameters are complete", Argument("only", "params")
            )
        )
        raise IncompleteError(reason, uri=checkpoint.uri, cure=Cure("restore the missing files, {}", choice))


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
        ignored: entries of the source that are not carried and what is next to it, each with its rule.
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


def unprepared_companions(mapped: Manifest, prepared: Manifest, row: Format) -> list[IgnoredEntry]:
    """The companions that a target format leaves out itself.

    Args:
        mapped: the source's tree with the key paths of the target.
        prepared: the same as the format will hold it.
        row: the target format.
    """
    kept = {one.name for one in prepared.companions}
    reason = f"{row.name} does not take it with these options"
    return [ignored_companion(one.name, reason) for one in mapped.companions if one.name not in kept]


def not_copied(change: Change) -> Iterator[IgnoredEntry]:
    """The files that a rewrite does not copy: entries of the step around the item, and files that it replaces."""
    found = {one.name: one for one in change.opened.ignored}
    yield from (one for one in found.values() if one.path[0] == "..")
    for name in change.left:
        yield found.get(name) or ignored_file(name, FILES, "a file of metadata", "the rewrite replaces it")


def within_source(ignored: Iterable[IgnoredEntry], source: str, opened: str) -> tuple[IgnoredEntry, ...]:
    """The entries, of which those outside the source's folder are named as such: they are not left out of it.

    Args:
        ignored: everything that is left out.
        source: the URI that the request names: an item, a step or a run.
        opened: the URI of the opened checkpoint, to which the names of files are relative.
    """
    rows = tuple(ignored)
    if not any(_around(one) for one in rows):
        return rows
    named, home = locate(source), locate(opened)
    if named.entry is None or not named.entry.is_dir:
        return rows
    root = posixpath.normpath(named.path) + "/"

    def outside(one: IgnoredEntry) -> bool:
        return _around(one) and not posixpath.normpath(posixpath.join(home.path, *one.path)).startswith(root)

    return tuple(replace(one, reason=_OUTSIDE, weights=False) if outside(one) else one for one in rows)


def _around(entry: IgnoredEntry) -> bool:
    """Whether an entry belongs to the step around an item."""
    return entry.rule == ITEMS or entry.path[0] == ".."


def require_requested(
    ignored: Iterable[IgnoredEntry], request: ConvertRequest | RewriteRequest, uri: str
) -> None:
    """Refuse to leave out weights unless the request says so.

    Naming one item of a step is such a request: its other items are left out.

    Args:
        ignored: everything that is left out.
        request: the request.
        uri: the source, for the error.

    Raises:
        UnrepresentableError: the first few files with weights are named.
    """
    if OTHERS in request.ignore:
        return
    chosen = request.source.item is not None
    rows = fold_entries(one for one in ignored if one.weights and not (chosen and one.rule == ITEMS))
    if rows:
        names = ", ".join(f"{one.name} ({one.what})" for one in rows[:_SHOWN])
        more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        why = f"; {rows[0].reason}" if rows[0].rule == OTHERS else ""  # which names the file that is read
        raise UnrepresentableError(
            f"weights next to the converted ones would be left out: {names}{more}{why}",
            uri=uri,
            cure=Cure(
                'pass {} to leave them out (in a route: ignore = ["{}"])', Argument("ignore", OTHERS), OTHERS
            ),
        )


def unused_options(
    seen: Checkpoint, row: Format, target: TargetRequest, ignore: Iterable[str], left: Iterable[str]
) -> Iterator[UnusedOption]:
    """The options of a target that its plan does not depend on.

    Args:
        seen: the source in the layout of the target.
        row: the target format.
        target: the options.
        ignore: the rules for what is left out.
        left: the names of `--set` that the view leaves to the tree and the format, which judge them.
    """
    has_files = row.holds.companions or bool(row.holds.stated)
    files = has_files and COMPANIONS not in ignore
    uses = seen.uses | (seen.uses_in_files if files else frozenset())
    changes_values = bool(seen.bounds or seen.manifest.origin.get("merge"))
    for name, value in _statements(target).items():
        if name in uses or name in left or (name == _OVERFLOW and changes_values):
            continue
        if name == _OVERFLOW:
            reason = "no value is cast or scaled, so none can overflow"
        elif name in seen.uses_in_files and has_files:
            reason = f"--ignore {COMPANIONS} leaves out the file that it changes"
        elif name in seen.uses_in_files:
            reason = f"it changes a companion file, and {row.name} holds none"
        elif seen.laid_out:
            reason = "the model and the layout of the target do not depend on it"
        else:
            reason = (
                f"{SCAN} reads no family" if SCAN in target.options else "the tree is kept without a layout"
            )
        yield UnusedOption(name, value, reason)


def require_used(
    uri: str, targets: Sequence[TargetRequest], unused: Sequence[tuple[UnusedOption, ...]]
) -> None:
    """Refuse an option that no target uses of those that state it.

    Args:
        uri: the source.
        targets: the targets.
        unused: the unused options of each.

    Raises:
        UsageError: there is one; the first is named with the reason.
    """
    for one in (option for row in unused for option in row):
        stating = [at for at, target in enumerate(targets) if _statements(target).get(one.name) == one.value]
        if all(any(other.name == one.name for other in unused[at]) for at in stating):
            spelled = (
                one.name if one.name.startswith("--") else f"--set {shlex.quote(f'{one.name}={one.value}')}"
            )
            raise UsageError(
                f"{spelled} changes nothing in this conversion: {one.reason}",
                uri=uri,
                cure="remove the option",
            )


def _statements(target: TargetRequest) -> dict[str, Any]:
    """The options that a target states, by name; `--family none` only keeps the tree."""
    layout = ((one.flag, getattr(target.layout, one.name)) for one in options_of(LayoutRequest))
    return {**{name: value for name, value in layout if value not in (None, NONE, False)}, **target.options}


def traffic_of(seen: Checkpoint, plan: Plan, shared: SharedTraffic = ONE_PROCESS) -> Traffic:
    """The traffic of a plan.

    Args:
        seen: the opened source, or its view in the layout of the target's system.
        plan: the plan.
        shared: what several workers ask for; by default one process converts.
    """
    stores = list[StoreTraffic]()
    if _is_remote(seen.original.uri):
        stores.append(_of_source(seen.original.location, seen, plan, shared))
    if _is_remote(plan.target):
        stores.append(_of_target(locate(plan.target), plan, shared))
    if len(stores) > 1 and stores[0].store == stores[1].store:
        one, other = stores
        sums = {name: value + getattr(other, name) for name, value in asdict(one).items() if name != "store"}
        stores = [StoreTraffic(one.store, **sums)]
    return Traffic(tuple(stores), _space(plan))


def require_room(plans: Sequence[Plan]) -> None:
    """Refuse targets for which their disks are too small together; called before the first byte is written.

    Raises:
        StorageError: they do not fit.
    """
    disks: dict[int, list[tuple[str, DiskSpace]]] = {}
    for plan in plans:
        space = plan.traffic.space or _space(plan)  # a plan that is about to be carried out states no traffic
        if space is not None and not space.compressed:
            disks.setdefault(Path(space.folder).stat().st_dev, []).append((plan.target, space))
    for rows in disks.values():
        needed, free = sum(space.needed for _target, space in rows), rows[0][1].empty
        if needed > free:  # only then look for what interrupted runs have staged
            free += sum(space.held for _target, space in rows)
        if needed > free:
            target = rows[0][0]
            several = f" for {plural(len(rows), 'target')}" if len(rows) > 1 else ""
            other = "folder with TMPDIR" if local_path(target) is None else "target"
            raise StorageError(
                f"the disk is too small{several}: {show_size(needed)} are needed, {show_size(free)} are free",
                uri=target,
                cure=f"free some space, or choose another {other}",
            )


def _is_remote(uri: str) -> bool:
    return local_path(uri) is None and not is_live(uri)


def _store_name(place: Location) -> str:
    return "/".join(place.uri.split("/", 3)[:3])


def _of_source(place: Location, seen: Checkpoint, plan: Plan, shared: SharedTraffic) -> StoreTraffic:
    original = seen.original
    twice = seen.is_view and not hashes_on_the_way()
    reads, egress = _reads_of_source(seen, plan, times=2 if twice else 1)
    reads, egress = round(reads * shared.times), round(egress * shared.times)
    companions, nbytes = _count(
        piece for companion in plan.manifest.companions for piece in _cut(companion.size, LARGEST)
    )
    folders: dict[str, int] = {}
    for member in original.reader.members():
        folder = member.name.rpartition("/")[0]
        folders[folder] = folders.get(folder, 0) + 1
    pages = sum(-(-count // _PAGE) for count in folders.values())
    return StoreTraffic(
        _store_name(place), reads=reads + companions + _METADATA_READS * shared.workers,
        lists=_LISTINGS * pages * shared.workers, egress=egress + nbytes,
    )  # fmt: skip


def hashes_on_the_way() -> bool:
    """Whether the source of a view is hashed while it is read, without a read for its own digests."""
    return kernels.load() is not None


def _reads_of_source(seen: Checkpoint, plan: Plan, *, times: int) -> tuple[int, int]:
    """The number of reads of the source's tensors, and their bytes.

    The own digests of the source of a view take reads of their own, where its tensors are not decoded anyway. With
    kernels they are hashed on the way; what is read again of short runs is not counted.

    Args:
        seen: the source.
        plan: of the conversion.
        times: how often tensors are read that are stored as they are.
    """
    original = seen.original
    wanted = {made for path in plan.pairs.values() for made in seen.made_of(path)}
    raw: list[TensorSpec] = []
    others: list[TensorSpec] = []
    for path, spec in original.manifest.tensors.items():
        is_raw = original.reader.access(spec).extents is not None
        if path in wanted:
            (raw if is_raw else others).append(spec)
        elif seen.is_view:
            others.append(spec)
    reads, egress = _count(_tensor_reads(original.reader, raw))
    more, nbytes = _count(_tensor_reads(original.reader, others))
    return reads * times + more, egress * times + nbytes


def _count(sizes: Iterable[int]) -> tuple[int, int]:
    """The number and the sum of some sizes, of which a huge model has a million."""
    count = total = 0
    for size in sizes:
        count, total = count + 1, total + size
    return count, total


def _of_target(place: Location, plan: Plan, shared: SharedTraffic) -> StoreTraffic:
    from wherry.target.uploaded_file import PART_BYTES

    companions = [companion.size for companion in plan.manifest.companions]
    written = plan.nbytes_out + sum(companions)
    parts = -(-plan.nbytes_out // PART_BYTES) + sum(max(-(-size // PART_BYTES), 1) for size in companions)
    read_back = plan.nbytes_out if plan.verify == "digest" else 0
    read_back = read_back if shared.read_back is None else shared.read_back
    return StoreTraffic(
        _store_name(place), reads=-(-read_back // LARGEST) + shared.records,
        writes=parts + _SMALL_WRITES + shared.records, lists=_LISTINGS + shared.records,
        egress=read_back, ingress=written,
    )  # fmt: skip


def _tensor_reads(reader: Contents, specs: list[TensorSpec]) -> Iterator[int]:
    """The bytes of each request that reads these tensors."""
    window = RangeWindow()
    for spec in specs:
        access = reader.access(spec)
        if not isinstance(access, Stored):
            yield from _decoded_reads(access, spec)
            continue
        way = Way.of(access)
        for move in way.moves(spec, ()):
            ranged = ranged_move(move, spec, way)
            if ranged is not None:
                for batch in window.add(ranged):
                    yield from request_sizes(batch)
    for batch in window.batches():
        yield from request_sizes(batch)


def _decoded_reads(access: Chunked | Computed, spec: TensorSpec) -> Iterator[int]:
    if isinstance(access, Chunked) and access.decoder is not None:
        lengths = [extent and extent.length for extent in map(access.place, cells(spec.whole, access.grid))]
        if None not in lengths:
            for length in filter(None, lengths):
                yield from _cut(length, STEP)
            return
    count = chunk_count(spec.shape, spec.chunks) if spec.chunks else 1
    yield from (math.ceil(spec.nbytes / count) for _ in range(count))


def _cut(nbytes: int, step: int) -> Iterator[int]:
    return (min(step, nbytes - start) for start in range(0, max(nbytes, 1), step))


def _space(plan: Plan) -> DiskSpace | None:
    whole = plan.nbytes_out + sum(companion.size for companion in plan.manifest.companions)
    compressed = str(plan.options.get("compression") or "none") != "none"
    path = local_path(plan.target)
    if path is not None:
        return DiskSpace(path, whole + plan.spill, compressed, resumed=True)
    target = locate(plan.target)
    straight = target.store.capabilities.parts
    if straight and not plan.spill:
        return None
    needed = plan.spill if straight else whole + plan.spill
    temporary = Path(tempfile.gettempdir(), target.name)
    return DiskSpace(str(temporary), needed, compressed and not straight, resumed=False)


def _held_by_staging(target: Path) -> int:
    """Bytes on disk of what interrupted runs have staged next to a target."""
    if not target.parent.is_dir():
        return 0
    areas = (one for one in target.parent.iterdir() if one.name.startswith(f"{staging_stem(target.name)}."))
    files = (file for area in areas for file in area.rglob("*") if file.is_file())
    return sum(file.lstat().st_blocks * 512 for file in files)
