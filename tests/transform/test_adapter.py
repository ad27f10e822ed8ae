"""A base with a PEFT adapter in its weights, by the definition; PEFT itself judges random ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.command import command
from tests.support.generations import ROOT, old_python
from tests.support.merging import START, delta, made, merged, pair, read, save, save_adapter
from tests.support.oracles.peft_cases import DRAWS, EQUAL, KINDS, MORE, PEFT, REASONS, REFUSED, WALK
from wherry.errors import UnrepresentableError, UsageError
from wherry.transform import peft
from wherry.transform.merge_view import LowRank, Magnitudes
from wherry.transform.peft import ModulePatterns, is_simple

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


# What a PEFT adapter trains besides the matrices of modules, by the definition; PEFT itself judges in
# `test_adapter`.


Q = "model.layers.0.q"
SHAPES_OF_TRAINED = {f"{Q}.weight": (8, 8), f"{Q}.bias": (8,), "score.weight": (3, 8), "score.bias": (3,),
          "model.norm.weight": (8,), "model.norm.bias": (8,), "model.embed_tokens.weight": (11, 8)}  # fmt: skip


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture
def base_of_trained(tmp_path):
    return save(tmp_path / "base", made(1, shapes=SHAPES_OF_TRAINED), {"model_type": "opt"})


def test_tensors_that_were_trained_whole_replace_those_of_the_base(base_of_trained, rng, tmp_path):
    """A classifier with its bias (SEQ_CLS), and the biases of modules with matrices and without."""
    own = {name: rng.standard_normal(SHAPES_OF_TRAINED[name]).astype("f4")
           for name in ("score.weight", "score.bias", "model.norm.bias", f"{Q}.bias")}  # fmt: skip
    stored = {name.replace(f"{Q}.", f"{Q}.base_layer."): tensor for name, tensor in own.items()}
    tensors = pair(rng, Q, 8, 8) | {START + name: tensor for name, tensor in stored.items()}
    adapter = save_adapter(tmp_path / "adapter", tensors, bias="all", modules_to_save=["score"])
    _receipt, found = merged(base_of_trained, adapter, tmp_path)
    for name, tensor in (made(1, shapes=SHAPES_OF_TRAINED) | own).items():
        if name != f"{Q}.weight":
            np.testing.assert_array_equal(found[name], tensor)


def test_copies_with_the_names_of_a_wrapper_are_left_out(base_of_trained, rng, tmp_path):
    """`bias="all"` saves the bias of a module that was trained whole under three names; PEFT reads the plain one."""
    own = rng.standard_normal(3).astype("f4")
    copies = {f"{START}score.{word}.bias": own + 1 for word in ("modules_to_save", "original_module")}
    tensors = pair(rng, Q, 8, 8) | copies
    with pytest.raises(UnrepresentableError, match="trained whole, which the adapter lacks"):
        merged(base_of_trained, save_adapter(tmp_path / "lacking", tensors, bias="all"), tmp_path)
    adapter = save_adapter(tmp_path / "adapter", tensors | {f"{START}score.bias": own}, bias="all")
    receipt, found = merged(base_of_trained, adapter, tmp_path)
    np.testing.assert_array_equal(found["score.bias"], own)
    assert any("score.original_module.bias" in one for one in receipt.warnings)


@pytest.mark.parametrize("below", [False, True])
def test_the_bias_of_b_is_scaled_and_added(base_of_trained, rng, below, tmp_path):
    """To the bias of the base, or to that which was trained below the matrices."""
    bias, own = (rng.standard_normal(8).astype("f4") for _ in range(2))
    tensors = pair(rng, Q, 8, 8) | {f"{START}{Q}.lora_B.bias": bias}
    tensors |= {f"{START}{Q}.base_layer.bias": own} if below else {}
    adapter = save_adapter(tmp_path / "adapter", tensors, lora_bias=True, bias="lora_only")
    _receipt, found = merged(base_of_trained, adapter, tmp_path)
    under = own if below else made(1, shapes=SHAPES_OF_TRAINED)[f"{Q}.bias"]
    np.testing.assert_allclose(found[f"{Q}.bias"], under + 3 * bias, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "stated", [[7, 2], {"embed_tokens": [7, 2]}, {"model.embed_tokens": [7, 2]}], ids=str
)
def test_trained_tokens_replace_rows(base_of_trained, rng, stated, tmp_path):
    rows = rng.standard_normal((2, 8)).astype("f4")
    tensors = {f"{START}model.embed_tokens.token_adapter.trainable_tokens_delta": rows}
    adapter = save_adapter(tmp_path / "adapter", tensors, trainable_token_indices=stated)
    _receipt, found = merged(base_of_trained, adapter, tmp_path)
    wanted = made(1, shapes=SHAPES_OF_TRAINED)["model.embed_tokens.weight"].copy()
    wanted[[7, 2]] = rows
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], wanted)


@pytest.mark.parametrize(("stated", "words"), [
    ([7], r"is \[2, 8\], but"), ([7, 11], "no row of the base"), ([7, 7], "a number twice"), ([-1, 2], "no row"),
    ([True, 2], "no row"), (None, "does not state which rows"), ({"other": [7, 2]}, "does not state which rows"),
    ("72", "does not state which rows"),
])  # fmt: skip
def test_rows_that_are_not_stated_are_refused(base_of_trained, rng, stated, words, tmp_path):
    rows = rng.standard_normal((2, 8)).astype("f4")
    tensors = {f"{START}model.embed_tokens.token_adapter.trainable_tokens_delta": rows}
    adapter = save_adapter(tmp_path / "adapter", tensors, trainable_token_indices=stated)
    with pytest.raises(UnrepresentableError, match=words):
        merged(base_of_trained, adapter, tmp_path)


# The class of a module decides on which side its inputs are; without a class, the only way that fits.
@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize(("kind", "module", "first"), [
    ("gpt2", "h.0.attn.c_proj", True), ("gpt2", "lm_head", False), ("llama", "model.layers.0.self_attn.q_proj", False),
])  # fmt: skip
def test_the_class_of_a_module_decides_its_orientation(kind, module, first, flag, rng, tmp_path):
    """Whatever `fan_in_fan_out` says: it is that of the last module that PEFT wrapped."""
    whole = made(1, shapes={f"{module}.weight": (8, 8)})
    base = save(tmp_path / "base", whole, {"model_type": kind})
    tensors = pair(rng, module, 8, 8)
    adapter = save_adapter(tmp_path / "adapter", tensors, fan_in_fan_out=flag)
    out = tmp_path / "out"
    wherry.merge([str(base), str(adapter)], out, to="huggingface", family="none", lineage=False)
    added = delta(tensors, module, 3.0)
    found = read(out)[(f"{module}.weight",)]
    wanted = whole[f"{module}.weight"] + (added.T if first else added)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [None, {"model_type": "someone's own"}, {}], ids=str)
@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (8, 8)], ids=str)
def test_of_an_unknown_class_only_one_way_may_fit(config, shape, rng, tmp_path):
    whole = made(1, shapes={"layer.weight": shape})
    base = save(tmp_path / "base", whole, config)
    tensors = pair(rng, "layer", 12 if shape != (8, 8) else 8, 8)
    adapter = save_adapter(tmp_path / "adapter", tensors)
    if shape == (8, 8):
        with pytest.raises(UnrepresentableError, match="square matrix of a module whose class is unknown"):
            merged(base, adapter, tmp_path)
        return
    _receipt, found = merged(base, adapter, tmp_path)
    added = delta(tensors, "layer", 3.0)
    wanted = whole["layer.weight"] + (added if shape == (8, 12) else added.T)
    np.testing.assert_allclose(found["layer.weight"], wanted, rtol=1e-5, atol=1e-5)


def test_the_flag_is_not_used_for_embeddings(base_of_trained, rng, tmp_path):
    tensors = pair(rng, "model.embed_tokens", 11, 8, kind="lora_embedding", end="")
    adapter = save_adapter(tmp_path / "adapter", tensors, fan_in_fan_out=True)
    _receipt, found = merged(base_of_trained, adapter, tmp_path)
    added = delta(tensors, "model.embed_tokens", 3.0, "lora_embedding", "").T
    wanted = made(1, shapes=SHAPES_OF_TRAINED)["model.embed_tokens.weight"] + added
    np.testing.assert_allclose(found["model.embed_tokens.weight"], wanted, rtol=1e-5, atol=1e-5)


EXPERTS, HIDDEN, FFN, RANK = 3, 8, 6, 2
MOE = "model.layers.0.mlp.experts"


def experts_adapter(folder, rng, **config):
    """Matrices of both parameters of experts, nested as by PEFT; and parameter → products, [expert, out, in]."""
    sides = {"gate_up_proj": (f"{MOE}.base_layer", HIDDEN, 2 * FFN), "down_proj": (MOE, FFN, HIDDEN)}
    tensors, products = {}, {}
    for name, (module, ins, outs) in sides.items():
        tensors |= pair(rng, module, ins, outs, rank=RANK * EXPERTS)
        down, up = (tensors[f"{START}{module}.lora_{letter}.weight"].astype("f8") for letter in "AB")
        each = np.einsum("ore,eri->eoi", up.reshape(outs, RANK, EXPERTS), down.reshape(EXPERTS, RANK, ins))
        products[name] = 3 * each
    stated = {
        "target_parameters": [f"mlp.experts.{name}" for name in sides],
        "peft_version": "0.21.2",
        **config,
    }
    return save_adapter(folder, tensors, **stated), products


@pytest.mark.parametrize("form", ["published", "memory", "inputs-first"])
def test_experts_of_one_parameter(form, rng, tmp_path):
    adapter, products = experts_adapter(tmp_path / "adapter", rng)
    gate_up, down = products["gate_up_proj"], products["down_proj"]
    if form == "published":
        parts = {"gate_proj": gate_up[:, :FFN], "up_proj": gate_up[:, FFN:], "down_proj": down}
        added = {
            f"{MOE}.{number}.{name}.weight": one[number]
            for name, one in parts.items()
            for number in range(EXPERTS)
        }
    elif form == "memory":
        added = {f"{MOE}.{name}": one for name, one in products.items()}
    else:
        added = {f"{MOE}.{name}": one.transpose(0, 2, 1) for name, one in products.items()}
    whole = made(1, shapes={name: one.shape for name, one in added.items()})
    base = save(
        tmp_path / "base", whole, {"model_type": "gpt_oss" if form == "inputs-first" else "qwen3_moe"}
    )
    out = tmp_path / "out"
    wherry.merge([str(base), str(adapter)], out, to="huggingface", family="none", lineage=False)
    found = {path[0]: tensor for path, tensor in read(out).items()}
    assert found.keys() == whole.keys()
    for name, one in added.items():
        np.testing.assert_allclose(found[name], whole[name] + one, rtol=1e-5, atol=1e-5)


def test_experts_that_no_parameter_fits_are_refused(rng, tmp_path):
    whole = made(1, shapes={f"{MOE}.gate_up_proj": (EXPERTS, 2 * FFN, HIDDEN + 1)})
    base = save(tmp_path / "base", whole, {"model_type": "qwen3_moe"})
    adapter, _products = experts_adapter(tmp_path / "adapter", rng)
    with pytest.raises(UnrepresentableError, match="fit 0 of the parameters that target_parameters names"):
        merged(base, adapter, tmp_path)


@pytest.mark.parametrize(("version", "kind", "works"), [
    ("0.21.2", "qwen3_moe", True), ("0.19.0", "qwen3_moe", True), ("0.18.1", "qwen3_moe", False),
    (None, "qwen3_moe", False), ("0.18.1", "gpt_oss", True), ("0.21.2", "someone's own", False),
])  # fmt: skip
def test_square_experts_need_a_known_class_and_a_version_of_peft(version, kind, works, rng, tmp_path):
    tensors = pair(rng, MOE, 8, 8, rank=RANK * EXPERTS)
    base = save(
        tmp_path / "base", made(1, shapes={f"{MOE}.down_proj": (EXPERTS, 8, 8)}), {"model_type": kind}
    )
    adapter = save_adapter(
        tmp_path / "adapter", tensors, target_parameters=["down_proj"], peft_version=version
    )
    words = [str(base), str(adapter)]
    if not works:
        with pytest.raises(UnrepresentableError, match="square matrices"):
            wherry.merge(words, tmp_path / "out", to="huggingface", family="none", lineage=False)
        return
    wherry.merge(words, tmp_path / "out", to="huggingface", family="none", lineage=False)


def test_a_parameter_of_a_module_is_stored_outputs_first(rng, tmp_path):
    """PEFT takes a matrix in `target_parameters` as it is stored, whatever the class of its module."""
    whole = made(1, shapes={"h.0.attn.c_proj.weight": (8, 8)})
    base = save(tmp_path / "base", whole, {"model_type": "gpt2"})
    tensors = pair(rng, "h.0.attn.c_proj", 8, 8)
    adapter = save_adapter(tmp_path / "adapter", tensors, target_parameters=["c_proj.weight"])
    wherry.merge([str(base), str(adapter)], tmp_path / "out", to="huggingface", family="none", lineage=False)
    wanted = whole["h.0.attn.c_proj.weight"] + delta(tensors, "h.0.attn.c_proj", 3.0)
    np.testing.assert_allclose(
        read(tmp_path / "out")[("h.0.attn.c_proj.weight",)], wanted, rtol=1e-5, atol=1e-5
    )


# Tied ends: what PEFT's model computes with the adapter, on models of transformers.
E_NAME, H_NAME, VOCAB, WIDTH = "model.embed_tokens", "lm_head", 60, 8


def of_base():
    return made(1, shapes={f"{E_NAME}.weight": (VOCAB, WIDTH)})[f"{E_NAME}.weight"]


def tied_base(folder, **config):
    shapes = {f"{E_NAME}.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    stated = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "tie_word_embeddings": True, **config}
    return save(folder, made(1, shapes=shapes), stated)


def lora(rng, end):
    return (
        pair(rng, E_NAME, VOCAB, WIDTH, kind="lora_embedding", end="")
        if end == E_NAME
        else pair(rng, H_NAME, WIDTH, VOCAB)
    )


def changed(tensors, end):
    """The tensor of an end with its adapter."""
    whole = tensors.get(f"{START}{end}.weight", of_base())
    if f"{START}{end}.lora_A.weight" in tensors:
        return whole + delta(tensors, end, 3.0)
    if f"{START}{end}.lora_embedding_A" in tensors:
        return whole + delta(tensors, end, 3.0, "lora_embedding", "").T
    return whole


@pytest.mark.parametrize("how", ["whole", "lora"])
@pytest.mark.parametrize("ends", [[E_NAME], [H_NAME], [E_NAME, H_NAME]], ids=str)
def test_ends_that_an_adapter_changes_apart_are_untied(ends, how, rng, tmp_path):
    base = tied_base(tmp_path / "base")
    tensors = {}
    for end in ends:
        own = rng.standard_normal((VOCAB, WIDTH)).astype("f4")
        tensors |= lora(rng, end) if how == "lora" else {f"{START}{end}.weight": own}
    receipt, found = merged(base, save_adapter(tmp_path / "adapter", tensors), tmp_path)
    for end in (E_NAME, H_NAME):
        np.testing.assert_allclose(found[f"{end}.weight"], changed(tensors, end), rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {**json.loads((base / "config.json").read_text()), "tie_word_embeddings": False}
    assert any("the result is untied" in one for one in receipt.warnings)
    assert any("merge_and_unload" in one for one in receipt.warnings) == (how == "lora")
    assert wherry.verify(tmp_path / "out", level="digest").ok


@pytest.mark.parametrize("how", ["whole", "lora", "rows"])
def test_ends_that_change_alike_stay_tied(how, rng, tmp_path):
    """Both saved with equal values, as `ensure_weight_tying` does; or rows of the embedding."""
    base, config = tied_base(tmp_path / "base"), {"ensure_weight_tying": True}
    if how == "whole":
        own = rng.standard_normal((VOCAB, WIDTH)).astype("f4")
        tensors, wanted = {f"{START}{end}.weight": own for end in (E_NAME, H_NAME)}, own
    elif how == "lora":
        tensors = lora(rng, E_NAME)
        for embedding_letter, head_letter in (("B", "A"), ("A", "B")):
            matrix = tensors[f"{START}{E_NAME}.lora_embedding_{embedding_letter}"]
            tensors[f"{START}{H_NAME}.lora_{head_letter}.weight"] = np.ascontiguousarray(matrix.T)
        wanted = changed(tensors, E_NAME)
    else:
        rows = rng.standard_normal((2, WIDTH)).astype("f4")
        tensors = {f"{START}{E_NAME}.token_adapter.trainable_tokens_delta": rows}
        config, wanted = {"trainable_token_indices": [3, 1]}, changed({}, E_NAME).copy()
        wanted[[3, 1]] = rows
    _receipt, found = merged(base, save_adapter(tmp_path / "adapter", tensors, **config), tmp_path)
    assert f"{H_NAME}.weight" not in found
    np.testing.assert_allclose(found[f"{E_NAME}.weight"], wanted, rtol=1e-5, atol=1e-5)
    assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_a_scale_of_one_end_alone_unties_equal_matrices(rng, tmp_path):
    base, tensors = tied_base(tmp_path / "base"), lora(rng, E_NAME)
    for embedding_letter, head_letter in (("B", "A"), ("A", "B")):
        matrix = tensors[f"{START}{E_NAME}.lora_embedding_{embedding_letter}"]
        tensors[f"{START}{H_NAME}.lora_{head_letter}.weight"] = np.ascontiguousarray(matrix.T)
    config = {"ensure_weight_tying": True, "alpha_pattern": {"lm_head": 2}}
    _receipt, found = merged(base, save_adapter(tmp_path / "adapter", tensors, **config), tmp_path)
    np.testing.assert_allclose(found[f"{E_NAME}.weight"], changed(tensors, E_NAME), rtol=1e-5, atol=1e-5)
    wanted = of_base() + delta(tensors, H_NAME, 1.0)
    np.testing.assert_allclose(found[f"{H_NAME}.weight"], wanted, rtol=1e-5, atol=1e-5)


def test_ends_that_should_be_tied_and_differ_are_refused(rng, tmp_path):
    first, second = rng.standard_normal((2, VOCAB, WIDTH)).astype("f4")
    tensors = {f"{START}{E_NAME}.weight": first, f"{START}{H_NAME}.weight": second}
    adapter = save_adapter(tmp_path / "adapter", tensors, ensure_weight_tying=True)
    with pytest.raises(UnrepresentableError, match="ensure_weight_tying is stated, but"):
        merged(tied_base(tmp_path / "base"), adapter, tmp_path)


@pytest.mark.parametrize(
    "config",
    [{"architectures": ["BertForMaskedLM"]}, {"is_encoder_decoder": True}, {"text_config": {}}],
    ids=str,
)
def test_a_class_that_has_no_untied_form_here_is_refused(config, rng, tmp_path):
    base = tied_base(tmp_path / "base", **config)
    with pytest.raises(UnrepresentableError, match="untied models of this class are not supported"):
        merged(base, save_adapter(tmp_path / "adapter", lora(rng, E_NAME)), tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stated", [True, False])
def test_a_base_with_both_ends_is_tied_if_its_config_says_so_and_they_are_equal(stated, rng, tmp_path):
    one = of_base()
    config = {"model_type": "opt", "architectures": ["OPTForCausalLM"], "tie_word_embeddings": stated}
    base = save(tmp_path / "base", {f"{E_NAME}.weight": one, f"{H_NAME}.weight": one.copy()}, config)
    rows = rng.standard_normal((1, WIDTH)).astype("f4")
    tensors = {f"{START}{E_NAME}.token_adapter.trainable_tokens_delta": rows}
    adapter = save_adapter(tmp_path / "adapter", tensors, trainable_token_indices=[4])
    _receipt, found = merged(base, adapter, tmp_path)
    np.testing.assert_array_equal(found[f"{E_NAME}.weight"][4], rows[0])
    np.testing.assert_array_equal(found[f"{H_NAME}.weight"][4], rows[0] if stated else one[4])


def test_a_bare_model_lacks_the_first_word_of_the_names(rng, tmp_path):
    """As the files of `gpt2` itself do, whose adapters name `transformer.h.0`."""
    whole = made(1, shapes={"h.0.attn.c_attn.weight": (8, 24), "wte.weight": (VOCAB, 8)})
    base = save(tmp_path / "base", whole, {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    own = rng.standard_normal((VOCAB, 8)).astype("f4")
    tensors = pair(rng, "transformer.h.0.attn.c_attn", 8, 24) | {f"{START}transformer.wte.weight": own}
    adapter = save_adapter(tmp_path / "adapter", tensors, modules_to_save=["wte"])
    wherry.merge([str(base), str(adapter)], tmp_path / "out", to="huggingface", family="none", lineage=False)
    found = {path[0]: tensor for path, tensor in read(tmp_path / "out").items()}
    wanted = whole["h.0.attn.c_attn.weight"] + delta(tensors, "transformer.h.0.attn.c_attn", 3.0).T
    np.testing.assert_allclose(found["h.0.attn.c_attn.weight"], wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found["wte.weight"], own)
    np.testing.assert_array_equal(found["lm_head.weight"], whole["wte.weight"])


def test_the_untied_result_is_computed_by_transformers(tmp_path):
    """Logits of a tied model whose embedding alone was trained."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}  # fmt: skip
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)).eval()
    model.save_pretrained(tmp_path / "base")
    own = torch.randn(VOCAB, 16)
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file({f"{START}{E_NAME}.weight": own.numpy()}, folder / "adapter_model.safetensors")
    stated = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 2,
        "target_modules": [],
        "modules_to_save": ["embed_tokens"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    wherry.merge([str(tmp_path / "base"), str(folder)], tmp_path / "out", to="huggingface", lineage=False)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        model.model.embed_tokens.weight = torch.nn.Parameter(own)
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(tokens).logits
        torch.testing.assert_close(found, model(tokens).logits, rtol=1e-5, atol=1e-5)


# The patterns of PEFT: those that are supported match what PEFT's own expression matches, in little time.


MODULES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.mlp.up_proj",
    "q_proj",
    "model.q_proj_extra",
    "xq_proj",
)
SUPPORTED = (
    "q_proj", "self_attn.q_proj", r"layers\.0\.self_attn\.q_proj", "^q_proj", "^model.layers.0.self_attn.q_proj$",
    r"layers\.\d+\.mlp\.up_proj", ".*up_proj", "(q_proj|up_proj)", "(?:q|k)_proj", "[qk]_proj", "layers.[0-9]{2}.*",
    "q_proj|up_proj", "mlp.*",
)  # fmt: skip


@pytest.mark.parametrize("pattern", SUPPORTED)
def test_a_pattern_matches_as_in_peft(pattern):
    assert is_simple(pattern) is (pattern != "layers.[0-9]{2}.*")
    found = ModulePatterns({pattern: 7})
    for module in MODULES:
        wanted = re.match(rf"(.*\.)?({pattern})$", module)
        assert found.value(module, None) == (7 if wanted else None)


def test_the_first_pattern_counts():
    found = ModulePatterns({"k": 1, "q_proj": 2, "proj": 3, ".*proj": 4})
    assert [found.value(one, 0) for one in ("a.q_proj", "a.o_proj", "a.b")] == [2, 4, 0]
    assert ModulePatterns(None).value("a", 5) == 5


@given(
    st.lists(
        st.sampled_from(
            ["a", ".", "*", "+", "?", "(", "(?:", ")", "|", "[a-z]", r"\d", r"\.", "{3}", "^", "$"]
        )
    )
)
def test_what_is_simple_ends_soon(parts):
    pattern = "".join(parts)
    if is_simple(pattern):
        began = time.process_time()
        ModulePatterns({pattern: 1}).value("a" * 1000, None)
        assert time.process_time() - began < 5


def test_names_and_comparisons_are_limited(monkeypatch):
    with pytest.raises(UnrepresentableError, match="too long"):
        ModulePatterns({"a": 1}).value("a" * 1001, None)
    monkeypatch.setattr(peft, "_MOST_COMPARISONS", 5)
    found = ModulePatterns({"a": 1, "b": 2})
    assert [found.value("x.b", None) for _ in range(2)] == [2, 2]
    with pytest.raises(UnrepresentableError, match="too many"):
        found.value("x.b", None)


# PEFT judges merges of random adapters, and of adapters of every field of LoraConfig, in an environment
# of its own.


JUDGE = ROOT / "tests" / "support" / "oracles" / "peft_judge.py"
slow = [pytest.mark.slow, pytest.mark.timeout(3600)]


def judge_answer(what, job):
    """The judge's answer."""
    file = Path(job["folder"]) / f"{what}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(job))
    env = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(old_python("merges")), str(JUDGE), what, str(file)], capture_output=True, text=True, check=False, env=env
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.with_suffix(".answer.json").read_text())


def judged(kind, folder, **job):
    """Name → equal, or why wherry or PEFT refuses; a result that is not equal fails."""
    answer = judge_answer("make", {"kind": kind, "folder": str(folder), **job})
    found, models = dict.fromkeys(answer["refused"], PEFT), {}
    for name, row in answer["rows"].items():
        out = folder / "out" / name
        try:
            wherry.merge([str(folder / "base"), row["adapter"]], out, to="huggingface", lineage=False)
            models[name] = str(out)
        except UnrepresentableError as error:
            found[name] = str(error)
    logits = judge_answer("logits", {"kind": kind, "folder": str(folder / "logits"), "models": models})
    for name, file in logits.items():
        row = answer["rows"][name]
        loaded, merged = (np.load(Path(row["answer"]) / f"{one}.npy") for one in ("loaded", "merged"))
        bound = 2e-5 * np.abs(loaded).max()
        assert np.abs(np.load(file) - loaded).max() <= bound, (name, row["config"])
        if np.abs(merged - loaded).max() <= bound:
            require_alike(tensors(Path(row["answer"]) / "model"), tensors(Path(models[name])), name)
        found[name] = EQUAL
    return found, answer


def tensors(folder):
    return {
        name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()
    }


def require_alike(wanted, found, name):
    """The same tensors: torch's matrix product and numpy's may differ in the last bits."""
    assert found.keys() == wanted.keys(), name
    for key, tensor in wanted.items():
        bound = 2**-20 * np.abs(tensor).max()
        np.testing.assert_allclose(found[key], tensor, rtol=0, atol=bound, err_msg=f"{name} {key}")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=slow) for kind in KINDS])
def test_random_adapters_are_merged_as_peft_computes_them(kind, tmp_path):
    found, _answer = judged(kind, tmp_path, draws=DRAWS)
    refusals = [one for name, one in found.items() if one not in (EQUAL, PEFT)]
    assert all(any(reason in one for reason in REASONS) for one in refusals), refusals
    assert (len(refusals), list(found.values()).count(EQUAL)) == (KINDS[kind], DRAWS - KINDS[kind])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_field_of_a_config_alone_is_merged_or_refused_by_name(tmp_path):
    configs = {name: config for name, (_field, config, _outcome) in WALK.items()}
    found, answer = judged("qwen2-tied", tmp_path, configs={**configs, **MORE})
    assert {field for field, _config, _outcome in WALK.values()} == set(answer["fields"])
    outcomes = {name: one if one in (EQUAL, PEFT) else REFUSED for name, one in found.items()}
    assert outcomes == {**{name: row[2] for name, row in WALK.items()}, **dict.fromkeys(MORE, EQUAL)}, found
    for name, one in found.items():
        assert outcomes[name] != REFUSED or f"{WALK[name][0]} is " in one, one


def test_the_page_states_what_is_judged():
    text = " ".join((ROOT / "docs" / "reference" / "judged.md").read_text().split())
    outcomes = [outcome for _field, _config, outcome in WALK.values()]
    fields = len({field for field, _config, _outcome in WALK.values()})
    refused = sum(KINDS.values())
    walked = ", ".join([
        f"{fields} fields of `LoraConfig`, each alone, in {len(WALK)} adapters: {outcomes.count(EQUAL)} are equal",
        f"{outcomes.count(REFUSED)} refused by name, and {outcomes.count(PEFT)} PEFT itself does not merge",
    ])  # fmt: skip
    assert f"{len(KINDS) * DRAWS} random adapters of {len(KINDS)} small models" in text
    assert f"{len(KINDS) * DRAWS - refused} are equal, and {refused} refused" in text
    assert walked in text, walked
