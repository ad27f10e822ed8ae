"""`wherry layouts`: where every system of a model family keeps each parameter, and what its axes are."""

from __future__ import annotations

import click

from wherry.cli.options import as_json


@click.command()
@click.argument("family", required=False)
@click.option("--family-file", metavar="FILE", help="Declare or change a model family (TOML).")
@as_json
def layouts(family: str | None, family_file: str | None, json_: bool) -> None:
    """Print the layouts of FAMILY in all systems side by side; without FAMILY, list the families."""
    from wherry.cli import console
    from wherry.view.system import table

    if family is None and family_file is None:
        _list_families(json_=json_)
        return
    found = table(family, family_file)
    if json_:
        console.print_json(found)
        return
    for parameter, systems in found.items():
        click.echo(parameter)
        rows = [(system, text) for system, texts in systems.items() for text in texts]
        width = max((len(system) for system, _text in rows), default=0)
        for system, text in rows:
            click.echo(f"  {system:<{width}}  {text}")


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
