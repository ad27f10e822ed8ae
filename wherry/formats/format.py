"""Format: the interface between one checkpoint system and the engine.

A format is one file in `integrations/formats/`, with a tuple `FORMATS` of `Format` rows. A row says how to
recognise the system, how to open it, how to write it, what it can hold, and which framework releases load the
result. Everything else (planning, moving, hashing, verifying, committing) is done by the engine and is the same
for all formats.

**Glimpse** is a cheap look at a location, and **Signs** are what it must show before a format's `detect` is called.
Signs decide nothing. They leave out the formats that cannot be meant, so that their code is not loaded. A format that
would recognise a location, or refuse it by name, has one of its signs there (`tests/formats/test_discover.py`).

**Contents**, which `open` returns, are the interface through which the engine reads the bytes of one opened checkpoint.
They answer one question for each tensor, from metadata alone: how are its bytes read (`access`)?

- `Stored`: byte ranges of files hold them as they are.
- `Chunked`: they lie in chunks of a grid, as they are or encoded.
- `Computed`: a function makes any region of them.

`wherry.mover.read` reads a region by any of these answers. `absent` is the presence check: it names every missing
chunk, from metadata alone. `ModelFiles`, such as the tokenizer in a GGUF file, are made only when a target needs them.

**Layout.** `layout(manifest, options, scene)` returns what each byte of a checkpoint's files is; see
`wherry.target.file_map`. The engine writes them (`wherry.mover.map_writer`).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

from wherry.core.account import IgnoredEntry, fold_entries
from wherry.core.detection import Detection, Evidence, Kind
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest, without_chunks

if TYPE_CHECKING:
    from wherry.core.tensorspec import Region, TensorSpec
    from wherry.formats.systems import TreeForm
    from wherry.store.location import Location
    from wherry.store.store import Entry
    from wherry.target.file_map import FileMap, Scene


HEAD_BYTES = 4096


class Glimpse:
    """A cheap look at a location: what it is, its entries, its first bytes; each fetched at most once."""

    def __init__(self, location: Location) -> None:
        self.location = location

    @cached_property
    def is_dir(self) -> bool:
        """Whether it is a folder (an object-store prefix counts)."""
        entry = self.location.entry
        return entry is not None and entry.is_dir

    @cached_property
    def is_file(self) -> bool:
        """Whether it is a file."""
        entry = self.location.entry
        return entry is not None and not entry.is_dir

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """Children by name; empty for a file."""
        return {entry.name: entry for entry in self.location.entries()} if self.is_dir else {}

    @cached_property
    def head(self) -> bytes:
        """The first 4 KiB of a file; empty for a folder."""
        return self.location.read(0, HEAD_BYTES) if self.is_file else b""

    @cached_property
    def size(self) -> int:
        """Bytes of a file."""
        return self.location.entry.size if self.location.entry else 0

    def detected(
        self,
        format: str,
        version: str | None,
        writer: str | None,
        *seen: Evidence | str,
        step: int | None = None,
        kind: Kind | None = None,
        reason: str | None = None,
    ) -> Detection:
        """What was found here.

        Args:
            format, version, writer, step, kind: see Detection.
            seen: the evidence; a text is about the location itself.
            reason: why the checkpoint is incomplete, if it is.
        """
        rows = (Evidence(self.location.name, one) if isinstance(one, str) else one for one in seen)
        return Detection(
            self.location.uri,
            format,
            format_version=version,
            writer=writer,
            step=step,
            kind=kind,
            verdict="incomplete" if reason else "ok",
            reason=reason,
            evidence=tuple(rows),
        )


@dataclass(frozen=True, slots=True)
class Signs:
    """The signs of a format; one of them is enough.

    Attributes:
        head: a regular expression that the first bytes of a file match; empty if they say nothing.
        files: how the names of its files end.
        entries: names of which one is in its folder.
        starts, ends: how a name in its folder starts, or ends.
        folders: whether any folder in a folder is a sign.
        named: a regular expression that the name of its folder matches; empty if it says nothing.
    """

    head: bytes = b""
    files: tuple[str, ...] = ()
    entries: frozenset[str] = frozenset()
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    folders: bool = False
    named: str = ""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Signs:
        """The signs that `to_json` has made."""
        return cls(
            head=fields["head"].encode("latin-1"),
            files=tuple(fields["files"]),
            entries=frozenset(fields["entries"]),
            starts=tuple(fields["starts"]),
            ends=tuple(fields["ends"]),
            folders=fields["folders"],
            named=fields["named"],
        )

    def to_json(self) -> dict[str, Any]:
        """Every field by its name; bytes are those of Latin-1."""
        return {
            "head": self.head.decode("latin-1"),
            "files": list(self.files),
            "entries": sorted(self.entries),
            "starts": list(self.starts),
            "ends": list(self.ends),
            "folders": self.folders,
            "named": self.named,
        }

    def are_at(self, glimpse: Glimpse) -> bool:
        """Whether one of the signs is at a location. A location that does not exist may have any sign."""
        if glimpse.is_dir:
            entries = glimpse.entries
            return (
                not self.entries.isdisjoint(entries)
                or bool(self.starts and any(name.startswith(self.starts) for name in entries))
                or bool(self.ends and any(name.endswith(self.ends) for name in entries))
                or (self.folders and any(entry.is_dir for entry in entries.values()))
                or bool(self.named and re.fullmatch(self.named, glimpse.location.name))
            )
        if glimpse.is_file:
            name = glimpse.location.name
            return name.endswith(self.files) or bool(
                self.head and re.compile(self.head, re.DOTALL).match(glimpse.head)
            )
        return True


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files for a target that uses the model.

    Attributes:
        files: name → bytes, as a Hugging Face folder has them.
        notes: what is uncertain about them.
        missing: why there are none, although the checkpoint states what they are made from; empty otherwise.
    """

    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    notes: tuple[str, ...] = ()
    missing: str = ""


class RangeChecksum(NamedTuple):
    """A checksum that the writer of a file recorded for a byte range of it.

    Attributes:
        offset: of the first byte.
        length: bytes.
        value: the checksum.
        kind: `CRC-32` or `CRC-32C`.
    """

    offset: int
    length: int
    value: int
    kind: Literal["CRC-32", "CRC-32C"] = "CRC-32"


class Extent(NamedTuple):
    """A byte range of a file that holds canonical bytes of a tensor.

    Attributes:
        location: the file, in the store of its checkpoint, which opens it once.
        offset: of its first byte.
        length: bytes.
        crc32: CRC-32 that the writer recorded for exactly these bytes; None if there is none.
        within: another checksum, of a range that includes these bytes, such as a storage that tensors share.
    """

    location: Location
    offset: int
    length: int
    crc32: int | None = None
    within: RangeChecksum | None = None

    @property
    def file(self) -> str:
        """URI of the file."""
        return self.location.uri

    @property
    def checksum(self) -> RangeChecksum | None:
        """The recorded checksum of a range that includes these bytes; None if there is none."""
        return self.within if self.crc32 is None else RangeChecksum(self.offset, self.length, self.crc32)


@dataclass(frozen=True, slots=True)
class Absent:
    """A missing chunk of a tensor."""

    path: KeyPath
    chunk: str
    reason: str


class Block(NamedTuple):
    """A box of a tensor's elements in C order, little endian.

    Attributes:
        region: its position; it may extend beyond the edge of the tensor, where its elements are padding.
        pieces: its bytes; each piece is valid until the next one is requested.
    """

    region: Region
    pieces: Iterator[memoryview]


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """A chunk of a tensor that a codec encoded into one byte range of a file.

    A writer names the chunks that it wrote, so that they are read back while others are written; the places and the
    decoder's key of the finished target's `Chunked` must be the same.

    Attributes:
        extent: its stored bytes.
        codec: everything that decoding depends on besides these bytes.
        memory: bytes that decoding takes at most, besides the stored bytes.
        decode: turns the stored bytes into the elements of the chunk.
    """

    extent: Extent
    codec: Hashable
    memory: int = field(compare=False)
    decode: Callable[[memoryview], Iterator[Block]] = field(compare=False)


class Stored(NamedTuple):
    """Files hold the canonical bytes of a tensor as they are.

    Attributes:
        extents: their byte ranges, in order.
    """

    extents: tuple[Extent, ...]

    decoder = None


def _no_pieces(_cell: Region) -> Iterator[Block]:
    raise AssertionError("where `memory` gives None, chunks are not decoded in pieces")


@dataclass(frozen=True, slots=True)
class ChunkDecoder:
    """How chunks of a tensor are decoded.

    Attributes:
        fill: fills memory with the canonical bytes of any region that is not empty; takes as much memory again.
        key: everything that decoding depends on besides the stored bytes.
        memory: bytes of memory that decoding one chunk in pieces takes; None if that cannot be done.
        decode: the elements of one chunk, which is a cell of the grid, in pieces.
    """

    fill: Callable[[Region, memoryview], None]
    key: Hashable = None
    memory: Callable[[Region], int | None] = lambda _cell: None
    decode: Callable[[Region], Iterator[Block]] = _no_pieces


@dataclass(frozen=True, slots=True)
class Chunked:
    """A tensor in chunks of a regular grid. If they are encoded, a part of one costs as much as all of it.

    Attributes:
        grid: extents of a chunk.
        decoder: how chunks are decoded; None if they are stored raw.
        place: where the stored bytes of a cell of the grid are, padding included; None if no file has them alone, which
            is so of no raw chunk.
        require: raises an error if a chunk of a region is missing, so that no memory is taken for what is not there.
    """

    extents: ClassVar[None] = None

    grid: tuple[int, ...]
    decoder: ChunkDecoder | None
    place: Callable[[Region], Extent | None] = lambda _cell: None
    require: Callable[[Region], None] = lambda _region: None


@dataclass(frozen=True, slots=True)
class Computed:
    """A tensor of which any region is computed, mostly from regions of other tensors.

    Attributes:
        fill: fills memory with the canonical bytes of any region that is not empty.
        memory: further bytes of memory that it takes for a region.
        gridded: whether the chunk grid of the tensor's spec says how to cut it.
    """

    extents: ClassVar[None] = None
    decoder: ClassVar[None] = None

    fill: Callable[[Region, memoryview], None]
    memory: Callable[[Region], int] = lambda _region: 0
    gridded: bool = False


Access: TypeAlias = Stored | Chunked | Computed


class Contents(ABC):
    """The bytes of one opened checkpoint; used from several threads."""

    __slots__ = ()

    @abstractmethod
    def access(self, spec: TensorSpec) -> Access:
        """How a tensor's bytes are read; the same answer each time."""

    @abstractmethod
    def companion(self, name: str) -> Location:
        """The location of a companion file of the manifest."""

    @abstractmethod
    def members(self) -> Iterable[Entry]:
        """Every file that belongs to the checkpoint."""

    def absent(self) -> Iterable[Absent]:
        """No missing chunks: opening has checked that they exist."""
        return ()

    def shortfall(self) -> str | None:
        """What is missing, as a text; None if that is unknown."""
        return None

    def model_files(self) -> ModelFiles:
        """None: what the checkpoint states of its model is in its companions."""
        return ModelFiles()

    def close(self) -> None:  # noqa: B027  most hold nothing
        """No resources to release."""


class ContentsOver(Contents):
    """Contents on top of other contents.

    Attributes:
        base: has everything that is not overridden; it is closed together with these contents.
    """

    __slots__ = ()

    base: Contents

    def inner(self, spec: TensorSpec) -> tuple[Contents, TensorSpec]:
        """The contents that have a tensor, and the spec of the tensor there: `base`, and the same spec."""
        return self.base, spec

    def access(self, spec: TensorSpec) -> Access:
        """How the tensor is read where it is."""
        contents, stored = self.inner(spec)
        return contents.access(stored)

    def companion(self, name: str) -> Location:
        """The location of a companion file of the base."""
        return self.base.companion(name)

    def members(self) -> Iterable[Entry]:
        """The files of the base."""
        return self.base.members()

    def absent(self) -> Iterable[Absent]:
        """The missing chunks of the base."""
        return self.base.absent()

    def shortfall(self) -> str | None:
        """The missing parts of the underlying reader."""
        return self.base.shortfall()

    def model_files(self) -> ModelFiles:
        """The files that the base states of its model."""
        return self.base.model_files()

    def close(self) -> None:
        """Close the base."""
        self.base.close()


__all__ = [
    "HEAD_BYTES",
    "Absent",
    "Adapted",
    "Block",
    "Change",
    "Contents",
    "Extent",
    "Format",
    "Glimpse",
    "Holds",
    "Opened",
    "Option",
    "Options",
    "Rewrite",
]
Options: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Holds:
    """The kinds of content that a format can hold; the plan refuses or lists everything else.

    Attributes:
        dtypes: names of element types.
        depth: maximum number of parts of a key path; None for any.
        zero_size: tensors without elements.
        values: non-tensor leaves.
        empties: empty nodes.
        companions: companion files.
        stated: names of companion files that are not kept as files, since the format's own files state what they
            say: its layout reads them.
        rank: largest number of dimensions; None for any.
        types: classes of values and keys that are not text, as in pickles; otherwise they become plain values.
        needs: required companion files, those that its own files state included, each with the minimal content that is
            accepted.
        names: key paths of required tensors, if the system has one fixed way of naming.
        ranks: whether key paths may begin with the number of a rank, and every rank has the same names.
    """

    dtypes: frozenset[str]
    depth: int | None = None
    zero_size: bool = True
    values: bool = False
    empties: bool = False
    companions: bool = False
    stated: frozenset[str] = frozenset()
    rank: int | None = None
    types: bool = False
    needs: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    names: tuple[KeyPath, ...] = ()
    ranks: bool = False


@dataclass(frozen=True, slots=True)
class Option:
    """A format-specific option, given as `--set name=value`.

    Attributes:
        default: its default value; its type is the option's type.
        help: one sentence.
        choices: the allowed values, if they are few.
    """

    default: str | int | bool | None
    help: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Opened:
    """What `open` returns: the refined detection, the contents, the reader, and what is not read.

    Entries of a source that are not read are evidence of its detection, so that `detect` names the same files as the
    plan of a conversion.
    """

    detection: Detection
    manifest: Manifest
    reader: Contents
    ignored: tuple[IgnoredEntry, ...] = ()

    def __post_init__(self) -> None:
        rows = [
            Evidence("/".join(one.path), f"{one.what}, not converted: {one.reason}")
            for one in fold_entries(self.ignored)
        ]
        new = [row for row in rows if row not in self.detection.evidence]
        object.__setattr__(self, "detection", self.detection.seen(*new) if new else self.detection)


DetectFunction: TypeAlias = "Callable[[Glimpse], Detection | None]"
OpenFunction: TypeAlias = "Callable[[Location, Detection], Opened]"
LayoutFunction: TypeAlias = "Callable[[Manifest, Options, Scene], FileMap]"
ValuesFunction: TypeAlias = "Callable[[Any, Options], Any]"  # of a Checkpoint, whose module imports this one


@dataclass(frozen=True, slots=True)
class Format:
    """One checkpoint system.

    Attributes:
        name: its name on the command line.
        title: its display name.
        detect: returns a detection if a location is of this format, else None; looks at names and first bytes only,
            since `discover` calls it on every folder.
        signs: without which `detect` is not called; see Signs. None for a plug-in's format: its `detect` is always
            called.
        open: reads metadata and returns manifest and reader.
        readable: whether `open` reads it; some formats are only recognised, so that they can be refused by name.
        holds: what it can hold.
        layout: what each byte of a checkpoint's files is; a pure function. None if the format is only read.
        refines: formats of which it is a specialisation; it takes precedence over them.
        system: the training system that saves it, such as `t5x` for both of T5X's formats; empty for a container.
        form: the form of the system's trees; None if the format is a container, if `adapt` makes the names, or if the
            names of a model say nothing (Hugging Face).
        names_needed: whether a target needs the names of the model that its config names, which only a family's layout
            proves; a tree without one is written only if the user states that there is no family.
        aliases: alternative names on the command line.
        single_file: whether a checkpoint is one file (otherwise a folder).
        companion_folder: the folder of companions within a checkpoint, with a trailing slash; empty for the top.
        commit_members: files that mark a checkpoint as complete; the first that it has is written last on a store
            without atomic rename.
        options: the options that `--set` accepts.
        loaded_by: the framework releases that load the written checkpoints, as tested.
        version: the format version in which a manifest and options will be written.
        step_folder: the folder (and what is below it) that `--into RUN` creates for a step; None if runs have
            no naming rule.
        finish_step: completes the step folder around an item, if the system requires files there.
        prepare: the manifest as this format will hold it: the input has the source's chunk grids, the output must
            have the target's (None for every tensor that takes any span).
        values: the source, in the layout of the format's system, with the values, types and companions that the format
            stores for some options; the layout gets the tensors of what it returns.
        divided: a source in the layout of the system, as this format divides a model for some options; not called if
            the user states that the names are kept.
        whole: its inverse: a source of this format in the layout of its system, for a target of another format of a
            system.
        adapt: for a system with one fixed way of naming: the source's tree under its names, unless the user
            gives `split` or `join`; refuses what the system could not load. Takes the source's manifest and the
            target's URI.
        in_store: the options for a target in a store of objects, where every file costs requests; takes the checked
            options.
        guard: refuses a target that the system itself could not handle; the flag says whether it was chosen by
            `--into`.
        rewrites: what `wherry rewrite --as` can change in its checkpoints without touching a tensor byte.
        served: whether servers load its folders, so that the end tokens that their files state must agree.
        pickle_globals: the (module, name) pairs that a pickle of its checkpoints may name; empty if it has none.
    """

    name: str
    title: str
    detect: DetectFunction
    open: OpenFunction
    holds: Holds
    layout: LayoutFunction | None = None
    signs: Signs | None = None
    refines: tuple[str, ...] = ()
    system: str = ""
    form: TreeForm | None = None
    names_needed: bool = False
    aliases: tuple[str, ...] = ()
    single_file: bool = False
    readable: bool = True
    companion_folder: str = ""
    commit_members: tuple[str, ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict[str, Option])
    loaded_by: str = ""
    version: Callable[[Manifest, Options], str] = lambda _manifest, _options: ""
    step_folder: Callable[[int], str] | None = None
    finish_step: Callable[[Location, Manifest], None] | None = None
    prepare: Callable[[Manifest, Options], Manifest] = lambda manifest, _options: without_chunks(manifest)
    values: ValuesFunction = lambda checkpoint, _options: checkpoint
    divided: ValuesFunction = lambda checkpoint, _options: checkpoint
    whole: Callable[[Any], Any] = lambda checkpoint: checkpoint
    adapt: Callable[[Manifest, str], Adapted] | None = None
    in_store: Callable[[Options], Options] = lambda options: options
    guard: Callable[[Location, bool], None] = lambda _target, _into: None
    rewrites: Mapping[str, Rewrite] = field(default_factory=dict[str, "Rewrite"])
    served: bool = False
    pickle_globals: Callable[[], Collection[tuple[str, str]]] = frozenset

    @property
    def is_written(self) -> bool:
        """Whether wherry writes it."""
        return self.layout is not None


def _nothing(_folder: Location) -> None:
    """The default `finish`: does nothing."""


@dataclass(frozen=True, slots=True)
class Change:
    """The result of planning a rewrite of one checkpoint.

    Attributes:
        opened: the source, opened; the caller closes its reader.
        carried: file of the source → its name in the target, both relative; copied byte by byte.
        files: small files that are new or changed in the target; written last, in this order.
        finish: completes the folder once these files are durable.
        made: files and folders that `finish` creates at the top of the folder.
        renamed: key path → new key path, for those that change.
        left: files of the source that the target does not have.
        staged_only: why it cannot be done in place; empty if it can.
        local_only: why it needs files of this machine; empty if `finish` completes a folder of a store too.
    """

    opened: Opened
    carried: Mapping[str, str]
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    finish: Callable[[Location], None] = _nothing
    made: tuple[str, ...] = ()
    renamed: Mapping[KeyPath, KeyPath] = field(default_factory=dict["KeyPath", "KeyPath"])
    left: tuple[str, ...] = ()
    staged_only: str = ""
    local_only: str = ""

    def name(self, path: KeyPath) -> KeyPath:
        """The key path in the target of a key path in the source."""
        return self.renamed.get(path, path)


PlanFunction: TypeAlias = "Callable[[Location, Detection, str | None], Change]"


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One rewrite of a format.

    Attributes:
        help: one sentence, as `wherry formats NAME` prints it.
        plan: looks at a checkpoint and returns the change; takes the location, its detection and the text
            after the `=` of `--as NAME=VALUE` (None if there is none). Raises if it cannot be done, or if
            something that the result needs is missing.
        value: what VALUE is, for the help; empty if it takes none.
    """

    help: str
    plan: PlanFunction
    value: str = ""


@dataclass(frozen=True, slots=True)
class Adapted:
    """What `Format.adapt` returns.

    Attributes:
        names: key path in the source → key path in the target, for every tensor, value and empty.
        lists: the target's nodes that are sequences.
        custom: entries that are added to the manifest's `custom`.
    """

    names: Mapping[KeyPath, KeyPath]
    lists: frozenset[KeyPath]
    custom: Mapping[str, Any]
