"""The command line: the same functions and option names as the library, with `--json` and documented exit codes.

A command imports its function only when it runs, so that `wherry --help` is fast and `wherry convert` never imports
prefect or mlflow.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import click

from wherry.cli.audit import audit, metrics
from wherry.cli.catalog import du, ls
from wherry.cli.deploy import deploy, emit, preflight, serve
from wherry.cli.errors import (
    DEBUG,
    DEBUG_ENV,
    complete_cure,
    document,
    flush_output,
    interrupt_error,
    is_debugging,
    silence,
    to_wherry_error,
)
from wherry.cli.help import (
    Sections,
    complete_arguments,
    completion,
    first_sentence,
    names_for,
    place_options,
    show_help,
)
from wherry.cli.init import init
from wherry.cli.inspect import diff, inspect, layouts
from wherry.cli.ledger import deliver, ledger, sign, verify_signature
from wherry.cli.lineage import lineage
from wherry.cli.merge import merge
from wherry.cli.models import fetch, promote, register, resolve
from wherry.cli.options import (
    CONVERSION,
    as_json,
    chosen,
    limit_storage,
    matched_targets,
    memory,
    quiet,
    requesting,
    stated_formats,
    walking,
)
from wherry.cli.rewrite import rewrite
from wherry.cli.routes import config_group, nightly, prune, routes
from wherry.cli.units import commit, on_engine, on_readers, split, unit_size, work
from wherry.console.say import explain, say_lines, show_waits
from wherry.core import interrupts
from wherry.core.request import SourceRequest, TargetRequest, convert_request
from wherry.core.units import parse_size
from wherry.errors import WherryError
from wherry.runtime.interpreter import keep_freed_memory, tune, use_utf8
from wherry.version import __version__

EXIT_CODES = """\b
Exit codes: 0 success · 1 `doctor` found a fault · 2 usage error · 3 not found
4 not a checkpoint, unsupported or ambiguous · 5 incomplete or corrupt
6 hostile · 7 not representable in the target, or unmatched
8 target exists or is in use
9 mismatch: intact data differs from what was expected · 10 storage error
11 missing extra · 12 done, but not recorded or not registered
70 internal error: a bug in wherry · 130 interrupted"""
_VERDICT_CODES = {
    "ok": 0,
    "incomplete": 5,
    "corrupt": 5,
    "malicious": 6,
    "not-a-checkpoint": 4,
    "unsupported": 4,
}


_HELP = ["-h", "--help"]


@click.group(
    cls=Sections, epilog=EXIT_CODES, context_settings={"help_option_names": _HELP, "max_content_width": 100}
)
@click.version_option(__version__, "-V", "--version", prog_name="wherry")
@click.option(
    DEBUG, is_flag=True, expose_value=False, help=f"Show the traceback of an error, as {DEBUG_ENV}=1 does."
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=explain,
    help="Report which configuration, ledger and registry are used, and what the command waits for.",
)
@click.option(
    "--storage-timeout",
    metavar="DURATION",
    expose_value=False,
    callback=limit_storage,
    help="Time without progress after which a request to a remote store fails, for example 5m.",
)
def cli() -> None:
    """Convert model checkpoints between training systems and prove that nothing was lost."""


@cli.command()
@click.argument("root")
@walking
@as_json
def discover(root: str, json_: bool, **which: Any) -> None:
    """Find the checkpoints below ROOT."""
    from wherry.console import results
    from wherry.formats.discover import SkippedPath, discover

    skipped: list[SkippedPath] = []
    results.show_found(discover(root, on_skip=skipped.append, **which), skipped, json_=json_)


@cli.command()
@click.argument("uri")
@chosen
@as_json
def detect(uri: str, json_: bool, given: dict[str, Any]) -> None:
    """Detect the format and version of the checkpoint at URI.

    Prints the evidence, too. Reads only metadata.
    """
    from wherry.console import results
    from wherry.formats.detect import detect_source
    from wherry.ledger.resolve import resolve_named

    found = detect_source(resolve_named(SourceRequest(uri, **given)))
    results.show_detection(found, json_=json_)
    sys.exit(_VERDICT_CODES[found.verdict])


@cli.command()
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
    from wherry.console import results
    from wherry.converter.plan import plan_targets
    from wherry.converter.prices import load_prices
    from wherry.workers.estimate import parse_rate, plan_for_workers

    prices = load_prices(price) if price else None
    [named] = stated_formats([target], [to] if to else [])
    request = convert_request(source, [TargetRequest(target, named)], **given)
    if workers is None:
        (found,), shared = plan_targets(request), None
    else:
        found, shared = plan_for_workers(request, workers, parse_size(unit), parse_rate(rate))
    cost = prices.cost(found.traffic.stores) if prices else None
    results.show_plan(found, json_=json_, cost=cost, workers=shared)
    results.require_room(found)


@cli.command()
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

    A target is committed in one step. With several targets, the source is read once:
    `wherry convert SRC --to orbax A --to hf B`.
    """
    from wherry.console import results, tables
    from wherry.workers import convert_on

    request = convert_request(
        source, matched_targets(targets, stated_formats(targets, to), given.pop("options")), **given
    )
    if dry_run:
        from wherry.converter.plan import plan_targets

        for found in plan_targets(request):
            results.show_plan(found, json_=json_)
            results.require_room(found)
        return
    keep_freed_memory()
    with (
        tables.show_before_error(results.show_receipts, json_=json_),
        tables.bar(quiet=quiet or json_) as progress,
    ):
        group = convert_on(request, on, unit_bytes=parse_size(unit), progress=progress)
    results.show_receipts(group, json_=json_)


@cli.command()
@click.argument("uri")
@click.option("--level", default="present", show_default=True,
              type=click.Choice(["structure", "present", "digest", "roundtrip", "native", "logits"]),
              help="Verification level; up to digest, each level includes those before it.")  # fmt: skip
@click.option("--against", metavar="URI", help="Checkpoint that must have the same tensors.")
@click.option(
    "--family-file",
    metavar="FILE",
    help="Family file that was used to convert the --against checkpoint to URI.",
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
    from wherry.console import results, tables
    from wherry.verifier.verify import verify as examine

    with (
        tables.show_before_error(results.show_verification, json_=json_),
        tables.bar(quiet=quiet or json_) as progress,
    ):
        verification = examine(SourceRequest(uri, **given), progress=progress, **arguments)
    results.show_verification(verification, json_=json_)
    sys.exit(verification.exit_code)


@cli.command()
@click.argument("name", required=False)
@as_json
def formats(name: str | None, json_: bool) -> None:
    """List the formats, or describe the format NAME.

    The description has what it can hold, its options, and which libraries load it.
    """
    from wherry.console import formats as shown
    from wherry.formats.registry import find_format, formats

    if name is None:
        shown.show_formats(list(formats().values()), json_=json_)
    else:
        shown.show_format(find_format(name), json_=json_)


@cli.command()
@click.argument("root")
@click.option("--dry-run", is_flag=True, help="List the staging areas without removing them.")
@as_json
def clean(root: str, dry_run: bool, json_: bool) -> None:
    """Remove the staging areas that killed conversions left below ROOT."""
    from wherry.console import results
    from wherry.target.clean import clean

    results.show_cleaned(clean(root, dry_run=dry_run), dry_run=dry_run, json_=json_)


@cli.command()
@as_json
def doctor(json_: bool) -> None:
    """Check what is installed, reachable and writable."""
    from wherry.console import results
    from wherry.watch.doctor import diagnose

    sys.exit(results.show_findings(diagnose(), json_=json_))


cli.add_command(emit)
cli.add_command(init)
cli.add_command(audit)
cli.add_command(completion)
cli.add_command(show_help)
cli.add_command(metrics)
cli.add_command(ls)
cli.add_command(du)
cli.add_command(inspect)
cli.add_command(diff)
cli.add_command(layouts)
cli.add_command(merge)
cli.add_command(deploy)
cli.add_command(preflight)
cli.add_command(serve)
cli.add_command(ledger)
ledger.add_command(deliver)
cli.add_command(lineage)
cli.add_command(rewrite)
cli.add_command(routes)
cli.add_command(config_group)
cli.add_command(nightly)
cli.add_command(prune)
cli.add_command(sign)
cli.add_command(verify_signature)
cli.add_command(fetch)
cli.add_command(promote)
cli.add_command(register)
cli.add_command(resolve)
cli.add_command(split)
cli.add_command(work)
cli.add_command(commit)


def _finish(group: click.Group) -> None:
    """Set `help_option_names` on each command; otherwise click caches those of the command that runs first.

    Its arguments get their completion here, and lists of commands its whole first sentence, which click would cut.
    """
    for command in group.commands.values():
        command.context_settings.setdefault("help_option_names", _HELP)
        command.short_help = first_sentence(command)
        complete_arguments(command)
        if isinstance(command, click.Group):
            _finish(command)


_finish(cli)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; every error becomes a message and an exit code, without a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments is None:  # called as the entry point of the process
            interrupts.interrupt()
            use_utf8()
        words = place_options(words, cli)
        code = _end(words, alone=arguments is None)
    except KeyboardInterrupt:  # outside of a command
        _fail(interrupt_error(), words)
    sys.exit(code)


def _end(words: list[str], *, alone: bool) -> int:
    """The exit code of a command, or its end by an error."""
    debug = is_debugging(words)
    if alone and not debug:
        silence()
    tune()
    show_waits(words)
    try:
        code = _run(words)
    except Exception as error:  # noqa: BLE001  the last place where a bug can become a message
        if debug:
            say_lines(traceback.format_exc().rstrip(), err=True)
        _fail(to_wherry_error(error, words), words)
    if interrupts.were_raised():  # something has swallowed it
        raise KeyboardInterrupt
    interrupts.end_with(code)
    return code


def _run(words: list[str]) -> int:
    try:
        code = cli.main(words, prog_name="wherry", standalone_mode=False)
    except SystemExit as ended:  # a verdict that is no success
        code = int(ended.code or 0)
    except click.exceptions.NoArgsIsHelpError as shown:
        click.echo(shown.format_message())
        code = 0
    unwritten = flush_output()
    if unwritten is not None:
        raise unwritten
    return code or 0


def _fail(error: WherryError, words: Sequence[str]) -> NoReturn:
    interrupts.end_with(error.exit_code)
    error.stage = error.stage or next((word for word in words if word in cli.commands), None)
    complete_cure(error, words, cli)
    notes: list[str] = getattr(error, "__notes__", [])
    if "--json" in words:
        import json

        with suppress(OSError):  # the reader has closed the pipe
            click.echo(json.dumps(document(error)))
    with suppress(OSError):
        say_lines("\n".join([f"error: {error.for_shell()}", *(f"note: {note}" for note in notes)]), err=True)
    flush_output()
    interrupts.leave(error.exit_code)
