"""promote: verify a registered checkpoint, check the policy, and move an alias to it.

candidate → champion → previous. A promotion verifies first: the manifest in the checkpoint's sidecar must hash to the
digest in the registry, the bytes of tensors and companion files must match the manifest, and every gate of the policy
must pass. Then the alias moves, and the promotion is recorded in the ledger; where the ledger cannot be written, the
alias moves back. `rollback` restores the previous version of the alias.

A sidecar can be replaced together with the bytes, so the proof begins at the registry. Companion files are verified
like tensors, and an added file fails too: an unrecorded tokenizer can change the model's behaviour like a replaced one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from wherry.config.roots import locate_stated, root_of
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import OnProgress
from wherry.core.receipt import utc_now
from wherry.core.request import SourceRequest
from wherry.core.services import service
from wherry.core.units import DEFAULT_MEMORY
from wherry.cures import Argument, Blank, Cure
from wherry.errors import MismatchError, NotFoundError, NotRecordedError, UsageError
from wherry.formats.checkpoint import open_source
from wherry.formats.recorded_files import file_differences
from wherry.ledger.record import Ledger, record_outcome
from wherry.ledger.replay import ADDED, READ_ONLY, has_passed
from wherry.ledger.resolve import ResolvedModel, is_model_uri, proved_digest, resolve_model, stores_of
from wherry.prove.verify import UNCOMPARED, failure_of, uncompared_error, unproved_error, verify
from wherry.store.home import user_name, without_secrets
from wherry.store.sidecar import Sidecar, read_sidecar

if TYPE_CHECKING:
    from wherry.models.policy import GateResult, Policy


CHAMPION = "champion"
# Tags that apply to a version in its own registry only.
_STAYING = (
    "wherry.adopted", "wherry.attempt", "wherry.logged_model", "wherry.promoted_", "wherry.replaced.",
    "wherry.rolled_back", "wherry.source_model", "wherry.uri", "wherry.withdrawn",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Promotion:
    """The result of a promotion or a rollback.

    Attributes:
        name: the registered model.
        version: the version that has the alias now.
        alias: the alias.
        replaced: the version that had it before, if any.
        already: whether the version had the alias already, so that nothing changed.
        uri: the checkpoint.
        checkpoint_digest: its identity.
        registry: the registry, without user, password or query.
        page: URL of the version in a browser; None without a server.
        by: the user: authenticated by the registry, or `<user> (not authenticated)`.
        level: level of the verification.
        gates: the result of each gate.
        statement: number of the ledger's statement; None where nothing changed.
    """

    name: str
    version: str
    alias: str
    replaced: str | None
    already: bool
    uri: str
    checkpoint_digest: str
    registry: str
    page: str | None
    by: str
    level: str
    gates: tuple[GateResult, ...]
    statement: int | None

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which `promote --json` prints."""
        return {"schema": 1, **asdict(self)}


def promote(
    uri_or_model: str | os.PathLike[str],
    *,
    model: str | None = None,
    alias: str = CHAMPION,
    policy: Policy | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    level: str = "digest",
    tracking_uri: str | None = None,
    registry_uri: str | None = None,
    to_registry_uri: str | None = None,
    memory: str | int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
) -> Promotion:
    """Verify a checkpoint, check the policy and move the alias to it.

    Args:
        uri_or_model: `models:/NAME@candidate`, `models:/NAME/VERSION`, or a checkpoint's URI.
        model: the registered model; required for a plain URI, which is registered if it is not yet.
        alias: the alias to set; the version that has it now becomes `previous`.
        policy: the gates, as an object, a mapping, a name, or a TOML or JSON file; by default only the bytes count.
        level: level of the verification: `digest` reads every byte.
        tracking_uri, registry_uri: MLflow's stores; as for `register`.
        to_registry_uri: another registry to promote into; the version is registered there with all its tags.
        memory: budget for reading.
        progress: called a few times a second.

    Raises:
        MismatchError: bytes, companions or identity differ from the registered ones, or a gate does not pass.
        IncompleteError: files are missing.
        NotFoundError: the version or checkpoint does not exist.
        TargetInUseError: another process moves aliases of this model.
        StorageError: a registry or the ledger cannot be reached; aliases are unchanged.
    """
    from wherry.ledger.record import open_ledger, record_event
    from wherry.models.policy import policy_of

    gates = policy_of(policy)
    stores = stores_of(tracking_uri, registry_uri)
    found = _find_version(uri_or_model, model, stores)
    there = {"tracking_uri": to_registry_uri, "registry_uri": to_registry_uri} if to_registry_uri else stores
    approver = service("mlflow").identity(there["registry_uri"])
    sidecar, passed = prove_version(found, gates, level, approver, memory, progress)
    by = _by(approver)
    if there["registry_uri"] != stores["registry_uri"]:
        found = _carry_version(found, sidecar, stores, there, model)
    registry = without_secrets(there["registry_uri"])
    tags = {"wherry.promoted_by": by, "wherry.promoted_at": utc_now()}
    entering = service("mlflow").promoting(found.name, found.version, alias, tags=tags, **there)
    seq: int | None = None
    with open_ledger() as ledger, entering as moved:
        if not (moved.already and _is_stated(ledger, registry, found, alias)):
            body = {
                "registry": registry,
                "name": found.name,
                "alias": alias,
                "version": found.version,
                "replaced": moved.replaced,
                "by": by,
                "level": level,
                "gates": [asdict(one) for one in passed],
                "promoted_from": found.tags.get("wherry.promoted_from"),
            }
            seq = record_event(ledger, "promotion", sidecar.checkpoint, body)
    return _promotion(found, alias, moved, there, by, level, passed, seq)


def rollback(
    model: str,
    *,
    alias: str = CHAMPION,
    level: str = "present",
    tracking_uri: str | None = None,
    registry_uri: str | None = None,
    memory: str | int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
) -> Promotion:
    """Move an alias back to the version that had it before; repeated calls go further back.

    Args:
        model: the registered model; `models:/NAME` is the same.
        alias: the alias.
        level: level of the verification of that version; `present` reads no tensors, so it is quick.
        tracking_uri, registry_uri: MLflow's stores; as for `register`.
        memory: budget for reading.
        progress: called a few times a second.

    Raises:
        NotFoundError: no version had the alias before, or its checkpoint does not exist.
        MismatchError, IncompleteError: its checkpoint differs from the registered one.
        TargetInUseError: another process moves aliases of this model.
    """
    from wherry.ledger.record import open_ledger, record_event
    from wherry.models.policy import Policy

    mlflow, stores = service("mlflow"), stores_of(tracking_uri, registry_uri)
    model = model.removeprefix("models:/")
    target, now = mlflow.rollback_target(model, alias, **stores)
    found = resolve_model(f"models:/{quote(model, safe='')}/{target}", **stores)
    approver = mlflow.identity(stores["registry_uri"])
    policy = Policy(level="structure", extra_companions=True, unregistered=True)
    sidecar, passed = prove_version(found, policy, level, approver, memory, progress)
    by = _by(approver)
    entering = mlflow.rolling_back(model, alias, target, now, when=utc_now(), **stores)
    body = {"name": model, "alias": alias, "version": target, "replaced": now, "by": by}
    body["registry"] = without_secrets(stores["registry_uri"])
    with open_ledger() as ledger, entering as moved:
        seq = record_event(ledger, "rollback", sidecar.checkpoint, body)
    return _promotion(found, alias, moved, stores, by, level, passed, seq)


def _find_version(uri: str | os.PathLike[str], name: str | None, stores: Mapping[str, str]) -> ResolvedModel:
    """The version of a model URI; a plain URI is registered first, which does nothing if it is registered already."""
    below = None
    if is_model_uri(uri):
        found = resolve_model(uri, **stores)
        if found.version is not None:
            return found
        uri, below = found.uri, root_of(found.uri)
    if name is None:
        raise UsageError(
            "missing name of the registered model",
            uri=str(uri),
            cure=Cure("add {}, or promote models:/NAME@ALIAS", Argument("model", Blank("NAME"))),
            stage="promote",
        )
    from wherry.models.register import register

    tracking, registry = stores["tracking_uri"], stores["registry_uri"]
    done = register(
        SourceRequest(os.fspath(uri), below=below), name, tracking_uri=tracking, registry_uri=registry
    )
    return resolve_model(f"models:/{quote(name, safe='')}/{done.version}", **stores)


def _carry_version(
    found: ResolvedModel,
    sidecar: Sidecar,
    stores: Mapping[str, str],
    there: Mapping[str, str],
    name: str | None,
) -> ResolvedModel:
    """Register the version in another registry, with all tags and its origin."""
    from wherry.models.register import enter

    if found.name is None:
        raise NotFoundError(
            "the checkpoint has no model version to promote into another registry",
            uri=found.uri,
            cure="promote models:/NAME@ALIAS, or register it first",
            stage="promote",
        )
    chosen = name or found.name
    origin = f"{without_secrets(stores['registry_uri'])} {found.name} {found.version}"
    own = {key: value for key, value in found.tags.items() if not key.startswith(_STAYING)}
    tags = {**own, "wherry.promoted_from": origin}
    done = enter(found.uri, sidecar, chosen, alias=None, tags=tags, **there)
    return replace(found, name=chosen, version=done.version, alias=None, tags=tags)


def _is_stated(ledger: Ledger, registry: str, found: ResolvedModel, alias: str) -> bool:
    """Whether the ledger's last statement about an alias is this version; a promotion may have been killed before."""
    from wherry.ledger.record import statements

    last = None
    for one in statements(ledger, kinds=("promotion", "rollback")):
        if (one.body["registry"], one.body["name"], one.body["alias"]) == (registry, found.name, alias):
            last = one.body["version"]
    return last == found.version


def _promotion(
    found: ResolvedModel,
    alias: str,
    moved: Any,
    stores: Mapping[str, str],
    by: str,
    level: str,
    passed: tuple[GateResult, ...],
    seq: int | None,
) -> Promotion:
    return Promotion(
        name=found.name or "",
        version=moved.version,
        alias=alias,
        replaced=moved.replaced,
        already=moved.already,
        uri=found.uri,
        checkpoint_digest=found.checkpoint_digest,
        registry=without_secrets(stores["registry_uri"]),
        page=service("mlflow").page(stores["registry_uri"], found.name or "", moved.version),
        by=by,
        level=level,
        gates=passed,
        statement=seq,
    )


def _by(approver: str | None) -> str:
    """The user who promotes, as recorded."""
    return f"{user_name()} (not authenticated)" if approver is None else approver


def prove_version(
    found: ResolvedModel,
    policy: Policy,
    level: str,
    approver: str | None,
    memory: str | int,
    progress: OnProgress | None,
) -> tuple[Sidecar, tuple[GateResult, ...]]:
    """Verify a registered checkpoint and check the policy.

    Args:
        found: the version and its place.
        policy: the gates.
        level: level of the verification.
        approver: the user whom the registry's server has authenticated.
        memory: budget for reading.
        progress: called a few times a second.

    Returns:
        Its sidecar, with its current URI, and the results of the gates.

    Raises:
        MismatchError: it differs from the registered one, or a gate does not pass.
        IncompleteError: files are missing.
    """
    from wherry.models.policy import judge

    sidecar = read_sidecar(locate_stated(found.uri))
    if sidecar is None or proved_digest(sidecar) != found.checkpoint_digest:
        raise MismatchError(
            f"digest mismatch: the manifest of the checkpoint is not the registered one, {found.checkpoint_digest}",
            uri=found.uri,
            cure="restore the checkpoint from a backup, or register it as a new version",
            stage="promote",
        )
    sidecar = replace(sidecar, checkpoint=replace(sidecar.checkpoint, uri=found.uri))
    # read before this promotion records a verification of its own
    facts = _facts(found, sidecar, level, approver)
    _verify(found.uri, sidecar, level, memory, progress)
    findings = judge(policy, facts)
    refused = [one for one in findings if not one.passed]
    if refused:
        reasons = "; ".join(f"{one.gate}: required {one.requested}, found {one.found}" for one in refused)
        raise MismatchError(
            f"the policy rejects the checkpoint: {reasons}",
            uri=found.uri,
            cure="meet the named gates, or change the policy",
            stage="promote",
        )
    return sidecar, tuple(findings)


def _verify(uri: str, sidecar: Sidecar, level: str, memory: str | int, progress: OnProgress | None) -> None:
    """Verify a checkpoint and record the outcome in the ledger in any case."""
    source = SourceRequest(uri, below=root_of(uri))
    outcome = verify(source, level=level, memory=memory, progress=progress)
    if outcome.verdict == READ_ONLY:  # its sidecar was removed meanwhile
        raise unproved_error(outcome)
    if outcome.verdict == UNCOMPARED:
        raise uncompared_error(outcome)
    try:
        record_outcome(
            sidecar.checkpoint if outcome.ok else outcome.subject or sidecar.checkpoint, outcome.to_json()
        )
    except NotRecordedError as error:
        if outcome.ok:  # without a record there is no promotion
            raise error.__cause__ or error from None
    if (
        not outcome.ok and outcome.verdict != ADDED
    ):  # the gate `extra_companions` judges files that were added
        cure = "restore the checkpoint from a backup, or convert it again"
        what = "the checkpoint differs from the registered one"
        raise failure_of(outcome, cure=cure, what=what, stage="promote")


def _facts(found: ResolvedModel, sidecar: Sidecar, level: str, approver: str | None) -> Any:
    from wherry.ledger.nodes import nodes, verifications
    from wherry.ledger.record import ancestors, conversions_to, open_ledger
    from wherry.models.policy import PolicyFacts

    digest, uri = sidecar.checkpoint.checkpoint_digest, found.uri
    with open_source(SourceRequest(uri, sidecar.checkpoint.format, below=root_of(uri))) as checkpoint:
        extra = file_differences(checkpoint, checkpoint.location, sidecar).strange
    with open_ledger() as ledger:
        outcomes, edges = verifications(ledger, digest), ancestors(ledger, digest)
        node, made = nodes(ledger, [digest]).get(digest), conversions_to(ledger, digest)
    exact = all(one.body["lossless"] for one in made) and all(edge.lossless for edge in edges)
    return PolicyFacts(
        uri=uri,
        manifest=sidecar.manifest,
        level=level,
        extra=extra,
        verifications={name: outcome for name, outcome in outcomes.items() if has_passed(outcome)},
        lossless=exact if made else None,
        earlier=all(edge.lossless for edge in edges if edge.target != digest),
        signed=lambda key: service("signing").require(uri, key),
        approver=approver,
        kind=node.kind if node else "",
        registered=any(
            (row.name, row.version) == (found.name, found.version)
            for row in (node.registrations if node else ())
        ),
        sources=frozenset(one.body["source"]["uri"] for one in made),
        finished=max((one.body["finished"] or one.time for one in made), default=""),
        unproved=frozenset(name for name, one in outcomes.items() if one.get("verdict") == READ_ONLY),
    )
