"""Receipt: what one conversion did. It is the lineage edge between two checkpoints.

A receipt states source and target by their digests, the plan that was carried out, the versions of the software,
how long it took and how the result was verified. It holds no secrets and nothing that only this machine can read.
It is stored in the target's sidecar, in the ledger and, as an artifact, in the registry.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, field, fields
from datetime import UTC, datetime
from functools import cache
from typing import Any

from wherry.core.digest import algorithm_of
from wherry.core.html import html_facts
from wherry.core.lazy_dataclass import dataclass
from wherry.core.packages import version_of
from wherry.core.steps import LARGEST_STEP
from wherry.core.units import show_seconds, show_size
from wherry.errors import CorruptError, describe_exception, schema_error
from wherry.kernels import kernels

SCHEMA = 2
# Fields that the JSON form has only where they are not empty.
_OPTIONAL = ("requested", "ignored", "family", "parents", "losses", "origin")
_JSON_TYPES: dict[str, tuple[type, ...]] = {  # by annotation; other fields are checked by their own readers
    "str": (str,),
    "str | None": (str, type(None)),
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (int, float),
    "bool": (bool,),
    "dict[str, Any]": (dict,),
    "dict[str, str]": (dict,),
    "dict[str, Any] | None": (dict, type(None)),
    "list[str]": (list,),
    "list[dict[str, str]]": (list,),
    "list[dict[str, Any]]": (list,),
}
_REPORTED = ("wherry", "numpy", "ml_dtypes", "tensorstore", "fsspec")


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A checkpoint as a node of the lineage graph.

    Attributes:
        uri: where it was when the record was written.
        format: its format.
        format_version: the format's name of the layout.
        checkpoint_digest: identity; the key of the node.
        weights_digest: equality of content.
        fingerprint: of the stored files at that moment (names, sizes, times).
        kind: `params`, `train-state` or `other`.
        step: training step, where known.
        tensors: number of tensors.
        parameters: number of elements.
        nbytes: bytes of all tensors in canonical form.
    """

    uri: str
    format: str
    format_version: str | None
    checkpoint_digest: str
    weights_digest: str
    fingerprint: str
    kind: str = "other"
    step: int | None = None
    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0

    @property
    def algorithm(self) -> str:
        """The algorithm of its digests."""
        return algorithm_of(self.checkpoint_digest)


def reference_from_json(data: Mapping[str, Any]) -> CheckpointRef:
    """Read the JSON form of a CheckpointRef.

    Raises:
        TypeError, KeyError: it is not one.
    """
    require_types(CheckpointRef, data)
    return CheckpointRef(**data)


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a conversion did.

    Attributes:
        source: the checkpoint that was read.
        target: the checkpoint that was written.
        plan_digest: digest of the plan that was carried out.
        options: the options of the conversion, including defaults.
        software: package → version; `kernels` → the vectors for which they are compiled, or `none`.
        started: UTC, ISO 8601.
        finished: UTC, ISO 8601.
        seconds: wall time.
        bytes_read: tensor bytes read from the source.
        bytes_written: tensor bytes written to the target.
        verification: JSON form of the verification that followed, or None.
        lossless: whether every move was exact.
        losses: what casts and scales did to the values of each tensor of the target whose values changed: its `path`,
            and what `wherry.core.account.Losses` counts.
        resumed_bytes: how many of the written bytes come from an interrupted run.
        note: why an interrupted run was not resumed, where there was one.
        already: True when the target was already the result of this same conversion and nothing was written.
        lineage: `recorded`, or why it was not.
        warnings: what could not be converted or made, for people.
        snippet: how the target's own software loads the result; empty where that is not known.
        group: names the pass that made several targets at once; the same in the receipt of each, empty for one.
        requested: the options that were stated, without defaults; see `converter.command`.
        ignored: what was not converted, as in the plan; many entries of one node are one row.
        family: the model family whose layouts were used; empty if the tree did not change.
        parents: of a merge: each source as a `checkpoint`, the first included, with its part in the merge, such as its
            `weight`. Empty for a conversion.
        origin: digest of the `origin` of the target's manifest, which those of the checkpoint do not cover.
    """

    source: CheckpointRef
    target: CheckpointRef
    plan_digest: str
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    software: dict[str, str] = field(default_factory=dict[str, str])
    started: str = ""
    finished: str = ""
    seconds: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    verification: dict[str, Any] | None = None
    lossless: bool = True
    resumed_bytes: int = 0
    note: str | None = None
    already: bool = False
    lineage: str = "not recorded"
    warnings: list[str] = field(default_factory=list[str])
    snippet: str = ""
    group: str = ""
    requested: dict[str, Any] = field(default_factory=dict[str, Any])
    ignored: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    family: str = ""
    parents: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    losses: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    origin: str = ""

    @property
    def sources(self) -> tuple[CheckpointRef, ...]:
        """Every checkpoint that was read: one, or the parents of a merge."""
        return tuple(reference_from_json(row["checkpoint"]) for row in self.parents) or (self.source,)

    def __repr__(self) -> str:
        done = (
            "already there"
            if self.already
            else f"{show_size(self.bytes_written)} in {show_seconds(self.seconds)}"
        )
        return f"<Receipt: {self.source.uri} ({self.source.format}) → {self.target.uri} ({self.target.format}), {done}>"

    def _repr_html_(self) -> str:
        return html_facts(repr(self), [
            ("tensors", f"{self.target.tensors:,}"),
            ("verified", (self.verification or {}).get("level", "not read back")),
            ("checkpoint digest", self.target.checkpoint_digest),
            ("weights digest", self.target.weights_digest),
            ("family", self.family),
            ("lineage", self.lineage),
            ("warnings", "; ".join(self.warnings)),
            ("to load it", self.snippet),
        ])  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """JSON form; the inverse of `from_json`."""
        return {
            name: value
            for name, value in {"schema": SCHEMA, **asdict(self)}.items()
            if value or name not in _OPTIONAL
        }


@dataclass(frozen=True, slots=True)
class GroupReceipt:
    """What one conversion of a source did for all its targets.

    Attributes:
        group: name of the conversion, as in each of the receipts.
        receipts: one for each target, in the order of the request.
        bytes_read: tensor bytes read from the source: once for all targets on this machine, and once for each target in
            a store whose objects are sent in parts.
    """

    group: str
    receipts: tuple[Receipt, ...]
    bytes_read: int = 0

    @property
    def source(self) -> CheckpointRef:
        """The checkpoint that was read."""
        return self.receipts[0].source

    def to_json(self) -> dict[str, Any]:
        """The receipt itself where there is one target; else the source once, and a row for each target."""
        if not self.group:
            return self.receipts[0].to_json()
        rows = [receipt.to_json() for receipt in self.receipts]
        return {
            "schema": SCHEMA,
            "group": self.group,
            "source": rows[0]["source"],
            "seconds": max(receipt.seconds for receipt in self.receipts),
            "bytes_read": self.bytes_read,
            "bytes_written": sum(receipt.bytes_written for receipt in self.receipts),
            "receipts": rows,
        }


def from_json(data: dict[str, Any], uri: str = "") -> Receipt:
    """Read the JSON form of a receipt.

    Raises:
        CorruptError: it is not a receipt, or this version of wherry does not support its schema.
    """
    try:
        if data["schema"] != SCHEMA:
            raise schema_error("receipt", data["schema"], SCHEMA, uri)
        stated = {name: value for name, value in data.items() if name != "schema"}
        stated["source"] = reference_from_json(stated["source"])
        stated["target"] = reference_from_json(stated["target"])
        require_types(Receipt, stated)
        _require_times(stated)
        _require_level(stated.get("verification"))
        for parent in stated.get("parents", []):
            reference_from_json(parent["checkpoint"])
        return Receipt(**stated)
    except (AttributeError, KeyError, TypeError) as error:
        raise CorruptError(f"invalid receipt: {describe_exception(error)}", uri=uri) from error


def _require_times(stated: Mapping[str, Any]) -> None:
    for name in ("started", "finished"):
        text = stated.get(name)
        if text and not _is_time(text):
            raise TypeError(f"expected a time with an offset as {name!r}, got {text[:40]!r}")


def _is_time(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _require_level(verification: Mapping[str, Any] | None) -> None:
    if verification and type(verification.get("level")) is not str:
        raise TypeError("expected a string as the 'level' of the verification")


def require_types(kind: type[CheckpointRef | Receipt], data: Mapping[str, Any]) -> None:
    """Refuse values of other types than the fields have, and integers that no database takes.

    Raises:
        TypeError: it names the field.
    """
    for one in fields(kind):
        allowed, value = _JSON_TYPES.get(str(one.type)), data.get(one.name)
        if allowed is None or one.name not in data:
            continue
        if type(value) not in allowed:
            raise TypeError(f"expected {one.type} as {one.name!r}, got {type(value).__name__}")
        if isinstance(value, int) and not -LARGEST_STEP <= value <= LARGEST_STEP:
            raise TypeError(f"{one.name!r} is beyond 64 bits")


def utc_now() -> str:
    """The current time in the form of receipts and the ledger."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@cache
def software() -> dict[str, str]:
    """Versions of what takes part in a conversion, and whether kernels do; read once, as each one is a file to read."""
    versions = {name: version_of(name) or "not installed" for name in _REPORTED}
    return {"python": platform.python_version(), **versions, "kernels": kernels()}
