"""The layout of torch archives: one in a file (a `.pt` file), or many in a row (the items of DCP files).

The root is `archive`, as when torch saves to a stream: a root named after the file would make two copies of one
checkpoint differ. Each tensor has its own contiguous storage. The `serialization_id` record is omitted, because no
reader requires it. Source: torch/serialization.py, torch/_utils.py and archives of torch 2.13.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING

from wherry.integrations.containers.torch.values import DTYPES
from wherry.integrations.containers.zip.write import ALIGNMENT, ArchiveForm, MemberRecord, lay_out, small
from wherry.target.file_map import Checksum, File, FileMap, Late, Segment, Segments, TensorSegments

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec
    from wherry.integrations.containers.pickle.writer import PickleWriter

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
    strides, step = list[int](), 1
    for extent in reversed(spec.shape):
        strides.append(step)
        step *= max(extent, 1)  # as torch computes them: an extent of 0 counts as 1
    out.tuple_of(tuple(reversed(strides)))
    out.value(value=False)
    out.name("collections", "OrderedDict")
    out.raw(b")R")
    if not storage:
        out.name("torch", dtype)
    out.raw(b"tR")


def _archive_form(pickle: bytes, sizes: Sequence[int]) -> ArchiveForm:
    """The members of an archive in torch's order; the storage of the n-th tensor has the key n.

    Args:
        pickle: what is saved.
        sizes: bytes of the tensors.
    """
    before = (
        small(f"{ROOT}/data.pkl", pickle),
        small(f"{ROOT}/.format_version", b"1"),
        small(f"{ROOT}/.storage_alignment", b"%d" % ALIGNMENT),
        small(f"{ROOT}/byteorder", b"little"),
    )
    kept = array("q", sizes)  # of very many tensors a record each would take ten times as much

    def record(number: int) -> MemberRecord:
        if number < len(before):
            return before[number]
        key = number - len(before)
        if key == len(kept):
            return small(f"{ROOT}/version", b"3\n")
        return MemberRecord(f"{ROOT}/data/{key}", None if kept[key] else b"", kept[key])

    return lay_out(len(before) + len(kept) + 1, record)


def whole_archive(pickle: bytes) -> bytes:
    """All bytes of an archive without tensors."""
    return _archive_form(pickle, ()).frame(0).data


class Archives:
    """The archives of one file, each of which begins at a multiple of 64, so that data is aligned in the file too.

    Attributes:
        forms: of the archives, in order.
        specs: the tensors with elements, in the order of the archives.
    """

    def __init__(self, contents: Iterable[tuple[bytes, Sequence[TensorSpec]]]) -> None:
        """Lay them out.

        Args:
            contents: pickle and tensors of each.
        """
        self.forms: list[ArchiveForm] = []
        self.specs: list[TensorSpec] = []
        known: dict[tuple[bytes, tuple[int, ...]], ArchiveForm] = {}
        for pickle, specs in contents:
            sizes = (specs[0].nbytes,) if len(specs) == 1 else tuple([spec.nbytes for spec in specs])
            form = known.get((pickle, sizes))
            if form is None:
                form = known[pickle, sizes] = _archive_form(pickle, sizes)
            self.forms.append(form)
            self.specs += specs if all(sizes) else [s for s, size in zip(specs, sizes, strict=True) if size]

    def starts(self) -> Sequence[int]:
        """The offset of each archive in the file."""
        found, start = array("q"), 0
        for form in self.forms:
            found.append(start)
            start += -(-form.length // ALIGNMENT) * ALIGNMENT
        return found


def archives_map(
    files: Mapping[str, Archives],
    late: Sequence[File] = (),
    chunks: Mapping[KeyPath, tuple[TensorSpec, int]] | None = None,
) -> FileMap:
    """The files of a checkpoint.

    Args:
        files: name → the archives in it.
        late: files without tensors, which are written last.
        chunks: key path of a tensor in an archive that is a chunk of another one → that one, and its first byte there.
    """
    bodies: list[Segments] = []
    tensors = TensorSegments(bodies)
    for number, archives in enumerate(files.values()):
        _ArchivesFile(number, archives, chunks or {}, tensors, bodies)
    found = [File(name, body) for name, body in zip(files, bodies, strict=True)]
    return FileMap((*found, *late), tensors.places, checksums=True)


class _ArchivesFile:
    """A frame, then each tensor with the frame after it: the end of an archive and the beginning of the next one."""

    def __init__(
        self,
        number: int,
        archives: Archives,
        chunks: Mapping[KeyPath, tuple[TensorSpec, int]],
        tensors: TensorSegments,
        bodies: list[Segments],
    ) -> None:
        self._number, self._forms, self._tensors = number, archives.forms, tensors
        self._firsts = array("q")  # of each archive: how many tensors are before it
        self._known: dict[tuple[ArchiveForm, ArchiveForm], Late] = {}  # between archives of two forms
        self._body = body = Segments(self._segment)
        bodies.append(body)
        sizes = {
            form: array("q", map(form.frame_bytes, range(len(form.tensors) + 1))) for form in set(self._forms)
        }
        specs, frame, count = iter(archives.specs), 0, 0
        for form in self._forms:
            self._firsts.append(count)
            *before, last = sizes[form]
            for nbytes in before:
                body.add(frame + nbytes)
                spec, frame = next(specs), 0
                whole, start = chunks.get(spec.path, (spec, 0))
                tensors.add(whole, number, 2 * count + 1, start)
                body.add(spec.nbytes, tensor=True)
                count += 1
            frame += last + -form.length % ALIGNMENT
        end = -self._forms[-1].length % ALIGNMENT if self._forms else 0
        body.add(frame - end)  # no archive follows the last one

    def _segment(self, number: int) -> Segment:
        if self._body.tensors[number]:
            return self._tensors.raw(self._number, number)
        after = number // 2  # so many tensors are before it
        if not after:
            return self._frame(0, 0)
        archive = bisect_right(self._firsts, after - 1) - 1
        frame = after - self._firsts[archive]
        form = self._forms[archive]
        if frame < len(form.tensors) or archive + 1 == len(self._forms):
            return self._frame(archive, frame)
        key = form, self._forms[archive + 1]
        found = self._known.get(key)
        if found is None:
            found = self._frame(archive, frame)
            if key[1].tensors:  # else a later archive is in it too
                self._known[key] = found
        return found

    def _frame(self, archive: int, number: int) -> Late:
        """From a frame of an archive to the next tensor, which may be in a later archive."""
        data, checksums = bytearray(), list[Checksum]()
        before = number  # tensors of this archive before the segment
        while archive < len(self._forms):
            form = self._forms[archive]
            frame = form.frame(number)
            for at, tensor in frame.crcs:
                segment = 2 * (tensor - before) + 1
                checksums.append(Checksum(len(data) + at, segment, segment + 1))
            data += frame.data
            if number < len(form.tensors):
                break
            if archive + 1 < len(self._forms):
                data += bytes(-form.length % ALIGNMENT)
            archive, number, before = archive + 1, 0, 0
        return Late(bytes(data), tuple(checksums))
