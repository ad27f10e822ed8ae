"""Names and rules that a user states mean what they mean in Flax, are kept, and contradict nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from wherry.core.manifest import Manifest, from_json
from wherry.core.tensorspec import Sharding, TensorSpec
from wherry.errors import MismatchError, UsageError
from wherry.integrations.containers.orbax import partitioning
from wherry.tree.axes import mesh_axes, name_axes, rules_of, settle_options

RULES = (("embed", "data"), ("mlp", "model"), ("layers", None))


NAME = st.sampled_from(["embed", "mlp", "layers", "heads", None])
MESH = st.sampled_from(["data", "model", "fsdp", None, ("data", "model"), ("fsdp", "x")])


@settings(max_examples=300, deadline=None)
@given(st.lists(NAME, max_size=5), st.lists(st.tuples(NAME.filter(bool), MESH), max_size=6))
def test_rules_mean_what_they_mean_in_flax(axes, rules):
    names = [name for name in axes if name]
    if len(set(names)) < len(names):
        with pytest.raises(UsageError, match="duplicate axis name"):
            mesh_axes(axes, tuple(rules))
        return
    assert PartitionSpec(*mesh_axes(axes, tuple(rules))) == nn.logical_to_mesh_axes(tuple(axes), tuple(rules))


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b/c", "b/d", "e/value/f"]), st.lists(NAME, max_size=3), min_size=1),
       st.sampled_from(["Partitioned", "LogicallyPartitioned"]), st.booleans())  # fmt: skip
def test_kept_names_are_read_back(rows, box, ruled):
    sharding = Sharding(spec=("data",), rules=RULES) if ruled else None
    specs = [
        TensorSpec(
            (*key.split("/"), "value"),
            (2,) * len(axes),
            "float32",
            axes=tuple(axes),
            sharding=sharding,
            tags={"box": box},
        )
        for key, axes in rows.items()
    ]
    manifest = Manifest({spec.path: spec for spec in specs})
    assert from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    bare = {
        path: replace(spec, axes=None, sharding=None, tags=None) for path, spec in manifest.tensors.items()
    }
    item = json.loads(json.dumps(partitioning.item_metadata(manifest)))
    found, _seen = partitioning.with_names(replace(manifest, tensors=bare, custom={"item": item}))
    assert found.tensors == manifest.tensors
    assert partitioning.item_metadata(found) == item


def test_what_a_file_of_names_refuses(tmp_path):
    spec = TensorSpec(("params", "w"), (2, 3), "float32")
    manifest = Manifest({spec.path: spec})
    file = tmp_path / "axes.toml"

    def given_(text, spec=spec, **options):
        file.write_text(text)
        return name_axes(
            replace(manifest, tensors={spec.path: spec}), {"axes": str(file), **options}
        ).tensors[spec.path]

    assert given_('[axes]\n"*/w" = ["embed", ""]').axes == ("embed", None)
    found = given_('rules = [["embed", ["data", "fsdp"]]]\n[axes]\n"*/w" = ["embed", "mlp"]')
    assert found.sharding == Sharding(spec=(("data", "fsdp"), None), rules=(("embed", ("data", "fsdp")),))
    for text, error, words in (
        ('[axes]\n"*/q" = ["embed"]', UsageError, "matches no remaining tensor"),
        ('[axes]\n"*/w" = ["embed"]', MismatchError, "expected 2 axis names, got 1"),
        ('[axes]\n"*/w" = "embed"', UsageError, "table of lists"),
        ('[axes]\n"*/w" = [1, 2]', UsageError, "invalid axis name 1"),
        ('[boxes]\n"*/w" = "Box"', UsageError, "table of classes"),
        ("[other]", UsageError, "other"),
        ("[", UsageError, "cannot read"),
        ('rules = [["embed", "data"]]', UsageError, "no tensor has any"),
        ('rules = "x"', UsageError, "rules"),
    ):
        with pytest.raises(error, match=words):
            given_(text)
    with pytest.raises(MismatchError, match="axis names differ"):
        given_('[axes]\n"*/w" = ["embed", "mlp"]', replace(spec, axes=("mlp", "embed")))
    with pytest.raises(UsageError, match="duplicate axis name"):
        given_('[axes]\n"*/w" = ["embed", "embed"]', rules="embed:data")
    with pytest.raises(UsageError):
        rules_of("embed=data")
    assert rules_of("a:b+c,d:-") == (("a", ("b", "c")), ("d", None)) == rules_of({"a": ["b", "c"], "d": None})
    file.write_text('[axes]\n"*/w" = ["embed", "mlp"]')
    assert settle_options({"axes": str(file), "rules": "a:b", "boxed": "true"}) == {
        "axes": {"axes": {"*/w": ["embed", "mlp"]}}, "rules": [["a", "b"]], "boxed": "true",
    }  # fmt: skip
