"""The walls of the house: which room may import from which, no circle of files, and rooms of a size to be known."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("flows", "tasks", "integrations")

# Room → rooms that it may import, from the ground to the roof: each imports only from rooms above its own line.
# Imports inside functions and for types count too. What a room below needs of a room above goes through the rows
# of `wherry/core/services.py`.
ROOMS: Mapping[str, str] = {
    "version": "",
    "installation": "",
    "cures": "",
    "credentials": "",
    "errors": "version installation cures credentials",
    "kernels": "",
    "core": "cures credentials errors kernels",
    "store": "installation cures credentials errors core",
    "target": "cures errors core store",
    "formats": "cures errors core store target",
    "layout": "cures errors kernels core formats",
    "families": "cures errors core store formats layout",
    "mover": "cures errors kernels core store target formats",
    "transform": "cures errors kernels core store formats layout families mover",
    "config": "cures errors core store formats",
    "ledger": "version cures credentials errors core store formats config",
    "converter": "version cures credentials errors kernels core store target formats layout mover"
    " transform config ledger",
    "workers": "version installation cures errors core store target formats mover config ledger converter",
    "prove": "version cures errors core store target formats layout mover transform config ledger"
    " converter workers",
    "live": "cures errors core store target formats layout mover transform ledger converter",
    "models": "cures credentials errors core store target formats config ledger prove",
    "nightly": "version installation cures credentials errors kernels core store target formats"
    " families transform config ledger workers prove models",
    "trace": "version cures credentials errors core store formats config ledger converter nightly",
    "testing": "errors core store formats mover converter",
    "cli": "version cures credentials errors core store target formats families transform config"
    " ledger converter workers prove models nightly trace",
    "__main__": "core cli",
}
# The same inside `integrations`: containers know no format, and a format knows another only where it is named here.
CONTAINERS: Mapping[str, str] = {
    "flat": "",
    "zip": "",
    "ocdbt": "",
    "safetensors": "flat",
    "msgpack": "flat",
    "npz": "flat zip",
    "pickle": "flat zip",
    "torch": "flat zip pickle",
    "zarr": "flat ocdbt",
    "orbax": "flat msgpack ocdbt zarr",
}
FORMATS: Mapping[str, str] = {
    "dcp": "huggingface",
    "dcp_safetensors": "dcp huggingface",
    "lingua": "dcp huggingface meta",
    "megatron": "dcp",
    "meta": "huggingface",
    "torchtitan": "dcp",
    "vllm": "huggingface",
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the product by its import name; `wherry.flows` and the like are outside the engine."""
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


def test_a_module_imports_from_the_rooms_that_the_table_allows() -> None:
    wrong = []
    for name in ENGINE:
        own = room(name)
        allowed = {own, *ROOMS[own].split(), *(OTHERS if own == "cli" else ())}
        wrong += [
            f"{name}:{line} imports {target}"  # also the door, which is no room
            for target, line in imports(name).items()
            if room(target) not in allowed
        ]
    assert not wrong


def wing(name: str) -> tuple[str, str]:
    """The wing and room of a module outside the engine: ("containers", "zarr"), ("formats", "t5x"), ("mlflow", "")."""
    parts = name.split(".")[2:]
    return (
        (parts[0], parts[1]) if parts[0] in ("containers", "formats") and len(parts) > 1 else (parts[0], "")
    )


OUTSIDE = sorted(name for name in modules() if name.startswith("wherry.integrations."))


def test_the_table_of_containers_goes_one_way() -> None:
    below: set[str] = set()
    for one, allowed in CONTAINERS.items():
        assert set(allowed.split()) <= below
        below.add(one)
    found = {wing(name)[1] for name in OUTSIDE if wing(name)[0] == "containers"} - {""}
    assert found == set(CONTAINERS)


def test_formats_stand_on_containers_and_containers_on_the_engine() -> None:
    wrong = []
    for name in OUTSIDE:
        kind, own = wing(name)
        table = CONTAINERS if kind == "containers" else FORMATS
        for target, line in imports(name).items() if kind in ("containers", "formats") else ():
            if target.startswith("wherry.integrations."):
                where, place = wing(target)
                allowed = {own, *table.get(own, "").split()} if where == kind else set(CONTAINERS)
                if where not in ("containers", kind) or place not in allowed:
                    wrong.append(f"{name}:{line} imports {target}")
    assert not wrong


def test_no_arrow_outside_the_engine_is_unused() -> None:
    used = {(wing(name), wing(target)) for name in OUTSIDE for target in imports(name) if target in OUTSIDE}
    tables = {"containers": CONTAINERS, "formats": FORMATS}
    unused = [
        (kind, one, other)
        for kind, table in tables.items()
        for one, allowed in table.items()
        for other in allowed.split()
        if ((kind, one), (kind, other)) not in used
    ]
    assert not unused


@pytest.mark.parametrize("one", CONTAINERS)
def test_a_container_says_what_it_is(one: str) -> None:
    tree = ast.parse((ROOT / "integrations" / "containers" / one / "__init__.py").read_text())
    assert len(ast.get_docstring(tree) or "") > 40


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


def test_the_top_of_the_engine_is_the_door() -> None:
    files = {path.name for path in (ROOT / "wherry").glob("*.py")}
    assert files == {
        "__init__.py",
        "credentials.py",
        "cures.py",
        "errors.py",
        "version.py",
        "installation.py",
        "__main__.py",
    }


@pytest.mark.parametrize(
    "one",
    [
        name
        for name in ROOMS
        if name not in ("version", "installation", "cures", "credentials", "errors", "__main__")
    ],
)
def test_a_room_defines_its_nouns(one: str) -> None:
    tree = ast.parse((ROOT / "wherry" / one / "__init__.py").read_text())
    assert len(ast.get_docstring(tree) or "") > 50


def test_the_page_for_contributors_draws_the_rooms_in_their_order() -> None:
    _, _, house = (ROOT / "CONTRIBUTING.md").read_text().partition("## Architecture")
    drawn = [line.split()[0] for line in house.splitlines() if line.startswith("    ") and "/ " not in line]
    assert drawn == [one for one in ROOMS if one not in ("version", "__main__")]
