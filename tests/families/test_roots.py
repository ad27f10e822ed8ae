"""The roots of a JAX system: a family sees the system's own names in every form in which trainers save a tree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.families import SIZES, made
from wherry.families import families, load_family, source_tree
from wherry.families.templates import form_choices
from wherry.tree.tree_reading import read_tree

WRAPPED = ("params", "params")
# What stands in place of `params/params`, and what is below every leaf: MaxText's NNX forms, and its bare trees.
FORMS = {
    "model": (("model",), ("value",)),
    "base": (("base",), ("value",)),
    "no root": ((), ("value",)),
    "item": (("model_params",), ("value",)),
    "one root": (("params",), ()),
    "bare": ((), ()),
    "flax 0.8": (("model",), ("raw_value",)),
}
HELD = [name for name in families() if {"maxtext", "huggingface"} <= load_family(name).systems.keys()]


def checkpoint(family):
    """A MaxText checkpoint of a family, in the first forms for which sizes of tests make one."""
    system = family.system("maxtext")
    conventions = {name: one.usual for name, one in system.conventions.items()}
    forms = next(form_choices(system, {}))
    sizes = {**dict.fromkeys(family.axes, 2), **SIZES}
    return made(family, "maxtext", {**forms, **conventions}, sizes=sizes).manifest


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", HELD)
def test_a_family_of_maxtext_is_seen_in_every_form(name, form):
    family, (root, end) = load_family(name), FORMS[form]
    plain = checkpoint(family)
    inside = {path for path in plain.tensors if path[:2] == WRAPPED}
    names = {path: (*root, *path[2:], *end) for path in inside}
    tensors = {names[path]: replace(plain.tensors[path], path=names[path]) for path in inside}
    manifest = replace(plain, tensors=tensors, kind="other", values={}, empties={}, lists=frozenset())
    found = source_tree(family, "orbax", manifest, read_tree(manifest))
    assert found is not None
    assert (found.system.name, found.unknown) == ("maxtext", 0)
    assert {found.tree.name(new) for new in tensors} == inside
    assert bool(found.tree.removed) == (
        form not in ("bare", "one root")
    )  # which has a part of MaxText's own root
