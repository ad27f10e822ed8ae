"""check: problems of a configuration beyond its schema: formats, options, families, policies, files and places.

An error keeps a route from working. A warning is a likely mistake, for example two steps with the same target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wherry.config.values import placeholders
from wherry.core.lazy_dataclass import dataclass
from wherry.core.request import NONE, SourceRequest
from wherry.cures import Command, Cure
from wherry.errors import UsageError, WherryError, choose
from wherry.families import families, load_family_file
from wherry.formats.registry import checked_options, find_format
from wherry.store.local_store import locate, store_of
from wherry.transform.settings import taken_by

if TYPE_CHECKING:
    from wherry.config.config import Config, ConfigFault, ConfigFaultsError
    from wherry.config.schema import Route, TargetRule


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: its severity, where in the configuration, what is wrong, and the cure."""

    severity: Literal["error", "warning"]
    where: str
    what: str
    cure: str

    def to_json(self) -> dict[str, str]:
        """The fields by name."""
        return {"severity": self.severity, "where": self.where, "what": self.what, "cure": self.cure}


@dataclass(frozen=True, slots=True)
class _Looks:
    """Checks whether places exist.

    Attributes:
        reach: whether to look at object stores too.
    """

    reach: bool

    def at(self, uri: str, where: str, severity: Literal["error", "warning"] = "error") -> Iterator[Problem]:
        """The problem that a place does not exist or cannot be reached, if so."""
        if store_of(uri) != "file" and not self.reach:
            return
        try:
            if not locate(uri).exists():
                yield Problem(
                    severity, where, f"file or folder not found: {uri}", "check the path, or create it"
                )
        except Exception as error:  # noqa: BLE001  storage libraries raise their own errors
            yield Problem(
                "warning",
                where,
                f"cannot access {uri}: {error}",
                "check the credentials and the network",
            )


def check(config: Config, *, reach: bool = False) -> list[Problem]:
    """All problems of the routes, policies and keys of a configuration.

    Args:
        config: the loaded configuration.
        reach: look at paths on object stores too; otherwise no network is used.
    """
    looks = _Looks(reach)
    problems = [problem for route in config.routes for problem in _of_route(route, looks)]
    problems += _of_settings(config, looks)
    seen: dict[str, str] = {}
    for route in config.routes:
        for rule in route.targets:
            other = seen.setdefault(rule.uri, route.name)
            if other != route.name and "route" not in placeholders(rule.uri):
                where = f"routes.{route.name}"
                what = f"{rule.uri} is also a target of the route {other}"
                problems.append(
                    Problem("warning", where, what, "add {route} to the template, or use another folder")
                )
    return problems


def faults_of(error: ConfigFaultsError) -> list[ConfigFault]:
    """Every mistake that keeps a configuration from being loaded, with formats and families that do not exist.

    Args:
        error: the refusal of the configuration.

    Returns:
        The mistakes in the order of the file.
    """
    names = [error.fault_at(*one) for one in _unknown_names(error.data)]
    return sorted([*error.faults, *names], key=lambda one: one.line)


def _unknown_names(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str, str | None]]:
    """The path, the text and the cure of names in the targets of routes that the schema does not know."""
    for name, route in _tables(data.get("routes")):
        rules: list[Any] = route["targets"] if isinstance(route.get("targets"), list) else []
        for number, rule in enumerate(rules):
            stated: dict[str, Any] = rule if isinstance(rule, dict) else {}
            at = ("routes", name, "targets", number)
            if "format" in stated:
                for problem in _failing("", lambda stated=stated: find_format(str(stated["format"]))):
                    yield (*at, "format"), problem.what, problem.cure
            family = stated.get("family")
            if isinstance(family, str) and "family_file" not in stated and family not in (NONE, *families()):
                yield (*at, "family"), *_unknown_family(family)


def _unknown_family(name: str) -> tuple[str, str]:
    cure = f"{choose(name, (NONE, *families()))}, or declare it in a family_file"
    return f"unknown family {name!r}", cure


def _tables(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tables of a table."""
    named: dict[str, Any] = value if isinstance(value, dict) else {}
    return ((name, one) for name, one in named.items() if isinstance(one, dict))


def _of_settings(config: Config, looks: _Looks) -> Iterator[Problem]:
    """Problems outside of routes: policies of promotion, and keys for the verification of signatures."""
    from wherry.models.policy import policy_of

    for name, gates in config.settings.policy.items():
        where = f"policy.{name}"
        found = list(_failing(where, lambda gates=gates: policy_of(gates)))
        yield from found
        key = None if found else policy_of(gates).signature
        if key is not None:
            yield from looks.at(key, f"{where}.signature")
    if config.settings.audit.key is not None:
        yield from looks.at(config.settings.audit.key, "audit.key")


def _of_route(route: Route, looks: _Looks) -> Iterator[Problem]:
    where = f"routes.{route.name}"
    yield from _failing(where, lambda: SourceRequest(route.root, allow_opaque=route.allow_opaque))
    names = [*route.formats, *([route.format] if route.format else [])]
    for name in names:
        yield from _failing(f"{where}.formats", lambda name=name: find_format(name))
    yield from looks.at(route.root, f"{where}.root", severity="warning")
    yield from _of_models(route, where)
    if route.sign is not None:
        yield from looks.at(route.sign, f"{where}.sign")
    for index, rule in enumerate(route.targets):
        yield from _of_target(route, rule, f"{where}.targets[{index}]", looks)


def _of_models(route: Route, where: str) -> Iterator[Problem]:
    """Targets of one checkpoint that become versions of one model: its alias ends on the last of them."""
    if not route.alias:
        return
    seen: dict[str, str] = {}
    for index, rule in enumerate(route.targets):
        template = rule.model or route.model
        if template is None:
            continue
        name = template.replace("{format}", rule.format)
        first = seen.setdefault(name, f"targets[{index}]")
        if first != f"targets[{index}]":
            what = (
                f"it registers versions of the model {name} that {first} also does, so the alias {route.alias} ends on "
                "the version that is registered last"
            )
            cure = f'give each target a model of its own, for example model = "{template}-{rule.format}"'
            yield Problem("warning", f"{where}.targets[{index}].model", what, cure)


def _of_target(route: Route, rule: TargetRule, where: str, looks: _Looks) -> Iterator[Problem]:
    found = list(_failing(f"{where}.format", lambda: _require_writer(rule.format)))
    yield from found
    if not found:
        yield from _failing(f"{where}.options", lambda: _require_options(rule))
    layout = rule.at(rule.uri).layout
    file = layout.family_file
    if layout.family is not None and layout.family not in (NONE, *families()) and file is None:
        yield Problem("error", f"{where}.family", *_unknown_family(layout.family))
    for field in ("family_file", "config", "assets"):
        path = getattr(layout, field)
        if path is not None:
            yield from looks.at(path, f"{where}.{field}")
    if file is not None and Path(file).is_file():
        yield from _failing(f"{where}.family_file", lambda: load_family_file(file))
    yield from _of_place(route, rule, where)


def _of_place(route: Route, rule: TargetRule, where: str) -> Iterator[Problem]:
    fields = set(placeholders(rule.uri))
    if "name" in fields:
        return
    if "run" not in fields:
        yield Problem(
            "warning", f"{where}.uri", "two runs would have the same target", "add {run} to the template"
        )
    if "step" not in fields and not rule.into:
        yield Problem(
            "warning",
            f"{where}.uri",
            "all steps of a run would have the same target",
            "add {step} to the template",
        )
    makes = (
        find_format(rule.format).step_folder
        if not list(_failing("", lambda: find_format(rule.format)))
        else None
    )
    if rule.into and makes is None:
        yield Problem(
            "error", f"{where}.into", f"format {rule.format} has no naming rule for steps", "remove `into`"
        )
    if route.alias and not (rule.model or route.model):
        yield Problem("warning", f"{where}.model", "`alias` is set without `model`", "add `model`")


def _require_writer(name: str) -> None:
    row = find_format(name)
    if not row.is_written:
        raise UsageError(
            f"format {row.name} cannot be written",
            cure=Cure("run {} to list the formats that can", Command("formats")),
        )


def _require_options(rule: TargetRule) -> None:
    row = find_format(rule.format)
    own = {name: value for name, value in rule.options.items() if name in row.options}
    checked_options(row, own)
    request = rule.at(rule.uri)
    taken_by([row], request.settings, request.layout.family_file)


def _failing(where: str, ask: Callable[[], object]) -> Iterator[Problem]:
    """The error that a call raises, if any, as a problem."""
    try:
        ask()
    except WherryError as error:
        yield Problem(
            "error",
            where,
            error.what,
            error.cure or Cure("run {} to list formats and options", Command("formats")),
        )
