"""ignored_entries: what a conversion leaves out, and the refusal to leave out weights unless the request says so.

A plan lists everything of a source that its target does not get: what the format found next to the tensors, what the
target cannot hold, what the rules of the request name. State of a trainer and files without weights are only named,
and so is what lies next to the source: a user who names an item of a step by its own location names nothing else of
the step.
"""

from __future__ import annotations

import posixpath
from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.core.account import FILES, ITEMS, OTHERS, IgnoredEntry, fold_entries, ignored_file
from wherry.errors import UnrepresentableError
from wherry.formats.companions import ignored_companion
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from wherry.core.manifest import Manifest
    from wherry.core.request import ConvertRequest, RewriteRequest
    from wherry.formats.format import Change, Format

_SHOWN = 3
_OUTSIDE = "it is not part of the source, which is one item of the step"


def unprepared_companions(mapped: Manifest, prepared: Manifest, row: Format) -> list[IgnoredEntry]:
    """The companions that a target format leaves out itself.

    Args:
        mapped: the source's tree with the key paths of the target.
        prepared: the same as the format will hold it.
        row: the target format.
    """
    kept = {one.name for one in prepared.companions}
    reason = f"{row.name} does not take it with these options"
    return [ignored_companion(one.name, reason) for one in mapped.companions if one.name not in kept]


def not_copied(change: Change) -> Iterator[IgnoredEntry]:
    """What a rewrite does not copy to its target: entries of the step around the item, and files that it replaces."""
    found = {one.name: one for one in change.opened.ignored}
    yield from (one for one in found.values() if one.path[0] == "..")
    for name in change.left:
        yield found.get(name) or ignored_file(name, FILES, "a file of metadata", "the rewrite replaces it")


def within_source(ignored: Iterable[IgnoredEntry], source: str, opened: str) -> tuple[IgnoredEntry, ...]:
    """The entries, of which those outside the source's folder are named as such: they are not left out of it.

    Args:
        ignored: everything that is left out.
        source: the URI that the request names: an item, a step or a run.
        opened: the URI of the opened checkpoint, to which the names of files are relative.
    """
    rows = tuple(ignored)
    if not any(_around(one) for one in rows):
        return rows
    named, home = locate(source), locate(opened)
    if named.entry is None or not named.entry.is_dir:
        return rows
    root = posixpath.normpath(named.path) + "/"

    def outside(one: IgnoredEntry) -> bool:
        return _around(one) and not posixpath.normpath(posixpath.join(home.path, *one.path)).startswith(root)

    return tuple(replace(one, reason=_OUTSIDE, weights=False) if outside(one) else one for one in rows)


def _around(entry: IgnoredEntry) -> bool:
    """Whether an entry belongs to the step around an item."""
    return entry.rule == ITEMS or entry.path[0] == ".."


def require_requested(
    ignored: Iterable[IgnoredEntry], request: ConvertRequest | RewriteRequest, uri: str
) -> None:
    """Refuse to leave out weights unless the request says so.

    Who names an item of a step says that the other items stay.

    Args:
        ignored: everything that is left out.
        request: the request.
        uri: the source, for the error.

    Raises:
        UnrepresentableError: the first few files with weights are named.
    """
    if OTHERS in request.ignore:
        return
    chosen = request.source.item is not None
    rows = fold_entries(one for one in ignored if one.weights and not (chosen and one.rule == ITEMS))
    if rows:
        names = ", ".join(f"{one.name} ({one.what})" for one in rows[:_SHOWN])
        more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        why = f"; {rows[0].reason}" if rows[0].rule == OTHERS else ""  # which names the file that is read
        raise UnrepresentableError(
            f"weights next to the converted ones would be left out: {names}{more}{why}",
            uri=uri,
            cure=f'pass --ignore {OTHERS} to leave them out (in a route: ignore = ["{OTHERS}"])',
        )
