"""Options that several commands share, and how their values are read."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from wherry.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wherry.converter.convert import Target

as_json = click.option("--json", "json_", is_flag=True, help="Print JSON instead of text.")
memory = click.option("--memory", default="128MiB", show_default=True, help="Budget for bytes in flight.")
quiet = click.option("--quiet", is_flag=True, help="No progress bar.")


def _let_pass(context: click.Context, _option: click.Parameter, names: tuple[str, ...]) -> None:
    from wherry.core.opaque import allowing

    context.with_resource(allowing(names))


opaque = click.option(
    "--allow-opaque", multiple=True, metavar="NAME", expose_value=False, callback=_let_pass,
    help="Read around objects of the class NAME (package.module.Class) in pickles; nothing is called.",
)  # fmt: skip


def chosen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say which checkpoint of a run or step is meant."""
    for option in (
        click.option("--item", metavar="NAME", help="Item of the step."),
        click.option("--step", type=int, help="Step of the run; the newest complete one by default."),
        click.option(
            "--from", "format", metavar="FORMAT", help="Source format, where detection would not decide so."
        ),
        opaque,
    ):
        function = option(function)
    return function


def walking(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say what counts in a walk."""
    for option in (
        click.option("--newest", is_flag=True, help="Of each run only the newest complete step."),
        click.option("--min-age", type=click.FloatRange(0), default=0.0, metavar="SECONDS",
                     help="Pass over what changed more recently and does not prove that it is committed."),
    ):  # fmt: skip
        function = option(function)
    return function


def conversion(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options that `plan` and `convert` share."""
    for option in (
        click.option("--verify", type=click.Choice(["digest", "none"]), default="digest", show_default=True,
                     help="Read the target back before the commit."),
        click.option("--ignore", metavar="RULES", default="",
                     help="Leave behind by name what the target cannot hold: values, empties, companions."),
        click.option("--only", type=click.Choice(["params"]), help="Carry the parameters alone."),
        memory,
        click.option("--set", "set_", multiple=True, metavar="NAME=VALUE",
                     help="Option of the target format or of its layout; see `wherry formats NAME`, `wherry layouts`."),
    ):  # fmt: skip
        function = option(function)
    return laid_out(chosen(function))


def laid_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options that say how one system's layout becomes another's; they reach the command as one `wish`."""

    @wraps(function)
    def command(**arguments: Any) -> Any:
        from wherry.core.request import Wish

        wish = Wish(**{name: arguments.pop(name) for name in Wish.__slots__})
        if rules := arguments.pop("rename"):
            arguments["set_"] = (*arguments["set_"], f"rename={'; '.join(rules)}")
        return function(wish=wish, **arguments)

    for option in (
        click.option("--rename", multiple=True, metavar="RULE",
                     help="Rename key paths: 'layers.{n}.w -> blocks/{n}/kernel'."),
        click.option("--assets", metavar="URI", help="Folder with tokenizer and the like for the target."),
        click.option("--dtype", metavar="DTYPE", help="Element type of the target's parameters."),
        click.option("--config", metavar="FILE", help="The source's config (JSON), where none lies beside it."),
        click.option("--family-file", metavar="FILE", help="Declare or change a model family (TOML)."),
        click.option("--family", metavar="NAME",
                     help="Model family, where detection would not decide so; `none` keeps the tree."),
    ):  # fmt: skip
        command = option(command)
    return command


def writing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of `convert` alone."""
    for option in (
        click.option("--dry-run", is_flag=True, help="The same as `wherry plan`."),
        click.option("--no-lineage", is_flag=True, help="Do not record the conversion in the ledger."),
        click.option("--sign", metavar="KEY", help="Sign each target with this private key (PEM)."),
        click.option("--meta", multiple=True, metavar="KEY=VALUE", help="Keep in the manifest."),
        click.option("--as-step", type=int, help="Step to write, where the source states none."),
        click.option("--into", is_flag=True, help="TARGET is a run: make the step folder inside it."),
        click.option("--if-exists", type=click.Choice(["fail", "skip", "resume"]), default="resume",
                     show_default=True,
                     help="Accept nothing at TARGET, anything that wherry wrote, or the result of this same "
                          "conversion."),
    ):  # fmt: skip
        function = option(function)
    return function


def settings(pairs: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE words as a mapping.

    Raises:
        UsageError: a word without `=`.
    """
    for pair in pairs:
        if "=" not in pair:
            raise UsageError(f"not NAME=VALUE: {pair!r}")
    return dict(pair.split("=", 1) for pair in pairs)


def rules(text: str) -> tuple[str, ...]:
    """Comma-separated words."""
    return tuple(rule.strip() for rule in text.split(",") if rule.strip())


def matched_targets(uris: Sequence[str], formats: Sequence[str], options: dict[str, str]) -> list[Target]:
    """Each target with its format and those of the options that the format takes.

    Raises:
        UsageError: their numbers differ, or an option is none of any target's.
    """
    from wherry.converter.convert import Target
    from wherry.formats.registry import find_format
    from wherry.tree.mapping import TREE_OPTIONS

    if len(uris) != len(formats):
        raise UsageError(
            f"{len(uris)} targets and {len(formats)} formats", cure="say --to FORMAT once for each target"
        )
    taken = {name: {*find_format(name).options, *TREE_OPTIONS} for name in formats}
    further = set(options) - set[str]().union(*taken.values())
    if further:
        from wherry.view.system import layout_options

        known = further & layout_options()
        taken = {name: names | known for name, names in taken.items()}
    unknown = sorted(further - set[str]().union(*taken.values()))
    if unknown:
        raise UsageError(
            f"{' and '.join(formats)} has no option {', '.join(unknown)}", cure="see `wherry formats NAME`"
        )
    return [
        Target(uri, name, {key: value for key, value in options.items() if key in taken[name]})
        for uri, name in zip(uris, formats, strict=True)
    ]
