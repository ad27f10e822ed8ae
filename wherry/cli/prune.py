"""The command line of retention."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from wherry.cli.options import as_json

if TYPE_CHECKING:
    from wherry.routes.prune import Pruning


@click.command()
@click.argument("names", nargs=-1, metavar="[ROUTE]...")
@click.option(
    "--config", metavar="FILE", help="The wherry.toml; WHERRY_CONFIG, ./wherry.toml or the home's by default."
)
@click.option("--env", metavar="NAME", help="Environment [env.NAME]; WHERRY_ENV by default.")
@click.option("--yes", is_flag=True, help="Remove; without it only say what would be removed.")
@as_json
def prune(names: tuple[str, ...], config: str | None, env: str | None, yes: bool, json_: bool) -> None:
    """Remove converted checkpoints that the retention of their route does not keep (a dry run without --yes).

    Never a source, a version with an alias, the only copy, or what a running job reads.
    """
    from wherry.config.config import in_force
    from wherry.routes.prune import prune
    from wherry.routes.routes import chosen_routes

    with in_force(config, env) as loaded:
        done = prune(chosen_routes(loaded, names), dry_run=not yes)
    if json_:
        rows = [asdict(one) for one in done.checkpoints]
        staging = [one._asdict() for one in done.staging]
        click.echo(
            json.dumps({"dry_run": not yes, "bytes": done.nbytes, "checkpoints": rows, "staging": staging})
        )
    else:
        _show(done, dry_run=not yes)
    sys.exit(10 if any(one.action == "failed" for one in done.checkpoints) else 0)


def _show(done: Pruning, *, dry_run: bool) -> None:
    from wherry.core.units import show_size

    for one in done.checkpoints:
        click.echo(f"{one.action:<8} {one.uri}  ({one.route}: {one.reason})")
    for area in done.staging:
        click.echo(f"{'removed' if area.removed else 'left':<8} {area.uri}  (staging: {area.reason})")
    verb = "would be removed; say --yes to remove it" if dry_run else "removed"
    click.echo(f"{show_size(done.nbytes)} {verb}")
