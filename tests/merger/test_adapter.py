"""A base with a PEFT LoRA adapter in its weights, by the definition; PEFT itself judges in `test_peft`."""

from __future__ import annotations

import json

import numpy as np
import pytest

import wherry
from tests.support.command import command
from tests.support.merging import START, delta, made, merged, pair, save, save_adapter
from wherry.errors import UnrepresentableError, UsageError
from wherry.merger.recipes import LowRank, Magnitudes

SHAPES = {
    "model.embed.weight": (11, 8), "model.layers.0.q.weight": (8, 8), "model.layers.0.up.weight": (12, 8),
    "model.layers.1.q.weight": (8, 8), "model.norm.weight": (8,), "head.weight": (11, 8),
}  # fmt: skip


@pytest.fixture
def base(tmp_path):
    return save(tmp_path / "base", made(1, shapes=SHAPES), {"model_type": "opt"})


@pytest.mark.parametrize("rslora", [False, True])
def test_the_weights_are_those_of_the_definition(base, rslora, tmp_path):
    rng, whole = np.random.default_rng(3), made(1, shapes=SHAPES)
    tensors = {
        **pair(rng, "model.layers.0.q", 8, 8), **pair(rng, "model.layers.0.up", 8, 12),
        **pair(rng, "model.layers.1.q", 8, 8, rank=4),
        **pair(rng, "model.embed", 11, 8, kind="lora_embedding", end=""),
        f"{START}head.weight": rng.standard_normal((11, 8)).astype("f4"),
    }  # fmt: skip
    adapter = save_adapter(
        tmp_path / "adapter", tensors, use_rslora=rslora, modules_to_save=["head"],
        rank_pattern={"layers.1.q": 4}, alpha_pattern={r"layers\.1\.q": 10},
    )  # fmt: skip
    receipt, found = merged(base, adapter, tmp_path)
    by = (lambda rank: rank**0.5) if rslora else (lambda rank: rank)
    wanted = dict(whole)
    for module, scale in {
        "layers.0.q": 6 / by(2),
        "layers.0.up": 6 / by(2),
        "layers.1.q": 10 / by(4),
    }.items():
        wanted[f"model.{module}.weight"] = whole[f"model.{module}.weight"] + delta(
            tensors, f"model.{module}", scale
        )
    wanted["model.embed.weight"] = (
        whole["model.embed.weight"] + delta(tensors, "model.embed", 6 / by(2), "lora_embedding", "").T
    )
    wanted["head.weight"] = tensors[f"{START}head.weight"]
    assert set(found) == set(SHAPES)
    for name, tensor in wanted.items():
        np.testing.assert_allclose(found[name], tensor, rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(found["model.norm.weight"], whole["model.norm.weight"])
    assert [row["role"] for row in receipt.parents] == ["base", "adapter"]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "opt"}
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert not receipt.lossless


def test_an_embedding_that_peft_saved_with_its_matrices(base, tmp_path):
    """Resized or not, it takes the place of the base's."""
    rng = np.random.default_rng(3)
    tensors = pair(rng, "model.embed", 11, 8, kind="lora_embedding", end="")
    own = rng.standard_normal((11, 8)).astype("f4")
    adapter = save_adapter(tmp_path / "adapter", {**tensors, f"{START}model.embed.base_layer.weight": own})
    _receipt, found = merged(base, adapter, tmp_path)
    wanted = own + delta(tensors, "model.embed", 3.0, "lora_embedding", "").T
    np.testing.assert_allclose(found["model.embed.weight"], wanted, rtol=1e-6, atol=1e-5)


def test_a_module_that_stores_its_inputs_first(base, tmp_path):
    """Its class is unknown, and its matrices fit in one way only."""
    (base / "config.json").write_text("{}")
    tensors = pair(np.random.default_rng(3), "model.layers.0.up", 12, 8)
    adapter = save_adapter(tmp_path / "adapter", tensors, fan_in_fan_out=True)
    _receipt, found = merged(base, adapter, tmp_path)
    wanted = made(1, shapes=SHAPES)["model.layers.0.up.weight"] + delta(tensors, "model.layers.0.up", 3.0).T
    np.testing.assert_allclose(found["model.layers.0.up.weight"], wanted, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("config", "words"), [
    ({"use_dora": True}, "lacks one of its three tensors"), ({"bias": "some"}, "bias is 'some'"),
    ({"peft_type": "IA3"}, "type IA3"), ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"), ({"something_new": 3}, "something_new is 3"),
    ({"r": 3}, r"is \[2, 8\], but the base and the config need \[3, 8\]"), ({"lora_alpha": None}, "lora_alpha is None"),
])  # fmt: skip
def test_what_cannot_be_merged_is_refused_by_name(base, config, words, tmp_path):
    adapter = save_adapter(
        tmp_path / "adapter", pair(np.random.default_rng(3), "model.layers.0.q", 8, 8), **config
    )
    with pytest.raises(UnrepresentableError, match=words):
        merged(base, adapter, tmp_path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.parametrize(("change", "words"), [
    (lambda one: {name: one[name] for name in list(one)[:1]}, "lacks one of its two matrices"),
    (lambda one: {name.replace("layers.0", "layers.7"): tensor for name, tensor in one.items()},
     "has no tensor model.layers.7.q.weight"),
    (lambda one: one | {f"{START}model.layers.0.q.lora_magnitude_vector": np.ones(8, "f4")}, "is no matrix of a LoRA"),
    (lambda one: one | {f"{START}model.layers.0.q.lora_B.bias": np.ones(8, "f4")}, "no tensor model.layers.0.q.bias"),
    (lambda one: one | {f"{START}model.score.weight": np.ones((2, 8), "f4")}, "has no tensor model.score.weight"),
    (lambda one: one | {"x.weight": np.ones((2, 8), "f4")}, "is no tensor of a LoRA"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(base, change, words, tmp_path):
    tensors = change(pair(np.random.default_rng(3), "model.layers.0.q", 8, 8))
    with pytest.raises(UnrepresentableError, match=words):
        merged(base, save_adapter(tmp_path / "adapter", tensors), tmp_path)


def with_lengths(tensors, rng, outs=8, module="model.layers.0.q"):
    return tensors | {f"{START}{module}.lora_magnitude_vector": rng.uniform(0.5, 2, outs).astype("f4")}


@pytest.mark.parametrize("first", [False, True], ids=["outputs-first", "inputs-first"])
def test_dora_scales_each_output_to_its_magnitude(base, first, tmp_path):
    rng = np.random.default_rng(3)
    (base / "config.json").write_text("{}")
    ins, outs = (12, 8) if first else (8, 12)
    tensors = with_lengths(pair(rng, "model.layers.0.up", ins, outs), rng, outs, "model.layers.0.up")
    adapter = save_adapter(tmp_path / "adapter", tensors, use_dora=True, fan_in_fan_out=first)
    _receipt, found = merged(base, adapter, tmp_path)
    weight = made(1, shapes=SHAPES)["model.layers.0.up.weight"].astype("f8")
    whole = (weight.T if first else weight) + delta(tensors, "model.layers.0.up", 3.0)
    lengths = tensors[f"{START}model.layers.0.up.lora_magnitude_vector"]
    wanted = lengths[:, None] * whole / np.linalg.norm(whole, axis=1, keepdims=True)
    up = found["model.layers.0.up.weight"]
    np.testing.assert_allclose(up.T if first else up, wanted, rtol=1e-5, atol=1e-6)
    assert np.linalg.norm(up.T if first else up, axis=1) == pytest.approx(lengths, rel=1e-5)


@pytest.mark.parametrize("first", [False, True], ids=["outputs-first", "inputs-first"])
def test_a_part_of_a_matrix_with_dora_is_that_of_the_whole(first):
    """Rows are measured as a whole, also if only some of their elements are read."""
    rng, sizes = np.random.default_rng(5), (6, 10)
    arrays = {
        "w": rng.standard_normal(sizes[::-1] if first else sizes), "a": rng.standard_normal((2, 10)),
        "b": rng.standard_normal((6, 2)), "m": rng.uniform(0.5, 2, 6),
    }  # fmt: skip
    recipe = Magnitudes(LowRank(("w",), ("a",), ("b",), 2, 0.5, first), ("m",), 10)

    def read(path, region):
        return arrays[path[0]][region]

    rows, columns = (slice(0, 10), slice(0, 6)) if first else (slice(0, 6), slice(0, 10))
    whole = recipe.values((rows, columns), read)
    part = (slice(3, 7), slice(1, 4)) if first else (slice(1, 4), slice(3, 7))
    np.testing.assert_allclose(recipe.values(part, read), whole[part], rtol=1e-12)


def test_dora_scales_each_column_of_an_embedding(base, tmp_path):
    rng = np.random.default_rng(3)
    tensors = with_lengths(
        pair(rng, "model.embed", 11, 8, kind="lora_embedding", end=""), rng, 8, "model.embed"
    )
    adapter = save_adapter(tmp_path / "adapter", tensors, use_dora=True)
    _receipt, found = merged(base, adapter, tmp_path)
    whole = (
        made(1, shapes=SHAPES)["model.embed.weight"]
        + delta(tensors, "model.embed", 3.0, "lora_embedding", "").T
    )
    lengths = tensors[f"{START}model.embed.lora_magnitude_vector"]
    wanted = lengths * whole / np.linalg.norm(whole, axis=0)
    np.testing.assert_allclose(found["model.embed.weight"], wanted, rtol=1e-5, atol=1e-6)


def test_lengths_of_another_shape_are_refused(base, tmp_path):
    rng = np.random.default_rng(3)
    longer = with_lengths(pair(rng, "model.layers.0.q", 8, 8), rng, 9)
    adapter = save_adapter(tmp_path / "adapter", longer, use_dora=True)
    with pytest.raises(UnrepresentableError, match=r"is \[9\], but"):
        merged(base, adapter, tmp_path)


def test_adapters_are_not_added(base, tmp_path):
    one, other = (
        save_adapter(tmp_path / name, pair(np.random.default_rng(3), "model.layers.0.q", 8, 8))
        for name in "xy"
    )
    for words, refusal in (
        ([f"{one}*0.5", f"{other}*0.5"], "adapters cannot be added"), ([f"{base}*1", f"{one}*1"], "without weights"),
        ([str(one), str(base)], "a base and one adapter"), ([str(base), str(one), str(other)], "a base and one"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=refusal):
            wherry.merge(words, tmp_path / "out", to="huggingface")


def test_the_command(base, tmp_path):
    adapter = save_adapter(tmp_path / "adapter", pair(np.random.default_rng(3), "model.layers.0.q", 8, 8))
    assert "a LORA adapter of org/base" in command("detect", adapter).stdout
    words = ["merge", base, adapter, tmp_path / "out", "--to", "huggingface"]
    assert "with the LoRA adapter" in command(*words, "--dry-run").stdout
    assert command(*words).returncode == 0
    why = command("lineage", "why", tmp_path / "out").stdout
    assert str(base) in why
    assert str(adapter) in why


@pytest.mark.parametrize("table", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    "patterns",
    [{"(": 2}, {"(a*)*b": 2}, {"(([a-z0-9_.]*)*)*!": 2}, {"(a|a)(a|a)": 2}, {".*.*.*q": 2}, {"q" * 1001: 2},
     {"[z-a]": 2}, {"(?P<x>q)": 2}, {r"(q)\1": 2}, {"(?=q)q": 2}, {"q{9,}": 2}, [1], "x", 3,
     {"q": "2"}, {"q": [2]}, {"q": None}, {"q": True}, {"q": {}}, {"q": float("nan")}, {"q": 10**400}],
    ids=lambda one: repr(one)[:40],
)  # fmt: skip
def test_patterns_that_may_run_for_ever_and_values_that_are_no_numbers_are_refused(
    base, table, patterns, tmp_path
):
    tensors = pair(np.random.default_rng(3), "model.layers.0.q", 8, 8)
    adapter = save_adapter(tmp_path / "adapter", tensors, **{table: patterns})
    with pytest.raises(UnrepresentableError, match=table if type(patterns) is not dict else None):
        merged(base, adapter, tmp_path)


@pytest.mark.parametrize("name", ["r", "lora_alpha"])
@pytest.mark.parametrize(
    "value",
    [None, "2", True, [2], float("nan"), float("inf"), 10**400, -(10**400)],
    ids=lambda one: repr(one)[:20],
)
def test_a_rank_or_an_alpha_that_is_no_number_is_refused(base, name, value, tmp_path):
    tensors = pair(np.random.default_rng(3), "model.layers.0.q", 8, 8)
    adapter = save_adapter(tmp_path / "adapter", tensors, **{name: value})
    with pytest.raises(UnrepresentableError, match=rf"{name} is .*, not a"):
        merged(base, adapter, tmp_path)


@pytest.mark.parametrize("rank", [0, -2, 2.0])
def test_a_rank_is_a_positive_integer(base, rank, tmp_path):
    adapter = save_adapter(
        tmp_path / "adapter",
        pair(np.random.default_rng(3), "model.layers.0.q", 8, 8),
        r=rank,
        use_rslora=True,
    )
    with pytest.raises(UnrepresentableError, match="not a positive integer"):
        merged(base, adapter, tmp_path)


def test_an_alpha_of_zero_for_a_module_is_zero(base, tmp_path):
    """Not the alpha of the other modules: PEFT takes what the table states."""
    tensors = pair(np.random.default_rng(3), "model.layers.0.q", 8, 8)
    adapter = save_adapter(tmp_path / "adapter", tensors, alpha_pattern={"q": 0})
    _receipt, found = merged(base, adapter, tmp_path)
    np.testing.assert_array_equal(
        found["model.layers.0.q.weight"], made(1, shapes=SHAPES)["model.layers.0.q.weight"]
    )


# ViT's modules as transformers 4 names them, whose names are published, and as transformers 5 does in memory.
VIT = {"vit.encoder.layer.0.attention.attention.query": "vit.layers.0.attention.q_proj",
       "vit.encoder.layer.0.attention.output.dense": "vit.layers.0.attention.o_proj",
       "vit.encoder.layer.0.output.dense": "vit.layers.0.mlp.fc2"}  # fmt: skip


@pytest.mark.parametrize("of_base", ["published", "memory"])
@pytest.mark.parametrize("of_adapter", ["published", "memory"])
def test_a_renamed_module_is_found_by_either_name(of_base, of_adapter, tmp_path):
    names = {"published": dict(zip(VIT, VIT, strict=True)), "memory": VIT}
    whole = made(1, shapes={f"{names[of_base][module]}.weight": (8, 8) for module in VIT})
    base = save(tmp_path / "base", whole, {"model_type": "vit"})
    rng = np.random.default_rng(3)
    tensors = {
        name: tensor for module in VIT for name, tensor in pair(rng, names[of_adapter][module], 8, 8).items()
    }
    _receipt, found = merged(base, save_adapter(tmp_path / "adapter", tensors), tmp_path)
    assert found.keys() == whole.keys()
    for module in VIT:
        name = f"{names[of_base][module]}.weight"
        wanted = whole[name] + delta(tensors, names[of_adapter][module], 3)
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6)


def test_a_module_of_another_model_type_is_not_renamed(tmp_path):
    (published, memory), *_ = VIT.items()
    base = save(tmp_path / "base", made(1, shapes={f"{published}.weight": (8, 8)}), {"model_type": "opt"})
    adapter = save_adapter(tmp_path / "adapter", pair(np.random.default_rng(3), memory, 8, 8))
    with pytest.raises(UnrepresentableError, match=f"has no tensor {memory}"):
        merged(base, adapter, tmp_path)
