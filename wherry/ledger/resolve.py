"""resolve: find the checkpoint that a model URI names, and its location.

`models:/<name>@<alias>`, `models:/<name>/<version>` and `models:/<name>`, which is the newest version, are looked up in
the registry, `wherry://blake3/<digest>` in the ledger and then in the registry, the beginning of a digest (8 hex
digits or more, with or without its algorithm) in the ledger.
The result is the URI of a place that still holds the checkpoint with the registered
digest; a place that holds another checkpoint is an error, never the result. Every verb that takes a checkpoint's URI
also takes these, by `resolve_named`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from wherry.core.detection import Detection
from wherry.core.digest import ALGORITHMS, digest_in
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import checkpoint_digest
from wherry.core.progress import logger
from wherry.core.request import SourceRequest
from wherry.core.services import service
from wherry.core.units import plural, short
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import AmbiguousError, MismatchError, NotFoundError, UsageError, WherryError
from wherry.formats.detect import detect_source
from wherry.store.home import without_secrets
from wherry.store.location import Location

if TYPE_CHECKING:
    from wherry.formats.checkpoint import Checkpoint
    from wherry.ledger.database import Ledger
    from wherry.ledger.replay import PlaceRecord
    from wherry.store.sidecar import Sidecar

_log = logger(__name__)
_MODEL = re.compile(r"models:/+(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+)|/latest)?")
_DIGEST = re.compile(rf"(?P<algorithm>(?:{'|'.join(ALGORITHMS)}):)?[0-9a-f]{{8,64}}")
_NAMED = 10  # checkpoints that an error names
_SCHEMES = ("models:/", "wherry://")
_FORMS = "models:/NAME, models:/NAME@ALIAS, models:/NAME/VERSION or wherry://ALGORITHM/DIGEST"
# Tags of a model version that point to its checkpoint.
URI_TAG = "wherry.uri"
DIGEST_TAG = "wherry.checkpoint_digest"
WEIGHTS_TAG = "wherry.weights_digest"
VERIFIED_TAG = "wherry.verified"  # its last verification: level, verdict and time
ALTERED_TAG = "wherry.altered"  # what an audit found wrong with its checkpoint
DELETED_TAG = "wherry.deleted"  # `prune` deleted its checkpoint intentionally


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The checkpoint that a model URI names.

    Attributes:
        uri: the location of the checkpoint.
        name: the registered model; None if a digest was given and no registry knows it.
        version: its version.
        alias: the alias in the model URI.
        checkpoint_digest: identity of the checkpoint.
        weights_digest: digest of its tensors.
        tags: tags of the version.
    """

    uri: str
    name: str | None
    version: str | None
    alias: str | None
    checkpoint_digest: str
    weights_digest: str
    tags: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class _ModelQuery:
    """A version in the registry, or only a digest."""

    uri: str
    digest: str
    row: Any = None
    alias: str | None = None


def is_model_uri(text: str | os.PathLike[str]) -> bool:
    """Whether a text is a model URI, valid or not; nothing is looked up."""
    return os.fspath(text).startswith(_SCHEMES)


def model_in(text: str) -> str | None:
    """The name of the registered model in a model URI, decoded; None if the text is none, or names a digest."""
    named = _MODEL.fullmatch(text)
    return unquote(named["name"]) if named is not None else None


def resolve_model(
    uri: str | os.PathLike[str], *, tracking_uri: str | None = None, registry_uri: str | None = None
) -> ResolvedModel:
    """Find the checkpoint that a model URI names, and its location.

    Args:
        uri: `models:/NAME@ALIAS`, `models:/NAME/VERSION`, `models:/NAME` or `models:/NAME/latest` (the version with
            the highest number), `wherry://ALGORITHM/DIGEST`, as in `wherry.core.digest.digest_uri`, or the
            beginning of a digest in the ledger.
        tracking_uri, registry_uri: MLflow's stores; as for `register`.

    Raises:
        UsageError: the URI has none of these forms.
        NotFoundError: the version does not exist, or no known place holds the checkpoint any more.
        AmbiguousError: several checkpoints have a digest with this beginning.
        MismatchError: another checkpoint is at its place.
        HostileError: routes are configured, and none reads or writes at its place; see `wherry.config.roots`.
        MissingExtraError: mlflow is not installed.
        StorageError: the registry or the ledger cannot be reached.
    """
    text = os.fspath(uri)
    stores = stores_of(tracking_uri, registry_uri)
    named, digest = _MODEL.fullmatch(text), digest_in(text)
    if named is not None:
        query = _by_name(text, named.groupdict(), stores)
    elif digest is not None:
        query = _ModelQuery(text, digest)
    elif (known := known_digest(text)) is not None:
        query = _ModelQuery(text, known)
    else:
        raise _unknown(text)
    return _place(query, stores)


def checkpoint_uri(uri: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The URI of the checkpoint that a model URI or the beginning of a digest names; any other URI unchanged.

    Raises:
        NotFoundError, MismatchError: as `resolve_model`.
        AmbiguousError: several checkpoints have a digest with this beginning.
    """
    if is_model_uri(uri):
        return resolve_model(uri).uri
    text = os.fspath(uri)
    prefix = _DIGEST.fullmatch(text)
    if prefix is None or os.path.lexists(uri):
        return uri
    from wherry.config.roots import root_of
    from wherry.ledger.database import open_ledger
    from wherry.ledger.nodes import nodes

    with open_ledger() as ledger:
        digest = digest_starting(ledger, text)
        known = nodes(ledger, {digest}) if digest else {}
    if digest is None or digest not in known:
        if prefix["algorithm"] is not None:
            raise _unknown(text)
        return uri
    places = [place for place in known[digest].places if place.gone is None]
    there = next((place.uri for place in places if _holds(place)), None)
    if there is None:
        for place in places:
            root_of(place.uri)  # a refusal says more than that nothing was found
        raise _nowhere(text, digest, [place.uri for place in places])
    return there


def known_digest(text: str) -> str | None:
    """The digest in the ledger that begins with a text; None if there is none, or if a file has this name.

    Raises:
        AmbiguousError: several checkpoints have a digest with this beginning.
    """
    if not _DIGEST.fullmatch(text) or os.path.lexists(text):
        return None
    from wherry.ledger.database import open_ledger

    with open_ledger() as ledger:
        return digest_starting(ledger, text)


def digest_starting(ledger: Ledger, text: str) -> str | None:
    """The checkpoint whose digest begins with a text; None if there is none, or the text is no digest.

    Args:
        ledger: the opened ledger.
        text: 8 hex digits or more of a checkpoint or weights digest, with or without its algorithm.

    Raises:
        AmbiguousError: several checkpoints have a digest with this beginning.
    """
    if not _DIGEST.fullmatch(text):
        return None
    from wherry.ledger.nodes import digests_starting

    found = digests_starting(ledger, text)
    if len(found) > 1:
        more = f" and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
        raise AmbiguousError(
            f"ambiguous digest prefix {text}: it matches {plural(len(found), 'checkpoint')}",
            cure=f"choose one of: {', '.join(map(short, found[:_NAMED]))}{more}",
            stage="resolve",
        )
    return found[0] if found else None


def _unknown(text: str) -> WherryError:
    """The error about a text that names no checkpoint."""
    if _DIGEST.fullmatch(text):
        return NotFoundError(
            "no checkpoint with this digest in the ledger", uri=text,
            cure=Cure("run {} to list the checkpoints in the ledger", Command("ls")), stage="resolve",
        )  # fmt: skip
    named = f"models:/{text}"
    cure = (
        f"did you mean {shlex.quote(named)}? Otherwise use {_FORMS}"
        if _MODEL.fullmatch(named)
        else f"use {_FORMS}"
    )
    return UsageError(f"invalid model URI: {text}", cure=cure, stage="resolve")


def _holds(place: PlaceRecord) -> bool:
    """Whether a place still holds what the ledger saw there: by its sidecar, or by sizes and times of its files."""
    from wherry.config.roots import root_of
    from wherry.formats.checkpoint import open_source, present_fingerprint

    try:
        found = _at(place.uri)
        if found is not None:
            return proved_digest(found[1]) == place.checkpoint_digest
        with open_source(SourceRequest(place.uri, below=root_of(place.uri))) as checkpoint:
            return present_fingerprint(checkpoint) == place.fingerprint
    except WherryError:
        return False


def _nowhere(text: str, digest: str, tried: Sequence[str]) -> NotFoundError:
    return NotFoundError(
        f"checkpoint {short(digest)} not found at any known location: {', '.join(tried) or 'none is known'}",
        uri=text,
        cure=Cure(
            "restore the checkpoint; run {} to see what it was converted from",
            Command("lineage show", short(digest)),
        ),
        stage="resolve",
    )


def stores_of(tracking_uri: str | None, registry_uri: str | None) -> dict[str, str]:
    """Both MLflow URIs as keyword arguments: those given, else from the environment, else in the home."""
    from wherry.config.settings import mlflow_registry_uri, mlflow_tracking_uri

    tracking = tracking_uri or mlflow_tracking_uri()
    registry = registry_uri or (tracking if tracking_uri else mlflow_registry_uri())
    return {"tracking_uri": tracking, "registry_uri": registry}


def _by_name(text: str, parts: Mapping[str, str | None], stores: Mapping[str, str]) -> _ModelQuery:
    name, alias = unquote(parts["name"] or ""), parts["alias"]
    _log.info("waiting for the model registry %s", without_secrets(stores["registry_uri"]))
    wanted = {"version": parts["version"], "alias": alias}
    # MLflow's client comes last, as importing it takes seconds.
    row = (
        service("mlflow-rest").look_up(name, registry_uri=stores["registry_uri"], **wanted)
        or service("mlflow-sqlite").look_up(name, registry_uri=stores["registry_uri"], **wanted)
        or service("mlflow").look_up(name, **wanted, **stores)
    )
    deleted = row.tags.get(DELETED_TAG)
    if deleted:
        raise NotFoundError(f"the checkpoint was deleted: {deleted}", uri=text, stage="resolve")
    digest = row.tags.get(DIGEST_TAG)
    if digest is None:
        raise NotFoundError(
            f"{name} version {row.version} was not registered by wherry",
            uri=text,
            cure=Cure(
                "register the checkpoint: {}",
                Command("register", Blank("URI"), Argument("model", Blank("NAME"))),
            ),
            stage="resolve",
        )
    return _ModelQuery(text, digest, row, alias)


def _place(query: _ModelQuery, stores: Mapping[str, str]) -> ResolvedModel:
    """The first place that holds the checkpoint; places from the registry come before those from the ledger."""
    tried: list[str] = []
    failed: list[WherryError] = []
    for place in _places(query, stores):
        if place in tried:
            continue
        tried.append(place)
        try:
            found = _at(place)
        except WherryError as error:  # another place may hold it
            failed.append(error)
            continue
        if found is not None and proved_digest(found[1]) == query.digest:
            row = query.row
            return ResolvedModel(
                uri=found[0].uri,
                name=row.name if row else None,
                version=row.version if row else None,
                alias=query.alias,
                checkpoint_digest=query.digest,
                weights_digest=found[1].checkpoint.weights_digest,
                tags=dict(row.tags) if row else {},
            )
        if found is not None:
            failed.append(
                MismatchError(
                    f"the checkpoint at this location is not the registered {short(query.digest)}",
                    uri=place,
                    cure="restore the registered checkpoint, or register the present one",
                    stage="resolve",
                )
            )
    if failed:
        raise next((error for error in failed if error.retryable), failed[0])
    raise _nowhere(query.uri, query.digest, tried)


def proved_digest(sidecar: Sidecar) -> str:
    """The checkpoint digest computed from a sidecar's manifest; the digest that it states may be altered."""
    subject = sidecar.checkpoint
    return checkpoint_digest(sidecar.manifest, subject.format, subject.format_version, sidecar.algorithm)


def proved_sidecar(location: Location, stage: str) -> Sidecar:
    """The sidecar of a checkpoint, after checking that its manifest matches its digest.

    Args:
        location: the checkpoint.
        stage: the verb that needs it.

    Raises:
        NotFoundError: the checkpoint has no sidecar.
        MismatchError: the sidecar was altered.
    """
    from wherry.store.sidecar import read_sidecar

    sidecar = read_sidecar(location)
    if sidecar is None:
        raise NotFoundError(
            "no digests are recorded for this checkpoint, so it cannot be verified",
            uri=location.uri,
            cure=Cure(
                "record its digests first: {}",
                Command("inspect", Argument("digest"), Argument("write"), location.uri),
            ),
            stage=stage,
        )
    if proved_digest(sidecar) != sidecar.checkpoint.checkpoint_digest:
        raise MismatchError(
            "digest mismatch in the sidecar: its manifest was altered",
            uri=location.uri,
            cure="restore the checkpoint and its sidecar",
            stage=stage,
        )
    return sidecar


def _places(query: _ModelQuery, stores: Mapping[str, str]) -> Iterator[str]:
    if query.row is not None and URI_TAG in query.row.tags:
        yield query.row.tags[URI_TAG]
    from wherry.ledger.database import open_ledger
    from wherry.ledger.nodes import nodes

    with open_ledger() as ledger:
        known = nodes(ledger, {query.digest})
    if query.digest in known:
        yield from (place.uri for place in known[query.digest].places)
    if query.row is None:
        row = service("mlflow").find_digest(query.digest, **stores)
        yield from [row.tags[URI_TAG]] if row is not None and URI_TAG in row.tags else []


def _at(uri: str) -> tuple[Location, Sidecar] | None:
    """The checkpoint at a place that a record states, with its sidecar; None if there is none."""
    from wherry.config.roots import locate_stated
    from wherry.store.sidecar import read_sidecar

    location = locate_stated(uri)
    sidecar = read_sidecar(location) if location.exists() else None
    return None if sidecar is None else (location, sidecar)


def resolve_named(source: SourceRequest) -> SourceRequest:
    """A source with the URI of the checkpoint itself in place of a model URI, below the root that holds that place.

    Raises:
        HostileError: the registry or the ledger names a place that no route reads or writes.
        NotFoundError, MismatchError, AmbiguousError: as `checkpoint_uri`.
    """
    uri = os.fspath(checkpoint_uri(source.uri))
    if uri == source.uri:
        return source
    from wherry.config.roots import root_of

    return replace(source, uri=uri, below=source.below or root_of(uri))


def open_checkpoint(
    uri: str | os.PathLike[str] | SourceRequest,
    *,
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
    allow_opaque: Iterable[str] = (),
) -> Checkpoint:
    """Open a checkpoint; `wherry.open`.

    Args:
        uri: a checkpoint, a step folder, a run folder (the newest complete step is taken), or a model URI; or a request
            for one, which states the other arguments itself.
        format: the format, a name or alias, instead of detecting it.
        step: which step of a run.
        item: which item of a step.
        allow_opaque: dotted names of unknown pickle classes to read as opaque values instead of raising an error;
            nothing is ever imported or called.

    Raises:
        NotFoundError, NotACheckpointError, UnsupportedError, AmbiguousError: the URI does not name one checkpoint.
        DamagedError: metadata is missing or inconsistent. A checkpoint with missing chunks can be opened; `absent`
            of the reader and `verify` report them.
        HostileError: the checkpoint tries to reach outside its folder or to run code.
    """
    if not isinstance(uri, SourceRequest):
        uri = SourceRequest(os.fspath(uri), format, step, item, tuple(allow_opaque))
    from wherry.formats.checkpoint import open_source

    return open_source(resolve_named(uri))


def detect(
    uri: str | os.PathLike[str] | SourceRequest,
    *,
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
) -> Detection:
    """Identify the checkpoint at a URI.

    Args:
        uri: a checkpoint, a step folder, a run folder or a model URI; or a request for one, which states the other
            arguments itself.
        format: the format, instead of detecting it.
        step: which step of a run.
        item: which item of a step.

    Returns:
        The detection; a damaged, hostile or unknown checkpoint is a verdict here, not an error.

    Raises:
        UsageError: the URI or the format is invalid.
        NotFoundError: the file, folder or step was not found.
        MissingExtraError: the package for the protocol is not installed.
        StorageError: the storage failed.
    """
    source = uri if isinstance(uri, SourceRequest) else SourceRequest(os.fspath(uri), format, step, item)
    return detect_source(resolve_named(source))
