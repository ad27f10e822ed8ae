"""routes: apply the routes of `wherry.toml` to a checkpoint: its run and step, and its targets.

The run is the path from the route's root to the checkpoint, without its step folder and the `checkpoints` folder of
some systems; the name is the whole path from the root. They fill the templates of targets and registered models.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from wherry.config.config import Config, load_config
from wherry.config.schema import Route, TargetRule
from wherry.config.values import render
from wherry.core.digest import sha256_of
from wherry.core.lazy_dataclass import dataclass
from wherry.core.request import SourceRequest
from wherry.core.steps import step_number
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import HostileError, NotFoundError, UsageError, WherryError, choose
from wherry.formats.registry import find_format
from wherry.store.local_store import is_at_or_below, locate
from wherry.store.open_file import local_path

if TYPE_CHECKING:
    from wherry.core.detection import Detection

__all__ = [
    "Config",
    "Explanation",
    "RouteTarget",
    "Whereabouts",
    "explain",
    "load_config",
    "require_file",
    "wanted_targets",
    "whereabouts",
]

_STEP_ROOTS = ("checkpoints", "checkpoint")


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Run, step and name of a checkpoint below the root of a route."""

    run: str
    step: int | None
    name: str


@dataclass(frozen=True, slots=True)
class RouteTarget:
    """One target of a route for a checkpoint.

    Attributes:
        rule: the target in the route.
        uri: the target of the conversion; with `into`, the run.
        place: URI of the target checkpoint.
        committed: URI that is committed in one step: the place, or the step folder that holds it.
        model: registered model; None where it is not registered.
        request: digest of everything that determines the result.
    """

    rule: TargetRule
    uri: str
    place: str
    committed: str
    model: str | None
    request: str

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which `routes explain --json` prints."""
        return {"format": self.rule.format, "uri": self.place, "model": self.model, "request": self.request}


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a route does with a checkpoint.

    Attributes:
        route: name of the route.
        takes: whether the route converts the checkpoint.
        reason: why not, or by which selection.
        where: run, step and name; None outside of the root.
        targets: the targets.
        source: URI of the checkpoint that the request, for example a run, resolves to; None where it is not taken.
        unselected: whether it belongs to the route, whose `select` leaves it out.
        excluded: whether the route's `runs` or `formats` leave it out.
    """

    route: str
    takes: bool
    reason: str
    where: Whereabouts | None = None
    targets: tuple[RouteTarget, ...] = ()
    source: str | None = None
    unselected: bool = False
    excluded: bool = False

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which `routes explain --json` prints."""
        where = self.where and {"run": self.where.run, "step": self.where.step, "name": self.where.name}
        return {
            "route": self.route, "takes": self.takes, "reason": self.reason, "where": where,
            "targets": [one.to_json() for one in self.targets],
        }  # fmt: skip


def chosen_routes(config: Config, names: Iterable[str] = ()) -> tuple[Route, ...]:
    """The routes with these names, or all.

    Raises:
        NotFoundError: a route is unknown, or the configuration is absent or has no routes.
    """
    known = {route.name: route for route in config.routes}
    if not known:
        require_file(config)
    missing = [name for name in names if name not in known]
    if missing or not known:
        what = f"unknown route {missing[0]!r}" if missing else "the configuration has no routes"
        cure = (
            choose(missing[0], known)
            if known
            else Cure("add routes to wherry.toml; {} prints some", Command("config example"))
        )
        raise NotFoundError(what, uri=config.file, cure=cure)
    return tuple(known[name] for name in names) or config.routes


def require_file(config: Config) -> str:
    """The configuration file.

    Raises:
        NotFoundError: there is none, and so no routes.
    """
    if config.file is None:
        raise NotFoundError(
            "no configuration found",
            cure=Cure(
                "run it in the folder of wherry.toml, or pass {}; {} writes one",
                Argument("config", Blank("FILE")),
                Command("init"),
            ),
        )
    return config.file


def whereabouts(root: str, found: Detection) -> Whereabouts | None:
    """Run, step and name of a checkpoint below a root; None where it is not below the root."""
    base, place = locate(root), locate(found.uri)
    if not is_at_or_below(base, place):
        return None
    parts = list(PurePosixPath(place.path[len(base.path.rstrip("/")) :].strip("/")).parts)
    at = _step_part(parts, found.step)
    run = parts if at is None else parts[:at]
    while run and run[-1] in _STEP_ROOTS:
        run = run[:-1]
    name = "/".join(parts) or base.name
    if at is None and run and _is_file(found):
        run = [*run[:-1], PurePosixPath(run[-1]).stem]
    if at is None and found.step is None and not parts:
        run = []
    return Whereabouts("/".join(run) or base.name, found.step, name)


def wanted_targets(route: Route, found: Detection, where: Whereabouts) -> tuple[RouteTarget, ...]:
    """The targets of a route for a checkpoint.

    Raises:
        UsageError: a template needs an unknown value, or two targets have the same URI.
    """
    made = tuple(_wanted_target(route, rule, found, where) for rule in route.targets)
    places = [one.place for one in made]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        raise UsageError("two targets have the same URI", uri=twice, cure="write {format} in their templates")
    return made


def explain(uri: str, config: Config) -> list[Explanation]:
    """What each route does with the checkpoint at a URI, and why.

    The URI may come from an event. Its text is compared with the roots before anything of it is opened, and it is
    opened below the root of its route: a route does not take what a link out of its root names, and says so.

    Raises:
        NotFoundError: the URI does not exist, or the configuration is absent or has no routes.
        WherryError: it is not a readable checkpoint.
    """
    from wherry.ledger.resolve import checkpoint_uri

    chosen_routes(config)
    text = os.fspath(checkpoint_uri(uri))
    return [
        _explain(route, locate(text).uri) if _is_below(route, text) else _outside(route)
        for route in config.routes
    ]


def _is_below(route: Route, uri: str) -> bool:
    """Whether a URI is below the root of a route, by its text; below a local root, no store is logged in to."""
    if (local_path(route.root) is None) != (local_path(uri) is None):
        return False
    return is_at_or_below(locate(route.root), locate(uri))


def _explain(route: Route, uri: str) -> Explanation:
    """The decision of a route about what is below its root; a link out of it is a reason."""
    from wherry.formats.detect import resolve_source

    try:
        found = resolve_source(SourceRequest(uri, below=route.root))[1]
    except HostileError as error:
        return Explanation(route.name, takes=False, reason=error.what)
    where = whereabouts(route.root, found)
    if where is None:
        return _outside(route)
    reason = refusal(route, found, where)
    if reason is not None:
        excluded = foreign_reason(route, found, where) is not None
        return Explanation(
            route.name, takes=False, reason=reason, where=where, unselected=not excluded, excluded=excluded
        )
    try:
        targets = wanted_targets(route, found, where)
    except WherryError as error:
        return Explanation(route.name, takes=False, reason=error.what, where=where)
    takes, reason = _is_meant(route, found, where)
    if not takes:
        return Explanation(route.name, takes=False, reason=reason, where=where, unselected=True)
    return Explanation(route.name, takes=True, reason=reason, where=where, targets=targets, source=found.uri)


def _outside(route: Route) -> Explanation:
    return Explanation(route.name, takes=False, reason=f"it is not below {route.root}")


def refusal(route: Route, found: Detection, where: Whereabouts) -> str | None:
    """Why a route does not take a checkpoint, regardless of other checkpoints; None where it may.

    This runs for each checkpoint of a walk, so it opens nothing: `latest`, `best` and `since` are decided elsewhere.
    """
    chosen, foreign = route.selection, foreign_reason(route, found, where)
    if foreign is not None:
        return foreign
    if chosen.choice == "every" and where.step is not None and where.step % chosen.steps:
        return f"step {where.step} is not a multiple of {chosen.steps}"
    return None


def unrouted_reason(explanations: Iterable[Explanation]) -> str | None:
    """Why no route takes a checkpoint or leaves it out by its `select`; None where one does."""
    every = tuple(explanations)
    if any(one.takes or one.unselected for one in every):
        return None
    return "no route takes it: " + "; ".join(f"{one.route}: {one.reason}" for one in every)


def foreign_reason(route: Route, found: Detection, where: Whereabouts) -> str | None:
    """Why `runs` or `formats` of a route leave a checkpoint out; None where they do not."""
    if route.runs and not any(fnmatch(where.run, pattern) for pattern in route.runs):
        return f"run {where.run} matches none of {', '.join(route.runs)}"
    if route.formats and found.format not in {find_format(name).name for name in route.formats}:
        return f"format {found.format} is not one of {', '.join(route.formats)}"
    return None


def _is_meant(route: Route, found: Detection, where: Whereabouts) -> tuple[bool, str]:
    """Whether `select` selects a checkpoint, as far as its run shows now, and the reason."""
    stated, choice = f"select = {route.select}", route.selection.choice
    if choice == "best":
        return True, f"{stated}, if it is the best step of its run"
    try:
        against = (
            _overtaken(route, found, where) if choice == "latest"
            else _too_old(route, found) if choice == "since" else None
        )  # fmt: skip
    except (WherryError, OSError) as error:  # the conversion reports the same error
        return True, f"{stated}, which cannot be determined: {error}"
    return against is None, against or stated


def _overtaken(route: Route, found: Detection, where: Whereabouts) -> str | None:
    """Why `latest` does not select a step: its run has a newer complete one."""
    from wherry.formats.discover import walk

    parts = PurePosixPath(where.name).parts
    at = _step_part(parts, found.step)
    if at is None or where.step is None:  # no name on the path states the step
        return None
    run = locate(route.root).join("/".join(parts[:at])) if at else locate(route.root)
    for other in walk(route.place(run.uri), None, route.min_age, newest=True):
        seen = whereabouts(route.root, other)
        if seen is None or seen.step is None or seen.run != where.run:
            continue
        if seen.step > where.step:
            return f"step {seen.step} of this run is newer and complete"
        if not _is_file(other):
            return None  # of steps that are folders the newest complete one comes first
    return None


def _too_old(route: Route, found: Detection) -> str | None:
    """Why `since` does not select a checkpoint: its newest file was written before."""
    from wherry.formats.checkpoint import open_source
    from wherry.store.location import modified_time

    since = route.selection.since
    with open_source(route.source(found)) as opened:
        written = modified_time(locate(found.uri), opened.reader.members())
    return f"it was written before {since.isoformat()}" if since is not None and written < since else None


def _wanted_target(route: Route, rule: TargetRule, found: Detection, where: Whereabouts) -> RouteTarget:
    row = find_format(rule.format)
    values = {
        "run": where.run, "step": None if where.step is None else str(where.step), "format": row.name,
        "name": where.name, "route": route.name, "family": found.family or rule.at("").layout.family,
        "kind": found.kind,
    }  # fmt: skip
    uri = filled_uri(rule.uri, values)
    place = committed = uri
    if rule.into:
        if row.step_folder is None or where.step is None:
            what = (
                f"format {row.name} has no naming rule for steps"
                if row.step_folder is None
                else "the checkpoint states no step"
            )
            raise UsageError(
                f"{what}, but `into` needs one", uri=found.uri, cure="remove `into` from the target"
            )
        folder = row.step_folder(where.step)
        place, committed = (locate(uri).join(name).uri for name in (folder, folder.split("/")[0]))
    template = rule.model or route.model
    model = None if template is None else render(template, values).replace("/", "-")
    return RouteTarget(rule, uri, place, committed, model, request_of(route, rule))


def filled_uri(template: str, values: Mapping[str, str | None]) -> str:
    """The URI of a target: the names that fill the template come from the storage that a route walks.

    Raises:
        UsageError: a value is unknown, or the result is not below the part before the first field.
    """
    quoted = values
    if template.startswith("file:"):  # a name is no URI: %2f in it is no slash
        quoted = {name: value and quote(os.fsencode(value)) for name, value in values.items()}
    fixed, field, _rest = template.partition("{")
    if not field:
        return locate(template).uri
    base, found = locate(fixed[: fixed.rfind("/") + 1] or "."), locate(render(template, quoted))
    if not is_at_or_below(base, found) or ".." in found.path[len(base.path) :].split("/"):
        raise UsageError(
            "the target does not lie below the fixed part of its template", uri=found.uri,
            cure=f"rename the run, or change the template {template!r}",
        )  # fmt: skip
    return found.uri


def request_of(route: Route, rule: TargetRule) -> str:
    """Digest of everything that determines the result of a conversion, except its URI."""
    stated = rule.model_dump(exclude={"uri", "model", "into"})
    return sha256_of("request", {**stated, "ignore": route.ignore, "source": route.format})


def _step_part(parts: Sequence[str], step: int | None) -> int | None:
    """Index of the last part of a path that states the step."""
    stated = (
        index for index in reversed(range(len(parts))) if step_number(parts[index], any_prefix=True) == step
    )
    return next(stated, None) if step is not None else None


def _is_file(found: Detection) -> bool:
    entry = locate(found.uri).entry
    return entry is not None and not entry.is_dir
