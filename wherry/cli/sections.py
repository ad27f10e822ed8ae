"""The list of commands in `wherry --help`: by task, each with the whole first sentence of its help."""

from __future__ import annotations

import click

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
