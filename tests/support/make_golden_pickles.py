"""Writes down what pickles may name: run it once a change of an allow-list is meant, and read the difference.

    python -m tests.support.make_golden_pickles tests/golden/pickle-globals.json

`tests/containers/test_pickle.py` compares the code with that file.
"""

from __future__ import annotations

import ast
import json
import sys
from importlib import import_module
from pathlib import Path

from wherry.integrations.containers.pickle.values import Rules

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "pickle-globals.json"


def rule_sets() -> dict[str, Rules]:
    """Every set of rules that a module of the integrations assigns at its top, by module and name."""
    found: dict[str, Rules] = {}
    for path in sorted((ROOT / "integrations").rglob("*.py")):
        text = path.read_text()
        if "containers.pickle.values import" in text:
            label = ".".join(path.relative_to(ROOT / "integrations").with_suffix("").parts)
            module = import_module(f"wherry.integrations.{label}")
            found |= {f"{label}:{name}": getattr(module, name) for name in assigned(text, Rules, module)}
    return found


def assigned(text: str, kind: type, module: object) -> list[str]:
    targets = [
        target
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if isinstance(getattr(module, name, None), kind)]


def listed(rules: Rules) -> dict[str, list[str]]:
    """The globals that a set of rules lets through: module → names."""
    modules = sorted({module for module, _name in rules.allowed})
    return {one: sorted(name for module, name in rules.allowed if module == one) for one in modules}


def main(target: str) -> None:
    golden = {name: listed(rules) for name, rules in sorted(rule_sets().items())}
    Path(target).write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
