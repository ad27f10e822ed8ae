"""What is wrong with a configuration beyond its schema: formats, options, families, policies, files and places.

Errors keep a route from ever working; warnings are what will surprise somebody, such as a second step that meets the
place of the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from wherry.config.values import placeholders
from wherry.core.request import NONE, SourceRequest
from wherry.errors import UsageError, WherryError
from wherry.families import families, load_family_file
from wherry.formats.registry import checked_options, find_format
from wherry.storage.stores import locate, store_of
from wherry.tree.mapping import TREE_OPTIONS
from wherry.view.system import layout_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wherry.config.config import Config
    from wherry.config.schema import Route, TargetRule


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: how bad, where in the configuration, what, and the cure."""

    severity: Literal["error", "warning"]
    where: str
    what: str
    cure: str

    def to_json(self) -> dict[str, str]:
        """The fields by name."""
        return {"severity": self.severity, "where": self.where, "what": self.what, "cure": self.cure}


@dataclass(frozen=True, slots=True)
class _Looks:
    """How far a check looks."""

    reach: bool

    def at(self, uri: str, where: str, severity: Literal["error", "warning"] = "error") -> Iterator[Problem]:
        """The problem that nothing is there, or that nobody can look there."""
        if store_of(uri) != "file" and not self.reach:
            return
        try:
            if not locate(uri).exists():
                yield Problem(severity, where, f"nothing is at {uri}", "check the path, or make it")
        except Exception as error:  # noqa: BLE001  storage libraries raise their own errors
            yield Problem(
                "warning",
                where,
                f"{uri} cannot be looked at: {error}",
                "check the credentials and the network",
            )


def check(config: Config, *, reach: bool = False) -> list[Problem]:
    """Everything that is wrong with the routes, policies and keys of a configuration.

    Args:
        config: what was loaded.
        reach: look at paths on object stores too; without it nothing leaves this machine.
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
                what = f"{rule.uri} is a target of the route {other} too"
                problems.append(
                    Problem("warning", where, what, "write {route} or another folder in one of them")
                )
    return problems


def _of_settings(config: Config, looks: _Looks) -> Iterator[Problem]:
    """What the routes do not state: the policies of promotion, and the keys that signatures are checked with."""
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
    yield from _failing(where, lambda: SourceRequest(route.root, opaque=route.opaque))
    names = [*route.formats, *([route.source_format] if route.source_format else [])]
    for name in names:
        yield from _failing(f"{where}.formats", lambda name=name: find_format(name))
    yield from looks.at(route.root, f"{where}.root", severity="warning")
    if route.sign is not None:
        yield from looks.at(route.sign, f"{where}.sign")
    for index, rule in enumerate(route.targets):
        yield from _of_target(route, rule, f"{where}.targets[{index}]", looks)


def _of_target(route: Route, rule: TargetRule, where: str, looks: _Looks) -> Iterator[Problem]:
    found = list(_failing(f"{where}.format", lambda: _require_writer(rule.format)))
    yield from found
    if not found:
        yield from _failing(f"{where}.options", lambda: _require_options(rule))
    layout = rule.at(rule.uri).layout
    file = layout.family_file
    if layout.family not in (None, NONE, *families()) and file is None:
        cure = f"choose {', '.join((NONE, *families()))}, or declare it in a family_file"
        yield Problem("error", f"{where}.family", f"no family is called {layout.family}", cure)
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
        yield Problem("warning", f"{where}.uri", "two runs would have one place", "write {run} in it")
    if "step" not in fields and not rule.into:
        yield Problem(
            "warning",
            f"{where}.uri",
            "the second step would meet the place of the first",
            "write {step} in it",
        )
    makes = (
        find_format(rule.format).step_folder
        if not list(_failing("", lambda: find_format(rule.format)))
        else None
    )
    if rule.into and makes is None:
        yield Problem(
            "error", f"{where}.into", f"{rule.format} has no naming rule for steps", "leave `into` away"
        )
    if route.alias and not (rule.model or route.model):
        yield Problem("warning", f"{where}.model", "an alias is stated and no model", "state `model`")


def _require_writer(name: str) -> None:
    row = find_format(name)
    if row.create is None:
        raise UsageError(f"{row.name} cannot be written", cure="see `wherry formats`")


def _require_options(rule: TargetRule) -> None:
    row = find_format(rule.format)
    layout = layout_options()
    own = {name: value for name, value in rule.options.items() if name in row.options}
    checked_options(row, own)
    asked = rule.at(rule.uri)
    unknown = [name for name in asked.settings if name not in {*row.options, *TREE_OPTIONS, *layout}]
    if unknown and asked.layout.family_file is None:
        raise UsageError(
            f"{row.name} has no option {', '.join(unknown)}", cure=f"see `wherry formats {row.name}`"
        )


def _failing(where: str, ask: Callable[[], object]) -> Iterator[Problem]:
    """The problem that asking runs into, if any."""
    try:
        ask()
    except WherryError as error:
        yield Problem("error", where, error.what, error.cure or "see `wherry formats`")
