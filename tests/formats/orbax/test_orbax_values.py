"""What an Orbax item of ours holds besides tensors: numbers, lists, PRNG keys, foreign metadata."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp1

from tests.support import orbax as support
from tests.support.orbax import opened
from wherry.core.tensorspec import TensorSpec


def test_numbers_come_back_as_the_values_they_were(tmp_path):
    values = {("epoch",): 3, ("lr",): 1e-4, ("done",): True, ("name",): "x", ("none",): None}
    arrays = {("w",): np.ones((4, 4), np.float32)}
    for version, ocdbt in product(("2", "3"), (True, False)):
        folder = tmp_path / f"{version}{ocdbt}"
        support.write(folder, arrays, support.manifest_of(arrays, values=values), zarr=version, ocdbt=ocdbt)
        found = opened(folder).manifest
        assert set(found.tensors) == set(arrays)
        assert found.values == {key: value for key, value in values.items() if value is not None}
        assert found.empties == {("none",): "none"}
        assert type(found.values[("done",)]) is bool
        restored = ocp.PyTreeCheckpointer().restore(folder)
        assert {key: restored[key] for key in ("epoch", "lr", "done", "name", "none")} == {
            path[0]: value for path, value in values.items()
        }


def test_long_lists_keep_their_order(tmp_path):
    arrays = {("list", str(index)): np.full(3, index, np.int32) for index in range(12)}
    manifest = replace(support.manifest_of(arrays), lists=frozenset({("list",)}))
    support.write(tmp_path / "item", arrays, manifest)
    for restored in (ocp.StandardCheckpointer().restore(tmp_path / "item"), ocp1.load(tmp_path / "item")):
        assert [int(leaf[0]) for leaf in restored["list"]] == list(range(12))


def test_what_orbax_has_no_place_for_is_kept(tmp_path):
    arrays = {("key",): np.asarray([1, 2], np.uint32)}
    spec = TensorSpec(("key",), (2,), "uint32", tags={"prng": "threefry2x32"})
    custom = {"item": {"a": 1}, "checkpoint": {"b": 2}, "format": "pt"}
    manifest = replace(support.manifest_of(arrays, custom=custom), tensors={("key",): spec})
    support.write(tmp_path / "item", arrays, manifest)
    found = opened(tmp_path / "item").manifest
    assert found.tensors[("key",)].tags == {"prng": "threefry2x32"}
    assert found.custom["item"]["a"] == 1
    assert found.custom["item"]["wherry"]["custom"] == {"format": "pt"}
    assert found.custom["checkpoint"] == {"b": 2}
    assert ocp.StandardCheckpointer().metadata(tmp_path / "item").custom_metadata["b"] == 2


def test_wrappers_are_distinguished_from_parameters_called_value():
    from wherry.integrations.containers.orbax.item import wrappers
    from wherry.tree.forms import wrapped_leaves

    old = [("layers", "0", "kernel", "raw_value"), ("layers", "0", "bias", "raw_value")]
    assert "2 of 2 arrays are NNX variables (`raw_value`, Flax 0.8)" in wrappers(old)[0].seen
    boxed = [("params", "wi", "kernel", "value"), ("params", "norm", "scale")]
    assert "1 of 2 arrays are in linen partition boxes" in wrappers(boxed)[0].seen
    assert wrapped_leaves([("a", "value"), ("a", "other")], "value") == set()
    assert wrapped_leaves([("a", "value"), ("a", "b", "c")], "value") == set()
    assert wrapped_leaves([("attention", "value", "kernel"), ("value",)], "value") == set()
