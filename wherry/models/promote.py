"""promote: put an alias on a registered checkpoint, after its bytes have been read again and the policy is met.

candidate → champion → previous. What is promoted is proved first: the registry's digest must be the one that the
manifest beside the checkpoint hashes to, the bytes of tensors and companion files must be the manifest's, and every
gate of the policy must pass. Then the alias moves, and the ledger says so; where the ledger cannot be written, the
alias goes back. `rollback` puts back what stood under the alias before.

A sidecar can be replaced together with the bytes. So the chain of the proof begins at the registry. Companion files
count like tensors, and one that was added counts too: a tokenizer that nobody recorded changes what the model does as
surely as a swapped one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from wherry.converter.plan import DEFAULT_MEMORY
from wherry.core.receipt import utc_now
from wherry.core.services import service
from wherry.errors import IncompleteError, MismatchError, NotFoundError, NotRecordedError, UsageError
from wherry.formats.checkpoint import open_checkpoint
from wherry.ledger.outcomes import record_outcome
from wherry.ledger.replay import passed
from wherry.ledger.resolve import ResolvedModel, is_model_uri, proved_digest, resolve_model, stores_of
from wherry.storage.home import user_name, without_secrets
from wherry.storage.sidecar import read_sidecar, unrecorded
from wherry.storage.stores import locate
from wherry.verifier.verify import verify

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from wherry.core.progress import OnProgress
    from wherry.ledger.record import Edge, Ledger
    from wherry.models.policy import GateResult, Policy
    from wherry.storage.sidecar import Sidecar


CHAMPION = "champion"
# Tags that are true of a version in its own registry alone.
_STAYING = (
    "wherry.adopted", "wherry.attempt", "wherry.logged_model", "wherry.promoted_", "wherry.replaced.",
    "wherry.rolled_back", "wherry.source_model", "wherry.uri", "wherry.withdrawn",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Promotion:
    """What a promotion or a rollback did.

    Attributes:
        name: the registered model.
        version: the version that has the alias now.
        alias: the alias.
        replaced: the version that had it before; None where none had.
        already: whether it was there already, so that nothing was moved.
        uri: the checkpoint.
        checkpoint_digest: its identity.
        registry: the registry, without user, password or query.
        page: where a browser shows the version; None where no server is known.
        by: who did it: the user whom the registry has authenticated, or `<user> (not authenticated)`.
        level: at which it was verified.
        gates: each gate with what was asked and found.
        statement: number of the ledger's statement; None where nothing was moved.
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
        """As `promote --json` prints it."""
        return {"schema": 1, **asdict(self)}


def promote(
    uri_or_model: str | os.PathLike[str],
    *,
    name: str | None = None,
    to_alias: str = CHAMPION,
    gates: Policy | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    level: str = "digest",
    tracking_uri: str | None = None,
    registry_uri: str | None = None,
    to_registry_uri: str | None = None,
    memory: str | int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
) -> Promotion:
    """Verify a checkpoint, judge it by the policy and give it an alias.

    Args:
        uri_or_model: `models:/NAME@candidate`, `models:/NAME/VERSION`, or a checkpoint's URI.
        name: the registered model; needed for a plain URI, which is registered where it is not yet.
        to_alias: the alias; what has it now becomes `previous`.
        gates: the policy, as an object, a mapping, or a TOML or JSON file; only the bytes count by default.
        level: of the verification: `digest` reads every byte.
        tracking_uri, registry_uri: MLflow's stores; as for `register`.
        to_registry_uri: another registry to promote into; the version goes there with all its tags.
        memory: budget for reading.
        progress: called a few times a second.

    Raises:
        MismatchError: bytes, companions or identity are not the registered ones, or a gate does not pass.
        IncompleteError: something is missing.
        NotFoundError: there is no such version or checkpoint.
        TargetInUseError: another process moves aliases of this model.
        StorageError: a registry or the ledger cannot be reached; aliases are what they were.
    """
    from wherry.models.policy import policy_of

    policy = policy_of(gates)
    stores = stores_of(tracking_uri, registry_uri)
    found = _found(uri_or_model, name, stores)
    there = {"tracking_uri": to_registry_uri, "registry_uri": to_registry_uri} if to_registry_uri else stores
    approver = service("mlflow").identity(there["registry_uri"])
    sidecar, passed = proved(found, policy, level, approver, memory, progress)
    by = _by(approver)
    if there["registry_uri"] != stores["registry_uri"]:
        found = _carried(found, sidecar, stores, there, name)
    return _move(found, sidecar, to_alias, there, by, level, passed)


def rollback(
    name: str,
    *,
    alias: str = CHAMPION,
    level: str = "present",
    tracking_uri: str | None = None,
    registry_uri: str | None = None,
    memory: str | int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
) -> Promotion:
    """Give an alias back to the version that had it before; again and again, as far as promotions go back.

    Args:
        name: the registered model.
        alias: the alias.
        level: at which the version is verified that gets it; `present` reads no tensors, so that it is quick.
        tracking_uri, registry_uri: MLflow's stores; as for `register`.
        memory: budget for reading.
        progress: called a few times a second.

    Raises:
        NotFoundError: no version had the alias before, or its checkpoint is gone.
        MismatchError, IncompleteError: its checkpoint is not what was registered.
        TargetInUseError: another process moves aliases of this model.
    """
    from wherry.ledger.record import open_ledger, record_event
    from wherry.models.policy import Policy

    mlflow, stores = service("mlflow"), stores_of(tracking_uri, registry_uri)
    target, now = mlflow.rollback_target(name, alias, **stores)
    found = resolve_model(f"models:/{quote(name, safe='')}/{target}", **stores)
    approver = mlflow.identity(stores["registry_uri"])
    policy = Policy(level="structure", extra_companions=True)
    sidecar, passed = proved(found, policy, level, approver, memory, progress)
    by = _by(approver)
    entering = mlflow.rolling_back(name, alias, target, now, when=utc_now(), **stores)
    body = {"name": name, "alias": alias, "version": target, "replaced": now, "by": by}
    body["registry"] = without_secrets(stores["registry_uri"])
    with open_ledger() as ledger, entering as moved:
        seq = record_event(ledger, "rollback", sidecar.checkpoint, body)
    return _promotion(found, alias, moved, stores, by, level, passed, seq)


def _found(asked: str | os.PathLike[str], name: str | None, stores: Mapping[str, str]) -> ResolvedModel:
    """The version that is meant; a plain URI is registered, which does nothing where it is."""
    if is_model_uri(asked):
        found = resolve_model(asked, **stores)
        if found.version is not None:
            return found
        asked = found.uri
    if name is None:
        raise UsageError(
            "a checkpoint is promoted as a version of a registered model",
            uri=str(asked),
            cure="say which: --name NAME, or promote models:/NAME@ALIAS",
            stage="promote",
        )
    from wherry.models.register import register

    tracking, registry = stores["tracking_uri"], stores["registry_uri"]
    done = register(asked, name, tracking_uri=tracking, registry_uri=registry)
    return resolve_model(f"models:/{quote(name, safe='')}/{done.version}", **stores)


def _carried(
    found: ResolvedModel,
    sidecar: Sidecar,
    stores: Mapping[str, str],
    there: Mapping[str, str],
    name: str | None,
) -> ResolvedModel:
    """The version in another registry: made of the same source, with every tag and where it came from."""
    from wherry.models.register import enter

    if found.name is None:
        raise NotFoundError("no version to carry over", uri=found.uri, stage="promote")
    chosen = name or found.name
    origin = f"{without_secrets(stores['registry_uri'])} {found.name} {found.version}"
    own = {key: value for key, value in found.tags.items() if not key.startswith(_STAYING)}
    tags = {**own, "wherry.promoted_from": origin}
    done = enter(found.uri, sidecar, chosen, alias=None, tags=tags, **there)
    return replace(found, name=chosen, version=done.version, alias=None, tags=tags)


def _move(
    found: ResolvedModel,
    sidecar: Sidecar,
    alias: str,
    stores: Mapping[str, str],
    by: str,
    level: str,
    passed: tuple[GateResult, ...],
) -> Promotion:
    from wherry.ledger.record import open_ledger, record_event

    registry = without_secrets(stores["registry_uri"])
    tags = {"wherry.promoted_by": by, "wherry.promoted_at": utc_now()}
    entering = service("mlflow").promoting(found.name, found.version, alias, tags=tags, **stores)
    seq: int | None = None
    with open_ledger() as ledger, entering as moved:
        if not (moved.already and _stated(ledger, registry, found, alias)):
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
    return _promotion(found, alias, moved, stores, by, level, passed, seq)


def _stated(ledger: Ledger, registry: str, found: ResolvedModel, alias: str) -> bool:
    """Whether the ledger's last word on an alias is this version; a promotion may have been killed just before."""
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
    """Who promotes, for the record."""
    return f"{user_name()} (not authenticated)" if approver is None else approver


def proved(
    found: ResolvedModel,
    policy: Policy,
    level: str,
    approver: str | None,
    memory: str | int,
    progress: OnProgress | None,
) -> tuple[Sidecar, tuple[GateResult, ...]]:
    """Read a registered checkpoint again and judge it.

    Args:
        found: the version and its place.
        policy: the gates.
        level: of the verification.
        approver: the user whom the registry's server has authenticated.
        memory: budget for reading.
        progress: called a few times a second.

    Returns:
        Its sidecar, with the place where it lies now, and the findings.

    Raises:
        MismatchError: it is not what was registered, or a gate does not pass.
        IncompleteError: something is missing.
    """
    from wherry.models.policy import judge

    sidecar = read_sidecar(locate(found.uri))
    if sidecar is None or proved_digest(sidecar) != found.checkpoint_digest:
        raise MismatchError(
            "the manifest beside it is not the registered one",
            uri=found.uri,
            cure="restore the checkpoint, or register the one that is there now",
            stage="promote",
        )
    sidecar = replace(sidecar, checkpoint=replace(sidecar.checkpoint, uri=found.uri))
    _verify(found.uri, sidecar, level, memory, progress)
    findings = judge(policy, _facts(found.uri, sidecar, level, approver))
    refused = [one for one in findings if not one.passed]
    if refused:
        reasons = "; ".join(f"{one.gate}: asked for {one.asked}, found {one.found}" for one in refused)
        raise MismatchError(
            f"the policy does not admit it: {reasons}",
            uri=found.uri,
            cure="meet the gates that are named, or change the policy",
            stage="promote",
        )
    return sidecar, tuple(findings)


def _verify(uri: str, sidecar: Sidecar, level: str, memory: str | int, progress: OnProgress | None) -> None:
    """The outcome goes to the ledger, whatever it is."""
    outcome = verify(uri, level=level, memory=memory, progress=progress)
    try:
        record_outcome(sidecar.checkpoint, outcome.to_json())
    except NotRecordedError as error:
        if outcome.ok:  # what is not recorded is not promoted
            raise error.__cause__ or error from None
    if outcome.ok:
        return
    first = outcome.failed[0]
    more = f"; {len(outcome.failed) - 1} more" if len(outcome.failed) > 1 else ""
    kind = IncompleteError if outcome.verdict == "incomplete" else MismatchError
    raise kind(
        f"it is not what was registered: {first.reason}{more}",
        uri=uri,
        path=first.path,
        cure="restore the checkpoint, or convert it again",
        stage="promote",
    )


def _facts(uri: str, sidecar: Sidecar, level: str, approver: str | None) -> Any:
    from wherry.ledger.nodes import verifications
    from wherry.ledger.record import ancestors, open_ledger
    from wherry.models.policy import PolicyFacts

    digest = sidecar.checkpoint.checkpoint_digest
    with open_checkpoint(uri, format=sidecar.checkpoint.format) as checkpoint:
        extra = unrecorded(sidecar, checkpoint.manifest)
    with open_ledger() as ledger:
        outcomes, edges = verifications(ledger, digest), ancestors(ledger, digest)
    return PolicyFacts(
        uri=uri,
        sidecar=sidecar,
        level=level,
        extra=extra,
        verifications={name: outcome for name, outcome in outcomes.items() if passed(outcome)},
        lossless=_lossless(digest, sidecar, edges),
        earlier=all(edge.lossless for edge in edges if edge.target != digest),
        signed=lambda key: service("signing").require(uri, key),
        approver=approver,
    )


def _lossless(digest: str, sidecar: Sidecar, edges: Sequence[Edge]) -> bool | None:
    """Whether every conversion above was exact; None where its own conversion is not in the ledger."""
    receipt = sidecar.receipt
    if receipt is None:
        return True  # an original of which stock was taken: nothing was converted
    same = receipt.source.checkpoint_digest == digest
    if not receipt.lossless or not all(edge.lossless for edge in edges):
        return False
    return True if same or any(edge.target == digest for edge in edges) else None
