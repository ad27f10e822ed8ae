"""PaxML's Flax checkpoints: one msgpack file with the leaves by number, and the structure as a text.

Key paths are as stored, `flattened_state/<i>`; the true names are kept in `custom["paxml"]["names"]`, if the text has
them, and every target gets those. The file is indexed in one pass without reading the arrays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, render
from wherry.core.manifest import Manifest
from wherry.errors import CorruptError
from wherry.formats.format import Opened
from wherry.integrations.containers.msgpack.contents import MsgpackContents, PlacedReader, gather
from wherry.integrations.containers.msgpack.index import index_file
from wherry.integrations.formats.paxml import metadata
from wherry.integrations.formats.paxml.layout import COMMITTED, Place
from wherry.integrations.formats.paxml.state import evidence
from wherry.integrations.formats.paxml.treedef import parse_structure
from wherry.store.store import Entry
from wherry.tree.tree_reading import read_leaves

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "paxml-flax"
LEAVES = "flattened_state"
STRUCTURE = "str_pytree_state"


def describe(place: Place) -> Detection:
    """The detection, from names, first bytes and the item `metadata`."""
    verdict, reason = place.verdict()
    return Detection(
        uri=place.home.uri,
        format=NAME,
        format_version=place.version,
        writer=f"paxml (checkpoint version {place.metadata.version:.1f}, Flax)",
        step=place.step,
        verdict=verdict,
        reason=reason,
        evidence=tuple(evidence(place)),
    )


def open_flax(place: Place, detection: Detection) -> Opened:
    """Open the checkpoint.

    Raises:
        CorruptError: the file is truncated, or has another structure.
        UnsupportedError: the file has an unknown type.
        HostileError: the nesting or a size is impossible.
    """
    place.require_committed()
    contents = gather(index_file(place.state), place.state)
    odd = next((path for path in contents.specs if path[0] != LEAVES), None)
    if odd is not None:
        raise CorruptError(f"unexpected array outside {LEAVES}", uri=place.state.uri, path=render(odd))
    names, lists = _names(contents)
    found = read_leaves(names.values()).whole if names else "other"
    kind = "train-state" if found == "other" else found
    fields: dict[str, Any] = {"version": place.metadata.version}
    if names:
        fields["names"] = {render(path): render(name) for path, name in names.items()}
        fields["lists"] = sorted(map(render, lists))
    manifest = Manifest(
        tensors=contents.specs,
        values=contents.values,
        empties=contents.empties,
        lists=frozenset(contents.lists),
        step=detection.step,
        kind=kind,
        custom={"paxml": fields},
    )
    reader = PlacedReader(place.home, contents.places, tuple(_members(place)))
    words = "the names of all leaves" if names else "no names of the leaves: abbreviated, or of another tree"
    precise = detection.seen(Evidence(STRUCTURE, f"the structure has {words}"))
    return Opened(replace(precise, kind=kind), manifest, reader)


def _names(contents: MsgpackContents) -> tuple[dict[KeyPath, KeyPath], frozenset[KeyPath]]:
    """Stored path → true name, and the sequences; empty if the structure does not have the name of every leaf."""
    text = contents.values.get((STRUCTURE,))
    found = parse_structure(text) if isinstance(text, str) else None
    stored = {path for path in (*contents.specs, *contents.empties) if path[:1] == (LEAVES,)}
    if found is None or {(LEAVES, str(number)) for number in range(len(found.leaves))} != stored:
        return {}, frozenset()
    return {(LEAVES, str(number)): name for number, name in enumerate(found.leaves)}, found.lists


def _members(place: Place) -> Iterator[Entry]:
    inner = place.state.path[len(place.home.path) :].strip("/")
    extra_files = (metadata.FILE, COMMITTED) if inner.count("/") else ()
    for name in (inner or place.home.name, *extra_files):
        entry = (place.home.join(name) if inner else place.home).stat()
        if entry is not None and not entry.is_dir:
            yield Entry(name, entry.size, is_dir=False, mark=entry.mark)
