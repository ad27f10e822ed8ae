"""Renames: invertible rules that rename key paths.

    layers.{n}.w -> blocks/{n}/kernel          a piece: text between `/` and `.`, never empty
    model/{rest*} -> params/{rest*}            a run: any text, across `/` and `.`, never empty
    a~1b -> {{a}}                              printed key paths; `{{` and `}}` are literal braces

There are no regular expressions. Both sides have the same names, each once, so that the rule read backwards is its
inverse. The first rule that matches a key path is applied, a key path that no rule matches is kept, and every rule must
be applied at least once. A key path that a rule matches in two ways is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from wherry.core.keypath import KeyPath, parse, render
from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Argument, Command, Cure
from wherry.errors import UsageError

ARROW = "->"
_SEPARATOR = "//"  # between the symbols of two parts; a symbol of a part is one character
_STOPS = frozenset((_SEPARATOR, "."))
_LONGEST = 4096  # matching takes time that grows with the square of the length
_CURE = Cure(
    "write `{}`, for example `{}`",
    Argument("rename", "PATTERN -> TEMPLATE"),
    Argument("rename", "layers.{n}.w -> blocks/{n}/kernel"),
)

Symbols: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hole:
    """A name in braces.

    Attributes:
        name: its name on both sides of a rule.
        run: whether it matches `/` and `.` too.
    """

    name: str
    run: bool


Piece: TypeAlias = Symbols | Hole


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        text: the rule as it was written.
        pattern: what a key path must match.
        template: what the key path becomes.
    """

    text: str
    pattern: tuple[Piece, ...]
    template: tuple[Piece, ...]

    def apply(self, path: KeyPath) -> KeyPath | None:
        """The new key path; None if the pattern does not match.

        Raises:
            UsageError: the pattern matches in two ways, or the key path is too long.
        """
        symbols = _symbols(path)
        if len(symbols) > _LONGEST:
            raise UsageError(
                f"key path of {len(symbols)} characters exceeds the limit of {_LONGEST} for rename rules",
                path=render(path)[:80],
            )
        found = _readings(self.pattern, symbols)
        if not found:
            return None
        if len(found) > 1:
            raise UsageError(
                f"ambiguous rename rule {self.text!r}: it matches this key path in two ways",
                path=render(path),
                cure="put a character that occurs nowhere else between the two names, or spell one of them out",
            )
        filled = (found[0][piece.name] if isinstance(piece, Hole) else piece for piece in self.template)
        return _parts(tuple(symbol for symbols in filled for symbol in symbols))

    @property
    def inverse(self) -> Rule:
        """The rule read backwards."""
        before, _arrow, after = self.text.partition(ARROW)
        return Rule(f"{after.strip()} {ARROW} {before.strip()}", self.template, self.pattern)


def parse_rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """Parse rules, each `pattern -> template`.

    Raises:
        UsageError: a text is not a rule, or its two sides do not have the same names.
    """
    return tuple(_rule(text.strip()) for text in texts)


def rename_paths(paths: Iterable[KeyPath], rules: Sequence[Rule]) -> dict[KeyPath, KeyPath]:
    """Key path → new key path.

    Args:
        paths: of everything in a tree, tensors and others.
        rules: the first rule that matches is applied; a key path that no rule matches is kept.

    Raises:
        UsageError: a rule is applied to no key path, or matches a key path in two ways.
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
                f"rename rule {rule.text!r} matches no remaining key path",
                cure=Cure(
                    "run {} to list the key paths; rules are applied in the order given", Command("inspect")
                ),
            )
    return names


def inverse_rules(names: dict[KeyPath, KeyPath], rules: Sequence[Rule]) -> tuple[str, ...] | None:
    """The inverse rules, if they alone restore every key path of this tree; otherwise None.

    They do not if a key path that was kept looks like one that was renamed.
    """
    back = [rule.inverse for rule in rules]
    try:
        given = rename_paths(names.values(), back)
    except UsageError:
        return None
    whole = all(given[new] == old for old, new in names.items())
    return tuple(rule.text for rule in back) if whole else None


def _rule(text: str) -> Rule:
    before, arrow, after = text.partition(ARROW)
    if not arrow or ARROW in after or not before.strip() or not after.strip():
        raise UsageError(f"invalid rename rule {text!r}", cure=_CURE)
    pattern, template = _pieces(before.strip(), text), _pieces(after.strip(), text)
    pattern_holes, template_holes = sorted(_holes(pattern)), sorted(_holes(template))
    if pattern_holes != template_holes or len(set(pattern_holes)) < len(pattern_holes):
        raise UsageError(
            f"rename rule {text!r} has no inverse: both sides must have the same names, each once",
            cure=_CURE,
        )
    return Rule(text, pattern, template)


def _holes(pieces: Iterable[Piece]) -> list[tuple[str, bool]]:
    return [(piece.name, piece.run) for piece in pieces if isinstance(piece, Hole)]


def _pieces(text: str, rule: str) -> tuple[Piece, ...]:
    """A side of a rule as literals and holes; two holes must not be adjacent."""
    pieces: list[Piece] = []
    for literal, hole in _tokens(text, rule):
        if literal:
            pieces.append(_literal(literal))
        if hole is not None:
            if pieces and isinstance(pieces[-1], Hole):
                raise UsageError(
                    f"adjacent names in rename rule {rule!r}: a literal must separate them", cure=_CURE
                )
            name = hole.removesuffix("*")
            if not name.isidentifier():
                raise UsageError(f"invalid name {{{hole}}} in rename rule {rule!r}", cure=_CURE)
            pieces.append(Hole(name, run=hole.endswith("*")))
    return tuple(pieces)


def _tokens(text: str, rule: str) -> Iterable[tuple[str, str | None]]:
    """Literal text and the name in braces that follows it; None at the end."""
    literal, place = "", 0
    while place < len(text):
        if text[place : place + 2] in ("{{", "}}"):
            literal, place = literal + text[place], place + 2
        elif text[place] == "{":
            end = text.find("}", place)
            if end < 0:
                raise UsageError(f"unmatched brace in rename rule {rule!r}", cure=_CURE)
            yield literal, text[place + 1 : end]
            literal, place = "", end + 1
        elif text[place] == "}":
            raise UsageError(f"unmatched brace in rename rule {rule!r}", cure=_CURE)
        else:
            literal, place = literal + text[place], place + 1
    yield literal, None


def _literal(text: str) -> Symbols:
    symbols: list[str] = []
    for place, part in enumerate(text.split("/")):
        symbols += [_SEPARATOR] if place else []
        symbols += parse(part)[0] if part else ""
    return tuple(symbols)


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


def _readings(pieces: tuple[Piece, ...], text: Symbols) -> list[dict[str, Symbols]]:
    """At most two ways to match a text: for each position, the possible values of the pieces from there on."""
    after: dict[int, list[dict[str, Symbols]]] = {len(text): [{}]}
    for piece in reversed(pieces):
        if isinstance(piece, Hole):
            after = _starts_of_hole(piece, text, after)
            continue
        after = {
            end - len(piece): found
            for end, found in after.items()
            if end >= len(piece) and text[end - len(piece) : end] == piece
        }
    return after.get(0, [])


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
