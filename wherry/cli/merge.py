"""`wherry merge`: one checkpoint out of several."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import click

from wherry.cli.help import names_for
from wherry.cli.options import as_json, matched_targets, quiet, requesting
from wherry.core.request import ConvertRequest, TargetRequest, convert_request
from wherry.errors import UsageError
from wherry.runtime.interpreter import keep_freed_memory

_FEWEST = 3


@click.command()
@click.argument("places", nargs=-1, required=True, metavar="SOURCE... TARGET")
@click.option(
    "--to",
    required=True,
    metavar="FORMAT",
    help="Target format.",
    shell_complete=names_for("to", written=True),
)
@requesting(TargetRequest, ConvertRequest)
@click.option("--dry-run", is_flag=True, help="Only show the plan.")
@quiet
@as_json
def merge(
    places: Sequence[str], to: str, dry_run: bool, quiet: bool, json_: bool, given: dict[str, Any]
) -> None:
    """Merge several checkpoints into TARGET.

    Verifies the result, commits it and records its lineage.

    `wherry merge 'A*0.5' 'B*0.5' DST --to huggingface` adds checkpoints of one tree, each times its weight.
    `wherry merge BASE ADAPTER DST --to huggingface` puts a PEFT LoRA adapter into the weights of its base.
    """
    from wherry.console import results, tables
    from wherry.core.receipt import GroupReceipt
    from wherry.merger.merge import merge_request, open_merged, parse_source

    if len(places) < _FEWEST:
        raise UsageError(
            "expected at least two sources and a target",
            cure="write `wherry merge 'A*0.5' 'B*0.5' DST --to FORMAT`",
        )
    sources, target = [parse_source(one) for one in places[:-1]], places[-1]
    request = convert_request(sources[0].uri, matched_targets([target], [to], given.pop("options")), **given)
    if dry_run:
        from wherry.converter.plan import plan_targets

        (found,) = plan_targets(request, partial(open_merged, sources, request))
        results.show_plan(found, json_=json_)
        results.require_room(found)
        return
    keep_freed_memory()
    with (
        tables.show_before_error(results.show_receipts, json_=json_),
        tables.bar(quiet=quiet or json_) as progress,
    ):
        receipt = merge_request(sources, request, progress=progress)
    results.show_receipts(GroupReceipt("", (receipt,)), json_=json_)
