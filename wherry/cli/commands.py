"""The commands that look into checkpoints, convert and verify them; `clean` and `doctor`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import click

from wherry.cli import results
from wherry.cli.help import names_for
from wherry.cli.options import (
    CONVERSION,
    as_json,
    chosen,
    matched_targets,
    memory,
    quiet,
    requesting,
    stated_formats,
    walking,
)
from wherry.cli.say import bar, show_before_error
from wherry.cli.units import on_engine, on_readers, unit_size
from wherry.core.interpreter import keep_freed_memory
from wherry.core.request import ConvertRequest, SourceRequest, TargetRequest, convert_request
from wherry.core.units import parse_size
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import UsageError

_VERDICT_CODES = {
    "ok": 0,
    "incomplete": 5,
    "corrupt": 5,
    "malicious": 6,
    "not-a-checkpoint": 4,
    "unsupported": 4,
}
_FEWEST = 3  # places of a merge: two sources and the target


@click.command()
@click.argument("root")
@walking
@as_json
def discover(root: str, json_: bool, **which: Any) -> None:
    """Find the checkpoints below ROOT."""
    from wherry.formats.discover import SkippedPath, discover

    skipped: list[SkippedPath] = []
    results.show_found(discover(root, on_skip=skipped.append, **which), skipped, json_=json_)


@click.command()
@click.argument("uri")
@chosen
@as_json
def detect(uri: str, json_: bool, given: dict[str, Any]) -> None:
    """Detect the format and version of the checkpoint at URI.

    Prints the evidence, too. Reads only metadata.
    """
    from wherry.ledger.resolve import detect

    found = detect(SourceRequest(uri, **given))
    results.show_detection(found, json_=json_)
    sys.exit(_VERDICT_CODES[found.verdict])


@click.command()
@click.argument("source")
@click.argument("target")
@click.option(
    "--to",
    metavar="FORMAT",
    help="Target format; npz, torch-zip or safetensors follow from the name of TARGET.",
    shell_complete=names_for("to", written=True),
)
@requesting(*CONVERSION, planned=True)
@click.option(
    "--price", metavar="TABLE", help="TOML file with prices of stores; prints what the conversion costs."
)
@click.option(
    "--workers", type=click.IntRange(1), metavar="N", help="Show the units of N workers, and their time."
)
@unit_size
@click.option(
    "--rate",
    metavar="RATE",
    default="400MB/s",
    show_default=True,
    help="Bytes a second of one worker, for --workers.",
)
@as_json
def plan(
    source: str, target: str, to: str | None, json_: bool, price: str | None, workers: int | None, unit: str, rate: str,
    given: dict[str, Any],
) -> None:  # fmt: skip
    """Show how SOURCE would be converted to TARGET; write nothing.

    Exits with 10 if the disk of TARGET is too small.
    """
    from wherry.converter.plan import plan_targets
    from wherry.converter.prices import load_prices
    from wherry.workers.unit import parse_rate, plan_for_workers

    prices = load_prices(price) if price else None
    [named] = stated_formats([target], [to] if to else [])
    request = convert_request(source, [TargetRequest(target, named)], **given)
    if workers is None:
        (found,), shared = plan_targets(request), None
    else:
        found, shared = plan_for_workers(request, workers, parse_size(unit), parse_rate(rate))
    cost = prices.cost(found.traffic.stores) if prices else None
    results.show_plan(found, json_=json_, cost=cost, workers=shared)
    results.require_room([found])


@click.command()
@click.argument("source")
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option(
    "--to",
    multiple=True,
    metavar="FORMAT",
    help="Target format; once for each TARGET. npz, torch-zip or safetensors follow from its name.",
    shell_complete=names_for("to", written=True),
)
@requesting(*CONVERSION)
@click.option("--dry-run", is_flag=True, help="Only show the plan, like `wherry plan`.")
@on_engine
@unit_size
@quiet
@as_json
def convert(
    source: str,
    targets: Sequence[str],
    to: Sequence[str],
    json_: bool,
    quiet: bool,
    dry_run: bool,
    on: str,
    unit: str,
    given: dict[str, Any],
) -> None:
    """Convert SOURCE, verify the result, commit it and record the lineage.

    A target is committed in one step. With several targets, the source is read once for all on this machine:
    `wherry convert SRC --to orbax A --to hf B`.
    """
    from wherry.workers import convert_on

    request = convert_request(
        source,
        matched_targets(targets, stated_formats(targets, to), given.pop("options"), given["family_file"]),
        **given,
    )
    if dry_run:
        from wherry.converter.plan import plan_targets

        plans = plan_targets(request)
        for found in plans:
            results.show_plan(found, json_=json_)
        results.require_room(plans)
        return
    keep_freed_memory()
    with (
        show_before_error(results.show_receipts, json_=json_),
        bar(quiet=quiet or json_) as progress,
    ):
        group = convert_on(request, on, unit_bytes=parse_size(unit), progress=progress)
    results.show_receipts(group, json_=json_)


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
    from wherry.converter.merge import merge_request, open_merged, parse_source
    from wherry.core.receipt import GroupReceipt

    if len(places) < _FEWEST:
        raise UsageError(
            "expected at least two sources and a target",
            cure=Cure(
                "write {}", Command("merge", "A*0.5", "B*0.5", Blank("DST"), Argument("to", Blank("FORMAT")))
            ),
        )
    sources, target = [parse_source(one) for one in places[:-1]], places[-1]
    request = convert_request(
        sources[0].uri, matched_targets([target], [to], given.pop("options"), given["family_file"]), **given
    )
    if dry_run:
        from wherry.converter.plan import plan_targets

        (found,) = plan_targets(request, partial(open_merged, sources, request))
        results.show_plan(found, json_=json_)
        results.require_room([found])
        return
    keep_freed_memory()
    with (
        show_before_error(results.show_receipts, json_=json_),
        bar(quiet=quiet or json_) as progress,
    ):
        receipt = merge_request(sources, request, progress=progress)
    results.show_receipts(GroupReceipt("", (receipt,)), json_=json_)


@click.command()
@click.argument("uri")
@click.option("--level", default="present", show_default=True,
              type=click.Choice(["structure", "present", "digest", "roundtrip", "native", "logits", "serve"]),
              help="Verification level; up to digest, each level includes those before it.")  # fmt: skip
@click.option("--against", metavar="URI", help="Checkpoint that must have the same tensors.")
@click.option(
    "--family-file",
    metavar="FILE",
    help="Family file that was used to convert the --against checkpoint to URI.",
)
@click.option(
    "--tokens",
    type=int,
    metavar="N",
    help="Tokens that level serve generates after each prompt; 32 by default.",
)
@click.option(
    "--record",
    is_flag=True,
    help="Record the outcome in the ledger, and the identity of a checkpoint that is not in it yet.",
)
@on_readers
@unit_size
@memory
@quiet
@chosen
@as_json
def verify(uri: str, json_: bool, quiet: bool, given: dict[str, Any], **arguments: Any) -> None:
    """Verify that the checkpoint at URI is complete and unaltered.

    Level digest reads every byte. If nothing was recorded about the checkpoint, the verdict is `read`: the checksums
    of its container are intact, and its digests are printed, but nothing is proved. --record records its identity.
    """
    from wherry.prove.verify import verify as examine

    with (
        show_before_error(results.show_verification, json_=json_),
        bar(quiet=quiet or json_) as progress,
    ):
        verification = examine(SourceRequest(uri, **given), progress=progress, **arguments)
    results.show_verification(verification, json_=json_)
    sys.exit(verification.exit_code)


@click.command()
@click.argument("name", required=False)
@as_json
def formats(name: str | None, json_: bool) -> None:
    """List the formats, or describe the format NAME.

    The description has what it can hold, its options, and which libraries load it.
    """
    from wherry.cli import format_list as shown
    from wherry.formats.registry import find_format, formats

    if name is None:
        shown.show_formats(list(formats().values()), json_=json_)
    else:
        shown.show_format(find_format(name), json_=json_)


@click.command()
@click.argument("root")
@click.option("--dry-run", is_flag=True, help="List the staging areas without removing them.")
@as_json
def clean(root: str, dry_run: bool, json_: bool) -> None:
    """Remove the staging areas that killed conversions left below ROOT."""
    from wherry.target.clean import clean

    results.show_cleaned(clean(root, dry_run=dry_run), dry_run=dry_run, json_=json_)


@click.command()
@as_json
def doctor(json_: bool) -> None:
    """Check what is installed, reachable and writable."""
    from wherry.nightly.doctor import diagnose

    sys.exit(results.show_findings(diagnose(), json_=json_))
