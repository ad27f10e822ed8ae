"""The socket: services define what the engine uses of them by name; the type checker cannot see through `service`."""

from __future__ import annotations

import ast
from collections import defaultdict
from importlib import import_module

import pytest

from tests.support.house import MODULES, label
from wherry.core.services import _SERVICES


def is_service(node):
    return (
        isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "service"
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
    )


def assigned(tree):
    """Variable → the service that it is, also where several are assigned at once."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = zip(target.elts, node.value.elts, strict=True) if both else [(target, node.value)]
                yield from (
                    (one.id, value.args[0].value)
                    for one, value in pairs
                    if isinstance(one, ast.Name) and is_service(value)
                )


def uses(tree):
    """Service and attribute, for each attribute of a service that a module uses."""
    names = dict(assigned(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if is_service(node.value):
                yield node.value.args[0].value, node.attr
            elif isinstance(node.value, ast.Name) and node.value.id in names:
                yield names[node.value.id], node.attr


def used_attributes():
    """Service → its attributes that the engine uses, each with the last module that uses it."""
    found = defaultdict(dict)
    for path in MODULES:
        text = path.read_text()
        for name, attribute in uses(ast.parse(text)) if "service(" in text else ():
            found[name][attribute] = label(path)
    return found


USED = used_attributes()


@pytest.mark.parametrize("name", sorted(USED))
def test_a_service_has_every_attribute_that_is_used(name):
    module_name, package, _extra = _SERVICES[name]
    pytest.importorskip(package or "wherry", reason=f"{package} is not installed")
    module = import_module(module_name)
    assert {one: file for one, file in USED[name].items() if not hasattr(module, one)} == {}


def test_the_uses_of_most_services_are_found():
    assert set(USED) > {"deploy", "export-processes", "mlflow", "signing"}
