"""The rules of the house, held by a machine: direction of imports, lightness, sizes, docstrings, no leftovers."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.support.house import MODULES, ROOMS, ROOT, SCRIPTS, SOURCES, label

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEAVY = {"prefect", "mlflow", "torch", "jax", "tensorstore", "orbax", "flax", "transformers", "sqlalchemy"}
TERMINAL = {"rich", "click"}
SERVICES = {"mlflow", "prefect"}  # rooms of integrations that are imported only where their library is there


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def is_roof(path: Path) -> bool:
    roof = any(path.is_relative_to(ROOT / "wherry" / room) for room in ("cli", "console"))
    return roof or path == ROOT / "wherry" / "__main__.py"


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def names_imported(node: ast.AST, path: Path) -> Iterator[str]:
    """Dotted names that one statement imports; `from wherry import flows` counts as wherry.flows."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{label(path)}:{node.lineno}: relative import"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when the module is imported: not the bodies of functions, not `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            yield from (found for other in child.orelse for found in (other, *at_import_time(other)))
            continue
        yield child
        yield from at_import_time(child)


def test_the_lists_hold_the_rooms() -> None:
    assert {room_of(path) for path in MODULES} == set(ROOMS)
    assert ROOT / "wherry" / "errors.py" in MODULES
    assert all((ROOT / "wherry" / room).is_symlink() for room in ROOMS[1:])


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_imports_go_one_way(path: Path) -> None:
    if is_roof(path):
        return
    allowed = ROOMS[: ROOMS.index(room_of(path)) + 1]
    for node in ast.walk(tree_of(path)):
        for name in names_imported(node, path):
            parts = name.split(".")
            if parts[0] == "wherry":
                target = parts[1] if len(parts) > 1 and parts[1] in ROOMS[1:] else "wherry"
                assert target in allowed, f"{label(path)} imports {name}"
                assert parts[1:2] != ["cli"], f"{name} is the roof"


@pytest.mark.parametrize("path", [path for path in MODULES if room_of(path) == "wherry"], ids=label)
def test_only_the_registry_names_other_rooms_in_strings(path: Path) -> None:
    if label(path) in ("wherry/core/services.py", "wherry/formats/registry.py") or is_roof(path):
        return
    words = [node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant)]
    dotted = [
        word
        for word in words
        if isinstance(word, str) and re.match(r"wherry\.(integrations|tasks|flows)\b\S*$", word)
    ]
    assert not dotted


@pytest.mark.parametrize("path", [path for path in MODULES if room_of(path) in ROOMS[:2]], ids=label)
def test_engine_and_integrations_import_nothing_heavy(path: Path) -> None:
    forbidden = HEAVY | TERMINAL
    if path.parent in (ROOT / "wherry" / "ledger", ROOT / "wherry" / "lineage"):
        forbidden = forbidden - {"sqlalchemy"}
    if is_roof(path):
        forbidden = forbidden - TERMINAL
    if path.parent.name in SERVICES:
        forbidden = forbidden - {path.parent.name}
    for node in at_import_time(tree_of(path)):
        for name in names_imported(node, path):
            assert name.split(".")[0] not in forbidden, f"{label(path)} imports {name} at its top"


LOAD = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
if "wherry.formats.registry" in sys.modules:
    sys.modules["wherry.formats.registry"].formats()
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


def loaded_by(*modules: str) -> set[str]:
    command = [sys.executable, "-c", LOAD, json.dumps(modules)]
    return set(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def test_the_door_loads_the_standard_library_alone() -> None:
    assert not loaded_by("wherry") & (HEAVY | TERMINAL | {"numpy", "fsspec", "ml_dtypes"})


def test_the_engine_and_all_formats_load_nothing_heavy() -> None:
    inside = [
        path.relative_to(ROOT) for path in MODULES if room_of(path) == "wherry" and path.stem != "__init__"
    ]
    engine = [".".join(path.with_suffix("").parts) for path in inside]
    found = loaded_by(*engine)
    assert "sqlalchemy" in found, "the check itself must see what is loaded"
    assert not found & (HEAVY - {"sqlalchemy"} | {"numpy"}), "bytes that lie raw are moved without any"


@pytest.mark.parametrize("path", SOURCES + SCRIPTS, ids=label)
def test_files_say_why_they_exist(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), f"{label(path)} does not say why it exists"


TESTS = [path for path in SOURCES if path.is_relative_to(ROOT / "tests")]


@pytest.mark.parametrize("path", TESTS, ids=label)
def test_what_tests_share_lies_in_support(path: Path) -> None:
    """No test imports from another, and none of our own modules is one that may be absent."""
    for node in ast.walk(tree_of(path)):
        for name in names_imported(node, path):
            assert not re.match(r"tests\.(?!support\b)", name), f"{label(path)} imports {name}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("importorskip"):
            asked = ast.unparse(node.args[0])
            assert not re.match(r"f?['\"](wherry|tests)\b", asked), (
                f"{label(path)}:{node.lineno} skips {asked}"
            )


def test_tests_lie_in_rooms() -> None:
    assert {path.name for path in TESTS if path.parent == ROOT / "tests"} == {"conftest.py"}
    stray = [
        label(path)
        for path in TESTS
        if path.parts[len(ROOT.parts) + 1] != "support" and not path.name.startswith(("test_", "conftest"))
    ]
    assert not stray


def texts() -> list[Path]:
    """Every text file that is, or is about to be, in the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    names = listed.stdout.split("\0") if listed.returncode == 0 else map(label, SOURCES + SCRIPTS)
    paths = [ROOT / name for name in names if name]
    kinds = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ""}
    return [path for path in paths if path.is_file() and not path.is_symlink() and path.suffix in kinds]


# Written in halves, so that this file does not hold what it looks for.
LEFTOVER = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b")
MACHINE = re.compile(
    r"(?<![\w.])(/wo" r"rk/|/tmp/e" r"nv\b|/opt/(wheels|py" r"pi)|/ro" r"ot/|py" r"pi\.org|pythonhos" r"ted)"
)


@pytest.mark.parametrize("path", texts(), ids=label)
def test_no_leftovers_and_nothing_of_one_machine(path: Path) -> None:
    text = path.read_text()
    assert not LEFTOVER.search(text)
    assert not MACHINE.search(text)


# The check of a bundle is copied into each one, and needs the standard library alone; it has limits of its own.
JSON_ROOMS = ("wherry/text/", "wherry/auditor/check.py")
PARSERS = {"load", "loads", "JSONDecoder", "decoder", "scanner"}


def json_parsers(tree: ast.Module) -> Iterator[str]:
    """Where a module uses a parser of the library json."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in PARSERS and ast.unparse(node.value) == "json":
            yield f"{node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "json":
            names = [alias.name for alias in node.names]
            if node.module != "json" or PARSERS & set(names):
                yield f"{node.lineno}: {ast.unparse(node)}"


def shown_errors(tree: ast.Module) -> Iterator[str]:
    """Where a module shows the repr of an exception, which holds whatever the exception was given."""
    caught = {node.name for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)} | {
        "error",
        "exception",
    }
    for node in ast.walk(tree):
        shown = None
        if isinstance(node, ast.FormattedValue) and node.conversion == ord("r"):
            shown = node.value
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("repr", "ascii")
        ):
            shown = node.args[0] if node.args else None
        if isinstance(shown, ast.Name) and shown.id in caught:
            yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_json_is_parsed_in_one_room_and_errors_are_described_in_one(path: Path) -> None:
    """`wherry.text` bounds what a text becomes; `wherry.errors.describe_exception` how long an error is."""
    if not label(path).startswith(JSON_ROOMS):
        assert list(json_parsers(tree_of(path))) == [], f"use wherry.text.json_values in {label(path)}"
    if label(path) != "wherry/errors.py":
        assert list(shown_errors(tree_of(path))) == [], f"use describe_exception in {label(path)}"


PARSED = (
    "import json\njson.loads(x)",
    "json.load(x)",
    "from json import loads",
    "f = json.loads",
    "json.JSONDecoder()",
    "json.decoder.JSONDecoder()",
    "from json.decoder import JSONDecoder",
)
SHOWN = ("f'{error!r}'", "try:\n    x\nexcept E as found:\n    f'{found!r:.9}'", "repr(error)")


def test_the_rule_sees_each_form_of_a_parser_and_of_a_shown_error() -> None:
    assert all(list(json_parsers(ast.parse(text))) for text in PARSED)
    assert all(list(shown_errors(ast.parse(text))) for text in SHOWN)
    fine = ast.parse("json.dumps(x)\nfrom json import dumps\nf'{name!r} {error}'")
    assert [*json_parsers(fine), *shown_errors(fine)] == []
