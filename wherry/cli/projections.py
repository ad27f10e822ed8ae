"""Commands about what leaves the ledger and the checkpoint: delivery to projections, signatures."""

from __future__ import annotations

import sys

import click

from wherry.cli.options import as_json, quiet


@click.command()
@click.argument("projection", required=False, metavar="[NAME]")
@click.option("--again", is_flag=True, help="From the first statement on.")
@as_json
def deliver(projection: str | None, *, again: bool, json_: bool) -> None:
    """Hand the ledger's statements on to NAME (by default, to all that are configured)."""
    from wherry.cli import console
    from wherry.ledger import deliver as outbox

    outcomes = outbox.deliver(projection, again=again)
    if json_:
        console.print_json(outbox.to_json(outcomes))
    for one in [] if json_ else outcomes:
        click.echo(f"{one.projection} to {one.destination}: {one.statements} statements, up to {one.cursor}")
        if one.failed:
            click.echo(f"the next one was not taken: {one.failed}", err=True)
    if not outcomes and not json_:
        click.echo(f"nothing is configured; set {', '.join(outbox.DESTINATIONS.values())}")
    sys.exit(10 if any(one.failed for one in outcomes) else 0)


@click.command()
@click.argument("uri")
@click.option("--key", required=True, metavar="FILE", help="Private key (PEM; P-256, P-384 or P-521).")
@click.option(
    "--out", metavar="FILE", help="Where the signature goes; in or beside the checkpoint by default."
)
@quiet
@as_json
def sign(uri: str, key: str, out: str | None, *, quiet: bool, json_: bool) -> None:
    """Sign every file of the checkpoint at URI, as `model_signing verify key` accepts it."""
    from wherry.cli import console
    from wherry.core.services import service

    with console.bar(quiet=quiet or json_) as progress:
        place = service("signing").sign(uri, key, out=out, progress=progress)
    if json_:
        console.print_json({"schema": 1, "uri": uri, "signature": place})
    else:
        click.echo(place)


@click.command("verify-signature")
@click.argument("uri")
@click.option("--key", required=True, metavar="FILE", help="Public key (PEM).")
@click.option(
    "--signature", metavar="FILE", help="Where the signature lies, if not in or beside the checkpoint."
)
@quiet
@as_json
def verify_signature(uri: str, key: str, signature: str | None, *, quiet: bool, json_: bool) -> None:
    """Say whether the checkpoint at URI is what was signed."""
    from wherry.cli import console
    from wherry.core.services import service

    with console.bar(quiet=quiet or json_) as progress:
        found = service("signing").verify(uri, key, signature=signature, progress=progress)
    if json_:
        console.print_json({"schema": 1, **found.to_json()})
    else:
        for name, reason in found.failed:
            click.echo(f"{name}: {reason}")
        console.print_rows(
            [
                ("signature", "ok" if found.ok else "NOT as signed"),
                ("files", found.files),
                ("signer", found.signer),
            ]
        )
    sys.exit(0 if found.ok else 9)
