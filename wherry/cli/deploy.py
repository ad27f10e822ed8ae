"""The commands that work with a Prefect server: `deploy`, `serve`, `preflight`, `emit`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click

from wherry.cli.say import print_json, say
from wherry.core.units import plural
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import StorageError, UsageError, WherryError

_EMIT_SECONDS = 5.0
_path = click.Path(path_type=Path)
_json = click.option("--json", "json_", is_flag=True, help="Print JSON.")


@click.command()
@click.argument("file", type=_path, default=None, required=False)
@click.option(
    "--pools", type=_path, help="Folder of the work pools; `pools` next to FILE by default, or wherry's own."
)
@click.option(
    "--automations",
    type=_path,
    help="File of the automations; `automations.yaml` next to FILE by default, or wherry's own.",
)
@click.option("--pool", metavar="NAME", help="Use this work pool for all deployments in FILE.")
@click.option(
    "--notify",
    metavar="TYPE/NAME",
    help="Prefect notification block that receives alerts; `notify.block` by default.",
)
@click.option(
    "--limit", "limits", multiple=True, metavar="NAME=SLOTS", help="Global concurrency limit to set."
)
@_json
def deploy(
    file: Path | None,
    pools: Path | None,
    automations: Path | None,
    pool: str | None,
    notify: str | None,
    limits: Sequence[str],
    json_: bool,
) -> None:
    """Create or update pools, limits and deployments in Prefect.

    Also creates the automations. FILE is a prefect.yaml, by default the one that comes with wherry
    (infra/prefect.yaml). Only the work pools that its deployments use are created. PREFECT_API_URL names the server.
    """
    from wherry.config.package_data import package_path
    from wherry.core.services import service

    prefect = service("deploy")
    chosen = file or package_path("prefect.yaml")
    slots: dict[str, int] = {}
    for word in limits:
        name, separator, number = word.partition("=")
        if not (name and separator and number.isdigit()):
            raise UsageError(
                f"invalid value for --limit: {word!r}; expected NAME=SLOTS",
                cure=Cure("write for example {}", Argument("limit", "s3-runs=4")),
            )
        slots[name] = int(number)
    plan = prefect.DeployPlan(
        file=chosen,
        pools=pools or _file_next_to(chosen, "pools"),
        automations=automations or _file_next_to(chosen, "automations.yaml"),
        pool=pool,
        notify=notify,
        limits=slots,
    )
    done = prefect.deploy(plan)
    if json_:
        print_json(done.to_json(), indent=None)
        return
    for kind, rows in (("work pool", done.pools), ("limit", done.limits), ("automation", done.automations)):
        for name, outcome in rows.items():
            say(f"{kind} {name}: {outcome}")
    for name in done.deployments:
        say(f"deployment {name}: deployed")


@click.command()
@click.argument("file", type=_path, default=None, required=False)
@click.option("--limit", default=2, show_default=True, help="Maximum number of concurrent runs.")
def serve(file: Path | None, limit: int) -> None:
    """Run the deployments in FILE in this process, without a work pool.

    FILE is as for `wherry deploy`. The process runs until it is stopped.
    """
    from wherry.config.package_data import package_path
    from wherry.core.services import service

    service("serve").serve(file or package_path("prefect.yaml"), limit=limit)


def _file_next_to(file: Path, name: str) -> Path:
    """A file next to another; if it does not exist, the file that comes with wherry."""
    from wherry.config.package_data import package_path

    sibling = file.parent / name
    return sibling if sibling.exists() or not file.exists() else package_path(name)


@click.command()
@click.argument("targets", nargs=-1)
@click.option("--pool-type", type=click.Choice(["process", "docker", "kubernetes"]), required=True,
              help="Type of the work pool.")  # fmt: skip
@_json
def preflight(targets: Sequence[str], pool_type: str, json_: bool) -> None:
    """Check that workers of a pool type write to persistent storage.

    Checks TARGETS, the ledger and the MLflow stores. The disk of a container is lost with the container.
    """
    from dataclasses import asdict

    from wherry.nightly import preflight as engine

    places = {**{f"target {at}": uri for at, uri in enumerate(targets, 1)}, **engine.stores()}
    if json_:
        found = engine.unshared_places(places, pool_type, engine.shared_paths())
        print_json({"schema": 1, "ok": not found, "unshared": [asdict(one) for one in found]}, indent=None)
        raise SystemExit(UsageError.exit_code if found else 0)
    engine.refuse_unshared(places, pool_type)
    say(f"{plural(len(places), 'place', 'is/are')} shared with the workers of a {pool_type} pool")


@click.command()
@click.argument("uri")
@click.option("--event", default="wherry.checkpoint.committed", show_default=True, help="Name of the event.")
@click.option("--step", type=int, help="Training step.")
@click.option("--api", metavar="URL", help="Base URL of the Prefect API; PREFECT_API_URL by default.")
@_json
def emit(uri: str, event: str, step: int | None, api: str | None, json_: bool) -> None:
    """Send Prefect the event that the checkpoint at URI was committed.

    The event starts the deployments that have it as a trigger.
    """
    from urllib.error import HTTPError

    from wherry.core.emit import event_body, post_event, whole_uri
    from wherry.ledger.resolve import checkpoint_uri
    from wherry.store.home import without_secrets
    from wherry.store.waits import answer_policy, call_with_retries

    place = whole_uri(os.fspath(checkpoint_uri(uri)))
    _warn_of_nothing(place)
    server = without_secrets(api or os.environ.get("PREFECT_API_URL", ""))
    body = event_body(place, event=event, step=step)  # of all attempts: the server may have taken the first

    def attempt(_seconds: float) -> str:
        try:
            return post_event(body, api=api, timeout=_EMIT_SECONDS)
        except HTTPError:
            raise  # it answered
        except OSError as error:
            raise _not_posted(error, server, place) from error

    try:
        number = call_with_retries(attempt, server, answer_policy())
    except WherryError:
        raise
    except ValueError as error:
        raise UsageError(
            str(error), cure=Cure("set PREFECT_API_URL, or give {}", Argument("api", Blank("URL")))
        ) from error
    except OSError as error:
        raise _not_posted(error, server, place) from error
    if json_:
        print_json({"id": number, "event": event, "uri": place}, indent=None)
    else:
        say(f"emitted {event} for {place}")


def _not_posted(error: OSError, server: str, place: str) -> StorageError:
    """The error that the event was not posted: the server refused it, or does not answer at all."""
    from urllib.error import HTTPError

    from wherry.store.probe import reason_of

    anyway = "the nightly run finds the checkpoint anyway"
    reason = reason_of(error, _EMIT_SECONDS)
    if isinstance(error, HTTPError):
        what = f"the Prefect server {server} did not accept the event: {reason}"
        return StorageError(what, uri=place, cure=f"check PREFECT_API_URL; {anyway}", retryable=True)
    cure = f"start the server (`prefect server start`), or check PREFECT_API_URL; {anyway}"
    return StorageError(f"Prefect does not answer: {reason}", uri=server, cure=cure, retryable=True)


def _warn_of_nothing(place: str) -> None:
    """Warn that nothing is at the place of an event; where this machine cannot see it, a worker may."""
    from wherry.store.local_store import locate

    try:
        there = locate(place).exists()
    except WherryError as error:
        say(f"warning: cannot look at {place} from here: {error.what}", err=True)
        return
    if not there:
        say(f"warning: file or folder not found: {place}; the run that the event starts will fail", err=True)
        return
    _warn_of_no_route(place)


def _warn_of_no_route(place: str) -> None:
    """Warn that no route takes the checkpoint, where this machine has the configuration."""
    from wherry.config.config import load_config
    from wherry.config.file import config_file
    from wherry.nightly.routes import explain, unrouted_reason

    if config_file() is None:
        return
    try:
        decisions = explain(place, load_config())
        reason = unrouted_reason(decisions)
    except WherryError as error:
        decisions, reason = [], error.what
    for one in decisions if reason is None else ():
        if one.excluded:
            say(f"note: route {one.route} does not convert {place}: {one.reason}", err=True)
    if reason is not None:
        cure = Cure("{} shows the decision of each route", Command("routes explain", place))
        say(f"warning: the event will not convert {place}: {reason}\nnote: {cure}", err=True)
