"""Records of a divided conversion: what a process leaves for the others, each a signed line in the folder of the job.

Every record is a dataclass of this module; its fields are the form that is checked where it is read. The signature says
who wrote it, not that it is right: its writer may be a worker with a fault.

A worker's `TaskRecord` says what it has written of a unit, or what storage gave when it was read back. Hashes of leaves
merge in any order, so the digests of the result are those of a conversion in one process. Of leaves of which other
units have the rest (of tensors in boxes, and of the stored tensors of a view) it has values, which are joined with
those of the other records (`joined_leaves`).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping  # noqa: TC003  pydantic reads it
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

from pydantic import (
    ConfigDict,
    Field,
    GetPydanticSchema,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import core_schema

from wherry.core.keypath import KeyPath, parse, render
from wherry.core.leaf_values import LeafValues
from wherry.core.request import ConvertRequest  # noqa: TC001  pydantic reads it
from wherry.errors import CorruptError, MismatchError, describe_exception
from wherry.store.store import Part, Upload  # noqa: TC001  pydantic reads it
from wherry.target.durable_move import DurableMove, decode_all, encode_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from wherry.workers.unit import Unit


SCHEMA = 2  # of the records of a job
_NAME = re.compile(r"(receipt|proof)-(\d+)-([0-9a-f]{8})")
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
R = TypeVar("R")


# ---- forms -----------------------------------------------------------------------------------------------------------


def _form_of(decode: Callable[[Any], Any], encode: Callable[[Any], Any]) -> GetPydanticSchema:
    """The form of values that have a JSON form of their own; what cannot be decoded is an error of the form."""

    def read(row: Any) -> Any:
        try:
            return decode(row)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(describe_exception(error)) from error

    written = core_schema.plain_serializer_function_ser_schema(encode)
    schema = core_schema.no_info_plain_validator_function(read, serialization=written)
    return GetPydanticSchema(lambda _type, _handler: schema)


def _raw(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_Path = Annotated[KeyPath, _form_of(parse, render)]
_Raw = Annotated[bytes, _form_of(_raw, lambda raw: base64.b64encode(raw).decode())]
_Values = Annotated[LeafValues, _form_of(LeafValues.from_json, LeafValues.to_json)]
_Moves = Annotated[tuple[DurableMove, ...], _form_of(lambda row: tuple(decode_all(row)), encode_all)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-z:-]+$")]


def encode(record: object) -> dict[str, Any]:
    """The JSON of a record; the inverse of `decode`."""
    return _form(type(record)).dump_python(record, mode="json")


def decode(form: type[R], text: bytes, name: str, uri: str) -> R:
    """A record from its JSON.

    Args:
        form: a dataclass of this module.
        text: the JSON.
        name: of the record.
        uri: folder of the job.

    Raises:
        CorruptError: it has another form.
    """
    try:
        return _form(form).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(one) for one in first["loc"])
        raise CorruptError(
            f"the record {name} is invalid{where and f' at {where}'}: {first['msg']}",
            uri=uri,
            cure="remove the record; workers write it again",
        ) from None


@cache
def _form(form: type[R]) -> TypeAdapter[R]:
    return TypeAdapter(form)


# ---- what workers have done ------------------------------------------------------------------------------------------


class TaskKind(StrEnum):
    """What a worker does with a unit; the word begins the name of its record."""

    MAKE = "receipt"
    READ = "proof"


class Task(NamedTuple):
    """What a worker does at a time."""

    kind: TaskKind
    unit: Unit

    @property
    def key(self) -> str:
        """Begins the names of its records, and is in those of its claims."""
        return f"{self.kind}-{self.unit.number:05d}"


class MadeFile(NamedTuple):
    """A file that was made.

    Attributes:
        name: relative to the target; `.` for the target itself.
        nbytes: its size.
        mark: its state: the time of the last change, an ETag or a generation.
    """

    name: str
    nbytes: NonNegativeInt
    mark: str


class BlockHash(NamedTuple):
    """The hash of bytes in a block that a part shares with others; the commit may write such a block again.

    Attributes:
        source: key path of the tensor that the part belongs to.
        name: of the file.
        start, length: the bytes.
        digest: their hash.
    """

    source: _Path
    name: str
    start: NonNegativeInt
    length: NonNegativeInt
    digest: _Raw


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """What an attempt at a task has done: what it has made of a unit, or what it has read back of it.

    Attributes:
        kind: of the task.
        unit: number of the unit.
        digest: of the unit.
        token: id of the attempt.
        version: of wherry.
        worker: host and process.
        seconds: how long it took.
        moves: the moves that were made, or read back, with the hashes of their leaves; also with the checksums of what
            was read, where those of what was made have checksums.
        files: what was made; of a read-back, the files of several units that it has read, as they were before.
        hashed: algorithm → stored tensor of the source → raw hashes of its leaves, of a view.
        boxes: tensor that the unit moves in boxes → what was hashed of it when it was made; of those that were hashed.
        sources: stored tensor of the source of a view → what was hashed of it.
        notes: what the writer has noted about objects, for the commit.
        parts: path of an object and one of its parts, with the checksum of the store: of regions, and all of them with
            `--verify store`.
        algorithm: of the hashes of a read-back.
        of: names of the records of what was read back: of the unit, and of units that share leaves with it.
        blocks: of local files that were read back.
        boxes_read: tensor that the unit moves in boxes, all of which were read back → digest of what was hashed of it.
    """

    __pydantic_config__ = _STRICT

    kind: TaskKind
    unit: NonNegativeInt
    digest: _Digest
    token: _Digest
    version: str
    worker: str
    seconds: float
    moves: _Moves = ()
    files: tuple[MadeFile, ...] = ()
    hashed: Mapping[str, Mapping[_Path, _Raw]] = field(default_factory=dict[str, "Mapping[KeyPath, bytes]"])
    boxes: Mapping[_Path, _Values] = field(default_factory=dict["KeyPath", LeafValues])
    sources: Mapping[_Path, _Values] = field(default_factory=dict["KeyPath", LeafValues])
    notes: tuple[list[Any], ...] = ()
    parts: tuple[tuple[str, Part], ...] = ()
    algorithm: str = ""
    of: tuple[str, ...] = ()
    blocks: tuple[BlockHash, ...] = ()
    boxes_read: Mapping[_Path, _Digest] = field(default_factory=dict["KeyPath", str])

    @property
    def name(self) -> str:
        """Name of the record."""
        return f"{self.kind}-{self.unit:05d}-{self.token}"


def records_by_unit(kind: TaskKind, names: Iterable[str]) -> dict[int, list[str]]:
    """Number of each unit of which there are records of a kind → their names.

    Args:
        kind: of the task.
        names: of the records of a job.
    """
    found: dict[int, list[str]] = {}
    for name in names:
        if (one := _NAME.fullmatch(name)) and one[1] == kind:
            found.setdefault(int(one[2]), []).append(name)
    return found


# ---- what else processes leave ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A conversion that is divided.

    Attributes:
        header: what identifies the conversion; the same in each of its processes.
        request: as it was stated.
        unit_bytes: size of a unit.
        units: the digests of the units.
        members: commit members of the target.
        run: its identity.
        key_owner: the process whose own key has signed it, if it was one.
        schema: of the records of the job.
    """

    __pydantic_config__ = _STRICT

    header: Mapping[str, str]
    request: ConvertRequest
    unit_bytes: PositiveInt
    units: tuple[_Digest, ...]
    members: tuple[str, ...]
    run: str
    key_owner: str = ""
    schema: int = 0


@dataclass(frozen=True, slots=True)
class ClaimRecord:
    """A claim; see `Claims`.

    Attributes:
        token: id of the attempt.
        run: the same, for `wherry clean`.
        owner: the process.
        beat: number of renewals.
        coordinator: id of the coordinator for which the worker works; empty if there is none.
    """

    __pydantic_config__ = _STRICT

    token: _Digest
    run: str
    owner: str
    beat: NonNegativeInt
    coordinator: str = ""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file of which several units make regions: the folder of a file system in which it lies, or its upload.

    Attributes:
        token: names the folder; empty in a store of objects.
        upload: None on a file system.
    """

    __pydantic_config__ = _STRICT

    token: Annotated[str, Field(pattern=r"^[0-9a-f]*$")] = ""
    upload: Upload | None = None

    def __post_init__(self) -> None:
        """Refuse a record that names nothing, or both."""
        if bool(self.token) == (self.upload is not None):
            raise ValueError("either a token or an upload is required")


@dataclass(frozen=True, slots=True)
class ChallengeRecord:
    """What a coordinator, or a worker that answers it, shows that it can write."""

    __pydantic_config__ = _STRICT

    secret: str


# ---- judged against the plan and against one another -----------------------------------------------------------------


def require_equal(first: TaskRecord, second: TaskRecord, uri: str) -> None:
    """Compare two attempts at one unit, which must have moved the same bytes.

    Raises:
        MismatchError: they differ.
    """
    # What both have hashed: a machine may have no kernels.
    pairs: list[tuple[Mapping[KeyPath, Any], Mapping[KeyPath, Any]]] = [
        (first.boxes, second.boxes),
        (first.sources, second.sources),
        *((rows, second.hashed.get(name, {})) for name, rows in first.hashed.items()),
    ]
    agree = all(left[path] == right[path] for left, right in pairs for path in left.keys() & right.keys())
    if _content(first) != _content(second) or not agree:
        raise MismatchError(
            f"two workers made different bytes of unit {first.unit}: {first.worker} and {second.worker}",
            uri=uri,
            cure=f"check both machines, remove {first.name} and {second.name}, and run `wherry work` again",
        )


def _content(record: TaskRecord) -> tuple[Any, ...]:
    moves = sorted((move.source, move.span, sorted(move.leaves.items())) for move in record.moves)
    return moves, sorted((file.name, file.nbytes) for file in record.files)


def require_whole(record: TaskRecord, unit: Unit, uri: str) -> None:
    """Refuse a record that is not of this unit, or that leaves something out of what is to be made.

    Raises:
        MismatchError: it says something else than the unit asks for.
    """
    moved = sum(move.span.nbytes for move in record.moves if unit.has(move.source, move.span))
    spans = {(move.source, move.span) for move in record.moves}
    whole = moved == sum(part.nbytes for part in unit.parts) and len(spans) == len(record.moves)
    files = {file.name: file.nbytes for file in record.files} == dict(unit.files)
    hashed = all(set(rows) <= set(unit.hashed) for rows in record.hashed.values())
    hashed = hashed and record.boxes.keys() <= {part.source for part in unit.parts}
    if record.digest != unit.digest or not (whole and files and hashed):
        raise MismatchError(
            f"the receipt of unit {unit.name} by {record.worker} does not cover the unit",
            uri=uri,
            cure=f"remove {record.name} and run `wherry work` again",
        )
