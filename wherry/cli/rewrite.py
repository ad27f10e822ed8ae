"""`wherry rewrite`: the command, and what it prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from wherry.cli import results
from wherry.cli.options import ORDER, as_json, quiet, requesting
from wherry.cli.say import bar, print_json, print_rows, say, show_before_error
from wherry.core.request import RewriteRequest, SourceRequest, options_of

if TYPE_CHECKING:
    from wherry.converter.rewrite_plan import RewritePlan, Rewritten


@click.command()
@click.argument("source")
@click.argument("target", required=False)
@click.option("--as", "as_", required=True, metavar="NAME[=VALUE]",
              help="Rewrite to apply; `wherry formats FORMAT` lists them.")  # fmt: skip
@click.option("--in-place", is_flag=True, help="Replace files of SOURCE itself; each is kept as FILE.before.")
@click.option(
    "--dry-run", is_flag=True, help="Check everything and show what would be done, without writing."
)
@requesting(
    RewriteRequest,
    SourceRequest,
    order=("ignore", "verify", "if_exists", "meta", "lineage", "memory", *ORDER),
)
@quiet
@as_json
def rewrite(
    source: str, target: str | None, as_: str, in_place: bool, dry_run: bool, json_: bool, quiet: bool,
    given: dict[str, Any],
) -> None:  # fmt: skip
    """Copy SOURCE to TARGET and change only its small files.

    Tensor bytes do not change. Files share their storage with the source where the file system supports it (reflink);
    otherwise they are copied. Within a bucket, the store copies them.
    """
    from wherry.converter.rewrite import carry_out, plan_rewrite

    which = {one.name: given.pop(one.name) for one in options_of(SourceRequest)}
    request = RewriteRequest(
        source=SourceRequest(source, **which), target=target, as_=as_, in_place=in_place, **given
    )
    if dry_run:
        _show_rewriting(plan_rewrite(request), json_=json_)
        return
    with (
        show_before_error(_show_rewritten, json_=json_),
        bar(quiet=quiet or json_) as progress,
    ):
        done = carry_out(request, progress=progress)
    _show_rewritten(done, json_=json_)


def _show_rewriting(rewriting: RewritePlan, *, json_: bool) -> None:
    from wherry.core.account import fold_entries
    from wherry.core.units import plural, show_size

    if json_:
        print_json(rewriting.to_json())
        return
    files, nbytes = rewriting.carried
    print_rows([
        ("source", f"{rewriting.source} ({rewriting.format})"),
        ("target", f"{rewriting.target}{', in place' if rewriting.in_place else ''}"),
        ("as", rewriting.name if rewriting.value is None else f"{rewriting.name}={rewriting.value}"),
        ("tensors", f"{rewriting.tensors:,}"),
        ("written", ", ".join(rewriting.files)),
        ("carried", "" if rewriting.in_place else f"{plural(files, 'file')}, {show_size(nbytes)}"),
        ("renamed", plural(len(rewriting.renamed), "tensor") if rewriting.renamed else ""),
        ("plan digest", rewriting.digest),
    ])  # fmt: skip
    results.show_ignored(row.to_json() for row in fold_entries(rewriting.ignored))
    for old, new in rewriting.renamed.items():
        say(f"  {old} → {new}")


def _show_rewritten(done: Rewritten, *, json_: bool) -> None:
    from wherry.core.units import plural, show_seconds, show_size

    if json_:
        print_json(done.to_json())
        return
    receipt, rewriting = done.receipt, done.rewriting
    if receipt is not None and receipt.already:
        say("already rewritten; nothing was written")
    ways = ", ".join(f"{show_size(nbytes)} by {way}" for way, nbytes in done.ways.items() if nbytes)
    print_rows([
        ("source", f"{rewriting.source} ({rewriting.format})"),
        ("target", f"{rewriting.target}{', in place' if rewriting.in_place else ''}"),
        ("tensors", f"{rewriting.tensors:,}"),
        ("carried", ways),
        ("written", ", ".join(rewriting.files)),
        ("renamed", plural(len(rewriting.renamed), "tensor") if rewriting.renamed else ""),
    ])  # fmt: skip
    if receipt is None:
        say("not read back and no digests are known, so no manifest was written and nothing was recorded")
        return
    checked = receipt.verification
    print_rows([
        ("time", show_seconds(receipt.seconds)),
        ("weights", receipt.target.weights_digest),
        ("checkpoint", receipt.target.checkpoint_digest),
        ("verified", f"every byte read back, {plural(checked['tensors'], 'tensor')}" if checked else "not read back"),
        ("lineage", receipt.lineage),
    ])  # fmt: skip
