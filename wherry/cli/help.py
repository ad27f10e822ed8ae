"""`wherry help`, the list of commands in `wherry --help`, `wherry completion`, and completion of names in a shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

from wherry.errors import UsageError, choose

_COMPLETION_VARIABLE = "_WHERRY_COMPLETE"
_SHELLS = ("bash", "zsh", "fish")
# Section → its commands, in the order in which a user meets them.
SECTIONS = {
    "Look into checkpoints": ("discover", "detect", "inspect", "diff", "formats", "layouts"),
    "Convert": ("convert", "plan", "merge", "rewrite", "clean"),
    "Convert on several machines": ("split", "work", "commit"),
    "Verify": ("verify", "sign", "verify-signature"),
    "Trace": ("ls", "du", "lineage", "audit", "ledger"),
    "Models": ("register", "resolve", "promote", "fetch"),
    "Every night": ("init", "routes", "config", "nightly", "prune", "metrics"),
    "Prefect": ("deploy", "serve", "emit", "preflight"),
    "Help": ("doctor", "help", "completion"),
}


class Sections(click.Group):
    """A group whose help lists its commands in sections."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each section; a command that no section has is listed under the last one."""
        in_sections = {name for names in SECTIONS.values() for name in names}
        others = tuple(name for name in self.list_commands(ctx) if name not in in_sections)
        for section, names in SECTIONS.items():
            listed = (*names, *(others if section == "Help" else ()))
            with formatter.section(section):
                formatter.write_dl([(name, self.commands[name].short_help or "") for name in listed])


def first_sentence(command: click.Command) -> str:
    """The first sentence of a command's help, on one line."""
    paragraph = " ".join((command.help or "").strip().split("\n\n")[0].split())
    return paragraph.partition(". ")[0].removesuffix(".")


@click.command("help")
@click.argument("verbs", nargs=-1, metavar="[COMMAND]...")
@click.pass_context
def show_help(context: click.Context, verbs: tuple[str, ...]) -> None:
    """Show the help of a command, as in `wherry help ledger record`."""
    found = context.find_root()
    for verb in verbs:
        known = found.command.commands if isinstance(found.command, click.Group) else {}
        if verb not in known:
            path = f"{found.command_path} {verb}"
            raise UsageError(f"no such command: {path}", cure=choose(verb, known))
        found = click.Context(known[verb], parent=found, info_name=verb)
    click.echo(found.get_help())


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print the completion script for SHELL.

    It completes commands, options, formats and families.

    bash: eval "$(wherry completion bash)" in ~/.bashrc

    zsh: eval "$(wherry completion zsh)" in ~/.zshrc

    fish: wherry completion fish > ~/.config/fish/completions/wherry.fish
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    if made is None:
        raise UsageError(f"unknown shell {shell!r}", cure=choose(shell, _SHELLS))
    root = click.get_current_context().find_root()
    click.echo(made(root.command, {}, "wherry", _COMPLETION_VARIABLE).source())


def names_for(option: str, *, written: bool = False) -> Callable[..., list[str]] | None:
    """The function that completes the value of an option; None if it has no list of names.

    Args:
        option: name of the option's field.
        written: only formats that can be written.
    """
    listed = {"format": _formats, "to": _formats, "family": _families}.get(option)
    if listed is None:
        return None

    def complete(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
        return [name for name in listed(written) if name.startswith(typed)]

    return complete


# Arguments that are paths or URIs; the shell completes files.
_PLACES = frozenset({"a", "b", "root", "source", "subject", "target", "targets", "uri", "x"})
_ARGUMENTS = {("formats", "name"): "format", ("layouts", "family"): "family"}


def complete_arguments(command: click.Command) -> None:
    """Let a shell complete files where an argument of the command is a path, and names where it is one."""
    for one in command.params:
        if not isinstance(one, click.Argument):
            continue
        listed = _ARGUMENTS.get((str(command.name), str(one.name)))
        if listed is not None:
            one.shell_complete = _as_items(names_for(listed))
        elif one.name in _PLACES:
            one.shell_complete = _files


def _files(ctx: click.Context, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001  click names them
    return [CompletionItem(incomplete, type="file")]


def _as_items(names: Callable[..., list[str]] | None) -> Callable[..., list[CompletionItem]]:
    def complete(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in (names(ctx, None, incomplete) if names else ())]

    return complete


def _formats(written: bool) -> Iterable[str]:
    from wherry.formats.registry import formats

    rows = [row for row in formats().values() if row.is_written or not written]
    return sorted(name for row in rows for name in (row.name, *row.aliases))


def _families(_written: bool) -> Iterable[str]:
    from wherry.families import families

    return families()


_OF_COMMANDS = ("-q", "--quiet", "--json")  # options of commands, which are accepted before the command too
_OF_ALL = ("-v", "--verbose")  # options of `wherry`, which are accepted after the command too


def place_options(words: list[str], group: click.Group) -> list[str]:
    """The words with `-q`, `--json` and `-v` where the command line expects them: after the command, or before it.

    Args:
        words: the command line without the program.
        group: the commands.
    """
    at = next((number for number, word in enumerate(words) if word in group.commands), None)
    if at is None:
        return words
    end = words.index("--") if "--" in words else len(words)
    command: click.Command = group
    for word in words[at:end]:
        below = command.commands.get(word) if isinstance(command, click.Group) else None
        if below is None:
            break
        command = below
    known = {name for one in command.params for name in one.opts}
    late = [word for word in words[:at] if word in _OF_COMMANDS and word in known]
    early = [word for word in words[at:end] if word in _OF_ALL and word not in known]
    before = [word for word in words[:at] if word not in late]
    after = [word for word in words[at:end] if word not in early]
    return [*early, *before, *after, *late, *words[end:]]
