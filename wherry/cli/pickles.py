"""`wherry inspect --pickles`: every pickle below a URI with the globals that it wants, known or not."""

from __future__ import annotations

import click

from wherry.cli.console import print_json, print_table
from wherry.integrations.containers.pickle_survey import survey


def show_pickles(uri: str, *, json_: bool) -> None:
    """Print the pickles of one file or folder; it need not be a checkpoint, and may be hostile."""
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
            click.echo(f"{stream.file} breaks off: {stream.error}")
    unknown = {one.name for stream in found for one in stream.globals if not one.known}
    click.echo(f"{len(found)} pickles, {len(rows)} globals, {len(unknown)} of them known to no reader")
