"""config: load `wherry.toml` for one environment, with the origin of each value.

The file is the one that `WHERRY_CONFIG` names, else `wherry.toml` in the working directory, else in the home. The
values of a table `[env.NAME]` override those of the file when `WHERRY_ENV` is NAME. Precedence of a setting: flag >
environment variable > env section > file > default. Errors name file, line, field and cure.

Workflows use `in_force`, which makes a configuration effective while they run, and `named_policy`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from wherry.config.file import CONFIG_ENV, ENVIRONMENT_ENV, config_file
from wherry.config.values import FieldStatement, line_at, lines_of, origin, stated_fields, where
from wherry.config.values import Path as FieldPath
from wherry.core.config_text import parse_toml
from wherry.core.lazy_dataclass import dataclass
from wherry.core.limits import beyond, exceeds, scale_limit
from wherry.core.names import meant_names
from wherry.cures import Command, Cure
from wherry.errors import NotFoundError, UsageError, WherryError, similar
from wherry.store.home import without_secrets
from wherry.store.local_store import locate
from wherry.store.location import MOST_CONFIG

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

    from wherry.config.schema import Route, Section, Settings


# setting → the environment variable that overrides the file; lists are separated as in PATH.
VARIABLES = {
    "ledger": "WHERRY_LEDGER",
    "digest": "WHERRY_DIGEST",
    "memory": "WHERRY_MEMORY",
    "storage_timeout": "WHERRY_STORAGE_TIMEOUT",
    "worker_wait": "WHERRY_WORKER_WAIT",
    "shared_paths": "WHERRY_SHARED_PATHS",
    "links": "WHERRY_LINKS",
    "mlflow.tracking_uri": "MLFLOW_TRACKING_URI",
    "mlflow.registry_uri": "MLFLOW_REGISTRY_URI",
    "notify.webhook": "WHERRY_NOTIFY_WEBHOOK",
    "notify.block": "WHERRY_NOTIFY_BLOCK",
    "openlineage.target": "WHERRY_OPENLINEAGE",
    "lineage.url": "WHERRY_LINEAGE_URL",
    "metrics.file": "WHERRY_METRICS",
    "audit.record": "WHERRY_AUDIT_RECORD",
    "child.timeout": "WHERRY_CHILD_TIMEOUT",
    "child.memory": "WHERRY_CHILD_MEMORY",
    "child.disk": "WHERRY_CHILD_DISK",
}
_MOST_ENVIRONMENTS = 100
_LISTS = ("shared_paths", "links")
_SECRET = ("notify.webhook",)
# Fields of routes, policies and [audit] that may be relative paths.
_PATHS = ("root", "uri", "family_file", "config", "assets", "sign", "signature", "key")


@dataclass(frozen=True, slots=True)
class Config:
    """The effective configuration.

    Attributes:
        file: the file that was read; None where there is none.
        env: the chosen environment; None without one.
        settings: the settings for all routes.
        routes: in the order of the file.
        origins: setting → origin of its value.
        stated: the fields that routes state.
        lines: the line of each key and table of the file.
    """

    file: str | None
    env: str | None
    settings: Settings
    routes: tuple[Route, ...]
    origins: Mapping[str, str]
    stated: tuple[FieldStatement, ...] = ()
    lines: Mapping[FieldPath, int] = field(default_factory=dict, repr=False)

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Each setting and each stated field of a route, with value and origin; secrets are masked."""
        values = self.settings.model_dump()
        for name, source in self.origins.items():
            yield name, mask_secret(name, value_at(values, name)), source
        for one in self.stated:
            yield one.name, mask_secret(one.name, one.value), origin(one, self.lines, self.file)


def load_config(path: str | os.PathLike[str] | None = None, env: str | None = None) -> Config:
    """Read the configuration.

    Args:
        path: the file; by default as described at the top of this module.
        env: the environment; `WHERRY_ENV` by default.

    Raises:
        NotFoundError: the file does not exist, or has no such environment.
        UsageError: it is not valid TOML, or a field is unknown or has an invalid value.
        HostileError: it exceeds the size limit of a configuration.
        StorageError: it cannot be read.
    """
    file = config_file() if path is None else Path(path).expanduser().absolute()
    if file is not None and not file.is_file():
        source = "--config" if path is not None else CONFIG_ENV
        raise NotFoundError("configuration file not found", uri=str(file), cure=f"check the path in {source}")
    chosen = env or os.environ.get(ENVIRONMENT_ENV) or None
    variables = tuple((name, os.environ.get(variable)) for name, variable in VARIABLES.items())
    stamp = file.stat().st_mtime_ns if file else 0
    return _load(file, stamp, chosen, variables)


@lru_cache(maxsize=8)
def _load(
    file: Path | None, _stamp: int, env: str | None, variables: tuple[tuple[str, str | None], ...]
) -> Config:
    from wherry.config.schema import ConfigFile, Settings

    text, data = _read(file) if file else ("", {})
    sections = _environments(data.pop("env", {}), text, file)
    if env is not None and file is not None and env not in sections:
        known = f"choose {' or '.join(sections)}" if sections else f"add [env.{env}] to the file"
        raise NotFoundError(
            f"unknown environment {env!r}: missing table [env.{env}]", uri=str(file), cure=known
        )
    origins: dict[str, str] = {}
    merged, lines = merge({}, data), lines_of(text)
    _note(origins, data, lines, file, ())
    if env is not None and env in sections:
        merged = merge(merged, sections[env])
        _note(origins, sections[env], lines, file, ("env", env))
    for name, value in variables:
        if value:
            _put(merged, name, value.split(os.pathsep) if name in _LISTS else value)
            origins[name] = f"environment variable {VARIABLES[name]}"
    _name_routes(merged, file)
    contents = _validate(ConfigFile, merged, text, file, env)
    for other in sections:
        _validate(ConfigFile, _name_routes(merge(merge({}, data), sections[other]), file), text, file, other)
    settings = Settings(**{name: getattr(contents, name) for name in Settings.model_fields})
    ordered = {name: origins.get(name, "default") for name in _leaves(settings.model_dump())}
    fields = stated_fields(merged, sections.get(env or "", {}), ("env", env or ""))
    routes = tuple(contents.routes.values())
    return Config(str(file) if file else None, env, settings, routes, ordered, fields, lines)


def _environments(sections: Any, text: str, file: Path | None) -> dict[str, dict[str, Any]]:
    names = sections if isinstance(sections, dict) else {}
    if exceeds(len(names), _MOST_ENVIRONMENTS):  # each is merged with the whole file, and validated
        raise beyond("the configuration", scale_limit(_MOST_ENVIRONMENTS), "environments", uri=str(file))
    odd = [name for name, values in names.items() if not isinstance(values, dict)]
    if odd or not isinstance(sections, dict):
        at = where(lines_of(text), ("env", *odd[:1]), None)
        raise UsageError(
            f"{at}: expected a table",
            uri=str(file),
            cure="write [env.NAME] with the values of that environment",
        )
    return sections


def merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables recursively; all other values, including lists, are replaced."""
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = (
            merge(below if isinstance(below, dict) else {}, value) if isinstance(value, dict) else value
        )
    return merged


def mask_secret(name: str, value: Any) -> str:
    """A value for display, with secrets masked."""
    if value in (None, (), {}):
        return ""
    if name in _SECRET:
        return "***"
    if isinstance(value, (list, tuple)):
        return ", ".join(mask_secret(name, one) for one in value)
    return without_secrets(value) if isinstance(value, str) and "://" in value else str(value)


def value_at(data: Mapping[str, Any], name: str) -> Any:
    """The value of a setting by its dotted name."""
    for part in name.split("."):
        data = data[part]
    return data


def _read(file: Path) -> tuple[str, dict[str, Any]]:
    """The text of the file, and its tables."""
    try:
        text = locate(file).read_whole(MOST_CONFIG).decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"invalid UTF-8 in the configuration: {error}", uri=str(file), cure="save the file as UTF-8"
        ) from error
    try:
        return text, parse_toml(text.encode(), "the configuration", uri=str(file))
    except ValueError as error:
        raise UsageError(
            f"invalid TOML: {error}",
            uri=str(file),
            cure=Cure("{} prints a commented one", Command("config example")),
        ) from error


def _name_routes(data: dict[str, Any], file: Path | None) -> dict[str, Any]:
    """Add its name to each route, and make paths absolute: they are relative to the folder of the file."""
    if isinstance(data.get("audit"), dict):
        data["audit"] = _absolute(data["audit"], file)
    if isinstance(data.get("policy"), dict):
        data["policy"] = {
            name: _absolute(gates, file) if isinstance(gates, dict) else gates
            for name, gates in data["policy"].items()
        }
    routes = data.get("routes", {})
    for name, route in routes.items() if isinstance(routes, dict) else ():
        if not isinstance(route, dict):
            continue  # the validation of the schema reports it
        routes[name] = {**_absolute(route, file), "name": name}
        if isinstance(route.get("targets"), list):
            routes[name]["targets"] = [
                _absolute(one, file) if isinstance(one, dict) else one for one in route["targets"]
            ]
    return data


def _absolute(table: dict[str, Any], file: Path | None) -> dict[str, Any]:
    def path(value: Any) -> Any:
        if not isinstance(value, str) or not value or "://" in value or file is None:
            return value
        return os.path.normpath(file.parent / Path(value).expanduser())

    return {name: path(value) if name in _PATHS else value for name, value in table.items()}


def _validate(kind: Any, data: dict[str, Any], text: str, file: Path | None, env: str | None) -> Any:
    from pydantic import ValidationError

    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _refusal(error, data, text, file, env) from error


_MOST_FAULTS = 20  # that an error names
# pydantic's type of fault → what is wrong.
_FAULTS = {"extra_forbidden": "unknown field", "missing": "required field not found"}


@dataclass(frozen=True, slots=True)
class ConfigFault:
    """One mistake in a configuration.

    Attributes:
        where: the field, with its line where it is in the file.
        line: its line, from 1; 0 where it is not in the file.
        column: the column of the line at which the field begins, from 1.
        what: what is wrong.
        cure: what to write instead; None if only the field is known to be wrong.
    """

    where: str
    line: int
    column: int
    what: str
    cure: str | None


class ConfigFaultsError(UsageError):
    """A configuration is invalid.

    Attributes:
        faults: the first mistakes, in the order of the file.
        data: the tables of the file.
        fault_at: a mistake from the path of its field, what is wrong, and the cure.
    """

    faults: tuple[ConfigFault, ...] = ()
    data: Mapping[str, Any] = MappingProxyType({})
    fault_at: Callable[[FieldPath, str, str | None], ConfigFault]


def _refusal(
    error: ValidationError, data: Mapping[str, Any], text: str, file: Path | None, env: str | None
) -> WherryError:
    """The first faults in one error, with the cure of the first one."""
    places, rows, found = lines_of(text), text.splitlines(), error.errors()
    # Without those that only report a fault below them.
    above = {fault["loc"][:depth] for fault in found for depth in range(len(fault["loc"]))}
    causes = [fault for fault in found if fault["loc"] not in above]
    causes.sort(key=lambda fault: line_at(places, tuple(fault["loc"]), env) or 0)
    fault_at = partial(_fault, places, rows, env)
    faults = tuple(fault_at(tuple(one["loc"]), *_words(one)) for one in causes[:_MOST_FAULTS])
    lines = [f"{one.where}: {one.what}" for one in faults]
    if len(causes) > _MOST_FAULTS:
        lines.append(f"{len(causes) - _MOST_FAULTS} more")
    cure = next((one.cure for one in faults if one.cure), None)
    variables = [name for name in VARIABLES if any(line.startswith(f"{name}:") for line in lines)]
    refused = ConfigFaultsError(
        "; ".join(lines),
        uri=str(file) if file else None,
        cure=cure
        or (
            f"check {VARIABLES[variables[0]]}"
            if variables
            else Cure("correct it and run {}", Command("routes check"))
        ),
    )
    refused.faults, refused.data, refused.fault_at = faults, data, fault_at
    return refused


def _fault(
    places: Mapping[FieldPath, int],
    rows: Sequence[str],
    env: str | None,
    at: FieldPath,
    what: str,
    cure: str | None,
) -> ConfigFault:
    line = line_at(places, at, env) or 0
    column = len(rows[line - 1]) - len(rows[line - 1].lstrip()) + 1 if line else 0
    return ConfigFault(where(places, at, env), line, column, what, cure)


def _words(fault: Any) -> tuple[str, str | None]:
    """The texts of what is wrong and of the cure."""
    cause = fault.get("ctx", {}).get("error")
    if isinstance(cause, WherryError):
        return cause.what, cause.cure
    kind, cure = fault["type"], Cure("{} shows all fields with their values", Command("config example"))
    if kind == "extra_forbidden":
        cure = _cure_of_field(tuple(fault["loc"]))
    elif kind == "literal_error":
        cure = f"write {fault['ctx']['expected']}"
    elif kind == "missing":
        cure = f"add {fault['loc'][-1]!r}"
    return str(_FAULTS.get(kind, fault["msg"])), cure


def _cure_of_field(at: FieldPath) -> str:
    from wherry.config.schema import ConfigFile, Section

    table: type[BaseModel] = ConfigFile  # in which the field is
    for part in at[:-1]:
        field = table.model_fields.get(str(part))
        table = next(_models_in(field.annotation), table) if field is not None else table
    name = str(at[-1])
    names = {other for section in _kinds(Section) for other in section.model_fields} - {name}
    near = meant_names(name, table.model_fields) or similar(name, names)
    start = (
        f"did you mean {' or '.join(near)}? Otherwise remove it" if near else f"remove {name!r}, or move it"
    )
    return Cure("{}; {} shows all fields and their tables", start, Command("config example"))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for one in get_args(annotation):
        yield from _models_in(one)


def _kinds(section: type[Section]) -> Iterator[type[Section]]:
    for kind in section.__subclasses__():
        yield kind
        yield from _kinds(kind)


def _note(
    origins: dict[str, str],
    data: Mapping[str, Any],
    lines: Mapping[FieldPath, int],
    file: Path | None,
    at: tuple[str, ...],
) -> None:
    section = f" [{'.'.join(at)}]" if at else ""
    for name in _leaves(data):
        line = lines.get((*at, *name.split(".")))
        origins[name] = f"{file}:{line}{section}" if line else f"{file}{section}"


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of the settings, without the routes; a table with keys of the user's choice is one setting."""
    for name, value in data.items():
        if not prefix and name == "routes":
            continue
        if isinstance(value, dict) and name not in ("concurrency", "policy"):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _put(data: dict[str, Any], name: str, value: Any) -> None:
    *tables, last = name.split(".")
    held: Any = data
    for table in tables:
        held = held.setdefault(table, {})
        if not isinstance(held, dict):
            return  # the validation of the schema reports it
    held[last] = value


@contextmanager
def in_force(path: str | os.PathLike[str] | None, env: str | None = None) -> Generator[Config]:
    """Make a configuration effective for all calls and child processes while the context is open.

    It is set for the whole process; workers run each flow in a separate process.

    Args:
        path: the file; the effective one by default.
        env: the environment; the effective one by default.

    Raises:
        NotFoundError, UsageError, StorageError: as `load_config`.
    """
    loaded = load_config(path, env)
    wanted = {CONFIG_ENV: loaded.file if path is not None else None, ENVIRONMENT_ENV: env}
    before = {name: os.environ.get(name) for name, value in wanted.items() if value}
    os.environ.update({name: value for name, value in wanted.items() if value})
    try:
        yield loaded
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def named_policy(name: str) -> Mapping[str, Any]:
    """The gates of `[policy.NAME]`, as `wherry.models.policy.policy_of` takes them.

    Raises:
        NotFoundError: the configuration has no such policy.
        UsageError, StorageError: as `load_config`.
    """
    loaded = load_config()
    policies = loaded.settings.policy
    if name not in policies:
        cure = (
            f"choose {' or '.join(policies)}" if policies else "add it to wherry.toml, or name a policy file"
        )
        raise NotFoundError(
            f"unknown policy {name!r}: missing table [policy.{name}]", uri=loaded.file, cure=cure
        )
    return policies[name]
