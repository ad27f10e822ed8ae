"""The form of each record of a job; a record of another form is an error that names what is wrong with it.

The signature of a record says who wrote it, not that it is right: its writer may be a worker with a fault.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    Strict,
    ValidationError,
    model_validator,
)

from wherry.core.request import ConvertRequest
from wherry.errors import CorruptError

_Digest = Annotated[str, Field(pattern=r"^[0-9a-z:-]+$")]
_File = Annotated[tuple[str, NonNegativeInt, str], Strict(False)]
_Values = Annotated[tuple[list[NonNegativeInt], str, list[list[Any]]], Strict(False)]
_Block = Annotated[tuple[str, str, NonNegativeInt, NonNegativeInt, str], Strict(False)]


class _RecordRow(BaseModel):
    """A record. `run` is the id of the process that created it."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    run: str = ""


class _JobRow(_RecordRow):
    """A conversion; see `SplitJob`."""

    schema_: int = Field(alias="schema")
    header: dict[str, str]
    request: dict[str, Any]
    unit_bytes: PositiveInt
    units: list[_Digest]
    members: list[str]


class _ClaimRow(_RecordRow):
    unit: _Digest
    token: _Digest
    owner: str
    beat: NonNegativeInt
    coordinator: str


class _PartRow(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    number: NonNegativeInt
    nbytes: NonNegativeInt
    mark: str
    checksum: str = ""


class _ReceiptRow(_RecordRow):
    unit: NonNegativeInt
    digest: _Digest
    token: _Digest
    version: str
    files: list[_File]
    moves: list[list[Any]]
    hashed: dict[str, dict[str, str]]
    notes: list[list[Any]]
    parts: list[Annotated[tuple[str, _PartRow], Strict(False)]]
    boxes: dict[str, _Values]
    sources: dict[str, _Values]
    worker: str
    seconds: float


class _ProofRow(_RecordRow):
    unit: NonNegativeInt
    digest: _Digest
    token: _Digest
    version: str
    algorithm: str
    receipts: list[str]
    moves: list[list[Any]]
    blocks: list[_Block]
    worker: str
    nbytes: NonNegativeInt
    seconds: float
    shared: list[_File]
    boxes: dict[str, _Digest]


class _UploadRow(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    path: str
    key: str
    run: str


class _SharedFileRow(_RecordRow):
    """A file that several units write regions of: its folder, or its upload."""

    token: _Digest | None = None
    upload: _UploadRow | None = None

    @model_validator(mode="after")
    def _require_one(self) -> Self:
        if (self.token is None) == (self.upload is None):
            raise ValueError("either a token or an upload is required")
        return self


class _ChallengeRow(_RecordRow):
    secret: str


_KINDS: dict[str, type[_RecordRow]] = {
    "job": _JobRow,
    "claim": _ClaimRow,
    "receipt": _ReceiptRow,
    "proof": _ProofRow,
    "shared": _SharedFileRow,
    "challenge": _ChallengeRow,
}


def require_form(name: str, row: Any, uri: str) -> dict[str, Any]:
    """A record, if it has the form that records of its kind have.

    Args:
        name: of the record; its first word is the kind.
        row: what it holds.
        uri: folder of the job.

    Raises:
        CorruptError: it has another form.
    """
    try:
        _KINDS[name.partition("-")[0].partition(".")[0]].model_validate(row)
    except ValidationError as error:
        raise _refusal(name, error, uri) from None
    return row


def request_of(row: dict[str, Any], name: str, uri: str) -> ConvertRequest:
    """The conversion that the record of a job asks for.

    Args:
        row: JSON form of the request.
        name: of the record.
        uri: folder of the job.

    Raises:
        CorruptError: the request has another form.
    """
    try:
        return ConvertRequest.from_json(row)
    except ValidationError as error:
        raise _refusal(name, error, uri) from None


def _refusal(name: str, error: ValidationError, uri: str) -> CorruptError:
    first = error.errors(include_input=False, include_url=False)[0]
    where = ".".join(str(one) for one in first["loc"])
    return CorruptError(
        f"the record {name} is invalid{where and f' at {where}'}: {first['msg']}",
        uri=uri,
        cure="remove the record; workers write it again",
    )
