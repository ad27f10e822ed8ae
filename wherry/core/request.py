"""request: the options of a conversion or rewrite. All of them are declared here.

An option is a field of one of these records. The command line, the form of the flow, the routes of `wherry.toml` and
`requested` in receipts are generated from it (`RequestOption`). So an option is added in two steps: a field here, with
its keyword in ConvertKeywords for editors and type checkers, and the code that implements it. Routes declare one of
them differently, in `config/schema`: `memory`, whose default is the setting.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, fields, replace
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

from wherry.core import dtypes
from wherry.core.lazy_dataclass import dataclass
from wherry.core.steps import LARGEST_STEP
from wherry.core.units import DEFAULT_MEMORY
from wherry.credentials import redact_values
from wherry.errors import UsageError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from wherry.core.progress import OnProgress


Kind = Literal["word", "rules", "list", "table", "flag"]  # in the order of a generated command line


@dataclass(frozen=True, slots=True)
class RequestOption:
    """An option of a request.

    Attributes:
        default: its value when not given; its type is the option's type.
        help: help text of the command line; also of forms and routes, unless `form` or `route` replaces it.
        name, type: of its field; the type as written in the source.
        spelled: its name on the command line; the field's name by default.
        metavar: placeholder for its value in the help.
        choices: its values, where they are enumerated; the items of a list.
        form: help text in the form of the flow; None where the form has no such field.
        route: help text in a route of `wherry.toml`; None where routes have no such field.
        stated: how a receipt states it: its `value`, a `file` by name and digest, a `place` without secrets, a `run` as
            its URI, `settings` with the renames, or not at all.
        decides: whether the result depends on it.
        planned: whether `wherry plan` takes it too.
    """

    default: Any
    help: str
    name: str = ""
    type: Any = ""
    spelled: str = ""
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    form: str | None = ""
    route: str | None = ""
    stated: str = "value"
    decides: bool = False
    planned: bool = False

    @property
    def flag(self) -> str:
        """The option's name on the command line."""
        return self.spelled or f"--{self.name.replace('_', '-')}"

    @property
    def kind(self) -> Kind:
        """The form of the option: a flag, a word, a list (the option repeated), comma-separated rules, or a table."""
        if isinstance(self.default, tuple):
            return "rules" if self.choices else "list"
        return (
            "flag"
            if isinstance(self.default, bool)
            else "table"
            if isinstance(self.default, dict)
            else "word"
        )

    @property
    def field(self) -> Any:
        """The dataclass field that declares it."""
        if self.kind == "table":
            return field(default_factory=dict[str, Any], metadata={"option": self})
        return field(default=self.default, metadata={"option": self})


def option(default: Any, help: str, **how: Any) -> Any:
    """A dataclass field that declares an option; see RequestOption."""
    return RequestOption(default, help, **how).field


@cache
def options_of(*records: type[Any]) -> tuple[RequestOption, ...]:
    """The options of records in their order, including those of nested records."""
    found: list[RequestOption] = []
    for one in chain.from_iterable(map(fields, records)):
        if "option" in one.metadata:
            found.append(replace(one.metadata["option"], name=one.name, type=one.type))
        elif "record" in one.metadata:
            found += options_of(one.metadata["record"])
    return tuple(found)


def in_order(options: Iterable[RequestOption], order: tuple[str, ...]) -> list[RequestOption]:
    """Options in this order of names; those that it does not name come last."""
    return sorted(options, key=lambda one: order.index(one.name) if one.name in order else len(order))


R = TypeVar("R")

NONE = "none"


SCAN = "scan"
DEQUANTIZE = "dequantize"
QUANTIZE = "quantize"
SCALES = "scales"
GROUP_SIZE = "group_size"


_KNOWN_FIELDS = {"extra": "forbid"}  # for pydantic, which reads the JSON form
_KEPT = "Metadata to store in the manifest of the checkpoint."


@dataclass(frozen=True, slots=True)
class SourceRequest:
    """Which checkpoint is read, and which of its classes may stay unread.

    Attributes:
        uri: a checkpoint, a step folder or a run folder.
        format, step, item: which checkpoint in it.
        allow_opaque: exact dotted names of classes, without patterns. Readers reject a pickle with an unknown class; an
            object of one of these classes becomes an opaque value in the manifest instead: the class name and the
            stored state. Nothing is imported or called.
        below: a folder that the checkpoint must not leave, not even through links; for a URI that a walk, an event or
            a record states, since only what a user names may itself be a link to anywhere.

    Raises:
        UsageError: a name in `allow_opaque` has no dot, or contains `*`.
    """

    __pydantic_config__ = _KNOWN_FIELDS

    uri: str
    format: str | None = option(
        None, "Format of the checkpoint; overrides detection.", metavar="FORMAT", route=None, planned=True,
    )  # fmt: skip
    step: int | None = option(
        None, "Step of the run; the newest complete one by default.", route=None, planned=True,
        form="Step of a run; the newest complete step by default.",
    )  # fmt: skip
    item: str | None = option(
        None, "Item of the step.", metavar="NAME", route=None, form="Item of a step.", planned=True
    )
    allow_opaque: tuple[str, ...] = option(
        (), "Accept objects of the class NAME (package.module.Class) in pickles as opaque values; nothing is called.",
        metavar="NAME",
        form="Classes (package.module.Class) to accept in pickles as opaque values.",
        route="Classes (package.module.Class) to accept in pickles as opaque values.", planned=True,
    )  # fmt: skip
    below: str | None = None

    def __post_init__(self) -> None:
        """Sort the names and check them."""
        object.__setattr__(self, "allow_opaque", tuple(sorted({*self.allow_opaque})))
        for name in self.allow_opaque:
            if "." not in name.strip(".") or "*" in name:
                raise UsageError(
                    f"invalid class name in allow_opaque: {name!r}",
                    cure="write package.module.Class, without patterns",
                )

    def for_reference(self, uri: str | os.PathLike[str]) -> SourceRequest:
        """The request for a checkpoint to compare with, which accepts the same opaque classes."""
        return SourceRequest(os.fspath(uri), allow_opaque=self.allow_opaque)


@dataclass(frozen=True, slots=True)
class LayoutRequest:
    """The layout of the target.

    Attributes:
        family: name of a model family; `none` keeps the tree as it is; None detects the family.
        family_file: a TOML file that declares one, or changes one of ours.
        config: a file with the model's config, of the source's or the target's system: JSON, YAML or gin.
        dtype: element type of the target's parameters; `bf16`, `fp16` and `f32` are short names.
        allow_overflow: whether finite values may become infinite in that type.
        assets: a folder or URI with tokenizer and the like for the target.
    """

    __pydantic_config__ = _KNOWN_FIELDS

    family: str | None = option(
        None, "Model family; overrides detection. `none` leaves the tree unchanged.", metavar="NAME",
        route="Model family; `none` leaves the tree unchanged.", decides=True, planned=True,
    )  # fmt: skip
    family_file: str | None = option(
        None, "TOML file that declares or changes a model family.", metavar="FILE", stated="file",
        decides=True, planned=True,
    )  # fmt: skip
    config: str | None = option(
        None, "Model config: config.json, MaxText's YAML, params.json or gin; if there is none next to the source.",
        metavar="FILE", stated="file", decides=True, planned=True,
    )  # fmt: skip
    dtype: str | None = option(
        None, "Data type of the target's parameters.", metavar="DTYPE", decides=True, planned=True
    )
    allow_overflow: bool = option(
        False, "Write finite values beyond the range of the target's data type as infinities.",
        decides=True, planned=True,
    )  # fmt: skip
    assets: str | None = option(
        None, "Folder or URI with the tokenizer and other companion files for the target.", metavar="URI",
        stated="place", decides=True, planned=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Short names of dtypes become full ones, so that both state the same conversion."""
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtypes.full_name(self.dtype))

    @property
    def explicit(self) -> bool:
        """Whether any option of the layout is set."""
        return bool(self.family_file or self.dtype or (self.family and self.family != NONE))


PLAIN = LayoutRequest()


@dataclass(frozen=True, slots=True)
class TargetRequest:
    """One target.

    Attributes:
        uri: the committed checkpoint; with `into`, the run in which the step folder is made.
        to: its format, a name or alias.
        options: format-specific options and `split` / `join`; options of the layout.
        only: `params` converts the parameters and leaves out optimizer state and counters.
        into: whether `uri` is a run.
        rename: rules for key paths, an option of the layout.
        layout: the other options of the layout.
    """

    __pydantic_config__ = _KNOWN_FIELDS

    uri: str
    to: str
    options: Mapping[str, Any] = option(
        {}, "Option of the target format or layout (`wherry formats NAME`, `wherry layouts`), or fact of the model.",
        spelled="--set", metavar="NAME=VALUE",
        form="Options of the target format and layout, as for `--set`.",
        route="Options of the format and layout (scan_layers, rope, query_scale), as for `--set`.",
        stated="settings", decides=True, planned=True,
    )  # fmt: skip
    only: str | None = option(
        None, "Convert only the parameters.", choices=("params",), decides=True, planned=True
    )
    into: bool = option(
        False, "TARGET is a run folder; create the step folder inside it.", stated="run",
        form="The target is a run folder; create the step folder inside it.",
        route="`uri` is a run folder; create the step folder inside it.",
    )  # fmt: skip
    layout: LayoutRequest = field(default=PLAIN, metadata={"record": LayoutRequest})
    rename: tuple[str, ...] = option(
        (), "Rule that renames key paths: 'layers.{n}.w -> blocks/{n}/kernel'.", metavar="RULE",
        form="Rules that rename key paths: 'layers.{n}.w -> blocks/{n}/kernel'.",
        route="Rules that rename key paths: 'layers.{n}.w -> blocks/{n}/kernel'.", stated="", planned=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        """One text is one rule, or several with `;` between them; never its characters."""
        rules: Any = self.rename
        object.__setattr__(self, "rename", (rules,) if isinstance(rules, str) else tuple(rules))

    @property
    def settings(self) -> dict[str, Any]:
        """The options, including the renames."""
        return {**self.options, **({"rename": "; ".join(self.rename)} if self.rename else {})}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """A conversion of one source to one target or several.

    Attributes:
        source: the checkpoint to read; never changed.
        targets: the checkpoints to make.
        ignore: named rules for what the target cannot hold (`values`, `empties`, `companions`), and for weights next
            to those that are converted (`others`).
        memory: budget of what is in flight, for example `128MiB`.
        as_step: the step to write, where the source states none (or another one is wanted).
        if_exists: which existing target is accepted: with `resume` the result of this same conversion, with `skip`
            anything that wherry wrote, with `fail` nothing.
        verify: `digest` reads each staged target back and compares every leaf, `none` does not.
        meta: further entries for the manifest's `origin`.
        sign: private key (a PEM file) with which each target is signed once it is committed.
        lineage: whether the ledger records the conversions.
    """

    __pydantic_config__ = _KNOWN_FIELDS

    source: SourceRequest
    targets: tuple[TargetRequest, ...]
    ignore: tuple[str, ...] = option(
        (), "Entries that may be left out, comma-separated: values, empties and companions that the target cannot "
        "hold; others, which are weights next to those that are converted. There need be none.",
        metavar="RULES", choices=("values", "empties", "companions", "others"),
        form="Entries to leave out if the target cannot hold them, and `others`: weights next to the converted ones.",
        route="Entries to leave out if a target cannot hold them, and `others`: weights next to the converted ones.",
        decides=True, planned=True,
    )  # fmt: skip
    memory: str | int = option(
        DEFAULT_MEMORY, "Memory budget for data in flight.", metavar="SIZE", stated="", planned=True,
    )  # fmt: skip
    as_step: int | None = option(None, "Step number to write, if the source has none.", route=None)
    if_exists: str = option(
        "resume",
        "What to accept at TARGET: nothing, anything that wherry wrote, or the result of this same conversion. "
        "Nothing is ever overwritten: remove TARGET first, or choose another one.",
        choices=("fail", "skip", "resume"), route=None, stated="",
        form="What to accept at the target: nothing, anything that wherry wrote, or the result of this conversion.",
    )  # fmt: skip
    verify: str = option(
        "digest",
        "Read the target back before the commit; `store` compares the checksums of the target's store instead.",
        choices=("digest", "store", "none"), planned=True,
        route="Read every byte of a target back before the commit (`digest`); `store` compares the checksums of the "
        "target's store instead.",
        form="Read every byte of the target back before the commit (`digest`); `store` compares the checksums of the "
        "target's store instead.",
    )  # fmt: skip
    meta: Mapping[str, str] = option(
        {}, "Metadata to store in the manifest.", metavar="KEY=VALUE", form=_KEPT, route=_KEPT
    )
    sign: str | None = option(
        None, "Sign each target with this private key (PEM).", metavar="KEY", stated="",
        form="Private key file (PEM) for signing the target.",
        route="Private key file (PEM) for signing the targets.",
    )  # fmt: skip
    lineage: bool = option(
        True, "Do not record the conversion in the ledger.", spelled="--no-lineage", form=None, route=None, stated=""
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Credentials in the metadata are cut out before anything is planned, stored or given to a worker."""
        object.__setattr__(self, "meta", redact_values(self.meta))
        if self.as_step is not None and not 0 <= self.as_step <= LARGEST_STEP:
            raise UsageError("invalid step number", cure="write a number from 0 to 9223372036854775807")

    @property
    def anchored(self) -> ConvertRequest:
        """The same request with absolute paths, for processes in other working folders."""
        targets = tuple(
            replace(
                one, uri=_whole(one.uri), layout=_whole_paths(one.layout, "family_file", "config", "assets")
            )
            for one in self.targets
        )
        return replace(_whole_paths(self, "sign"), source=_whole_paths(self.source, "uri"), targets=targets)

    def to_json(self) -> dict[str, Any]:
        """JSON form; the inverse of `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ConvertRequest:
        """Read the JSON form; the inverse of `to_json`.

        Raises:
            pydantic.ValidationError: a field is unknown, missing, or of another type.
        """
        return _json_form().validate_json(json.dumps(data), strict=True)


@cache
def _json_form() -> TypeAdapter[ConvertRequest]:
    from pydantic import TypeAdapter

    return TypeAdapter(ConvertRequest)


def _same(name: str, help: str = "") -> Any:
    """An option that a conversion has too, with another help text if given."""
    (same,) = (one for one in options_of(ConvertRequest) if one.name == name)
    return replace(same, help=help or same.help).field


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteRequest:
    """A rewrite of the small files of one checkpoint; shared options mean the same as in a conversion.

    Attributes:
        source: changed only with `in_place`.
        target: URI of the committed checkpoint; None in place.
        as_: `NAME` or `NAME=VALUE`; `wherry formats FORMAT` lists the names.
        in_place: replace files of the source itself, and keep each as `<file>.before`.
        verify: with `digest`, every tensor is read at the source and at the target, and compared; with `none`, only the
            metadata is compared, and nothing is recorded unless the source's digests are known.
    """

    source: SourceRequest
    target: str | None
    as_: str
    in_place: bool = False
    ignore: tuple[str, ...] = _same(
        "ignore",
        "Entries to leave out, comma-separated: others, which are weights of the step next to the item.",
    )
    verify: str = _same("verify", "Read every tensor of source and target and compare them.")
    if_exists: str = _same(
        "if_exists",
        "What to accept at TARGET: nothing, anything that wherry wrote, or the result of this same rewrite.",
    )
    meta: Mapping[str, str] = _same("meta")
    lineage: bool = _same("lineage", "Do not record the rewrite in the ledger.")
    memory: str | int = _same("memory")

    def __post_init__(self) -> None:
        """Credentials in the metadata are cut out before anything is stored."""
        object.__setattr__(self, "meta", redact_values(self.meta))


def values_of(*records: Any) -> Iterator[tuple[RequestOption, Any]]:
    """The options of these records with their values."""
    for record in filter(None, records):
        for one in options_of(type(record)):
            yield one, getattr(record if hasattr(record, one.name) else record.layout, one.name)


class WritingKeywords(TypedDict, total=False):
    """How a checkpoint is written."""

    only: str | None
    ignore: Iterable[str]
    memory: str | int
    verify: str
    if_exists: str
    into: bool
    meta: Mapping[str, str]
    family: str | None
    config: str | os.PathLike[str] | None
    dtype: str | None
    allow_overflow: bool
    assets: str | os.PathLike[str] | None


class MergeKeywords(WritingKeywords, total=False):
    """The keyword arguments of `wherry.merge`: how the merged checkpoint is made."""

    allow_opaque: Iterable[str]
    family_file: str | os.PathLike[str] | None
    rename: str | Iterable[str]
    as_step: int | None
    sign: str | os.PathLike[str] | None
    lineage: bool
    layout: LayoutRequest
    progress: OnProgress | None


class ConvertKeywords(MergeKeywords, total=False):
    """The keyword arguments of `wherry.convert`: which source, and how it is converted."""

    format: str | None
    step: int | None
    item: str | None


def convert_request(
    source: str | os.PathLike[str],
    targets: Sequence[TargetRequest],
    *,
    layout: LayoutRequest | None = None,
    **options: Any,
) -> ConvertRequest:
    """A conversion request from the keyword options of `wherry.convert`; None stands for the default.

    Args:
        source: URI of a checkpoint, step or run.
        targets: the checkpoints to make.
        layout: the layout.
        options: of a ConvertRequest or its source; those of targets and layouts apply to every target that does not
            state another value.

    Raises:
        TypeError: an option is unknown.
    """
    given = {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in options.items()
        if value is not None
    }
    chosen = _take_options(SourceRequest, given)
    layout = replace(layout or PLAIN, **_take_options(LayoutRequest, given))
    shared = {**_take_options(TargetRequest, given), "layout": layout}
    whole: list[TargetRequest] = []
    for target in targets:
        plain = TargetRequest(target.uri, target.to)
        same = (name for name in shared if getattr(target, name) == getattr(plain, name))
        whole.append(replace(target, **{name: shared[name] for name in same}))
    return ConvertRequest(source=SourceRequest(os.fspath(source), **chosen), targets=tuple(whole), **given)


def _take_options(record: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options that are fields of a record, and return them."""
    return {one.name: options.pop(one.name) for one in options_of(record) if one.name in options}


def _whole_paths(record: R, *names: str) -> R:
    changed: dict[str, Any] = {name: _whole(getattr(record, name)) for name in names}
    return replace(record, **changed)  # pyright: ignore[reportArgumentType]  records are dataclasses


def _whole(place: str | None) -> str | None:
    """A URI as it is, and a path made absolute."""
    if not place:
        return place
    from wherry.core.emit import whole_uri

    return whole_uri(place)
