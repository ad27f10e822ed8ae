"""`wherry split`, `work` and `commit`: one conversion, made by several processes."""

from __future__ import annotations

import click

unit_size = click.option(
    "--unit",
    metavar="SIZE",
    default="1GiB",
    show_default=True,
    help="Size of a unit: files of the target that one worker makes; a larger file is one unit.",
)
