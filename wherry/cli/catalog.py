"""`wherry ls` and `wherry du`: the checkpoints that the ledger knows, and what they take up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from wherry.cli.help import names_for
from wherry.cli.options import as_json
from wherry.cli.say import print_json, print_table, say
from wherry.core.units import plural, short, show_size

if TYPE_CHECKING:
    from wherry.trace.catalog import Grouping

_GROUPS = ("run", "format", "family", "age")


@click.command()
@click.argument("root", required=False)
@click.option("--format", metavar="NAME", help="Only this format.", shell_complete=names_for("format"))
@click.option("--family", metavar="NAME", help="Only this model family.", shell_complete=names_for("family"))
@click.option("--model", metavar="NAME", help="Only versions of this registered model.")
@click.option("--deleted", is_flag=True, help="Also those whose deletion is recorded.")
@as_json
def ls(
    root: str | None, format: str | None, family: str | None, model: str | None, deleted: bool, json_: bool
) -> None:
    """List the checkpoints in the ledger, all or those below ROOT.

    Does not read the storage: `wherry discover` finds checkpoints there, `wherry audit` compares the two.
    """
    from wherry.trace.catalog import listing

    found = listing(root, format=format, family=family, model=model, deleted=deleted)
    if json_:
        print_json({"schema": 1, "checkpoints": [one.to_json() for one in found]})
    elif found:
        cells = (
            [
                one.uri if one.gone is None else f"{one.uri} (deleted {one.gone[:10]})",
                one.format,
                one.family,
                "" if one.step is None else str(one.step),
                show_size(one.nbytes),
                short(one.checkpoint_digest).rpartition(":")[2],
                ", ".join(one.versions),
                f"{one.verified}, {one.verified_at[:10]}" if one.verified else "",
            ]
            for one in found
        )
        print_table(
            ["checkpoint", "format", "family", "step", "size", "digest", "models", "verified"],
            cells,
            cut="checkpoint",
            drop=("family", "verified", "models", "format", "size", "step"),
        )
    else:
        which = "no matching checkpoints" if root or format or family or model else "no checkpoints"
        say(f"{which} in the ledger; conversions and `wherry verify --record` add some")


@click.command()
@click.argument("root", required=False)
@click.option("--by", type=click.Choice(_GROUPS), default="run", show_default=True, help="What to sum over.")
@click.option(
    "--config",
    metavar="FILE",
    help="Path of the wherry.toml whose retention rules state what can be removed.",
)
@as_json
def du(root: str | None, by: Grouping, config: str | None, json_: bool) -> None:
    """Sum the sizes of the checkpoints in the ledger, all or those below ROOT.

    With routes in wherry.toml, the last column is what `wherry prune` would remove.
    """
    from wherry.config.config import in_force
    from wherry.trace.catalog import usage

    with in_force(config) as loaded:
        rows = usage(root, by=by, routes=loaded.routes)
    if json_:
        print_json({"schema": 1, "by": by, "groups": [one.to_json() for one in rows]})
        return
    if rows:
        cells = (
            [
                one.group,
                str(one.checkpoints),
                show_size(one.nbytes),
                show_size(one.prunable) if one.prunable else "",
            ]
            for one in rows
        )
        print_table([by, "checkpoints", "size", "prune would remove"], cells)
    total = plural(sum(one.checkpoints for one in rows), "checkpoint")
    say(f"{show_size(sum(one.nbytes for one in rows))} in {total}")
