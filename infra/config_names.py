"""The names that configs of a system's library have, and the line that reads each: tables/attributes_SYSTEM.toml.

    python infra/config_names.py megatron core_v0.16.1=FOLDER d98e8a6=FOLDER …
    python infra/config_names.py maxtext e591f30=FOLDER …
    python infra/config_names.py huggingface 5.23.0=FOLDER 4.46.3=FOLDER

Each FOLDER is a checkout of that version; nothing of it is imported, but Python must be
as new as its syntax (MaxText: 3.12). The first version given that has a name is the one
that the table cites. A row is the version, the file and line that reads the name from a config (or that declares it,
where the library passes it on without naming it again), and the default as the source states it.

`systems/SYSTEM.toml` says of each of these names what it is to wherry; `tests/families/test_attributes.py` compares the
two files, so a name that the library does not have can be neither ignored nor checked.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FAMILIES = Path(__file__).resolve().parents[1] / "wherry" / "families"
_CONFIGS = ("args", "config", "cfg", "hparams")  # variables and attributes whose names end so are configs
_CLASS = "MaxTextConfig"
_OTHERS = {
    "legacy", "tests", "T5", "bert", "vision", "multimodal", "mimo", "rl", "export", "elastification",
    "inference",
}  # fmt: skip


class Line(NamedTuple):
    """Where a name stands, and its default in the words of the source."""

    place: str
    default: str


@cache
def modules(folder: Path) -> dict[Path, ast.Module]:
    """The parsed modules below a folder, those of the model's code first."""
    parsed: dict[Path, ast.Module] = {}
    for path in sorted(folder.rglob("*.py"), key=lambda one: (_rank(one), str(one))):
        parsed[path] = ast.parse(path.read_text(encoding="utf-8"))
    return parsed


def _rank(path: Path) -> int:
    parts = set(path.parts)
    if parts & _OTHERS:
        return 4
    if parts & {"training", "configs", "trainers", "utils"}:
        return 3 if path.stem != "arguments" else 2
    return 0 if parts & {"transformer", "gpt", "common", "layers"} else 1


@cache
def readings(folder: Path, root: Path) -> dict[str, str]:
    """Name → the first line that reads it from a config."""
    found: dict[str, str] = {}
    for path, module in modules(folder).items():
        for node in ast.walk(module):
            name = _read_name(node)
            if name is not None:
                found.setdefault(name, f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}")
    return found


def _read_name(node: ast.AST) -> str | None:
    match node:
        case ast.Attribute(value=value, attr=name, ctx=ast.Load()) if _is_config(value):
            return name
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str() as name), *_]):
            return name if _is_config(value) else None
        case _:
            return None


def _is_config(node: ast.expr) -> bool:
    return ast.unparse(node).endswith(_CONFIGS)


def megatron(root: Path) -> dict[str, Line]:
    """The arguments of Megatron's training program, and those fields of its configs that the system's file names."""
    folder = root / "megatron"
    parser = root / "megatron" / "training" / "arguments.py"
    training = {
        path: module for path, module in modules(folder).items() if path.is_relative_to(parser.parent)
    }
    found: dict[str, Line] = {}
    for node in ast.walk(training[parser]):
        for name, line in _argument(node, root, parser, folder):
            found.setdefault(name, line)
    for path, module in training.items():
        for name, number in _assigned(module):
            found.setdefault(name, Line(f"{path.relative_to(root)}:{number}", ""))
    declared = _declared("megatron")
    for kind in _classes_of_configs(folder):
        for name, line in fields(folder, root, kind):
            if name in declared:
                found.setdefault(name, line)
    return found


def _classes_of_configs(folder: Path) -> list[str]:
    """The names of the classes that are configs, those of the model first."""
    return [
        node.name
        for module in modules(folder).values()
        for node in module.body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config")
    ]


def _argument(node: ast.AST, root: Path, path: Path, folder: Path) -> Iterator[tuple[str, Line]]:
    if not isinstance(node, ast.Call):
        return
    options = {word.arg: word.value for word in node.keywords}
    function = ast.unparse(node.func)
    if function.endswith(".add_argument") and node.args:
        words = [str(one.value) for one in node.args if isinstance(one, ast.Constant)]
        if not words:
            return
        name = next((word for word in words if word.startswith("--")), words[0])
        if "dest" in options:
            name = ast.literal_eval(options["dest"])
        action = ast.unparse(options["action"]) if "action" in options else ""
        switched = {"'store_true'": "False", "'store_false'": "True"}.get(action, "None")
        default = ast.unparse(options["default"]) if "default" in options else switched
        yield (name.lstrip("-").replace("-", "_"), Line(f"{path.relative_to(root)}:{node.lineno}", default))
    elif function.endswith("ArgumentGroupFactory") and node.args:
        left_out = _excluded(options.get("exclude"), modules(folder)[path])
        for name, line in fields(folder, root, ast.unparse(node.args[0])):
            if name not in left_out:
                yield name, line


def _excluded(node: ast.expr | None, module: ast.Module) -> set[str]:
    """The names of a list, or of a variable that holds one and is added to."""
    if not isinstance(node, ast.Name):
        return set(ast.literal_eval(node)) if node is not None else set()
    lists = [
        one.value
        for one in ast.walk(module)
        if (isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == node.id)
        or (isinstance(one, ast.AugAssign) and ast.unparse(one.target) == node.id)
    ]
    return {name for one in lists for name in ast.literal_eval(one)}


def _assigned(module: ast.Module) -> Iterator[tuple[str, int]]:
    """The attributes that the program itself adds to its arguments."""
    for node in ast.walk(module):
        match node:
            case ast.Attribute(value=ast.Name(id="args"), attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case _:
                pass


def fields(folder: Path, root: Path, kind: str) -> Iterator[tuple[str, Line]]:
    """The fields of a class of configs, those of its bases first."""
    for path, module in modules(folder).items():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and node.name == kind:
                for base in node.bases:
                    yield from fields(folder, root, ast.unparse(base).split(".")[-1])
                for one in node.body:
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                        name, default = _field(one.target.id, one.value)
                        yield name, Line(f"{path.relative_to(root)}:{one.lineno}", default)
                return


def _field(name: str, value: ast.expr | None) -> tuple[str, str]:
    """The name under which a field is stored, and its default."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func).lower().endswith("field")):
        return name, ast.unparse(value) if value is not None else ""
    options = {word.arg: word.value for word in value.keywords}
    first = value.args[0] if value.args else options.get("default", options.get("default_factory"))
    default = ast.unparse(first) if first is not None else ""
    for key, stated in _literal(options.get("metadata")).get("argparse_meta", {}).items():
        name = stated if key == "dest" else name
        default = repr(stated) if key == "default" else default
    return name, default


def _literal(node: ast.expr | None) -> dict[str, Any]:
    try:
        return ast.literal_eval(node) if node is not None else {}
    except ValueError:
        return {}


def maxtext(root: Path) -> dict[str, Line]:
    """What MaxText's base.yml states, and the fields of the config that it makes of it."""
    base = next(root.rglob("configs/base.yml"))
    found: dict[str, Line] = {}
    for number, text in enumerate(base.read_text(encoding="utf-8").splitlines(), 1):
        if stated := re.match(r"(\w+):\s*(.*?)\s*(?:#.*)?$", text):
            found[stated[1]] = Line(f"{base.relative_to(root)}:{number}", stated[2])
    for name, line in fields(base.parent, root, _CLASS):
        found.setdefault(name, line)
    return found


def huggingface(root: Path) -> dict[str, Line]:
    """What the configs of all classes of transformers have, and what generation adds to them."""
    folder = root / "transformers"
    found: dict[str, Line] = {}
    for kind in ("PreTrainedConfig", "PretrainedConfig", "GenerationConfig"):
        found = {**dict(fields(folder, root, kind)), **_parameters(folder, root, kind), **found}
    return found


def _parameters(folder: Path, root: Path, kind: str) -> dict[str, Line]:
    """The arguments that a class takes from its caller by name."""
    found: dict[str, Line] = {}
    for path, module in modules(folder).items():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and node.name == kind:
                for one in ast.walk(node):
                    match one:
                        case ast.Call(
                            func=ast.Attribute(attr="pop"), args=[ast.Constant(value=str() as name), *rest]
                        ):
                            place = f"{path.relative_to(root)}:{one.lineno}"
                            found.setdefault(name, Line(place, ast.unparse(rest[0]) if rest else ""))
                        case _:
                            pass
    return found


SYSTEMS = {
    "megatron": (megatron, "megatron"),
    "maxtext": (maxtext, "src"),
    "huggingface": (huggingface, "transformers"),
}


def rows(system: str, versions: dict[str, Path]) -> dict[str, tuple[str, str, str]]:
    """Name → version, place, default; of the first version that has the name."""
    names_of, folder = SYSTEMS[system]
    found: dict[str, tuple[str, str, str]] = {}
    for version, root in versions.items():
        read = readings(root / folder, root)
        for name, line in names_of(root).items():
            found.setdefault(name, (version, read.get(name, line.place), line.default))
        if system == "huggingface":  # attributes of single classes have no common list
            for name in _declared(system) - set(found):
                if name in read:
                    found[name] = (version, read[name], "")
    return found


def _declared(system: str) -> set[str]:
    """The names that the system's file ignores or checks."""
    config = tomllib.loads((FAMILIES / "systems" / f"{system}.toml").read_text(encoding="utf-8"))["config"]
    return {*config["usual"], *(name for names in config["ignored"].values() for name in names)}


def render(system: str, found: dict[str, tuple[str, str, str]]) -> str:
    """The table as TOML."""
    lines = [
        f"# Made by infra/config_names.py {system}: name = [version, the line that reads it, its default there].",
        "",
    ]
    lines += [f"{name} = {json.dumps(row, ensure_ascii=False)}" for name, row in sorted(found.items())]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Write the table of a system."""
    system, *versions = arguments
    found = rows(system, {one.partition("=")[0]: Path(one.partition("=")[2]) for one in versions})
    path = FAMILIES / "tables" / f"attributes_{system}.toml"
    path.write_text(render(system, found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
