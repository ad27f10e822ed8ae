"""What is measured, as data: one entry for each row, and the groups that are compared with each other.

A new format is a new entry in `ROWS`, with an input in `INPUTS` when it reads something new. Words of a command
that stand in braces are filled in: `python`, `source`, `target`.
"""

from __future__ import annotations

from typing import NamedTuple

_WHERRY = ("{python}", "-m", "wherry.cli", "convert", "{source}", "{target}", "--json", "--memory", "128MiB")
_AS_ORBAX = ("--to", "orbax", "--set", "zarr=2")  # the layout that StandardCheckpointer writes
_WORK = ("{python}", "-m", "benchmarks.work")


class Row(NamedTuple):
    """One way to do one job.

    Attributes:
        name: as `--rows` selects it and the table prints it.
        group: rows of one group do the same job on the same input.
        source: name of the input.
        target: file name of the output.
        command: the process.
        ours: whether the memory limit is asserted.
        floor: whether the group's other rows are compared with this one.
    """

    name: str
    group: str
    source: str
    target: str
    command: tuple[str, ...]
    ours: bool = False
    floor: bool = False


class Made(NamedTuple):
    """An input that is made from another one by a command."""

    source: str
    command: tuple[str, ...]


TO_ORBAX = "safetensors → orbax"
TO_SAFETENSORS = "orbax → safetensors"

# The first input is made from nothing, by `inputs.py`; the others by the systems' own libraries.
FIRST_INPUT = "huggingface"
INPUTS: dict[str, Made] = {
    "orbax": Made("huggingface", (*_WORK, "naive-to-orbax", "{source}", "{target}")),
}

ROWS = (
    Row(
        "copy and hash, to orbax",
        TO_ORBAX,
        "huggingface",
        "copy",
        (*_WORK, "copy-and-hash", "{source}", "{target}"),
        floor=True,
    ),
    Row(
        "wherry --verify none, to orbax",
        TO_ORBAX,
        "huggingface",
        "orbax",
        (*_WHERRY, *_AS_ORBAX, "--verify", "none"),
        ours=True,
    ),
    Row("wherry, to orbax", TO_ORBAX, "huggingface", "orbax", (*_WHERRY, *_AS_ORBAX), ours=True),
    Row(
        "load all, then save, to orbax",
        TO_ORBAX,
        "huggingface",
        "orbax",
        (*_WORK, "naive-to-orbax", "{source}", "{target}"),
    ),
    Row(
        "copy and hash, to safetensors",
        TO_SAFETENSORS,
        "orbax",
        "copy",
        (*_WORK, "copy-and-hash", "{source}", "{target}"),
        floor=True,
    ),
    Row(
        "wherry --verify none, to safetensors",
        TO_SAFETENSORS,
        "orbax",
        "model.safetensors",
        (*_WHERRY, "--to", "safetensors", "--verify", "none"),
        ours=True,
    ),
    Row(
        "wherry, to safetensors",
        TO_SAFETENSORS,
        "orbax",
        "model.safetensors",
        (*_WHERRY, "--to", "safetensors"),
        ours=True,
    ),
    Row(
        "load all, then save, to safetensors",
        TO_SAFETENSORS,
        "orbax",
        "model.safetensors",
        (*_WORK, "naive-to-safetensors", "{source}", "{target}"),
    ),
)
