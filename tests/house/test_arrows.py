"""The walls of the engine: which room may import from which, no circle of files, and rooms of a size to be known."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("flows", "tasks", "integrations")

# Room → rooms that it may import, from the ground to the roof: each imports only from rooms above its own line.
# Imports inside functions and for types count too. What a room below needs of a room above goes through the rows
# of `wherry/core/services.py`.
ROOMS: Mapping[str, str] = {
    "version": "",
    "errors": "version",
    "core": "errors",
    "runtime": "errors core",
    "storage": "errors core runtime",
    "staging": "errors core storage",
    "formats": "errors core storage",
    "format": "formats",
    "tree": "errors core formats",
    "layout": "errors core formats",
    "families": "errors core storage formats layout",
    "mover": "errors core runtime storage staging formats",
    "view": "errors core runtime storage formats tree layout families mover",
    "config": "errors core storage formats",
    "ledger": "errors version core storage formats config",
    "converter": "errors version core runtime storage staging formats tree mover view ledger",
    "verifier": "errors core runtime storage staging formats tree mover view ledger converter",
    "live": "errors core runtime storage staging formats tree mover view ledger converter",
    "models": "errors core storage staging formats mover config ledger converter verifier",
    "routes": "errors version core runtime storage staging formats tree families view config ledger converter"
    " verifier models",
    "lineage": "errors version core runtime storage formats config ledger converter routes",
    "auditor": "errors version core runtime storage formats tree mover config ledger converter verifier",
    "watch": "errors core storage formats config ledger routes",
    "testing": "errors core runtime storage formats mover converter",
    "cli": "errors version core runtime storage staging formats tree families view config ledger converter verifier"
    " models routes lineage auditor watch",
}
FEWEST, MOST = 3, 16


@cache
def modules() -> dict[str, Path]:
    """Every module of the product by its import name; `wherry.flows` and its like lie beside the engine."""
    found: dict[str, Path] = {}
    for folder in ("wherry", *OTHERS):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if folder == "wherry" and parts[1] in OTHERS:
                continue  # the links by which a checkout is importable
            name = ".".join(parts if folder == "wherry" else ("wherry", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


@cache
def imports(name: str) -> dict[str, int]:
    """The modules of ours that a module imports, anywhere in it, each with a line."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(modules()[name].read_text())):
        for dotted in imported(node):
            target = dotted if dotted in modules() else dotted.rpartition(".")[0]
            if target in modules() and target != name:
                found[target] = getattr(node, "lineno", 0)
    return found


def imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


ENGINE = sorted(name for name in modules() if room(name) not in ("", *OTHERS))


def test_the_table_has_every_room_and_goes_one_way() -> None:
    assert {room(name) for name in ENGINE} == set(ROOMS)
    below: set[str] = set()
    for one, allowed in ROOMS.items():
        assert set(allowed.split()) <= below, f"{one} is listed before a room that it imports"
        below.add(one)


@pytest.mark.parametrize("name", ENGINE)
def test_a_module_imports_from_the_rooms_that_the_table_allows(name: str) -> None:
    own = room(name)
    allowed = {own, *ROOMS[own].split(), *(OTHERS if own == "cli" else ())}
    for target, line in imports(name).items():
        assert room(target), f"{name}:{line} imports the door"
        assert room(target) in allowed, f"{name}:{line} imports {target}"


def test_no_arrow_of_the_table_is_unused() -> None:
    used = {(room(name), room(target)) for name in ENGINE for target in imports(name)}
    unused = [
        (one, other)
        for one, allowed in ROOMS.items()
        for other in allowed.split()
        if (one, other) not in used
    ]
    assert not unused


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not list(circles({name: set(imports(name)) for name in modules()}))


def test_the_check_of_circles_sees_one() -> None:
    assert list(circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == [["a", "b", "c"]]


def circles(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """What remains when, again and again, the modules without imports and those that nobody imports are taken away."""
    rest = {name: set(targets) for name, targets in graph.items()}
    while rest:
        wanted = set[str]().union(*rest.values())
        ended = {name for name, targets in rest.items() if not targets & set(rest) or name not in wanted}
        if not ended:
            yield sorted(rest)
            return
        rest = {name: targets - ended for name, targets in rest.items() if name not in ended}


def test_rooms_are_of_a_size_to_be_known() -> None:
    sizes = Counter(
        room(name) for name in ENGINE if modules()[name].stem != "__init__" and name.count(".") > 1
    )
    assert {one: size for one, size in sizes.items() if not FEWEST <= size <= MOST} == {}


def test_the_top_of_the_engine_is_the_door() -> None:
    files = {path.name for path in (ROOT / "wherry").glob("*.py")}
    assert files == {"__init__.py", "errors.py", "version.py", "format.py"}


@pytest.mark.parametrize("one", [name for name in ROOMS if name not in ("version", "errors", "format")])
def test_a_room_defines_its_nouns(one: str) -> None:
    tree = ast.parse((ROOT / "wherry" / one / "__init__.py").read_text())
    assert len(ast.get_docstring(tree) or "") > 50


def test_plug_ins_find_the_format_row_at_its_former_place() -> None:
    with pytest.warns(DeprecationWarning, match=r"wherry\.formats\.format"):
        module = importlib.import_module("wherry.format")
    assert module.Format is importlib.import_module("wherry.formats.format").Format


def test_the_readme_draws_the_rooms_in_their_order() -> None:
    _, _, house = (ROOT / "README.md").read_text().partition("## The house")
    drawn = [line.split()[0] for line in house.splitlines() if line.startswith("    ") and "/ " not in line]
    assert drawn == [one for one in ROOMS if one not in ("version", "format")]
