"""The commands that work with a Prefect server: `deploy`, `serve`, `preflight`, `emit`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wherry.errors import StorageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


_FILE = Path("infra/prefect.yaml")
_path = click.Path(path_type=Path)
_json = click.option("--json", "json_", is_flag=True, help="Print JSON.")


@click.command()
@click.argument("file", type=_path, default=_FILE)
@click.option("--pools", type=_path, help="Folder of the work pools; `pools` beside FILE by default.")
@click.option("--automations", type=_path, help="Their file; `automations.yaml` beside FILE by default.")
@click.option("--pool", metavar="NAME", help="One work pool for all deployments of FILE.")
@click.option("--notify", metavar="TYPE/NAME", help="Prefect notification block that alerts go to.")
@click.option(
    "--limit", "limits", multiple=True, metavar="NAME=SLOTS", help="Global concurrency limit to set."
)
@_json
def deploy(
    file: Path,
    pools: Path | None,
    automations: Path | None,
    pool: str | None,
    notify: str | None,
    limits: Sequence[str],
    json_: bool,
) -> None:
    """Make or update work pools, limits, deployments and automations as FILE says.

    FILE is a prefect.yaml, infra/prefect.yaml by default; the server is that of PREFECT_API_URL.
    """
    from wherry.core.services import service

    prefect = service("deploy")
    plan = prefect.DeployPlan(
        file=file,
        pools=pools or file.parent / "pools",
        automations=automations or file.parent / "automations.yaml",
        pool=pool,
        notify=notify,
        limits=dict(_slots(word) for word in limits),
    )
    done = prefect.deploy(plan)
    if json_:
        click.echo(json.dumps(done.to_json()))
        return
    for kind, rows in (("work pool", done.pools), ("limit", done.limits), ("automation", done.automations)):
        for name, outcome in rows.items():
            click.echo(f"{kind} {name}: {outcome}")
    for name in done.deployments:
        click.echo(f"deployment {name}: deployed")


@click.command()
@click.argument("file", type=_path, default=_FILE)
@click.option("--limit", default=2, show_default=True, help="Runs at a time.")
def serve(file: Path, limit: int) -> None:
    """Carry out the deployments of FILE in this process, without a work pool, until stopped."""
    from wherry.core.services import service

    service("serve").serve(file, limit=limit)


@click.command()
@click.argument("targets", nargs=-1)
@click.option("--pool-type", type=click.Choice(["process", "docker", "kubernetes"]), required=True,
              help="Where it would run.")  # fmt: skip
@_json
def preflight(targets: Sequence[str], pool_type: str, json_: bool) -> None:
    """Say whether workers of a type could keep TARGETS, the ledger and the MLflow stores safe."""
    from dataclasses import asdict

    from wherry.watch import preflight as engine

    places = {**{f"target {at}": uri for at, uri in enumerate(targets, 1)}, **engine.stores()}
    if json_:
        found = engine.unshared(places, pool_type, engine.shared_paths())
        click.echo(json.dumps({"schema": 1, "ok": not found, "unshared": [asdict(one) for one in found]}))
        raise SystemExit(UsageError.exit_code if found else 0)
    engine.refuse_unshared(places, pool_type)
    click.echo(f"all {len(places)} places are shared with the workers of a {pool_type} pool")


def _slots(word: str) -> tuple[str, int]:
    name, separator, slots = word.partition("=")
    if not (name and separator and slots.isdigit()):
        raise UsageError(
            f"invalid value for --limit: {word!r}; expected NAME=SLOTS",
            cure="write for example --limit s3-runs=4",
        )
    return name, int(slots)


@click.command()
@click.argument("uri")
@click.option("--event", default="wherry.checkpoint.committed", show_default=True, help="Name of the event.")
@click.option("--step", type=int, help="Training step.")
@click.option("--api", metavar="URL", help="Base URL of the server's API; PREFECT_API_URL by default.")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def emit(uri: str, event: str, step: int | None, api: str | None, json_: bool) -> None:
    """Tell a Prefect server that URI was committed; deployments with that trigger take it up."""
    from wherry.core.emit import emit as post

    try:
        number = post(uri, event=event, step=step, api=api)
    except ValueError as error:
        raise UsageError(str(error), cure="set PREFECT_API_URL, or give --api URL") from error
    except OSError as error:
        raise StorageError(
            f"the Prefect server did not accept the event: {error}",
            uri=uri,
            cure="check PREFECT_API_URL and that the server runs; the nightly run finds the checkpoint anyway",
            retryable=True,
        ) from error
    click.echo(
        json.dumps({"id": number, "event": event, "uri": uri}) if json_ else f"emitted {event} for {uri}"
    )
