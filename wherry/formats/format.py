"""Format: the interface between one checkpoint system and the engine.

A format is one file in `integrations/formats/`, with a tuple `FORMATS` of `Format` rows. A row says how to
recognise the system, how to open it, how to write it, what it can hold, and which framework releases load the
result. Everything else (planning, moving, hashing, verifying, committing) is done by the engine and is the same
for all formats.

**Contents.** Returned by `open`; see `wherry.formats.contents`. If files hold a tensor's canonical bytes unencoded, the
mover reads them itself; otherwise the contents decode them.

**Layout.** `layout(manifest, options, scene)` returns what each byte of a checkpoint's files is; see
`wherry.target.file_map`. The engine writes them (`wherry.mover.map_writer`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from wherry.core.account import IgnoredEntry, fold_entries
from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Manifest, without_chunks
from wherry.formats.contents import Absent, Block, Contents, Extent
from wherry.formats.glimpse import HEAD_BYTES, Glimpse, Signs

if TYPE_CHECKING:
    from wherry.formats.systems import TreeForm
    from wherry.storage.location import Location
    from wherry.target.file_map import FileMap, Scene

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
    """What a format can hold; the plan refuses or lists everything else.

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

    What is not read of a source is evidence of its detection, so that `detect` names the same files as the plan of a
    conversion.
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
        adapt: for a system with one fixed way of naming: the source's tree under its names, unless the user
            gives `split` or `join`; refuses what the system could not load. Takes the source's manifest and the
            target's URI.
        in_store: the options for a target in a store of objects, where every file costs requests; takes the checked
            options.
        guard: refuses a target that the system itself could not handle; the flag says whether it was chosen by
            `--into`.
        rewrites: what `wherry rewrite --as` can change in its checkpoints without touching a tensor byte.
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
    adapt: Callable[[Manifest, str], Adapted] | None = None
    in_store: Callable[[Options], Options] = lambda options: options
    guard: Callable[[Location, bool], None] = lambda _target, _into: None
    rewrites: Mapping[str, Rewrite] = field(default_factory=dict[str, "Rewrite"])
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
