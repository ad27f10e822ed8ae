"""Renames: rules that give key paths other names, and prove that they can be given back.

    layers.{n}.w -> blocks/{n}/kernel          a piece: text between `/` and `.`, never empty
    model/{rest*} -> params/{rest*}            a run: any text, across `/` and `.`, never empty
    a~1b -> {{a}}                              printed key paths; `{{` and `}}` are braces themselves

There are no regular expressions. Both sides have the same names, each once, so that the rule read backwards is its
inverse. The first rule that matches a key path counts, a key path that none matches stays, and every rule must have
counted at least once. A key path that a rule can read in two ways is refused, not decided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from wherry.core.keypath import KeyPath, parse, render
from wherry.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ARROW = "->"
_SEPARATOR = "//"  # between the symbols of two parts; a symbol of a part is one character
_STOPS = frozenset((_SEPARATOR, "."))
_LONGEST = 4096  # trying every place where a name may end takes time that grows with the square of it
_CURE = "write for example `layers.{n}.w -> blocks/{n}/kernel`"

Symbols: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hole:
    """A name in braces.

    Attributes:
        name: what it is called on both sides of a rule.
        run: whether it goes across `/` and `.`.
    """

    name: str
    run: bool


Piece: TypeAlias = Symbols | Hole


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        text: as it was written.
        pattern: what a key path must be.
        template: what it becomes.
    """

    text: str
    pattern: tuple[Piece, ...]
    template: tuple[Piece, ...]

    def apply(self, path: KeyPath) -> KeyPath | None:
        """The new key path; None where the pattern does not match.

        Raises:
            UsageError: the pattern can be read in two ways, or the key path is absurdly long.
        """
        symbols = _symbols(path)
        if len(symbols) > _LONGEST:
            raise UsageError(
                f"a key path of {len(symbols)} signs is too long for rules", path=render(path)[:80]
            )
        found = _readings(self.pattern, symbols)
        if not found:
            return None
        if len(found) > 1:
            raise UsageError(
                f"the rule {self.text!r} can be read in two ways",
                path=render(path),
                cure="put a sign that occurs nowhere else between the two names, or spell one of them out",
            )
        return _parts(tuple(symbol for piece in self.template for symbol in _filled(piece, found[0])))

    @property
    def inverse(self) -> Rule:
        """The rule read backwards."""
        before, _arrow, after = self.text.partition(ARROW)
        return Rule(f"{after.strip()} {ARROW} {before.strip()}", self.template, self.pattern)


def parse_rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """Read rules, each `pattern -> template`.

    Raises:
        UsageError: a text is no rule, or its two sides do not have the same names.
    """
    return tuple(_rule(text.strip()) for text in texts)


def renamed(paths: Iterable[KeyPath], rules: Sequence[Rule]) -> dict[KeyPath, KeyPath]:
    """What each key path becomes.

    Args:
        paths: of everything in a tree, tensors and others.
        rules: the first that matches counts; where none does, a key path stays.

    Raises:
        UsageError: a rule counts for no key path, or a key path can be read in two ways.
    """
    names: dict[KeyPath, KeyPath] = {}
    used: set[str] = set()
    for path in paths:
        names[path] = path
        for rule in rules:
            new = rule.apply(path)
            if new is not None:
                names[path] = new
                used.add(rule.text)
                break
    for rule in rules:
        if rule.text not in used:
            raise UsageError(
                f"the rule {rule.text!r} renames nothing: it matches no key path, or rules before it took them all",
                cure="`wherry inspect` lists the key paths; rules count in the order given",
            )
    return names


def inverse_rules(names: dict[KeyPath, KeyPath], rules: Sequence[Rule]) -> tuple[str, ...] | None:
    """The rules read backwards, where they alone give every key path of this tree back; else None.

    They do not where a key path that stayed looks like one that was renamed.
    """
    back = [rule.inverse for rule in rules]
    try:
        given = renamed(names.values(), back)
    except UsageError:
        return None
    whole = all(given[new] == old for old, new in names.items())
    return tuple(rule.text for rule in back) if whole else None


def _rule(text: str) -> Rule:
    before, arrow, after = text.partition(ARROW)
    if not arrow or ARROW in after or not before.strip() or not after.strip():
        raise UsageError(f"not a rule: {text!r}", cure=_CURE)
    pattern, template = _pieces(before.strip(), text), _pieces(after.strip(), text)
    ours, theirs = sorted(_holes(pattern)), sorted(_holes(template))
    if ours != theirs or len(set(ours)) < len(ours):
        raise UsageError(
            f"the rule {text!r} does not have the same names on both sides, each once: it would have no inverse",
            cure=_CURE,
        )
    return Rule(text, pattern, template)


def _holes(pieces: Iterable[Piece]) -> list[tuple[str, bool]]:
    return [(piece.name, piece.run) for piece in pieces if isinstance(piece, Hole)]


def _pieces(text: str, rule: str) -> tuple[Piece, ...]:
    """A side of a rule as literals and holes; no two holes touch."""
    pieces: list[Piece] = []
    for literal, hole in _tokens(text, rule):
        if literal:
            pieces.append(_literal(literal))
        if hole is not None:
            if pieces and isinstance(pieces[-1], Hole):
                raise UsageError(f"two names touch in {rule!r}: nothing says where one ends", cure=_CURE)
            pieces.append(_hole(hole, rule))
    return tuple(pieces)


def _tokens(text: str, rule: str) -> Iterable[tuple[str, str | None]]:
    """Literal text with the name in braces behind it, None at the end."""
    literal, place = "", 0
    while place < len(text):
        if text[place : place + 2] in ("{{", "}}"):
            literal, place = literal + text[place], place + 2
        elif text[place] == "{":
            end = text.find("}", place)
            if end < 0:
                raise UsageError(f"a brace without its partner in {rule!r}", cure=_CURE)
            yield literal, text[place + 1 : end]
            literal, place = "", end + 1
        elif text[place] == "}":
            raise UsageError(f"a brace without its partner in {rule!r}", cure=_CURE)
        else:
            literal, place = literal + text[place], place + 1
    yield literal, None


def _literal(text: str) -> Symbols:
    symbols: list[str] = []
    for place, part in enumerate(text.split("/")):
        symbols += [_SEPARATOR] if place else []
        symbols += parse(part)[0] if part else ""
    return tuple(symbols)


def _hole(text: str, rule: str) -> Hole:
    name = text.removesuffix("*")
    if not name.isidentifier():
        raise UsageError(f"{{{text}}} is no name in {rule!r}", cure=_CURE)
    return Hole(name, run=text.endswith("*"))


def _symbols(path: KeyPath) -> Symbols:
    symbols: list[str] = []
    for place, part in enumerate(path):
        symbols += [_SEPARATOR] if place else []
        symbols += part
    return tuple(symbols)


def _parts(symbols: Symbols) -> KeyPath:
    parts = [""]
    for symbol in symbols:
        if symbol == _SEPARATOR:
            parts.append("")
        else:
            parts[-1] += symbol
    return tuple(parts)


def _filled(piece: Piece, values: dict[str, Symbols]) -> Symbols:
    return values[piece.name] if isinstance(piece, Hole) else piece


def _readings(pieces: tuple[Piece, ...], text: Symbols) -> list[dict[str, Symbols]]:
    """At most two ways to read a text: for each place in it what the pieces from there on can be."""
    after: dict[int, list[dict[str, Symbols]]] = {len(text): [{}]}
    for piece in reversed(pieces):
        after = (
            _starts_of_hole(piece, text, after) if isinstance(piece, Hole) else _starts(piece, text, after)
        )
    return after.get(0, [])


def _starts(
    literal: Symbols, text: Symbols, after: dict[int, list[dict[str, Symbols]]]
) -> dict[int, list[dict[str, Symbols]]]:
    size = len(literal)
    return {
        end - size: found for end, found in after.items() if end >= size and text[end - size : end] == literal
    }


def _starts_of_hole(
    hole: Hole, text: Symbols, after: dict[int, list[dict[str, Symbols]]]
) -> dict[int, list[dict[str, Symbols]]]:
    starts: dict[int, list[dict[str, Symbols]]] = {}
    for end, found in after.items():
        for start in range(end - 1, -1, -1):
            if not hole.run and text[start] in _STOPS:
                break
            known = starts.setdefault(start, [])
            known += [{**one, hole.name: text[start:end]} for one in found[: 2 - len(known)]]
    return starts
