"""Any tree: layers stacked and taken apart by a pattern, without a family."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.families import Made, carried, opened, same
from wherry.errors import AmbiguousError, IncompleteError, UnrepresentableError, UsageError
from wherry.families import convert_layout, tree_family


def tree(layers=3, **more):
    rng = np.random.default_rng(0)
    tensors = {("params", "norm", "scale"): rng.random(5, "f4"), ("step",): np.int32(7).reshape(())}
    for layer in range(layers):
        for root in ("params", "mu"):
            tensors[(root, f"layers_{layer}", "mlp", "kernel")] = rng.random((5, 4), "f4")
            tensors[(root, f"layers_{layer}", "norm.scale")] = rng.random(5, "f4")
            tensors[(root, f"layers_{layer}", "gain")] = rng.random((), "f4").reshape(())
    return Made({**tensors, **more})


def turned(begun, family, scan, **stated):
    projected = convert_layout(
        begun.manifest, family, "tree", "tree", options={"scan_layers": scan, **stated}
    )
    return carried(projected, begun.read)


@pytest.mark.parametrize("axis", ["0", "1"])
def test_there_and_back(axis):
    begun = tree()
    family = tree_family(begun.manifest, "layers", "layers_{layer}")
    there = turned(begun, family, "true", param_scan_axis=axis)
    stack = there.tensors["mu", "layers", "mlp", "kernel"]
    assert stack.shape == ((3, 5, 4) if axis == "0" else (5, 3, 4))
    np.testing.assert_array_equal(stack.take(1, int(axis)), begun.tensors["mu", "layers_1", "mlp", "kernel"])
    assert there.tensors["params", "layers", "gain"].shape == (3,)
    family = tree_family(there.manifest, "layers", "layers_{layer}")
    assert same(turned(there, family, "false").tensors, begun.tensors)


def test_the_maxtext_corpus_without_a_family():
    with opened("maxtext-llama31-l3-scan", "orbax") as checkpoint:
        kept = {path: spec for path, spec in checkpoint.manifest.tensors.items() if path[0] != "nnx_aux"}
        begun = Made({path: checkpoint.read(path) for path in kept})
    family = tree_family(begun.manifest, "layers", "layers_{layer}")
    there = turned(begun, family, "false")
    with opened("maxtext-llama31-l3-unscan", "orbax") as checkpoint:
        wanted = {
            path: one.shape for path, one in checkpoint.manifest.tensors.items() if path[0] != "nnx_aux"
        }
    assert {path: array.shape for path, array in there.tensors.items()} == wanted
    family = tree_family(there.manifest, "layers", "layers_{layer}")
    assert same(turned(there, family, "true").tensors, begun.tensors)


def test_refusals():
    begun = tree()
    for patterns in (
        ("layers", "layers"),
        ("layers", "layers_{other}"),
        ("", "layers_{layer}"),
        ("blocks", "block_{layer}"),
    ):
        with pytest.raises(UsageError):
            tree_family(begun.manifest, *patterns)
    with pytest.raises(UnrepresentableError, match="reserve"):
        tree_family(Made({("layers_0", "a{b}"): np.zeros(2)}).manifest, "layers", "layers_{layer}")
    lacking = dict(begun.tensors)
    del lacking["mu", "layers_1", "gain"]
    begun = Made(lacking)
    with pytest.raises(IncompleteError, match="missing index 1"):
        turned(begun, tree_family(begun.manifest, "layers", "layers_{layer}"), "true")


def test_the_scan_axis_of_a_square_stack_must_be_stated():
    begun = Made({("layers", "w"): np.zeros((4, 4), "f4")})
    family = tree_family(begun.manifest, "layers", "layers_{layer}")
    with pytest.raises(AmbiguousError, match="param_scan_axis"):
        turned(begun, family, "false")
