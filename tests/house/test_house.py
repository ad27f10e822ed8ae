"""The rules of the house, held by a machine: direction of imports, lightness, sizes, docstrings, no leftovers."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.house import MODULES, ROOMS, ROOT, SCRIPTS, SOURCES, label

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


def test_imports_go_one_way() -> None:
    wrong = []
    for path in MODULES:
        allowed = ROOMS[: ROOMS.index(room_of(path)) + 1]
        for node in () if is_roof(path) else ast.walk(tree_of(path)):
            for name in names_imported(node, path):
                parts = name.split(".")
                if parts[0] == "wherry":
                    target = parts[1] if len(parts) > 1 and parts[1] in ROOMS[1:] else "wherry"
                    if target not in allowed or parts[1:2] == ["cli"]:  # cli is the roof
                        wrong.append(f"{label(path)} imports {name}")
    assert not wrong


def test_only_the_registry_names_other_rooms_in_strings() -> None:
    dotted = [
        f"{label(path)}:{node.lineno}: {node.value}"
        for path in MODULES
        if room_of(path) == "wherry" and not is_roof(path)
        if label(path) not in ("wherry/core/services.py", "wherry/formats/registry.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.match(r"wherry\.(integrations|tasks|flows)\b\S*$", node.value)
    ]
    assert not dotted


def forbidden_at_the_top_of(path: Path) -> set[str]:
    forbidden = HEAVY | TERMINAL
    if is_roof(path):
        forbidden = forbidden - TERMINAL
    if path.parent.name in SERVICES:
        forbidden = forbidden - {path.parent.name}
    return forbidden


def test_engine_and_integrations_import_nothing_heavy() -> None:
    heavy = [
        f"{label(path)} imports {name} at its top"
        for path in MODULES
        if room_of(path) in ROOMS[:2]
        for node in at_import_time(tree_of(path))
        for name in names_imported(node, path)
        if name.split(".")[0] in forbidden_at_the_top_of(path)
    ]
    assert not heavy


LOAD = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
if "wherry.formats.registry" in sys.modules:
    list(sys.modules["wherry.formats.registry"].formats().values())
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
    assert "sqlite3" in found, "the check itself must see what is loaded"
    assert not found & (HEAVY | {"numpy"}), "bytes that lie raw are moved without any"


def test_files_say_why_they_exist() -> None:
    assert not [label(path) for path in SOURCES + SCRIPTS if not ast.get_docstring(tree_of(path))]


TESTS = [path for path in SOURCES if path.is_relative_to(ROOT / "tests")]


def test_what_tests_share_lies_in_support() -> None:
    """No test imports from another, and none of our own modules is one that may be absent."""
    wrong = []
    for path in TESTS:
        for node in ast.walk(tree_of(path)):
            imported = [
                name for name in names_imported(node, path) if re.match(r"tests\.(?!support\b)", name)
            ]
            wrong += [f"{label(path)} imports {name}" for name in imported]
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("importorskip"):
                module = ast.unparse(node.args[0])
                if re.match(r"f?['\"](wherry|tests)\b", module):
                    wrong.append(f"{label(path)}:{node.lineno} skips without {module}")
    assert not wrong


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


def test_no_leftovers_and_nothing_of_one_machine() -> None:
    wrong = [
        f"{label(path)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if LEFTOVER.search(line) or MACHINE.search(line)
    ]
    assert not wrong


# The check of a bundle is copied into each one, and needs the standard library alone; it has limits of its own.
# How wherry was installed is read by its errors, which stand below all rooms.
JSON_ROOMS = ("wherry/core/", "wherry/prove/check.py", "wherry/installation.py")
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


def test_json_is_parsed_in_one_room_and_errors_are_described_in_one() -> None:
    """`wherry.core.limits` bounds what a text becomes; `wherry.errors.describe_exception` how long an error is."""
    wrong = []
    for path in MODULES:
        if not label(path).startswith(JSON_ROOMS):
            wrong += [
                f"{label(path)}:{found}: use wherry.core.json_document"
                for found in json_parsers(tree_of(path))
            ]
        if label(path) != "wherry/errors.py":
            wrong += [
                f"{label(path)}:{found}: use describe_exception" for found in shown_errors(tree_of(path))
            ]
    assert not wrong


def test_methods_of_dataclasses_are_made_late() -> None:
    """Those of the standard library would be a third of the start of a command (decision 069)."""
    exempt = {
        "wherry/core/lazy_dataclass.py",
        "wherry/cures.py",  # below the room of the other decorator
        "wherry/prove/check.py",  # runs alone, in a bundle
    }
    wrong = [
        label(path)
        for path in MODULES
        if label(path) not in exempt
        for node in ast.walk(tree_of(path))
        if "dataclasses.dataclass" in names_imported(node, path)
    ]
    assert not wrong, "import it from wherry.core.lazy_dataclass"
