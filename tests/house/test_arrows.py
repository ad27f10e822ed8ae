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
    "text": "credentials errors",
    "kernels": "",
    "core": "credentials cures errors text kernels",
    "runtime": "errors core",
    "remote": "credentials errors core",
    "store": "errors installation text core runtime remote",
    "storage": "credentials errors text core runtime remote store",
    "target": "errors text core runtime storage store",
    "formats": "errors text core remote storage store target",
    "tree": "errors text core formats",
    "layout": "errors kernels core formats",
    "families": "errors text core storage formats tree layout",
    "mover": "errors kernels core runtime storage store target formats",
    "quantized": "errors text kernels core storage formats layout mover",
    "view": "errors text core runtime storage formats tree layout families mover quantized",
    "config": "errors text core storage formats",
    "ledger": "credentials errors version text core remote storage formats config",
    "converter": "credentials errors text version kernels core runtime storage store target formats tree"
    " mover view config ledger",
    "merger": "errors core formats tree layout families mover view converter",
    "workers": "errors version installation text core runtime remote storage store target formats"
    " mover config ledger converter",
    "compare": "errors text core runtime formats mover view config ledger",
    "verifier": "errors text core runtime storage target formats tree mover quantized view config ledger converter"
    " workers compare",
    "live": "errors text core runtime remote store storage target formats tree mover view ledger converter",
    "models": "credentials errors text core store storage target formats config ledger verifier",
    "routes": "errors version text core runtime storage target formats tree families view config ledger"
    " workers verifier models",
    "catalog": "errors core storage formats config ledger routes",
    "lineage": "errors text core runtime storage formats config ledger converter routes",
    "auditor": "errors version text core runtime storage formats tree config ledger converter"
    " workers verifier",
    "site": "credentials errors version core config ledger catalog lineage",
    "watch": "credentials errors installation kernels core runtime remote storage formats config ledger routes",
    "testing": "errors text core runtime storage formats mover converter",
    "console": "credentials errors version core storage config target formats converter workers verifier models routes"
    " lineage watch",
    "cli": "errors cures version text core runtime remote storage target formats tree families quantized view config"
    " ledger converter merger workers compare verifier models routes catalog lineage site auditor watch"
    " console",
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
    "zarr": "msgpack ocdbt",
    "orbax": "msgpack ocdbt zarr",
}
FORMATS: Mapping[str, str] = {
    "dcp": "huggingface",
    "dcp_safetensors": "dcp huggingface",
    "lingua": "dcp huggingface meta",
    "megatron": "dcp",
    "meta": "huggingface",
    "torchtitan": "dcp",
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
