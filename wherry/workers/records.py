"""Records: what the processes of a job leave for each other: small signed files in its folder, next to the target.

On a file system they are files, in a store objects. A record is created on the condition that it does not exist, so of
two processes one gets it. Each is signed with the user's key (`WHERRY_KEY`, which several machines can share): what
another user has put there is not believed. The signature says who wrote it, not that it is right: its writer may be a
worker with a fault. Every record is a dataclass of this module; its fields are the form that is checked where it is
read.

A worker's `TaskRecord` says what it has written of a unit, or what storage gave when it was read back. Hashes of leaves
merge in any order, so the digests of the result are those of a conversion in one process. Of leaves of which other
units have the rest (of tensors in boxes, and of the stored tensors of a view) it has values, which the commit joins
with those of the other records.

Claims: which worker has a task. A claim is a record that its owner renews, and that expires when it does not. Clocks
are never compared: a claim expires when it has not changed while another worker watched it for `expiry` seconds; the
owner of a claim on the same machine is looked up in the process table. The next attempt at the task is a new claim,
create-only, so one worker gets it. A worker whose claim has expired may still finish: an attempt has files of its own,
or objects that carry its id, so it changes nothing of a later attempt.
"""

from __future__ import annotations

import base64
import io
import json
import secrets
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
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

from wherry.core import threads
from wherry.core.digest import LeafValues
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import logger
from wherry.core.request import ConvertRequest
from wherry.errors import (
    CorruptError,
    HostileError,
    NotFoundError,
    UnsupportedError,
    WherryError,
    describe_exception,
    storage_errors,
)
from wherry.store.folders import (
    PREFIX,
    create_file,
    remove_leftover,
    replace_file,
    sync_folder,
)
from wherry.store.location import MOST_CONFIG, Location
from wherry.store.store import Part, Store, Upload
from wherry.target.journal import DurableMove, decode_all, encode_all
from wherry.target.lease import Sighting, Verdict, Watch, this_process
from wherry.target.leftovers import CLAIM, CLAIM_SECONDS, JOB, JOB_SUFFIX, TASK_RECORD
from wherry.target.signed_log import KEY_ENV, checked_lines, journal_key, sign

if TYPE_CHECKING:
    from wherry.workers.unit import Unit


SCHEMA = 3  # of the records of a job
TOKEN_DIGITS = 8  # hex digits of the id of an attempt
_MOST_RECORD = 4 * MOST_CONFIG
_AT_ONCE = 16  # requests
_BEATS = 4  # renewals in the time after which a claim expires
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_log = logger(__name__)
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


_Path = Annotated[KeyPath, _form_of(parse, render)]
_Raw = Annotated[
    bytes, _form_of(partial(base64.b64decode, validate=True), lambda raw: base64.b64encode(raw).decode())
]
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
    """A kind of task that a worker carries out on a unit; the word is the beginning of the name of its record."""

    MAKE = "receipt"
    READ = "proof"


class Task(NamedTuple):
    """One task of a worker."""

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
    """The result of an attempt at a task: the files that it made for a unit, or what it read back of them.

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
        if (one := TASK_RECORD.fullmatch(name)) and one[2] == kind:
            found.setdefault(int(one[3]), []).append(name)
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
        run: id of the attempt; `wherry clean` removes the objects that carry it.
        owner: the process.
        beat: number of renewals.
        coordinator: id of the coordinator for which the worker works; empty if there is none.
    """

    __pydantic_config__ = _STRICT

    run: _Digest
    owner: str
    beat: NonNegativeInt
    coordinator: str = ""


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file of which several units make regions: the folder of a file system in which it is, or its upload.

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

    @property
    def mark(self) -> str:
        """The name of the record in receipts."""
        return self.token or (self.upload.key if self.upload else "")


@dataclass(frozen=True, slots=True)
class ChallengeRecord:
    """What a coordinator, or a worker that answers it, shows that it can write."""

    __pydantic_config__ = _STRICT

    secret: str


# ---- where they lie -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Records:
    """The records of one job.

    Attributes:
        folder: of the job.
        store: its store; None on a file system.
    """

    folder: Location
    store: Store | None

    def begin(self) -> None:
        """Make the folder, accessible to its user alone.

        Raises:
            StorageError: the storage failed.
        """
        if self.store is None:
            with storage_errors(self.folder.uri):
                Path(self.folder.path).mkdir(mode=0o700, parents=True, exist_ok=True)
                sync_folder(Path(self.folder.path).parent)

    def create(self, name: str, record: object, run: str) -> bool:
        """Create a record; False if it exists.

        Args:
            name: of the record.
            record: a dataclass of this module.
            run: id of the process that creates it.

        Raises:
            StorageError: the storage failed.
        """
        place, data = self.folder.join(name), sign(encode(record), journal_key())
        if self.store is None:
            with storage_errors(self.folder.uri):
                try:
                    create_file(Path(place.path), data)
                except FileExistsError:
                    return False
                return True
        with suppress(FileExistsError):
            self.store.put_object(place.path, data, run)
            return True
        return False

    def replace(self, name: str, record: object, run: str) -> bool:
        """Write a record anew; False if it no longer exists.

        Raises:
            StorageError: the storage failed.
        """
        place, data = self.folder.join(name), sign(encode(record), journal_key())
        if self.store is None:
            with storage_errors(place.uri):
                if there := Path(place.path).exists():
                    replace_file(Path(place.path), data)
                return there
        if (found := self.store.head(place.path)) is not None:
            with suppress(FileExistsError):
                self.store.put_object(place.path, data, run, replaces=found.mark)
                return True
        return False

    def read(self, name: str, form: type[R]) -> R | None:
        """A record; None if it does not exist.

        Args:
            name: of the record.
            form: a dataclass of this module.

        Raises:
            HostileError: it was altered, or signed with another key.
            CorruptError: it has another form.
            StorageError: the storage failed.
        """
        try:
            data = self.folder.join(name).read_whole(_MOST_RECORD)
        except NotFoundError:
            return None
        lines, altered = checked_lines(io.BytesIO(data), journal_key())
        if altered or len(lines) != 1:
            raise HostileError(
                f"the record {name} was altered, or signed with another key",
                uri=self.folder.uri,
                cure=f"set the same {KEY_ENV} for every process of the job, or remove the record",
            )
        return decode(form, lines[0].text, name, self.folder.uri)

    def read_all(self, names: Sequence[str], form: type[R]) -> list[R]:
        """Read those of some records that exist, several at the same time; see `read`."""
        with threads.executor(_AT_ONCE, "wherry-records", numbers=False) as pool:
            return [found for found in pool.map(partial(self.read, form=form), names) if found]

    def names(self) -> list[str]:
        """The names of all records, sorted.

        Raises:
            StorageError: the storage failed.
        """
        return sorted(entry.name for entry in self.folder.entries() if not entry.is_dir)

    def remove(self, name: str) -> None:
        """Remove a record; nothing happens if it does not exist.

        Raises:
            StorageError: the storage failed.
        """
        place = self.folder.join(name)
        if self.store is None:
            with storage_errors(place.uri):
                Path(place.path).unlink(missing_ok=True)
        elif found := self.store.head(place.path):
            self.store.remove_object(place.path, found.mark)

    def end(self) -> None:
        """Remove the folder with everything in it, the record that names the job first.

        Raises:
            StorageError: the storage failed.
        """
        self.remove(JOB)
        if self.store is None:
            with storage_errors(self.folder.uri):
                remove_leftover(Path(self.folder.path))
            return
        for name in self.names():
            self.remove(name)


def job_records(target: Location) -> Records:
    """The records of the job that makes a target; nothing is read.

    Raises:
        UnsupportedError: the store of the target creates no objects under a condition.
    """
    store = target.store if target.store.capabilities.parts else None
    if store is None and not target.store.capabilities.local:
        raise UnsupportedError(
            f"{target.store.protocol}:// cannot hold the records of a job",
            uri=target.uri,
            cure="choose a target on a file system that all workers share, gs:// or s3://",
        )
    return Records(target.parent.join(f"{PREFIX}{target.name}{JOB_SUFFIX}"), store)


def target_of(place: Location) -> Location:
    """The target of a job, from the location of its folder or of the target itself."""
    named = place.name.startswith(PREFIX) and place.name.endswith(JOB_SUFFIX)
    return place.parent.join(place.name[len(PREFIX) : -len(JOB_SUFFIX)]) if named else place


# ---- claims ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker's right to a task.

    Attributes:
        key: of the task.
        attempt: number of the attempt, from 0.
        token: id of the attempt; names its files and objects.
        before: ids of earlier attempts.
    """

    key: str
    attempt: int
    token: str
    before: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Name of the record."""
        return f"claim-{self.key}-{self.attempt}"


@dataclass(slots=True)
class Claims:
    """The claims of a job, as one worker sees them.

    Attributes:
        records: of the job.
        expiry: seconds after which a claim that is not renewed expires.
        coordinator: id of the coordinator for which the worker makes units; it knows when an attempt is lost or slow,
            so a claim that was made for it holds off no other worker of it.
    """

    records: Records
    expiry: float = CLAIM_SECONDS
    coordinator: str = ""
    _watches: dict[str, Watch] = field(default_factory=dict[str, Watch])
    _held: dict[str, str] = field(
        default_factory=dict[str, str]
    )  # name of each claim that is not over → token

    def take(self, task: Task, names: Iterable[str]) -> Claim | None:
        """Claim a task; None if another worker has it.

        Args:
            task: one that is not done.
            names: of the records of the job.

        Raises:
            HostileError: a claim was signed with another key.
            StorageError: the storage failed.
        """
        attempts = sorted(attempt for key, attempt in claims_among(names) if key == task.key)
        earlier = [Claim(task.key, attempt, "").name for attempt in attempts]
        rows = [self.records.read(name, ClaimRecord) for name in earlier]
        if earlier:
            is_ours = self.coordinator and rows[-1] and rows[-1].coordinator == self.coordinator
            if not (is_ours or self._has_ended(earlier[-1])):
                return None
        before = frozenset(row.run for row in rows if row)
        token = secrets.token_hex(TOKEN_DIGITS // 2)
        claim = Claim(task.key, attempts[-1] + 1 if attempts else 0, token, before)
        self._held[claim.name] = token
        if self.records.create(claim.name, self._record(claim, 0), token):
            return claim
        del self._held[claim.name]
        return None

    @contextmanager
    def renewed(self, claim: Claim) -> Generator[None]:
        """Renew a claim while the block runs; it is removed if the block fails, so that another takes over."""
        over = threading.Event()

        def beat() -> None:
            count = 0
            while not over.wait(self.expiry / _BEATS):
                count += 1
                try:
                    self.records.replace(claim.name, self._record(claim, count), claim.token)
                except WherryError as error:  # harmless if the storage recovers in time
                    _log.warning("%s was not renewed: %s", claim.name, error)

        heart = threading.Thread(target=beat, name="wherry-claim", daemon=True)
        heart.start()
        try:
            yield
        except (Exception, KeyboardInterrupt, SystemExit):
            self.records.remove(claim.name)
            raise
        finally:
            over.set()
            heart.join()
            self._held.pop(claim.name, None)

    def release(self) -> None:
        """Remove the claims that are not over, as their worker was interrupted before it began or renewed them.

        Raises:
            StorageError: the storage failed.
        """
        for name, token in self._held.items():
            row = self.records.read(name, ClaimRecord)
            if row is not None and row.run == token:
                self.records.remove(name)
        self._held.clear()

    def _has_ended(self, name: str) -> bool:
        """Whether the owner of a claim has ended, or has not renewed it for long enough; looks once."""
        watch = self._watches.get(name)
        if watch is None:
            watch = self._watches[name] = Watch(name, lambda: self._see(name), self.expiry)
        return watch.look() in (Verdict.DEAD, Verdict.EXPIRED)

    def _record(self, claim: Claim, beat: int) -> ClaimRecord:
        owner = json.dumps(this_process(claim.token).to_json())
        return ClaimRecord(claim.token, owner, beat, self.coordinator)

    def _see(self, name: str) -> Sighting | None:
        row = self.records.read(name, ClaimRecord)
        return None if row is None else Sighting(row.beat, row.owner.encode())


def claims_among(names: Iterable[str]) -> list[tuple[str, int]]:
    """Task and attempt of every claim among the names of records."""
    return [(found[1], int(found[2])) for found in map(CLAIM.fullmatch, names) if found]
