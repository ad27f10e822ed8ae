"""`wherry rewrite`: the command, and what it prints."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, NoReturn

import click

from wherry.cli.options import as_json, chosen, memory, quiet, settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherry.converter.rewrite_plan import Rewriting, Rewritten


@click.command()
@click.argument("source")
@click.argument("target", required=False)
@click.option("--as", "as_", required=True, metavar="NAME[=VALUE]",
              help="What to make of it; `wherry formats FORMAT` lists the names.")  # fmt: skip
@click.option("--in-place", is_flag=True, help="Replace files of SOURCE itself; each is kept as FILE.before.")
@click.option("--dry-run", is_flag=True, help="Only look at everything, and say what would be done.")
@click.option("--verify", type=click.Choice(["digest", "none"]), default="digest", show_default=True,
              help="Read every tensor at both ends and compare.")  # fmt: skip
@click.option("--if-exists", type=click.Choice(["fail", "skip", "resume"]), default="resume", show_default=True,
              help="Accept nothing at TARGET, anything that wherry wrote, or the result of this same "
                   "rewrite.")  # fmt: skip
@click.option("--meta", multiple=True, metavar="KEY=VALUE", help="Keep in the manifest.")
@click.option("--no-lineage", is_flag=True, help="Do not record it in the ledger.")
@memory
@chosen
@quiet
@as_json
def rewrite(
    source: str,
    target: str | None,
    as_: str,
    in_place: bool,
    dry_run: bool,
    meta: Sequence[str],
    no_lineage: bool,
    json_: bool,
    quiet: bool,
    **arguments: Any,
) -> None:
    """Make TARGET of SOURCE by changing its small files alone; tensor bytes go over as they are.

    Files share their storage with the source where the file system can (reflink), else they are copied.
    """
    from wherry.cli import console
    from wherry.converter.rewrite import plan_rewrite
    from wherry.converter.rewrite import rewrite as run

    which = {name: arguments[name] for name in ("format", "step", "item")}
    if dry_run:
        _show_rewriting(plan_rewrite(source, target, as_=as_, in_place=in_place, **which), json_=json_)
        return
    signal.signal(signal.SIGTERM, _stop)
    with (
        console.committed(_show_rewritten, json_=json_),
        console.bar(quiet=quiet or json_) as progress,
    ):
        done = run(
            source,
            target,
            as_=as_,
            in_place=in_place,
            lineage=not no_lineage,
            meta=settings(meta),
            progress=progress,
            **arguments,
        )
    _show_rewritten(done, json_=json_)


def _show_rewriting(rewriting: Rewriting, *, json_: bool) -> None:
    from wherry.cli import console
    from wherry.core.units import show_size

    if json_:
        console.print_json(rewriting.to_json())
        return
    files, nbytes = rewriting.carried
    console.print_rows([
        ("source", f"{rewriting.source} ({rewriting.format})"),
        ("target", f"{rewriting.target}{', in place' if rewriting.in_place else ''}"),
        ("as", rewriting.name if rewriting.value is None else f"{rewriting.name}={rewriting.value}"),
        ("tensors", f"{rewriting.tensors:,}"),
        ("written", ", ".join(rewriting.files)),
        ("carried", "" if rewriting.in_place else f"{files:,} files, {show_size(nbytes)}"),
        ("left behind", ", ".join(rewriting.left)),
        ("renamed", f"{len(rewriting.renamed)} tensors" if rewriting.renamed else ""),
        ("plan digest", rewriting.digest),
    ])  # fmt: skip
    for old, new in rewriting.renamed.items():
        click.echo(f"  {old} becomes {new}")


def _show_rewritten(done: Rewritten, *, json_: bool) -> None:
    from wherry.cli import console
    from wherry.core.units import show_seconds, show_size

    if json_:
        console.print_json(done.to_json())
        return
    receipt, rewriting = done.receipt, done.rewriting
    if receipt is not None and receipt.already:
        click.echo("already rewritten; nothing was written")
    ways = ", ".join(f"{show_size(nbytes)} by {way}" for way, nbytes in done.ways.items() if nbytes)
    console.print_rows([
        ("source", f"{rewriting.source} ({rewriting.format})"),
        ("target", f"{rewriting.target}{', in place' if rewriting.in_place else ''}"),
        ("tensors", f"{rewriting.tensors:,}"),
        ("carried", ways),
        ("written", ", ".join(rewriting.files)),
        ("renamed", f"{len(rewriting.renamed)} tensors" if rewriting.renamed else ""),
    ])  # fmt: skip
    if receipt is None:
        click.echo("not read back, and no digests are known: no manifest was left and nothing was recorded")
        return
    checked = receipt.verification
    console.print_rows([
        ("time", show_seconds(receipt.seconds)),
        ("weights", receipt.target.weights_digest),
        ("checkpoint", receipt.target.checkpoint_digest),
        ("verified", f"every byte read back, {checked['tensors']} tensors" if checked else "not read back"),
        ("lineage", receipt.lineage),
    ])  # fmt: skip


def _stop(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
