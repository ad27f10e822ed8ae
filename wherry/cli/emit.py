"""`wherry emit`: tell Prefect that a checkpoint was committed."""

from __future__ import annotations

import json

import click

from wherry.errors import StorageError, UsageError


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
            f"the event was not taken: {error}",
            uri=uri,
            cure="check PREFECT_API_URL and that the server runs; the nightly run finds the checkpoint anyway",
            retryable=True,
        ) from error
    click.echo(
        json.dumps({"id": number, "event": event, "uri": uri}) if json_ else f"emitted {event} for {uri}"
    )
