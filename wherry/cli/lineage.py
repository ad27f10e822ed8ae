"""`wherry lineage`: where a checkpoint came from, what was derived from it, and what is stale."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from wherry.cli import results
from wherry.cli.options import as_json
from wherry.cli.say import print_json, say, say_lines
from wherry.core.units import short
from wherry.errors import storage_error
from wherry.trace.nearest import NEIGHBOURS

_ABOUT = "X is a URI, a digest (at least 8 hex digits) or models:/NAME@ALIAS."
_every = click.option(
    "--all",
    "all_",
    is_flag=True,
    help="Show every conversion. By default, a large lineage is shortened to the nearest ones: at most "
    f"{NEIGHBOURS} sources and {NEIGHBOURS} results of one checkpoint, the registered, failed and last ones first. "
    "--json is complete.",
)
_STALE_CODE = 9  # intact data differs from what was expected


@click.group()
def lineage() -> None:
    """Show where a checkpoint came from and what was derived from it."""


@lineage.command("show", epilog=_ABOUT)
@click.argument("x")
@click.option("--html", "html_file", metavar="FILE", help="Write a searchable HTML page that works offline.")
@_every
@as_json
def show_(x: str, html_file: str | None, *, all_: bool, json_: bool) -> None:
    """Print the ancestors and descendants of X as a tree."""
    from wherry.trace.lineage import show

    tree = show(x, brief=not (all_ or json_ or html_file is not None))
    if html_file is not None:
        from wherry.trace.page import page

        text = page(tree)
        try:
            Path(html_file).expanduser().write_text(text, encoding="utf-8")
        except OSError as error:
            raise storage_error(error, html_file) from error
    if json_ or html_file is None:
        results.show_lineage(tree, json_=json_)
    else:
        say(html_file)


@lineage.command("why", epilog=_ABOUT)
@click.argument("x")
@as_json
def why_(x: str, json_: bool) -> None:
    """Show what produced X: every conversion above it, with options, software and proof."""
    from wherry.trace.answers import render_why, why

    found = why(x)
    print_json(found.to_json()) if json_ else say_lines(render_why(found))


@lineage.command("impact", epilog=_ABOUT)
@click.argument("x")
@_every
@as_json
def impact_(x: str, *, all_: bool, json_: bool) -> None:
    """List what was derived from X, and the model versions and places that are affected."""
    from wherry.trace.answers import impact, render_impact

    found = impact(x, receipts=json_, brief=not (all_ or json_))
    print_json(found.to_json()) if json_ else say_lines(render_impact(found))


@lineage.command("serve")
@click.option("--port", type=click.IntRange(0, 65535), default=8047, show_default=True,
              help="Port to listen on; 0 chooses a free one.")  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
              help="Address of the interface to listen on, for a proxy with TLS on another machine; `lineage.url` in "
              "wherry.toml says where it shows the pages.")  # fmt: skip
def serve_(port: int, host: str) -> None:
    """Serve read-only pages about the whole ledger: checkpoints, runs, storage, findings.

    By default only this machine can open them. Runs until it is stopped with Ctrl-C.
    """
    from wherry.trace.site_server import serve

    serve(port, lambda url: say(f"serving {url}; Ctrl-C ends it"), host=host)


@lineage.command("stale", epilog=_ABOUT)
@click.argument("x", required=False)
@click.option(
    "--config",
    metavar="FILE",
    help="The wherry.toml with the routes; found as for `wherry routes` by default.",
)
@as_json
def stale_(x: str | None, config: str | None, json_: bool) -> None:
    """List converted checkpoints that would come out differently if converted again.

    With X, list only X and what was derived from it. Exits with 9 if something is stale.
    """
    from wherry.trace.stale import SCHEMA, stale

    found = stale(x, config=config)
    if json_:
        print_json({"schema": SCHEMA, "stale": [one.to_json() for one in found]})
    else:
        for one in found:
            say(f"{one.uri} ({one.format}, {short(one.checkpoint_digest)})")
            for reason in one.reasons:
                say(f"  {reason.kind}: {reason.detail}")
            if one.cure:
                say(f"  move the target away, then run: {one.cure}")
        say(f"{len(found)} stale" if found else "nothing is stale")
    sys.exit(_STALE_CODE if found else 0)
