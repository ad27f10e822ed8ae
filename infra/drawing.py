"""Draws faults: changes of one expression in a function, by chance and the same for the same seed.

The places come from the syntax trees of all product code; the operators are those of mutation testing: a comparison is
negated, a boundary moved, a truth value or `and` changed, a number counted up, a call left out, two arguments swapped.
Each room gets faults by the square root of its places, at least one, so that small rooms count too.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

PRODUCT = ("wherry", "integrations", "tasks", "flows")
_DEEP = ("integrations/containers", "integrations/formats")  # whose rooms are a level deeper
_NEGATED: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
    ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">",
}  # fmt: skip
_MOVED: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_TYPED = frozenset({"isinstance", "issubclass"})  # which fail at once with swapped arguments
Place: TypeAlias = "tuple[int, int]"  # the bytes of an expression in its file


@dataclass(frozen=True)
class Fault:
    """One change.

    Attributes:
        file: path of the file, relative to the checkout.
        line: number of the line.
        operator: which kind of change.
        old: the text of the expression.
        new: the text that replaces it.
        place: the bytes of the old text in the file.
    """

    file: str
    line: int
    operator: str
    old: str
    new: str
    place: Place

    @property
    def room(self) -> str:
        """The room of its file."""
        return room_of(self.file)

    def apply(self, text: str) -> str:
        """The text of the file with the change."""
        data = text.encode()
        first, last = self.place
        return (data[:first] + self.new.encode() + data[last:]).decode()


def room_of(file: str) -> str:
    """The package of a file: `wherry/mover`, `integrations/formats/dcp`, `flows`."""
    parts = file.split("/")
    depth = 3 if file.startswith(_DEEP) else 2
    return "/".join(parts[: min(depth, len(parts) - 1)])


def draw_faults(root: Path, seed: int, count: int) -> list[Fault]:
    """Faults over all rooms; no two of them overlap.

    Args:
        root: the checkout.
        seed: of the random numbers.
        count: how many.
    """
    rooms: dict[str, list[Fault]] = {}
    for top in PRODUCT:
        for path in sorted((root / top).rglob("*.py")):
            if not any(parent.is_symlink() for parent in (path, *path.parents)):
                for fault in faults_of(path.relative_to(root).as_posix(), path.read_text()):
                    rooms.setdefault(fault.room, []).append(fault)
    generator = random.Random(seed)
    return sorted(
        (
            fault
            for room, share in _shares(rooms, count).items()
            for fault in _choose(rooms[room], share, generator)
        ),
        key=lambda fault: (fault.file, fault.place),
    )


def faults_of(file: str, text: str) -> Iterator[Fault]:
    """Every fault of a file.

    Args:
        file: path of the file.
        text: what it holds.
    """
    data, starts = text.encode(), [0]
    for line in text.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)

    def place(node: ast.expr) -> Place:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def source(node: ast.expr) -> str:
        first, last = place(node)
        return data[first:last].decode()

    for node, dropped in _expressions(ast.parse(text)):
        if node.lineno == node.end_lineno:
            for operator, new in _changes(node, source, dropped=dropped):
                yield Fault(file, node.lineno, operator, source(node), new, place(node))


def _expressions(tree: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """The expressions in bodies of functions, and whether each is a statement of its own."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in node.body:
                yield from _within(statement)


def _within(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.JoinedStr, ast.pattern)):
        return  # functions within functions are walked by themselves
    if isinstance(node, ast.expr):
        yield node, False
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node.value, True
    for field, value in ast.iter_fields(node):
        if field != "annotation":
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _within(child)


def _changes(
    node: ast.expr, source: Callable[[ast.expr], str], *, dropped: bool
) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            for name, words in (("comparison", _NEGATED), ("boundary", _MOVED)):
                if type(operator) in words:
                    yield name, f"{source(left)} {words[type(operator)]} {source(right)}"
        case ast.BoolOp(op=operator, values=values):
            word = " or " if isinstance(operator, ast.And) else " and "
            yield "boolean", f"({word.join(source(value) for value in values)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "boolean", f"bool({source(operand)})"
        case ast.Constant(value=int() as value):
            yield ("boolean", str(not value)) if isinstance(value, bool) else ("constant", str(value + 1))
        case ast.Call() if dropped:
            yield "dropped call", "None"
        case ast.Call(args=[first, second, *_]) if source(first) != source(second):
            starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            if source(node.func) not in _TYPED and not starred:
                yield (
                    "swapped arguments",
                    _swap(node, source(node.func), source(first), source(second), source),
                )
        case _:
            return


def _swap(call: ast.Call, function: str, first: str, second: str, source: Callable[[ast.expr], str]) -> str:
    inside = source(call)[len(function) :]
    swapped = inside.replace(first, "\0", 1).replace(second, first, 1)
    return function + swapped.replace("\0", second, 1)


def _shares(rooms: dict[str, list[Fault]], count: int) -> dict[str, int]:
    """How many faults each room gets: the largest remainders are rounded up."""
    weights = {room: len(faults) ** 0.5 for room, faults in rooms.items()}
    rest, total = max(count - len(rooms), 0), sum(weights.values())
    exact = {room: rest * weight / total for room, weight in weights.items()}
    shares = {room: int(number) for room, number in exact.items()}
    missing = rest - sum(shares.values())
    for room in sorted(exact, key=lambda room: shares[room] - exact[room])[:missing]:
        shares[room] += 1
    return {room: share + 1 for room, share in shares.items()}


def _choose(faults: Sequence[Fault], count: int, generator: random.Random) -> list[Fault]:
    """Faults of a room: an operator by chance, then one of its places; none overlaps another."""
    by: dict[str, list[Fault]] = {}
    for fault in faults:
        by.setdefault(fault.operator, []).append(fault)
    chosen: list[Fault] = []
    while by and len(chosen) < count:
        operator = generator.choice(sorted(by))
        fault = by[operator].pop(generator.randrange(len(by[operator])))
        if not by[operator]:
            del by[operator]
        if not any(_overlap(fault, other) for other in chosen):
            chosen.append(fault)
    return chosen


def _overlap(first: Fault, second: Fault) -> bool:
    return first.file == second.file and first.place[0] < second.place[1] and second.place[0] < first.place[1]
