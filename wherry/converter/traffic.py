"""traffic: what a planned conversion asks of stores and disks: requests, bytes in and out, and room.

The numbers follow from metadata alone. Reads of raw tensors are counted as the mover makes them; reads of encoded
chunks, writes and lists are estimates, which leave out retries. Bytes that leave a store are what its provider bills as
egress: those of the source, and those of the target that are read back.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from wherry import kernels
from wherry.core.units import show_size
from wherry.errors import StorageError
from wherry.formats.contents import Chunked, Stored
from wherry.mover.move import Way, cells, chunk_count
from wherry.mover.range_batch import RangeWindow, ranged_move, request_sizes
from wherry.storage.folders import staging_stem
from wherry.storage.local_paths import local_path
from wherry.storage.ranges import LARGEST
from wherry.storage.read_ahead import STEP
from wherry.storage.stores import is_live, locate
from wherry.target.uploaded_file import PART_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.contents import Computed, Contents
    from wherry.storage.location import Location

_PAGE = 1000  # entries of one answer to a list request
_METADATA_READS = 4  # names and headers, when a checkpoint is opened
_SMALL_WRITES = 6  # lease, journal, sidecar, commit member, and beginning and end of an upload
_LISTINGS = 2  # of each folder: when it is opened, and before the commit


class PlannedConversion(Protocol):
    """What the traffic of a plan follows from; see `Plan`."""

    @property
    def target(self) -> str:
        """URI of the target."""
        ...

    @property
    def to(self) -> str:
        """Target format."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the target format."""
        ...

    @property
    def manifest(self) -> Manifest:
        """The contents of the target."""
        ...

    @property
    def pairs(self) -> Mapping[KeyPath, KeyPath]:
        """Target key path → source key path."""
        ...

    @property
    def verify(self) -> str:
        """Verification before the commit."""
        ...

    @property
    def nbytes_out(self) -> int:
        """Bytes of the target's tensors."""
        ...

    @property
    def spill(self) -> int:
        """Bytes of temporary files."""
        ...

    @property
    def traffic(self) -> Traffic:
        """The traffic of the plan."""
        ...


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
        """As `wherry plan` prints it."""
        return (
            f"about {self.reads:,} reads, {self.writes:,} writes, {self.lists:,} lists; "
            f"{show_size(self.egress)} leave it, {show_size(self.ingress)} are written"
        )


@dataclass(frozen=True)
class DiskSpace:
    """The disk on which a target lies, or on which it is staged; a target that streams needs one for spill files alone.

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
    def _empty(self) -> int:
        return shutil.disk_usage(self.folder).free

    @cached_property
    def free(self) -> int:
        """Bytes that are free, and those that an interrupted run holds for the same target."""
        return self._empty + (_held_by_staging(Path(self.path)) if self.resumed else 0)

    @property
    def fits(self) -> bool:
        """Whether it is not certain that the disk is too small; looks for staged parts only where that matters."""
        return self.compressed or self.needed <= self._empty or self.needed <= self.free

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
    """What several workers ask of stores, where it differs from what one process does.

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


def traffic_of(seen: Checkpoint, plan: PlannedConversion, shared: SharedTraffic = ONE_PROCESS) -> Traffic:
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


def require_room(plan: PlannedConversion) -> None:
    """Refuse a target for which its disk is too small.

    Raises:
        StorageError: it does not fit.
    """
    _require_space(plan, plan.traffic.space)


def require_room_now(plan: PlannedConversion) -> None:
    """Refuse a target for which its disk is too small, before its first byte is written.

    Args:
        plan: a plan that is about to be carried out, so that it states no traffic.

    Raises:
        StorageError: it does not fit.
    """
    _require_space(plan, _space(plan))


def _require_space(plan: PlannedConversion, space: DiskSpace | None) -> None:
    if space is not None and not space.fits:
        raise StorageError(
            f"the disk is too small: {show_size(space.needed)} are needed, {show_size(space.free)} are free",
            uri=plan.target,
            cure=f"free some space, or choose another {_choice(plan)}",
        )


def _is_remote(uri: str) -> bool:
    return local_path(uri) is None and not is_live(uri)


def _store_name(place: Location) -> str:
    return "/".join(place.uri.split("/", 3)[:3])


def _of_source(
    place: Location, seen: Checkpoint, plan: PlannedConversion, shared: SharedTraffic
) -> StoreTraffic:
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


def _reads_of_source(seen: Checkpoint, plan: PlannedConversion, *, times: int) -> tuple[int, int]:
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
    """The number and the sum of some sizes, of which a giant has a million."""
    count = total = 0
    for size in sizes:
        count, total = count + 1, total + size
    return count, total


def _of_target(place: Location, plan: PlannedConversion, shared: SharedTraffic) -> StoreTraffic:
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


def _choice(plan: PlannedConversion) -> str:
    return "folder with TMPDIR" if local_path(plan.target) is None else "target"


def _space(plan: PlannedConversion) -> DiskSpace | None:
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
