"""Writes torch.save archives: one with many tensors (a `.pt` file), or many in a row (the items of DCP files).

Every offset follows from the manifest before the first byte is written; any span of any tensor can then be written at
any time from any thread, any number of times. The CRC-32 of each tensor is combined from those of its pieces; pieces
that an earlier process wrote are read again. `finish` writes everything but the tensors.

The root is `archive`, as when torch saves to a stream: a root named after the file would make two copies of one
checkpoint differ. Each tensor has its own contiguous storage. The `serialization_id` record is omitted, because no
reader requires it. Source: torch/serialization.py, torch/_utils.py and archives of torch 2.13.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from isal.isal_zlib import crc32

from wherry.core.keypath import render
from wherry.core.tensorspec import Span
from wherry.errors import UsageError
from wherry.formats.reader import Extent
from wherry.integrations.containers.flat.files import (
    SMALL,
    FlatFiles,
    FlatFilesWriter,
    open_files,
    write_runs,
)
from wherry.integrations.containers.torch.frames import StreamedFrames
from wherry.integrations.containers.torch.values import DTYPES
from wherry.integrations.containers.zip.write import (
    ALIGNMENT,
    ArchiveForm,
    ArchivePlan,
    MemberRecord,
    SmallFrame,
    frame,
    is_of_one,
    lay_out,
    small,
)
from wherry.mover.checksums import PieceCrc
from wherry.upload.selection import is_region

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.formats.writer import Checks
    from wherry.integrations.containers.pickle.writer import PickleWriter
    from wherry.storage.location import Location

ROOT = "archive"
WRITABLE = frozenset(ours for _, ours, _ in DTYPES)
_TORCH = {ours: (torch, storage) for torch, ours, storage in DTYPES}


def emit_tensor(out: PickleWriter, spec: TensorSpec, key: str) -> None:
    """A contiguous tensor over the whole of one storage, as torch pickles it.

    Args:
        out: the pickle.
        spec: the tensor.
        key: name of its storage: the member `data/<key>`.
    """
    dtype, storage = _TORCH[spec.dtype]
    out.name("torch._utils", "_rebuild_tensor_v2" if storage else "_rebuild_tensor_v3")
    out.raw(b"((")
    out.word("storage")
    out.name(*(("torch", storage) if storage else ("torch.storage", "UntypedStorage")))
    out.value(key)
    out.word("cpu")
    out.value(spec.size if storage else spec.nbytes)
    out.raw(b"tQ")
    out.value(0)
    out.tuple_of(spec.shape)
    out.tuple_of(_strides(spec.shape))
    out.value(value=False)
    out.name("collections", "OrderedDict")
    out.raw(b")R")
    if not storage:
        out.name("torch", dtype)
    out.raw(b"tR")


def archive_records(pickle: bytes, specs: Sequence[TensorSpec]) -> list[MemberRecord]:
    """The members of an archive in torch's order; the storage of the n-th tensor has the key n."""
    return [
        small(f"{ROOT}/data.pkl", pickle),
        small(f"{ROOT}/.format_version", b"1"),
        small(f"{ROOT}/.storage_alignment", b"%d" % ALIGNMENT),
        small(f"{ROOT}/byteorder", b"little"),
        *(
            MemberRecord(f"{ROOT}/data/{index}", None, spec.nbytes)
            if spec.nbytes
            else small(f"{ROOT}/data/{index}", b"")
            for index, spec in enumerate(specs)
        ),
        small(f"{ROOT}/version", b"3\n"),
    ]


def place_archives(
    contents: Iterable[tuple[bytes, Sequence[TensorSpec]]], file: str = ""
) -> tuple[list[ArchivePlan], int]:
    """Archives in a row, each beginning at a multiple of 64, so that data is aligned in the file too.

    Args:
        contents: pickle and tensors of each.
        file: its name, if there are others.

    Returns:
        The archives, and the size of the file.
    """
    plans: list[ArchivePlan] = []
    forms: dict[tuple[bytes, tuple[int, ...]], ArchiveForm] = {}
    end = 0
    for pickle, specs in contents:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        sizes = tuple([spec.nbytes for spec in specs])
        form = forms.get((pickle, sizes))
        if form is None:
            form = forms[pickle, sizes] = lay_out(archive_records(pickle, specs))
        paths = tuple([spec.path for spec, size in zip(specs, sizes, strict=True) if size])
        plans.append(ArchivePlan(start, form, paths, file))
        end = start + form.length
    return plans, end


def whole_archive(pickle: bytes) -> bytes:
    """All bytes of an archive without tensors."""
    return b"".join(run for _at, run in frame(ArchivePlan(0, lay_out(archive_records(pickle, ())), ()), {}))


class _RecordPlace(NamedTuple):
    file: str
    start: int
    size: int


class ArchivesWriter(FlatFilesWriter):
    """A writer of the engine's protocol over the archives of one or several files in a folder."""

    def __init__(
        self,
        folder: Location,
        files: Mapping[str, tuple[Sequence[ArchivePlan], int]],
        chunks: Collection[KeyPath] = (),
    ) -> None:
        """Create the files.

        Args:
            folder: an existing local folder, or one in the staged objects of a run.
            files: name → the archives in it, and its size.
            chunks: key paths of those that are chunks of a tensor: even a small one may be written in pieces.

        Raises:
            UnsupportedError: the folder is neither.
            StorageError: the storage is full or failed.
        """
        self._home = folder
        self._plans = {name: plans for name, (plans, _) in files.items()}
        self._pieces: dict[KeyPath, PieceCrc] = {}  # of tensors that are not written at once
        self._lock = threading.Lock()
        # Of whole tensors, once they are known; of small ones, once their archives are written, None if an earlier run
        # has written them.
        self._crcs: dict[KeyPath, int | None] = {}
        # Archives of one small tensor, as the items of DCP files, are written with its data.
        alone = not is_region(folder)
        self._small: dict[KeyPath, ArchivePlan] = {}
        self._places: dict[KeyPath, _RecordPlace] = {}  # of the other tensors
        forms = {plan.form for plans in self._plans.values() for plan in plans} if alone else ()
        of_one = {form for form in forms if is_of_one(form, SMALL)}
        for name, plans in self._plans.items():
            for plan in plans:
                if plan.form in of_one and plan.file == name and plan.paths[0] not in chunks:
                    self._small[plan.paths[0]] = plan
                    continue
                for path, slot in plan.tensors():
                    self._places[path] = _RecordPlace(name, plan.start + slot.data, slot.record.size)
        self._frames = {form: SmallFrame(form) for form in {plan.form for plan in self._small.values()}}
        self._files = open_files(folder, {name: size for name, (_, size) in files.items()})
        self._streamed = (
            None if isinstance(self._files, FlatFiles) else StreamedFrames(files, self._files.write)
        )
        # Bytes that nobody has written, where frames are written as soon as their tensors are complete.
        self._left: dict[KeyPath, int] = {}
        if self._streamed is not None:
            self._left = {path: place.size for path, place in self._places.items()}
            self._left |= {path: self._frames[plan.form].size for path, plan in self._small.items()}

    def _place_of(self, path: KeyPath) -> _RecordPlace | None:
        """Where the bytes of a tensor lie; None for a tensor without elements."""
        plan = self._small.get(path)
        if plan is None:
            return self._places.get(path)
        around = self._frames[plan.form]
        return _RecordPlace(plan.file, plan.start + around.data, around.size)

    def _require_place(self, path: KeyPath) -> _RecordPlace:
        place = self._place_of(path)
        if place is None:
            raise KeyError(path)
        return place

    def place(self, path: KeyPath, where: Region | Span) -> int:
        """The offset of a span in its file."""
        place = self._place_of(path)  # None for tensors without elements
        return place.start + where.start if place and isinstance(where, Span) else 0

    def extents(self, path: KeyPath, where: Region | Span) -> tuple[Extent, ...] | None:
        """The byte range of a span; tensors without elements have none. After `finish`, a whole tensor has its CRC.

        Read-back compares that CRC with the one that the archive records, and reads the tensor again without it.
        """
        place = self._place_of(path)
        if place is None or not isinstance(where, Span):
            return None
        crc = self._crcs.get(path) if where.nbytes == place.size else None
        return (Extent(self._home.join(place.file), place.start + where.start, where.nbytes, crc),)

    def write(self, path: KeyPath, where: Region | Span, data: memoryview) -> None:
        """Write a span.

        Raises:
            UsageError: `where` is not a span of this tensor, or does not agree with the data.
            StorageError: the storage failed.
        """
        if not isinstance(where, Span) or where.nbytes != len(data):
            raise UsageError(f"{where} is not a span of {len(data)} bytes", path=render(path))
        if not data:
            return  # tensors without elements have no offset
        place = self._require_place(path)
        if not 0 <= where.start <= where.stop <= place.size:
            raise UsageError(f"span {where} is not inside the tensor", path=render(path))
        small = self._small.get(path)
        if small is not None and len(data) == place.size:
            self._write_archive(small, place, data)
        else:
            if small is not None:
                self._crcs.pop(path, None)
            self._piece_crc(path).update(where.start, data)
            self._files.write(place.file, place.start + where.start, data)
            self._count(path, len(data))

    def write_all(self, parts: Sequence[tuple[KeyPath, Span, memoryview]]) -> None:
        """Write the archives of whole small tensors together, as they follow one another; see `write`."""
        if self._streamed is not None:
            super().write_all(parts)
            return
        crcs: dict[KeyPath, int] = {}
        rows: list[tuple[str, int, bytes]] = []
        for path, where, data in parts:
            plan = self._small.get(path)
            around = None if plan is None else self._frames[plan.form]
            if plan is None or around is None or len(data) != around.size:
                self.write(path, where, data)
                continue
            crc = crcs[path] = crc32(data)
            rows.append((plan.file, plan.start, around.around(data, crc)))
        write_runs(self._files, rows, ALIGNMENT)
        self._crcs |= crcs

    def stored(self, path: KeyPath, where: Region | Span) -> bool:
        """Whether a span is durable after a `sync`; the archive of a small tensor counts as a whole."""
        plan = self._small.get(path)
        if plan is None or isinstance(self._files, FlatFiles):
            return super().stored(path, where)
        place = self._home.join(plan.file)
        return self._files.holds(place.path, plan.start, plan.start + plan.length)

    def checks(self, path: KeyPath, where: Span) -> Checks:
        """The CRCs of the pieces of a span, if the frames are written before all of them are known."""
        return () if self._streamed is None or path in self._small else self._piece_crc(path).known(*where)

    def restore(self, path: KeyPath, where: Span, checks: Checks) -> None:
        """Take up the CRCs of stored pieces; an archive of a small tensor was stored with its frame, and has none."""
        if path in self._small and not checks:
            self._crcs[path] = None
        elif self._place_of(path) is not None:
            self._piece_crc(path).take(checks)
            self._count(path, where.nbytes)

    def _count(self, path: KeyPath, nbytes: int) -> None:
        """Count bytes that are known; after the last ones of a tensor, its frames are."""
        if self._streamed is None:
            return
        with self._lock:
            self._left[path] -= nbytes
            complete = not self._left[path]
        if complete:
            crc = self._crcs[path] = self._crc(path)
            self._streamed.complete(path, crc)

    def _write_archive(self, plan: ArchivePlan, place: _RecordPlace, data: memoryview) -> None:
        """Write the archive of one small tensor at once: written later, its frame would read each block again."""
        self._files.write(place.file, plan.start, self._frames[plan.form].around(data, crc := crc32(data)))
        self._crcs[plan.paths[0]] = crc

    def close(self) -> None:
        """Close the files; on a local disk, forget the small tensors, which are read back by the target's reader."""
        super().close()
        if isinstance(self._files, FlatFiles):
            self._plans, self._small, self._frames = {}, {}, {}
            self._crcs = {path: crc for path, crc in self._crcs.items() if path in self._places}

    def finish(self) -> None:
        """Write the frames of the archives, which need all CRCs, unless they were written meanwhile."""
        for name, plans in self._plans.items() if self._streamed is None else ():
            for plan in plans:
                if plan.paths and plan.paths[0] in self._small and plan.paths[0] in self._crcs:
                    continue  # written with its tensor
                crcs = {path: self._crc(path) for path in plan.paths}
                self._crcs |= crcs
                for offset, run in frame(plan, crcs):
                    self._files.write(name, offset, run)
        self._files.finish()

    def _piece_crc(self, path: KeyPath) -> PieceCrc:
        with self._lock:
            known = self._pieces.get(path)
            if known is None:
                known = self._pieces[path] = PieceCrc(self._require_place(path).size)
            return known

    def _crc(self, path: KeyPath) -> int:
        """The CRC of a tensor; pieces that this process did not write are read from the staged file."""
        place = self._require_place(path)
        return self._piece_crc(path).value(
            lambda start, stop: self._files.read(place.file, place.start + start, place.start + stop)
        )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor as torch computes them: an extent of 0 counts as 1."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
