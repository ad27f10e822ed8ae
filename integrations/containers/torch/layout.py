"""The layout of torch archives: one in a file (a `.pt` file), or many in a row (the items of DCP files).

The root is `archive`, as when torch saves to a stream: a root named after the file would make two copies of one
checkpoint differ. Each tensor has its own contiguous storage. The `serialization_id` record is omitted, because no
reader requires it. Source: torch/serialization.py, torch/_utils.py and archives of torch 2.13.

Rebuilds from key paths the nested object that torch.save would pickle.

Nodes are dicts, or lists where the manifest says so. The manifest's `custom` says which keys were numbers and which
values were objects of a class; these are restored (`emit_typed`). Tensors stay TensorSpecs until they are pickled.

The reader stores the plain value of an object that is more than a dict, list or scalar, and its class next to it
(`manifest.custom["pickle"]["types"]`). Common classes of torch files (tuples, bytes, sets, sizes, devices, dtypes) and
plain records (`Namespace`, paths, dates) are pickled as Python would; every other class cannot be written, and the
error names it. Numpy scalars become plain numbers of the same value.
"""

from __future__ import annotations

import datetime as dt
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, cast

from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.cures import Argument, Cure
from wherry.errors import UnrepresentableError
from wherry.integrations.containers.pickle.writer import PickleWriter
from wherry.integrations.containers.torch.values import DTYPES
from wherry.integrations.containers.zip.write import ALIGNMENT, ArchiveForm, MemberRecord, lay_out, small
from wherry.target.file_map import Checksum, File, FileMap, Late, Segment, Segments, TensorSegments

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
        """The bytes from a frame of an archive to the next tensor, which may be in a later archive."""
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


_RECORDS = ("argparse.Namespace", "types.SimpleNamespace")
_MAPPINGS = ("collections.defaultdict", "collections.Counter")
_DTYPES = frozenset(f"torch.{torch}" for torch, _, _ in DTYPES)


@dataclass(frozen=True, slots=True)
class TypedObject:
    """A value or node with the class that it had."""

    kind: str
    value: Any


def require_written(path: KeyPath, kind: str, value: Any) -> None:
    """Refuse a class that can be read but not written.

    Raises:
        UnrepresentableError: the class cannot be written.
    """
    plain = kind.startswith("numpy.") and not isinstance(value, (dict, list))
    known = plain or kind.startswith("pathlib.") or kind in (*_EMITTERS, *_RECORDS, *_MAPPINGS)
    odd = (kind == "global" and value not in _DTYPES) or (
        kind.startswith("datetime.") and _moment(kind, value) is None
    )
    if known and not odd:
        return
    raise UnrepresentableError(
        f"cannot write {render(path)!r}: unsupported class {value if kind == 'global' else kind}",
        cure=Cure("pass {} to leave out such objects", Argument("ignore", "values")),
    )


def emit_typed(out: PickleWriter, typed: TypedObject, emit: Callable[[Any], None]) -> None:
    """Pickle an object of a class.

    Args:
        out: the pickle.
        typed: the object.
        emit: pickles a child.
    """
    module, _, name = typed.kind.rpartition(".")
    if typed.kind in _RECORDS:
        fields = cast("Mapping[str, Any]", typed.value or {})
        out.state(module, name, ((key, partial(emit, child)) for key, child in fields.items()))
    elif typed.kind in _MAPPINGS:
        out.made(module, name, partial(out.raw, b")"))
        if typed.value:
            out.raw(b"(")
            for key, child in typed.value.items():
                out.value(key)
                emit(child)
            out.raw(b"u")
    elif module == "pathlib":
        out.made(module, name, partial(out.tuple_of, (typed.value,)))
    elif module == "numpy":
        out.value(typed.value)
    else:
        _EMITTERS[typed.kind](out, typed.value, emit)


def _tuple(out: PickleWriter, value: Any, emit: Callable[[Any], None]) -> None:
    out.tuple_with([partial(emit, child) for child in value])


def _bytes(out: PickleWriter, value: str, _emit: Any) -> None:
    out.made("_codecs", "encode", partial(out.tuple_of, (value, "latin1")))


def _device(out: PickleWriter, value: str, _emit: Any) -> None:
    kind, _, index = value.partition(":")
    out.made("torch", "device", partial(out.tuple_of, (kind, int(index)) if index else (kind,)))


def _layout(out: PickleWriter, value: str, _emit: Any) -> None:
    out.made("torch.serialization", "_get_layout", partial(out.tuple_of, (value,)))


def _complex(out: PickleWriter, value: str, _emit: Any) -> None:
    number = complex(value)
    out.made("__builtin__", "complex", partial(out.tuple_of, (number.real, number.imag)))


def _dtype(out: PickleWriter, value: str, _emit: Any) -> None:
    out.name("torch", value.removeprefix("torch."))


def _of_one(module: str, name: str) -> Callable[[PickleWriter, Any, Callable[[Any], None]], None]:
    """A class that is called with one argument: a list or tuple of items, or a string."""

    def run(out: PickleWriter, value: Any, emit: Callable[[Any], None]) -> None:
        def args() -> None:
            emit(value)
            out.raw(b"\x85")

        out.made(module, name, args)

    return run


def _size(out: PickleWriter, value: Any, emit: Callable[[Any], None]) -> None:
    def args() -> None:
        _tuple(out, value, emit)
        out.raw(b"\x85")

    out.made("torch", "Size", args)


def _bytearray(out: PickleWriter, value: str, emit: Callable[[Any], None]) -> None:
    def args() -> None:
        _bytes(out, value, emit)
        out.raw(b"\x85")

    out.made("__builtin__", "bytearray", args)


def _moment(kind: str, value: Any) -> tuple[int, ...] | None:
    """Arguments of a date or time from its ISO 8601 form; None if that is not enough (with a time zone)."""
    try:
        if kind == "datetime.date":
            day = dt.date.fromisoformat(value)
            return day.year, day.month, day.day
        if kind == "datetime.time":
            time = dt.time.fromisoformat(value)
            return time.hour, time.minute, time.second, time.microsecond
        whole = dt.datetime.fromisoformat(value)
    except ValueError:
        return None
    if kind != "datetime.datetime" or whole.tzinfo:
        return None
    return (*whole.timetuple()[:6], whole.microsecond)


def _moment_of(kind: str) -> Callable[[PickleWriter, Any, Callable[[Any], None]], None]:
    return lambda out, value, _emit: out.made(
        "datetime", kind.partition(".")[2], partial(out.tuple_of, _moment(kind, value) or ())
    )


_EMITTERS: Mapping[str, Callable[[PickleWriter, Any, Callable[[Any], None]], None]] = {
    "tuple": _tuple,
    "bytes": _bytes,
    "bytearray": _bytearray,
    "set": _of_one("__builtin__", "set"),
    "frozenset": _of_one("__builtin__", "frozenset"),
    "collections.deque": _of_one("collections", "deque"),
    "decimal.Decimal": _of_one("decimal", "Decimal"),
    "complex": _complex,
    "global": _dtype,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.layout": _layout,
    **{kind: _moment_of(kind) for kind in ("datetime.date", "datetime.time", "datetime.datetime")},
}


_EMPTIES: Mapping[str, Any] = {"dict": {}, "list": [], "tuple": (), "none": None}


@dataclass(frozen=True, slots=True)
class _TensorLeaf:
    value: Any


def build(manifest: Manifest) -> Any:
    """The object that holds a manifest's tensors, values and empties.

    Raises:
        UnrepresentableError: a leaf is below another leaf, a list has a gap, or the class of an object cannot
            be written.
    """
    leaves: dict[KeyPath, _TensorLeaf] = {path: _TensorLeaf(spec) for path, spec in manifest.tensors.items()}
    leaves |= {path: _TensorLeaf(value) for path, value in manifest.values.items()}
    leaves |= {path: _TensorLeaf(_EMPTIES[kind]) for path, kind in manifest.empties.items()}
    if () in leaves and len(leaves) == 1:
        return _Finish(manifest).node(leaves[()], ())
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        _insert(root, path, leaf)
    return _Finish(manifest).node(root, ())


def _insert(root: dict[str, Any], path: KeyPath, leaf: _TensorLeaf) -> None:
    node: Any = root
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            break
    if not path or not isinstance(node, dict) or path[-1] in node:
        raise UnrepresentableError(
            f"{render(path)!r} is both a leaf and a node",
            cure="rename it in the source",
        )
    node[path[-1]] = leaf


class _Finish:
    """Turns the tree of key paths into the object."""

    def __init__(self, manifest: Manifest) -> None:
        said: Any = manifest.custom.get("pickle")
        notes: dict[str, Any] = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
        self._types: dict[str, Any] = notes.get("types") or {}
        self._keys: dict[str, Any] = notes.get("keys") or {}
        self._lists = manifest.lists

    def node(self, node: Any, path: KeyPath) -> Any:
        value = self._plain(node, path)
        kind = self._types.get(render(path)) if self._types else None
        if not isinstance(kind, str) or isinstance(value, TensorSpec):
            return value
        require_written(path, kind, value)
        return TypedObject(kind, value)

    def _plain(self, node: Any, path: KeyPath) -> Any:
        if isinstance(node, _TensorLeaf):
            return node.value
        children = {name: self.node(child, (*path, name)) for name, child in node.items()}
        if path not in self._lists:
            if not self._keys:
                return children
            return {self._keys.get(render((*path, name)), name): child for name, child in children.items()}
        names = [str(index) for index in range(len(children))]
        if set(names) != set(children):
            raise UnrepresentableError(f"list {render(path)!r} has gaps in its indices")
        return [children[name] for name in names]


def pickle_object(root: Any) -> tuple[bytes, list[TensorSpec]]:
    """The pickle of an object, and its tensors in the order in which it numbers their storages."""
    out, specs = PickleWriter(), list[TensorSpec]()
    _emit(out, root, specs)
    return out.done(), specs


def alike(node: Any) -> tuple[bytes, list[TensorSpec]]:
    """Like `pickle_object`; the pickles of tensors of one dtype and shape are equal, and made once."""
    if isinstance(node, TensorSpec):
        return _tensor_pickle(node.dtype, node.shape), [node]
    return pickle_object(node)


@lru_cache(1 << 12)
def _tensor_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    return pickle_object(TensorSpec((), shape, dtype))[0]


def _emit(out: PickleWriter, node: Any, specs: list[TensorSpec]) -> None:
    if isinstance(node, TensorSpec):
        emit_tensor(out, node, str(len(specs)))
        specs.append(node)
    elif isinstance(node, TypedObject):
        emit_typed(out, node, lambda child: _emit(out, child, specs))
    elif isinstance(node, dict):
        children = cast("dict[str, Any]", node)
        out.mapping((key, partial(_emit, out, child, specs)) for key, child in children.items())
    elif isinstance(node, list):
        out.sequence([partial(_emit, out, child, specs) for child in cast("list[Any]", node)])
    else:
        out.value(node)
