"""conversion: what is done with one checkpoint, by a night, an export or a form: convert, verify, register, note."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from wherry.config.schema import Route
from wherry.core.lazy_dataclass import dataclass
from wherry.core.request import ConvertRequest, SourceRequest
from wherry.cures import Command, Cure
from wherry.errors import NotRecordedError, WherryError
from wherry.formats.registry import find_format
from wherry.ledger.record import not_recorded, registration_of, verification_of
from wherry.ledger.replay import PRODUCT
from wherry.nightly.routes import RouteTarget, Whereabouts
from wherry.prove.verify import comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion and the steps after its commit, as a route requests them for one checkpoint, or a form.

    Attributes:
        request: source, targets and options.
        models: for each target, the registered model that gets a version; None if none does.
        on: the engine; see `wherry.workers.engines`.
        unit: size of a unit of the engine.
        level: level of the verification of each target; `none` leaves it out.
        alias, tags, tracking_uri, registry_uri: as for `wherry.register`.
        notes: the notes for the ledger, once everything else is done; see `conversion_for`.
    """

    request: ConvertRequest
    models: tuple[str | None, ...]
    on: str
    unit: str
    level: str
    alias: str | None
    tags: Mapping[str, str]
    tracking_uri: str | None = None
    registry_uri: str | None = None
    notes: tuple[dict[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """JSON form; the inverse of `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Conversion:
        """Read the JSON form; the inverse of `to_json`."""
        parts: dict[str, Any] = {
            "request": ConvertRequest.from_json(data["request"]),
            "models": tuple(data["models"]),
            "notes": tuple(data["notes"]),
        }
        return cls(**{**data, **parts})


def conversion_for(
    route: Route, source: SourceRequest, where: Whereabouts, targets: Sequence[RouteTarget], memory: str,
    score: float | None,
) -> Conversion:  # fmt: skip
    """What a route requests for one checkpoint, without the URIs of the registry, which may contain credentials.

    The notes say which route requested each target, and with which request digest. They are recorded last: the next
    night resumes a target without a note.

    Args:
        route: the route.
        source: the checkpoint.
        where: its run and step.
        targets: the targets to make.
        memory: the setting, used where the route states none.
        score: the metric by which the route selects or keeps checkpoints; None where there is none or it is unknown.
    """
    notes = tuple(
        {
            "about": PRODUCT, "route": route.name, "request": one.request, "target": one.place,
            "committed": one.committed, "source": source.uri, "run": where.run, "step": where.step,
            "format": find_format(one.rule.format).name, "score": score,
        }
        for one in targets
    )  # fmt: skip
    return Conversion(
        request=route.request(source, [one.rule.at(one.uri) for one in targets], memory),
        models=tuple(one.model for one in targets), on=route.on, unit=route.unit, level=route.level,
        alias=route.alias, tags=route.tags, notes=notes,
    )  # fmt: skip


def after_commit(
    conversion: Conversion, number: int, uri: str, source: str,
    verify: Callable[..., Any], enter: Callable[..., Any],
) -> tuple[Any, Any, list[NotRecordedError]]:  # fmt: skip
    """Verify and register a committed target; a failure of ledger or registry stops neither the other step nor others.

    Args:
        conversion: what is done.
        number: the number of the target.
        uri: its URI.
        source: URI of the source.
        verify: takes the URI, and what `comparison` returns: `verify_and_record`, or the task that calls it.
        enter: `register`, or the task that calls it.

    Returns:
        What the two steps returned, None for a step that was left out or refused, and the refusals. A verification that
        could not be recorded is returned in its JSON form; if it passed, it counts.
    """
    verification = registration = None
    request, model = conversion.request, conversion.models[number]
    proved = conversion.level == "none"
    refused: list[NotRecordedError] = []
    try:
        if conversion.level != "none":
            family_file = request.targets[number].layout.family_file
            with verification_of(uri):
                verification = verify(
                    uri, **comparison(conversion.level, source, request.source.below, family_file)
                )
            proved = True
    except NotRecordedError as error:
        refused.append(error)
        if error.result is not None:
            verification = {**error.result.to_json(), "lineage": error.what}
            proved = error.result.ok  # not if its bytes could not be compared with the ledger
    try:
        if model is not None and proved:
            named: dict[str, Any] = {"alias": conversion.alias, "tags": conversion.tags}
            stores = {"tracking_uri": conversion.tracking_uri, "registry_uri": conversion.registry_uri}
            with registration_of(uri, model, **named):
                registration = enter(uri, model, **named, **stores)
    except NotRecordedError as error:
        refused.append(error)
    return verification, registration, refused


def note(bodies: Iterable[dict[str, Any]]) -> None:
    """Append notes to the ledger.

    Raises:
        StorageError: the ledger cannot be written.
    """
    from wherry.ledger.record import open_ledger, record_event

    every = list(bodies)
    if not every:
        return  # without notes the ledger is not opened, so that it cannot fail
    with open_ledger() as ledger:
        for body in every:
            record_event(ledger, "note", None, body)


def note_made(bodies: Sequence[dict[str, Any]]) -> None:
    """Append the notes of a conversion, once everything else is done.

    Raises:
        NotRecordedError: the ledger cannot be written.
    """
    try:
        note(bodies)
    except WherryError as error:
        uris = [str(body["target"]) for body in bodies]
        raise not_recorded(
            error, uris, cure=Cure("run {} again; it resumes here", Command("nightly"))
        ) from error
