"""Templates of Penzai, and every whole checkpoint of the corpus restored into a template of its own."""

from __future__ import annotations

import json

import numpy as np
import pytest

import wherry
from tests.support.corpus import CORPUS, expected, needs
from wherry.errors import MismatchError, UnrepresentableError
from wherry.integrations.live.trees import flatten, rebuilt, survey

CASES = [
    "maxtext-llama31-l3-scan", "t5x-legacy-v3-f32-2024", "lingua-fsdp2-w2", "hf-llama-sharded-fp32",
    "dcp-fsdp2-w4-bf16",
    "flax-nnx-state", "flax-gda", "orbax-0128-sharded8", "penzai-llama-unroll-label-dict", "npz-g2p-en",
]  # fmt: skip


def test_states_of_the_frameworks_are_laid_out_and_made_again():
    optax = pytest.importorskip("optax", reason="optax is not installed")
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
    params = {"a": [jnp.ones(2), (jnp.zeros(3), {})], "b": None}
    state = {"params": params, "opt": optax.adam(0.1).init(params["a"][0]), "name": "run"}
    tree = survey(state)
    assert {leaf.stored for leaf in tree.leaves} == {
        ("params", "a", "0"), ("params", "a", "1", "0"), ("opt", "0", "count"), ("opt", "0", "mu"),
        ("opt", "0", "nu"), ("name",),
    }  # fmt: skip
    assert tree.empties == {("params", "a", "1", "1"): "dict", ("params", "b"): "none", ("opt", "1"): "none"}
    assert tree.lists == {("params", "a"), ("params", "a", "1"), ("opt",)}
    again = rebuilt(state, lambda leaf: leaf.value if leaf.dtype is None else leaf.value + 1)
    assert again["name"] == "run"
    assert float(again["params"]["a"][0].sum()) == 4
    assert type(again["opt"][0]) is type(state["opt"][0])


def test_what_is_no_array_is_named():
    with pytest.raises(wherry.WherryError, match=r"(?s)builtins\.object.*tensor a/b"):
        list(flatten({"a": {"b": object()}}))


@pytest.fixture
def penzai():
    pytest.importorskip("penzai", reason="penzai is not installed")
    import jax
    from penzai import pz
    from penzai.models import simple_mlp

    def make(seed):
        rng = jax.random.key(seed)
        return simple_mlp.MLP.from_config(name="mlp", init_base_rng=rng, feature_sizes=[4, 4, 3])

    return pz, make


def arrays(pz, model):
    return {one.label: one.value for one in pz.unbind_params(model)[1]}


def written(folder, named, axes):
    """A Penzai checkpoint with axis names, its arrays as given; by Orbax."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
    tree = {label: {"data_array": array} for label, array in named.items()}
    rows = {
        label: {"axes": list(names), "shape": list(named[label].shape), "metadata": {},
                "path": wherry.core.keypath.render((label, "data_array"))}
        for label, names in axes.items()
    }  # fmt: skip
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(tree))
    (folder / "penzai.json").write_text(json.dumps({"version": 1, "arrays": rows}))
    return folder


def test_named_arrays_are_filled_by_name_whatever_the_order_of_axes(penzai, tmp_path):
    import jax.numpy as jnp

    pz, make = penzai
    one, other = make(0), make(1)
    before = {label: np.asarray(value.data_array) for label, value in arrays(pz, other).items()}
    named = arrays(pz, one)
    turned = {label: jnp.asarray(np.asarray(value.data_array).T) for label, value in named.items()}
    axes = {label: tuple(reversed(value.named_axes)) for label, value in named.items()}
    found = wherry.restore(written(tmp_path / "step", turned, axes), into=other).state
    for label, value in arrays(pz, found).items():
        np.testing.assert_array_equal(np.asarray(value.data_array), np.asarray(named[label].data_array))
        assert value.named_axes == named[label].named_axes
    after = {label: np.asarray(value.data_array) for label, value in arrays(pz, other).items()}
    assert all(np.array_equal(before[label], after[label]) for label in before)
    wrong = {label: ("p", "q")[: len(names)] for label, names in axes.items()}
    with pytest.raises(MismatchError, match="axes mismatch"):
        wherry.restore(written(tmp_path / "wrong", turned, wrong), into=other)


def test_three_axes_in_another_order_are_filled_by_name(penzai, tmp_path):
    """Of two axes every order is its own inverse; of three it is not."""
    import jax.numpy as jnp

    pz, _make = penzai
    value = np.arange(24, dtype="f4").reshape(2, 3, 4)
    stored = {"w": jnp.asarray(value.transpose(2, 0, 1))}
    folder = written(tmp_path / "step", stored, {"w": ("r", "p", "q")})
    into = {"w": pz.nx.wrap(jnp.zeros((2, 3, 4))).tag("p", "q", "r")}
    found = wherry.restore(folder, into=into).state["w"]
    np.testing.assert_array_equal(np.asarray(found.unwrap("p", "q", "r")), value)


def test_a_variable_at_two_places_is_one_and_labels_are_apart(penzai):
    _pz, make = penzai
    one, other = make(0), make(1)
    assert len(list(flatten({"model": one, "again": one}))) == 4
    with pytest.raises(UnrepresentableError, match="duplicate Penzai variable label"):
        list(flatten({"model": one, "again": other}))


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_of_the_corpus_fill_templates(case):
    needs(case)
    uri = CORPUS / case / "checkpoint" / expected(case).get("uri", "")
    with wherry.open(uri) as checkpoint:
        specs, values = dict(checkpoint.manifest.tensors), dict(checkpoint.manifest.values)
        wanted = {path: checkpoint.read(path) for path in specs}
    template: dict = {}
    for path, leaf in {**{path: np.empty_like(wanted[path]) for path in specs}, **values}.items():
        node = template
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = leaf
    found = {leaf.stored: leaf.value for leaf in flatten(wherry.restore(uri, into=template).state)}
    assert found.keys() >= wanted.keys()
    assert all(found[path].tobytes() == wanted[path].tobytes() for path in wanted)
