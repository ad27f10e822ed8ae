"""`wherry help`, the list of commands in `wherry --help`, `wherry completion`, and completion of names in a shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING

import click

from wherry.errors import UsageError, choose

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_COMPLETION_VARIABLE = "_WHERRY_COMPLETE"
_SHELLS = ("bash", "zsh", "fish")
# Section → its commands, in the order in which a user meets them: where each is, and the first sentence of its help.
SECTIONS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Look into checkpoints": {
        "discover": ("commands:discover", "Find the checkpoints below ROOT"),
        "detect": ("commands:detect", "Detect the format and version of the checkpoint at URI"),
        "inspect": ("inspect:inspect", "List the contents of the checkpoint at URI"),
        "diff": ("inspect:diff", "List the differences between the checkpoints A and B"),
        "formats": ("commands:formats", "List the formats, or describe the format NAME"),
        "layouts": ("inspect:layouts", "List the model families, or show the layouts of FAMILY"),
    },
    "Convert": {
        "convert": (
            "commands:convert",
            "Convert SOURCE, verify the result, commit it and record the lineage",
        ),
        "plan": ("commands:plan", "Show how SOURCE would be converted to TARGET; write nothing"),
        "merge": ("commands:merge", "Merge several checkpoints into TARGET"),
        "rewrite": ("rewrite:rewrite", "Copy SOURCE to TARGET and change only its small files"),
        "clean": ("commands:clean", "Remove the staging areas that killed conversions left below ROOT"),
    },
    "Convert on several machines": {
        "split": ("units:split", "Divide the conversion of SOURCE to TARGET into units of work"),
        "work": (
            "units:work",
            "Write units of JOB until all are written, and read back those of other workers",
        ),
        "commit": ("units:commit", "Verify and commit the target of JOB when all units are written"),
    },
    "Verify": {
        "verify": ("commands:verify", "Verify that the checkpoint at URI is complete and unaltered"),
        "sign": ("ledger:sign", "Sign every file of the checkpoint at URI"),
        "verify-signature": (
            "ledger:verify_signature",
            "Verify the checkpoint at URI against its signature",
        ),
    },
    "Trace": {
        "ls": ("catalog:ls", "List the checkpoints in the ledger, all or those below ROOT"),
        "du": ("catalog:du", "Sum the sizes of the checkpoints in the ledger, all or those below ROOT"),
        "lineage": ("lineage:lineage", "Show where a checkpoint came from and what was derived from it"),
        "audit": ("audit:audit", "Compare the ledger with the storage and the model registry"),
        "ledger": ("ledger:ledger", "Check, rebuild and deliver the ledger"),
    },
    "Models": {
        "register": ("models:register", "Register the checkpoint at URI in MLflow, without copying it"),
        "resolve": ("models:resolve", "Print the URI of the checkpoint that MODEL refers to"),
        "promote": ("models:promote", "Verify SUBJECT again, check its policy and set an alias on it"),
        "fetch": ("models:fetch", "Copy the checkpoint at URI to TARGET and verify its digests"),
    },
    "Every night": {
        "init": ("init:init", "Write a commented wherry.toml with one route, and check it"),
        "routes": ("routes:routes", "Check and explain the routes of wherry.toml"),
        "config": ("routes:config_group", "Show the settings and routes in effect, or an example file"),
        "nightly": ("routes:nightly", "Convert the unconverted checkpoints that the routes select"),
        "prune": ("routes:prune", "Remove converted checkpoints that no retention rule keeps"),
        "metrics": ("audit:metrics", "Print metrics for Prometheus"),
    },
    "Prefect": {
        "deploy": ("deploy:deploy", "Create or update pools, limits and deployments in Prefect"),
        "serve": ("deploy:serve", "Run the deployments in FILE in this process, without a work pool"),
        "emit": ("deploy:emit", "Send Prefect the event that the checkpoint at URI was committed"),
        "preflight": ("deploy:preflight", "Check that workers of a pool type write to persistent storage"),
    },
    "Help": {
        "doctor": ("commands:doctor", "Check what is installed, reachable and writable"),
        "help": ("help:show_help", "Show the help of a command, as in `wherry help ledger record`"),
        "completion": ("help:completion", "Print the completion script for SHELL"),
    },
}
HELP_OPTIONS = ["-h", "--help"]


class Commands(MutableMapping[str, click.Command]):
    """The commands by their names; each is imported when it is looked up."""

    def __init__(self) -> None:
        self._places = {
            name: place for listed in SECTIONS.values() for name, (place, _sentence) in listed.items()
        }
        self._loaded: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        """A command."""
        if name not in self._loaded:
            module, _, attribute = self._places[name].partition(":")
            self[name] = getattr(import_module(f"wherry.cli.{module}"), attribute)
        return self._loaded[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        """Add a command."""
        _finish(command)
        self._places.setdefault(name, "")
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        """Remove a command."""
        del self._places[name]
        self._loaded.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self._places)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        """Whether there is a command of this name; it is not imported."""
        return name in self._places


def _finish(command: click.Command) -> None:
    """Set `help_option_names` on a command; otherwise click caches those of the command that runs first.

    Its arguments get their completion here, and lists of commands its whole first sentence, which click would cut.
    """
    command.context_settings.setdefault("help_option_names", HELP_OPTIONS)
    command.short_help = first_sentence(command)
    complete_arguments(command)
    for one in command.commands.values() if isinstance(command, click.Group) else ():
        _finish(one)


class Sections(click.Group):
    """A group whose help lists its commands in sections."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  of click
        """Write each section."""
        for section, listed in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name, sentence) for name, (_place, sentence) in listed.items()])


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
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def _as_items(names: Callable[..., list[str]] | None) -> Callable[..., list[CompletionItem]]:
    def complete(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

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
