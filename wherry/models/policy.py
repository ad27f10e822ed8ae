"""policy: the conditions for the promotion of a checkpoint, as data.

A policy is a table of gates. Each gate compares its requirement with the ledger's statements about the checkpoint or
with the verification of this promotion, and gives one result: what is required, what was found, and whether it passes.
What a checkpoint's own sidecar says is no fact, except for what the registered digest covers. A gate without recorded
facts does not pass.

    [policy]                          # in wherry.toml; a separate file omits the heading
    level = "digest"                  # minimum level of the verification now
    recorded = ["roundtrip"]          # levels that a recorded verification must have passed
    max_error = 0.0                   # all conversions lossless; or the largest error of values
    optimizer = "absent"
    companions = ["tokenizer*", "config.json"]
    max_age_days = 30
    signature = "keys/release.pub"
    approvers = ["alice", "bob"]      # users that the registry's server has authenticated
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wherry.core.config_text import parse_table, read_config
from wherry.core.lazy_dataclass import dataclass
from wherry.errors import UsageError, WherryError

if TYPE_CHECKING:
    from wherry.core.manifest import Manifest

Level = Literal["structure", "present", "digest", "roundtrip", "native", "logits", "serve"]
_SECONDS_A_DAY = 86_400
_NAME = re.compile(r"[\w-]+")


class Policy(BaseModel):
    """The gates of a promotion; a gate that is left out lets everything pass."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Literal["structure", "present", "digest"] = Field(
        default="digest", description="Lowest level at which the promotion itself verifies the checkpoint."
    )
    recorded: tuple[Level, ...] = Field(
        default=(), description="Levels at which the ledger must contain a passed verification."
    )
    max_error: float | None = Field(
        default=None,
        ge=0,
        description="Largest permitted error of values; 0 requires that all conversions were lossless.",
    )
    unregistered: bool = Field(
        default=False,
        description="Permit versions that the ledger has not registered, such as those of another team's registry.",
    )
    optimizer: Literal["any", "present", "absent"] = Field(
        default="any", description="Whether optimizer state must be present or absent."
    )
    companions: tuple[str, ...] = Field(
        default=(), description="Patterns of companion files; each must match an existing file."
    )
    extra_companions: bool = Field(
        default=False, description="Permit files in its folder that were not recorded with the checkpoint."
    )
    max_age_days: float | None = Field(
        default=None, gt=0, description="Maximum age of the conversion in days."
    )
    signature: str | None = Field(
        default=None,
        description="Public key (PEM file); the checkpoint must have a signature that it verifies.",
    )
    approvers: tuple[str, ...] = Field(
        default=(),
        description="Users who may promote; the server of the registry must authenticate them.",
    )


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """The facts about a checkpoint that gates are compared with.

    Attributes:
        uri: its URI.
        manifest: what it holds; the registered digest covers the names of its companion files.
        kind: its kind by the ledger; empty where the ledger does not have it.
        level: level of the verification of this promotion.
        extra: names of files in its folder that are not in its record.
        registered: whether the ledger has registered this version.
        verifications: level → JSON form of the last verification that passed, recorded before this promotion.
        sources: URIs that the ledger's conversions to it have read.
        finished: when the last of these conversions was finished; empty where the ledger has none.
        unproved: levels at which the last verification only read the checkpoint, as nothing was recorded about it.
        lossless: whether each conversion above it was exact; None where the ledger has no conversion to it.
        earlier: whether the conversions before its own were exact; its own roundtrip cannot measure their error.
        signed: checks the signature with a public key; raises a WherryError where none matches.
        approver: the authenticated user, or None.
    """

    uri: str
    manifest: Manifest
    level: str
    extra: Sequence[str]
    verifications: Mapping[str, Mapping[str, Any]]
    lossless: bool | None
    earlier: bool
    signed: Callable[[str], str]
    approver: str | None
    kind: str = ""
    registered: bool = False
    sources: frozenset[str] = frozenset()
    finished: str = ""
    unproved: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class GateResult:
    """The result of one gate: its name, what is required, what was found, and whether it passes."""

    gate: str
    requested: str
    found: str
    passed: bool


def policy_of(gates: Policy | Mapping[str, Any] | str | os.PathLike[str] | None) -> Policy:
    """A policy from a Policy, a mapping, its name in wherry.toml, a TOML or JSON file, or None for the defaults.

    A string without a dot or slash is a name: `[policy.NAME]`.

    Raises:
        NotFoundError: no policy has this name, or the file does not exist.
        UsageError: a gate is unknown or has an invalid value; the error names file and gate.
        StorageError: the file cannot be read.
    """
    if isinstance(gates, Policy):
        return gates
    if isinstance(gates, str) and _NAME.fullmatch(gates):
        from wherry.config.config import named_policy

        gates = named_policy(gates)
    origin = "the policy" if gates is None or not isinstance(gates, str | os.PathLike) else os.fspath(gates)
    data = _read(Path(gates)) if isinstance(gates, str | os.PathLike) else dict(gates or {})
    try:
        return Policy.model_validate(data.get("policy", data))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        fault = "unknown gate" if first["type"] == "extra_forbidden" else first["msg"]
        raise UsageError(
            f"{origin}: {where}: {fault}",
            cure=f"the gates are: {', '.join(Policy.model_fields)}",
            stage="promote",
        ) from error


def judge(policy: Policy, facts: PolicyFacts) -> list[GateResult]:
    """The results of all gates of the policy."""
    order = ("structure", "present", "digest")
    level = facts.level if facts.level in order else "present"  # the others include this level only
    enough = order.index(level) >= order.index(policy.level)
    findings = [GateResult("level", f"at least {policy.level}", facts.level, enough)]
    if not policy.unregistered:
        found = "registered" if facts.registered else "not registered, or with other contents"
        findings.append(GateResult("registered", "by the ledger", found, facts.registered))
    findings += [_recorded_gate(level, facts) for level in policy.recorded]
    if policy.max_error is not None:
        findings.append(_error(policy.max_error, facts))
    if policy.optimizer != "any":
        unknown = (
            f"unknown for a checkpoint of kind {facts.kind}" if facts.kind else "not recorded in the ledger"
        )
        found = {"train-state": "present", "params": "absent"}.get(facts.kind, unknown)
        findings.append(GateResult("optimizer", policy.optimizer, found, found == policy.optimizer))
    for pattern in policy.companions:
        names = (companion.name for companion in facts.manifest.companions)
        fits = [one for one in names if fnmatchcase(one, pattern) or fnmatchcase(Path(one).name, pattern)]
        findings.append(GateResult("companions", pattern, ", ".join(fits) or "no matching file", bool(fits)))
    if not policy.extra_companions:
        extra = ", ".join(facts.extra)
        findings.append(GateResult("extra_companions", "none", extra or "none", not extra))
    if policy.max_age_days is not None:
        findings.append(_age(policy.max_age_days, facts))
    if policy.signature is not None:
        try:
            found, passed = facts.signed(policy.signature), True
        except WherryError as error:
            found, passed = error.what, False
        findings.append(GateResult("signature", policy.signature, found, passed))
    if policy.approvers:
        found = facts.approver or "no user that the registry's server has authenticated"
        passed = facts.approver in policy.approvers
        findings.append(GateResult("approvers", " or ".join(policy.approvers), found, passed))
    return findings


def _read(path: Path) -> dict[str, Any]:
    data = read_config(path)
    try:
        return parse_table(data, "the policy", json=path.suffix == ".json", uri=str(path))
    except ValueError as error:
        raise UsageError(
            f"invalid policy {path}: {error}", cure="write it as a TOML or JSON table"
        ) from error


def _recorded_gate(level: str, facts: PolicyFacts) -> GateResult:
    found = facts.verifications.get(level)
    if found is not None and level == "roundtrip" and found.get("against") not in facts.sources:
        other = found.get("against", "an unrecorded checkpoint")
        return GateResult("recorded", level, f"passed against {other}, which is not its source", passed=False)
    lacking = "read, but not proved" if level in facts.unproved else "not recorded"
    return GateResult("recorded", level, "passed" if found else lacking, bool(found))


def _error(limit: float, facts: PolicyFacts) -> GateResult:
    """Lossless conversions have no error; otherwise a roundtrip verification must have measured it."""
    required = "lossless" if limit == 0 else f"at most {limit:g}"
    if facts.lossless:
        return GateResult("max_error", required, "lossless", passed=True)
    roundtrip = facts.verifications.get("roundtrip", {})
    measured = roundtrip.get("lossy") if roundtrip.get("against") in facts.sources else None
    if facts.lossless is None:
        return GateResult("max_error", required, "its conversion is not recorded", passed=False)
    if not facts.earlier:
        return GateResult("max_error", required, "an earlier conversion was lossy too", passed=False)
    if measured is None:
        return GateResult(
            "max_error", required, "lossy, and no roundtrip verification has measured the error", passed=False
        )
    return GateResult("max_error", required, f"{measured['error']:g}", passed=measured["error"] <= limit)


def _age(limit: float, facts: PolicyFacts) -> GateResult:
    required = f"at most {limit:g} days"
    if not facts.finished:
        return GateResult("max_age_days", required, "not recorded", passed=False)
    age = (datetime.now(UTC) - datetime.fromisoformat(facts.finished)).total_seconds() / _SECONDS_A_DAY
    if age < 0:
        return GateResult("max_age_days", required, f"a time in the future, {facts.finished}", passed=False)
    return GateResult("max_age_days", required, f"{age:.1f} days", age <= limit)
