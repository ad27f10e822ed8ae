"""PaxML's Flax checkpoints: one msgpack file with the leaves by number, and the structure as a text.

Key paths are as stored, `flattened_state/<i>`; the true names are kept in `custom["paxml"]["names"]`, if the text has
them, and every target gets those. The file is indexed in one pass without reading the arrays.

The names of PaxML's Flax leaves, from the text that jax prints for a tree's structure.

`PyTreeDef(CustomNode(TrainState[()], [*, {'params': …}, [CustomNode(NestedMap[('no_prefix',)], [(…)])], ()]))`:
a leaf is `*`; dicts, lists and tuples are written as in Python; a custom node has its type, the type's static data in
brackets, and the children. The static data of a NestedMap are the names of its children. The text is parsed, never
evaluated. jax abbreviates long texts (`...`): then the names are lost.

Facts (praxis 1.4.0): TrainState has the children step, mdl_vars, opt_states and, since 1.0, extra_state.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, render
from wherry.errors import CorruptError
from wherry.formats.format import Opened
from wherry.integrations.containers.flat.reader import FlatReader
from wherry.integrations.containers.msgpack.contents import MsgpackContents, gather
from wherry.integrations.containers.msgpack.index import index_file
from wherry.integrations.formats.paxml.layout import COMMITTED, METADATA_FILE, Place
from wherry.integrations.formats.paxml.state import evidence
from wherry.layout.tree_reading import read_leaves

_FIELDS = {"TrainState": ("step", "mdl_vars", "opt_states", "extra_state")}
_CLOSING = {"[": "]", "(": ")"}
_DEEPEST = 200
_LONGEST = 1 << 24
_LONGEST_KEPT = 1 << 20
_TOKEN = re.compile(
    r"""\s*('[^'\\]*+(?:\\.[^'\\]*+)*+'|"[^"\\]*+(?:\\.[^"\\]*+)*+"|\*|None|CustomNode|PyTreeDef|-?\d+|[{}\[\]():,])"""
)


class _NotUnderstoodError(Exception):
    """The text does not have the form that jax prints, or was abbreviated."""


class Structure(NamedTuple):
    """The facts about a tree that the text states.

    Attributes:
        leaves: the key path of each leaf, in order.
        lists: the nodes that are lists or tuples.
    """

    leaves: list[KeyPath]
    lists: frozenset[KeyPath]


def parse_structure(text: str) -> Structure | None:
    """Read the key paths of the leaves and of the sequences; None if the text does not have all of them."""
    if len(text) > _LONGEST:
        return None
    reader = _Text(text)
    try:
        reader.expect("PyTreeDef")
        reader.expect("(")
        names = list(_node(reader, (), 0))
        reader.expect(")")
    except (_NotUnderstoodError, ValueError, SyntaxError):
        return None
    return Structure(names, frozenset(reader.lists))


class _Text:
    """A position in the text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self.lists: set[KeyPath] = set()

    def peek(self) -> str:
        """The next token, without consuming it."""
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            raise _NotUnderstoodError
        return found.group(1)

    def take(self) -> str:
        """The next token."""
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            raise _NotUnderstoodError
        self._at = found.end()
        return found.group(1)

    def expect(self, sign: str) -> None:
        """Consume an expected token."""
        if self.take() != sign:
            raise _NotUnderstoodError

    def type_name(self) -> tuple[str, str]:
        """A custom node's type and its static data in brackets, up to the comma before its children."""
        start = self._text.find("[", self._at)
        if start < 0:
            raise _NotUnderstoodError
        name = self._text[self._at : start]
        stop = _closing(self._text, start)
        self._at = stop + 1
        return name, self._text[start + 1 : stop]


def _node(reader: _Text, path: KeyPath, depth: int) -> Iterator[KeyPath]:
    sign = reader.take()
    if depth > _DEEPEST:
        raise _NotUnderstoodError
    if sign == "*":
        yield path
    elif sign == "{":
        while reader.peek() != "}":
            key = str(ast.literal_eval(reader.take()))
            reader.expect(":")
            yield from _node(reader, (*path, key), depth + 1)
            if reader.peek() != "}":
                reader.expect(",")
        reader.take()
    elif sign in _CLOSING:
        reader.lists.add(path)
        yield from _items(reader, _CLOSING[sign], path, depth, ())
    elif sign == "CustomNode":
        reader.expect("(")
        kind, kept = reader.type_name()
        reader.expect(",")
        reader.expect("[")
        known = next((fields for name, fields in _FIELDS.items() if name in kind), None)
        yield from _items(reader, "]", path, depth, known or _names_in(kept))
        reader.expect(")")
    elif sign != "None":
        raise _NotUnderstoodError


def _items(
    reader: _Text, closing: str, path: KeyPath, depth: int, names: tuple[str, ...]
) -> Iterator[KeyPath]:
    number = 0
    while reader.peek() != closing:
        part = names[number] if number < len(names) else str(number)
        yield from _node(reader, (*path, part), depth + 1)
        number += 1
        if reader.peek() != closing:
            reader.expect(",")
    reader.take()


def _names_in(kept: str) -> tuple[str, ...]:
    """The names of a NestedMap's children; empty for other types."""
    if len(kept) > _LONGEST_KEPT:
        return ()
    try:
        value = ast.literal_eval(kept)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ()
    if isinstance(value, (tuple, list)) and all(isinstance(name, str) for name in value):  # pyright: ignore[reportUnknownVariableType]
        return tuple(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return ()


def _closing(text: str, start: int) -> int:
    """Position of the bracket that closes the one at `start`, with quotes skipped."""
    depth, at = 0, start
    while at < len(text):
        letter = text[at]
        if letter in "'\"":
            end = re.compile(rf"{letter}[^{letter}\\]*+(?:\\.[^{letter}\\]*+)*+{letter}").match(text, at)
            if end is None:
                break
            at = end.end()
            continue
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if not depth:
            return at
        at += 1
    raise _NotUnderstoodError


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
    manifest = replace(contents.manifest(detection.step, kind), custom={"paxml": fields})
    around = (METADATA_FILE, COMMITTED) if "/" in place.inner else ()
    files = [(name, place.home.join(name).stat()) for name in (place.inner, *around) if name]
    members = [replace(entry, name=name) for name, entry in files if entry is not None and not entry.is_dir]
    members = members or [place.state.present()]
    reader = FlatReader(place.home, contents.places, tuple(members), packs=False)
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
