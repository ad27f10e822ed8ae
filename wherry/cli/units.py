"""`wherry split`, `work` and `commit`: one conversion, made by several processes."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from wherry.cli import results
from wherry.cli.options import CONVERSION, as_json, quiet, requesting
from wherry.cli.say import bar, print_json, print_rows, say, show_before_error
from wherry.core.request import TargetRequest, convert_request
from wherry.core.units import DEFAULT_UNIT, duration, parse_size, plural, show_seconds, show_size

if TYPE_CHECKING:
    from wherry.workers.records import TaskRecord
    from wherry.workers.unit import Unit

unit_size = click.option(
    "--unit",
    metavar="SIZE",
    default=DEFAULT_UNIT,
    show_default=True,
    help="Size of a unit: what one worker writes, or reads, at a time; larger files of a target are cut if possible.",
)

on_engine = click.option(
    "--on",
    metavar="ENGINE",
    default="threads",
    show_default=True,
    help="Engine that runs the conversion: threads of this process; processes:N, dask:N or ray:N on this machine; or "
    "the cluster at dask://HOST:PORT or ray://HOST:PORT. Its workers share the units of the plan.",
)

on_readers = click.option(
    "--on",
    metavar="ENGINE",
    default="threads",
    show_default=True,
    help="What reads the bytes at level digest: threads of this process, or workers as for `convert --on`.",
)


@click.command()
@click.argument("source")
@click.argument("target")
@click.option("--to", required=True, metavar="FORMAT", help="Target format.")
@requesting(*CONVERSION)
@unit_size
@as_json
def split(source: str, target: str, to: str, unit: str, json_: bool, given: dict[str, Any]) -> None:
    """Divide the conversion of SOURCE to TARGET into units of work.

    Any number of `wherry work` processes then write the units. The job is a folder next to TARGET. All workers must
    see SOURCE and TARGET under these names, and share WHERRY_KEY.
    """
    from wherry.target.signed_log import require_shared_key
    from wherry.workers.job import split as make_job
    from wherry.workers.unit import large_files

    require_shared_key()
    made = make_job(convert_request(source, [TargetRequest(target, to)], **given), parse_size(unit))
    sizes = [one.nbytes for one in made.units]
    large = large_files(made.units, made.job.committed)
    if json_:
        units = [one.to_json() for one in made.units]
        said = {"one_worker": made.whole, "large_files": large}
        print_json({"job": made.uri, **said, "units": units})
        return
    job = shlex.quote(made.job.committed.uri)
    print_rows([
        ("job", made.uri),
        ("units", f"{len(sizes)}, {show_size(sum(sizes))}"),
        ("one worker", made.whole),
        ("large files", large),
        ("next", f"wherry work {job}, as often as you like; then wherry commit {job}"),
    ])  # fmt: skip


@click.command()
@click.argument("job")
@click.option(
    "--expiry",
    metavar="DURATION",
    default="60s",
    show_default=True,
    help="Time without a heartbeat after which the unit of another worker is written again.",
)
@click.option("--commit", "commits", is_flag=True, help="Commit the target when all units are written.")
@quiet
@as_json
def work(job: str, expiry: str, commits: bool, quiet: bool, json_: bool) -> None:
    """Write units of JOB until all are written, and read back those of other workers.

    JOB is its folder, or its target. Any number of processes can do this at the same time, on any machines. If a
    worker dies, another one writes its unit.
    """
    from wherry.workers.work import work as make_units

    def report_unit(unit: Unit, receipt: TaskRecord) -> None:
        say(f"unit {unit.name}: {show_size(unit.nbytes)} in {show_seconds(receipt.seconds)}", err=True)

    report = make_units(job, expiry=duration(expiry), on_unit=None if quiet or json_ else report_unit)
    if commits and not report.ended:
        _commit(job, quiet=quiet, json_=json_)
    elif json_:
        print_json(report.to_json())
    else:
        read = f"; read back {plural(len(report.proved), 'unit')} of others" if report.proved else ""
        say(f"wrote {plural(len(report.made), 'unit')} of {report.units}, {show_size(report.nbytes)}{read}")


@click.command()
@click.argument("job")
@quiet
@as_json
def commit(job: str, quiet: bool, json_: bool) -> None:
    """Verify and commit the target of JOB when all units are written.

    JOB is its folder, or its target.
    """
    _commit(job, quiet=quiet, json_=json_)


def _commit(job: str, *, quiet: bool, json_: bool) -> None:
    from wherry.workers.commit import commit as commit_job

    with (
        show_before_error(results.show_receipts, json_=json_),
        bar(quiet=quiet or json_) as progress,
    ):
        group = commit_job(job, progress=progress)
    results.show_receipts(group, json_=json_)
