"""`wherry init`: from nothing to a checked wherry.toml and the plan of its first night."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wherry.cli import results
from wherry.cli.help import names_for
from wherry.cli.options import as_json
from wherry.cli.say import print_json, say, say_lines
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import UsageError

if TYPE_CHECKING:
    from wherry.config.config import Config
    from wherry.nightly.check import Problem
    from wherry.nightly.report import NightReport

_QUESTIONS = {
    "root": "Folder or URI with the checkpoints",
    "target": "Folder or URI for the converted checkpoints",
    "format": "Their format (`wherry formats` lists them)",
    "registry": "Model registry: URL of an MLflow server, `embedded` (a file), or `none`",
}


@click.command()
@click.option("--root", metavar="URI", help="Folder or URI with the checkpoints.")
@click.option(
    "--target", metavar="URI", help="Folder or URI for the converted checkpoints; `converted` by default."
)
@click.option("--to", "format", metavar="FORMAT", shell_complete=names_for("to", written=True),
              help="Format of the converted checkpoints; safetensors by default.")  # fmt: skip
@click.option("--registry", metavar="URI",
              help="MLflow server; `embedded` for a file, the default, or `none` to register nothing.")  # fmt: skip
@click.option("--config", "file", metavar="FILE", default="wherry.toml", show_default=True,
              type=click.Path(path_type=Path), help="File to write.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Ask nothing; use the defaults for options that are not given.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@as_json
def init(file: Path, yes: bool, force: bool, json_: bool, **given: str | None) -> None:
    """Write a commented wherry.toml with one route, and check it.

    Asks for what no option gives, and shows what the first night would do. Converts nothing.
    """
    from wherry.config.config import in_force
    from wherry.nightly.check import check
    from wherry.nightly.first import FirstRoute, first_config, write_config
    from wherry.nightly.night import run_night

    file = file.expanduser()
    if file.exists() and not force:
        write_config(file, "")  # raises its error before any question
    values = {name: value for name, value in given.items() if value}
    for name, question in () if yes or json_ else _QUESTIONS.items():
        if name not in values:
            default = getattr(FirstRoute(""), name) or None
            values[name] = _answer(question, default)
    if "root" not in values:
        raise UsageError(
            "missing option '--root'",
            cure=Cure(
                "pass {}, or leave out {} to be prompted for it",
                Argument("root", Blank("URI")),
                Argument("yes"),
            ),
        )
    write_config(file, first_config(FirstRoute(**values)), force=force)
    with in_force(file) as loaded:
        problems = check(loaded)
        report = run_night(loaded, loaded.routes, dry_run=True)
    _show(loaded, problems, report, json_=json_)
    sys.exit(2 if any(one.severity == "error" for one in problems) else 0)


def _answer(question: str, default: str | None) -> str:
    """What the user types.

    Raises:
        UsageError: standard input has ended, as it has in a script.
    """
    try:
        return click.prompt(question, default=default, type=str, err=True).strip()
    except click.Abort as error:
        if not isinstance(error.__context__, EOFError):
            raise
        raise UsageError(
            "cannot ask: standard input has ended",
            cure=Cure(
                "state the options: {}", Command("init", Argument("root", Blank("URI")), Argument("yes"))
            ),
        ) from error


def _show(loaded: Config, problems: list[Problem], report: NightReport, *, json_: bool) -> None:
    if json_:
        rows = [one.to_json() for one in problems]
        print_json({"schema": 1, "file": loaded.file, "problems": rows, "night": report.to_json()})
        return
    say(f"wrote {loaded.file}")
    for one in problems:
        say_lines(f"{one.severity}: {one.where}: {one.what}\n  cure: {one.cure}")
    say("The first night would do this; nothing was converted:")
    results.show_night(report, json_=False)
    say(f"next: {_next(loaded, report)}")


def _next(loaded: Config, report: NightReport) -> str:
    """What to do now: a first night that finds nothing to convert is of no use yet."""
    given = Path("wherry.toml").absolute() != Path(str(loaded.file))
    night = shlex.join(["wherry", "nightly", *(["--config", str(loaded.file)] if given else [])])
    if any(plan.works for plan in report.plans):
        return f"`{night}` converts now; `wherry deploy` schedules it every night in Prefect"
    if "not settled" in report.counts:
        now = f"set min_age = 0 in {loaded.file} to convert them now"
        return f"run `{night}` when the checkpoints are settled, or {now}"
    return f"correct the root, or save a checkpoint below it; then `{night} --dry-run` shows what would be converted"
