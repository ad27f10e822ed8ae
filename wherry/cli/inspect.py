"""`wherry layouts` and `wherry inspect --pickles`: layouts of the families, and what pickles would import."""

from __future__ import annotations

import click

from wherry.cli.options import as_json
from wherry.cli.say import say


@click.command()
@click.argument("family", required=False)
@click.option("--family-file", metavar="FILE", help="TOML file that declares or changes a model family.")
@as_json
def layouts(family: str | None, family_file: str | None, json_: bool) -> None:
    """List the families, or show the layouts, facts and judges of FAMILY in all systems side by side."""
    from wherry.cli import console
    from wherry.view.system import table

    if family is None and family_file is None:
        _list_families(json_=json_)
        return
    found = table(family, family_file)
    if json_:
        console.print_json(found)
        return
    for parameter, systems in found["parameters"].items():
        _show_group(parameter, [(system, text) for system, texts in systems.items() for text in texts])
    for name, fact in found["facts"].items():
        _show_group(f"fact {name}: {fact['about']}", list(fact["systems"].items()))
    _show_group("judges, apart from the way there and back", [
        (system, f"{ways['into']} (to {system}); {ways['out_of']} (from {system})")
        for system, ways in found["judged"].items()
    ])  # fmt: skip


def _show_group(heading: str, rows: list[tuple[str, str]]) -> None:
    say(heading)
    width = max((len(system) for system, _text in rows), default=0)
    for system, text in rows:
        say(f"  {system:<{width}}  {text}")


def _list_families(*, json_: bool) -> None:
    from wherry.cli import console
    from wherry.families import families, load_family

    rows = [load_family(name) for name in families()]
    if json_:
        console.print_json([
            {"name": row.name, "about": row.about, "systems": sorted(row.systems)} for row in rows
        ])  # fmt: skip
        return
    console.print_table(
        ["family", "models", "systems"], [[row.name, row.about, ", ".join(row.systems)] for row in rows]
    )


def show_pickles(uri: str, *, json_: bool) -> None:
    """Print the pickles of one file or folder; it need not be a checkpoint, and may be hostile."""
    from wherry.cli.console import print_json, print_table
    from wherry.integrations.containers.pickle.survey import survey

    found = survey(uri)
    if json_:
        print_json([stream.to_json() for stream in found])
        return
    rows = [
        [stream.file, str(one.position), one.name, str(one.count), "yes" if one.known else "NO"]
        for stream in found
        for one in stream.globals
    ]
    if rows:
        print_table(["pickle", "byte", "global", "times", "known"], rows)
    for stream in found:
        if stream.error:
            say(f"{stream.file}: reading stopped: {stream.error}")
    unknown = {one.name for stream in found for one in stream.globals if not one.known}
    say(f"{len(found)} pickles, {len(rows)} globals, {len(unknown)} of them unknown to all readers")
