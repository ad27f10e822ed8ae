"""nearby: where the checkpoint is that a path narrowly misses: one level below, one level above, or on the Hub."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from wherry.core.steps import unfinished_reason
from wherry.cures import Command, Cure
from wherry.errors import AmbiguousError, CrowdedFolderError

if TYPE_CHECKING:
    from wherry.formats.format import Glimpse
    from wherry.store.location import Location

_FEW = 8  # files of a folder that are looked at one by one
MOST_LOOKED_AT = 32  # folders of a folder that are looked at one by one
_SHOWN = 3
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def cure_of_absence(given: str, location: Location) -> str:
    """What to do about a path that does not exist.

    Args:
        given: the path as it was given.
        location: the same as a location.
    """
    parent = location.parent
    if _HUB_NAME.fullmatch(given) and location.store.capabilities.local and not parent.exists():
        return f"check the path; a model of the Hugging Face Hub is written hf://{given}"
    while location.store.capabilities.local and not parent.exists():
        parent = parent.parent
    return Cure("check the path, or run {} to see what is there", Command("discover", parent.uri))


def cure_of_nothing(glimpse: Glimpse, is_checkpoint: Callable[[Location], bool]) -> str:
    """What to do about a path that exists, but is no checkpoint.

    Args:
        glimpse: the path.
        is_checkpoint: whether a format recognises a location.
    """
    location = glimpse.location
    if glimpse.is_file:
        if checkpoints_among([location.parent], is_checkpoint):
            return f"pass its folder: {shlex.quote(location.parent.uri)}"
        return Cure("run {} to list the supported formats", Command("formats"))
    files = [name for name, entry in glimpse.entries.items() if not (entry.is_dir or entry.barred)]
    alone = (
        checkpoints_among((location.join(name) for name in files), is_checkpoint)
        if len(files) <= _FEW
        else []
    )
    if len(alone) == 1:
        return f"pass its file: {shlex.quote(alone[0].uri)}"
    if alone:
        names = ", ".join(shlex.quote(place.uri) for place in alone)
        return Cure("pass one of its files ({}), or run {}", names, Command("discover", location.uri))
    folders = [
        name
        for name, entry in glimpse.entries.items()
        if entry.is_dir and not entry.barred and unfinished_reason(name) is None
    ]
    below = checkpoints_among(
        (location.join(name) for name in islice(folders, MOST_LOOKED_AT)), is_checkpoint
    )
    if below:
        return _cure_of_folders(location, below)
    return Cure(
        "run {} to list the supported formats, or {} to search the folders below it",
        Command("formats"),
        Command("discover"),
    )


def _cure_of_folders(location: Location, below: list[Location]) -> str:
    if len(below) == 1:
        return f"pass the checkpoint in it: {shlex.quote(below[0].uri)}"
    shown = ", ".join(f"{place.name}/" for place in below[:_SHOWN])
    more = ", …" if len(below) > _SHOWN else ""
    return Cure(
        "pass one of the checkpoints in it ({}{}); {} lists all",
        shown,
        more,
        Command("discover", location.uri),
    )


def checkpoints_among(
    places: Iterable[Location], is_checkpoint: Callable[[Location], bool]
) -> list[Location]:
    """The places that a format recognises."""
    found: list[Location] = []
    for place in places:
        with suppress(AmbiguousError, CrowdedFolderError):
            found += [place] if is_checkpoint(place) else []
    return found
