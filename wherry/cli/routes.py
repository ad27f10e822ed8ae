"""The commands for routes and configuration: `routes`, `config`, `nightly` and `prune`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from wherry.cli import results
from wherry.cli.options import as_json
from wherry.cli.say import print_json, say, say_lines
from wherry.core.units import plural, show_size
from wherry.cures import Command, Cure
from wherry.errors import StorageError

if TYPE_CHECKING:
    from wherry.config.config import ConfigFault, ConfigFaultsError
    from wherry.config.schema import Route
    from wherry.nightly.report import NightPlan, WorkOutcome


def _with_location(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--env", metavar="NAME", help="Environment [env.NAME]; WHERRY_ENV by default."),
        click.option("--config", metavar="FILE",
                     help="Path of wherry.toml; WHERRY_CONFIG, ./wherry.toml or the one in WHERRY_HOME by default."),
    ):  # fmt: skip
        function = option(function)
    return function


@click.group()
def routes() -> None:
    """Check and explain the routes of wherry.toml.

    A route states which checkpoints are converted, to which formats, and where the results are written.
    """


@routes.command("check")
@_with_location
@click.option("--reach", is_flag=True, help="Check paths in object stores too.")
@as_json
def routes_check(config: str | None, env: str | None, reach: bool, json_: bool) -> None:
    """Check every field, format, option, family and file in the configuration."""
    from wherry.config.config import ConfigFaultsError
    from wherry.nightly.check import check, faults_of
    from wherry.nightly.routes import load_config, require_file

    try:
        loaded = load_config(config, env)
    except ConfigFaultsError as error:
        faults = faults_of(error)
        if not (faults[1:] or json_):
            raise  # one mistake is an error like any other
        _show_faults(error, faults, json_=json_)
        sys.exit(error.exit_code)
    require_file(loaded)
    problems = check(loaded, reach=reach)
    if json_:
        print_json({"file": loaded.file, "problems": [one.to_json() for one in problems]})
    else:
        for one in problems:
            say_lines(f"{one.severity}: {one.where}: {one.what}\n  cure: {one.cure}")
        say(f"{loaded.file}: {plural(len(loaded.routes), 'route')}, {plural(len(problems), 'problem')}")
    sys.exit(2 if any(one.severity == "error" for one in problems) else 0)


def _show_faults(error: ConfigFaultsError, faults: Sequence[ConfigFault], *, json_: bool) -> None:
    """Every mistake that keeps a configuration from being loaded: its place, what is wrong, and the cure."""
    if json_:
        rows = [
            {"severity": "error", "where": one.where, "what": one.what, "cure": one.cure} for one in faults
        ]
        print_json({"file": error.uri, "problems": rows})
        return
    for one in faults:
        place = f"{error.uri}:{one.line}:{one.column}" if one.line else "not in the file"
        field = one.where.rpartition(", ")[2]
        cure = one.cure or Cure("{} shows all fields with their values", Command("config example"))
        say(f"{place}: {field}: {one.what}; {cure}")


@routes.command("explain")
@click.argument("uri")
@_with_location
@as_json
def routes_explain(uri: str, config: str | None, env: str | None, json_: bool) -> None:
    """Show which routes take the checkpoint at URI, and which targets they convert it to."""
    from wherry.nightly.routes import explain, load_config

    rows = explain(uri, load_config(config, env))
    if json_:
        print_json([row.to_json() for row in rows])
        return
    for row in rows:
        say(f"{row.route}: {'takes it' if row.takes else 'does not take it'}: {row.reason}")
        for one in row.targets:
            model = f", registered as {one.model}" if one.model else ""
            say(f"  {one.rule.format} → {one.place}{model}")


@click.group("config")
def config_group() -> None:
    """Show the settings and routes in effect, or an example file."""


@config_group.command("show")
@_with_location
@as_json
def config_show(config: str | None, env: str | None, json_: bool) -> None:
    """Print each setting with its value and the origin of the value; secrets are masked."""
    from wherry.nightly.routes import load_config

    loaded = load_config(config, env)
    rows = [{"setting": name, "value": value, "origin": origin} for name, value, origin in loaded.rows()]
    if json_:
        shown = {"file": loaded.file, "env": loaded.env, "settings": rows}
        print_json({**shown, "routes": [route.name for route in loaded.routes]})
        return
    say(f"file: {loaded.file or 'none'}; environment: {loaded.env or 'none'}")
    width = max(len(row["setting"]) for row in rows)
    for row in rows:
        say(f"{row['setting']:<{width}}  {row['value'] or '-'}  ({row['origin']})")


@config_group.command("example")
def config_example() -> None:
    """Print a wherry.toml with every setting and field of a route, commented."""
    from wherry.config.package_data import package_path

    click.echo(package_path("wherry.toml").read_text("utf-8"), nl=False)


@click.command()
@click.argument("names", nargs=-1, metavar="[ROUTE]...")
@_with_location
@click.option("--dry-run", is_flag=True, help="Only report what would be converted: count, bytes, hours.")
@click.option(
    "--go",
    is_flag=True,
    help="Convert even on the first night of a route, however many checkpoints are waiting.",
)
@click.option(
    "--retry-failed",
    is_flag=True,
    help="Retry conversions that failed permanently, although their files are the same.",
)
@as_json
def nightly(
    names: tuple[str, ...],
    config: str | None,
    env: str | None,
    json_: bool,
    dry_run: bool,
    go: bool,
    retry_failed: bool,
) -> None:
    """Convert the unconverted checkpoints that the routes select.

    Does the same as the Prefect flow, without Prefect.
    """
    from wherry.config.config import in_force
    from wherry.nightly.ending import blame, ending
    from wherry.nightly.night import run_night
    from wherry.nightly.report import failure, warning
    from wherry.nightly.routes import chosen_routes

    with in_force(config, env) as loaded, ending("nightly-convert", "Nightly conversion") as end:
        chosen = chosen_routes(loaded, names)
        said: dict[str, Any] = {} if json_ or dry_run else {"on_plan": _say_plan, "on_outcome": _say_outcome}
        if not dry_run:
            _warn_of_registry(chosen)
        report = run_night(loaded, chosen, dry_run=dry_run, go=go, retry_failed=retry_failed, **said)
        end.counts, end.silent = dict(report.counts), dry_run or report.left_to_another
        end.warning, error = warning(report), failure(report)
        if error is not None:
            blame(end, error)
    results.show_night(report, json_=json_)
    if error is not None:
        if not json_:
            say_lines(f"error: {error.for_shell()}", err=True)
        sys.exit(error.exit_code)


def _warn_of_registry(chosen: Iterable[Route]) -> None:
    """Say at once that versions cannot be registered; the next night registers what this one converts."""
    from wherry.config.settings import mlflow_registry_uri, mlflow_tracking_uri
    from wherry.core.services import service

    if not any(route.model or any(rule.model for rule in route.targets) for route in chosen):
        return
    try:
        service("mlflow-probe").require_answer(mlflow_tracking_uri(), mlflow_registry_uri())
    except StorageError as error:
        note = "checkpoints are converted all the same, and registered by a later night"
        say_lines(f"warning: {error.for_shell()}\nnote: {note}", err=True)


def _say_plan(plan: NightPlan) -> None:
    todo = plan.todo
    waiting = (
        f"{plural(todo.count, 'checkpoint')} waiting, {show_size(todo.nbytes)}, about {plan.hours:.1f} h"
    )
    say(f"{plan.route.name}: {waiting}", err=True)


def _say_outcome(outcome: WorkOutcome) -> None:
    say(f"{outcome.route}: {outcome.came}: {outcome.source}", err=True)


@click.command()
@click.argument("names", nargs=-1, metavar="[ROUTE]...")
@_with_location
@click.option(
    "--yes", is_flag=True, help="Remove them; without this option, only list what would be removed."
)
@as_json
def prune(names: tuple[str, ...], config: str | None, env: str | None, yes: bool, json_: bool) -> None:
    """Remove converted checkpoints that no retention rule keeps.

    Without --yes this is a dry run. Never removes a source, a model version with an alias, the only copy of a
    checkpoint, or the input of a running job.
    """
    from wherry.config.config import in_force
    from wherry.nightly.prune import prune
    from wherry.nightly.routes import chosen_routes

    with in_force(config, env) as loaded:
        done = prune(chosen_routes(loaded, names), dry_run=not yes)
    if json_:
        rows = [asdict(one) for one in done.checkpoints]
        staging = [one._asdict() for one in done.staging]
        print_json(
            {"dry_run": not yes, "bytes": done.nbytes, "checkpoints": rows, "staging": staging}, indent=None
        )
    else:
        for one in done.checkpoints:
            say(f"{one.action:<8} {one.uri}  ({one.route}: {one.reason})")
        for area in done.staging:
            say(f"{'removed' if area.removed else 'left':<8} {area.uri}  (staging: {area.reason})")
        verb = "removed" if yes else "would be removed; add --yes to remove it"
        say(f"{show_size(done.nbytes)} {verb}")
    sys.exit(10 if any(one.action == "failed" for one in done.checkpoints) else 0)
