"""Families of LoRA adapters, derived from those of their models; `tests/oracles/test_maxtext_adapters` judges them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.command import command
from tests.support.families import SIZES, carried, made, same
from wherry.errors import AmbiguousError, MismatchError, UnrepresentableError, UsageError, WherryError
from wherry.families import adapter_families, convert_layout, families, load_family
from wherry.families.templates import form_choices
from wherry.transform.adapter import notes_of

RANK, LAYERS, EMBED, GROUPS, HEADS, DIM, FFN = 3, 2, 24, 2, 4, 16, 16  # 1 / sqrt(DIM) rounds nothing
CONFIG = {
    "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": EMBED, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "head_dim": DIM, "intermediate_size": FFN, "vocab_size": 20, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "attention_bias": False,
    "mlp_bias": False, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
MODULES = {
    "self_attn.q_proj": (EMBED, HEADS * DIM), "self_attn.k_proj": (EMBED, GROUPS * DIM),
    "self_attn.v_proj": (EMBED, GROUPS * DIM), "self_attn.o_proj": (HEADS * DIM, EMBED), "mlp.gate_proj": (EMBED, FFN),
    "mlp.up_proj": (EMBED, FFN), "mlp.down_proj": (FFN, EMBED),
}  # fmt: skip
START = "base_model.model.model.layers"


@pytest.fixture
def base(tmp_path):
    """The config of a base, without its weights."""
    return save_base(tmp_path)


def save_base(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return str(folder / "config.json")


def save_peft(folder, modules=MODULES, **config):
    rng, tensors = np.random.default_rng(2), {}
    folder.mkdir()
    for layer in range(LAYERS):
        for module, (ins, outs) in modules.items():
            for letter, shape in (("A", (RANK, ins)), ("B", (outs, RANK))):
                tensors[f"{START}.{layer}.{module}.lora_{letter}.weight"] = rng.standard_normal(shape).astype(
                    "f4"
                )
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    names = sorted(name.rpartition(".")[2] for name in modules)
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 12, "target_modules": names, **config}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder, tensors


def metadata(step):
    return json.loads((step / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]


# ---- Derived families


def test_every_family_with_layouts_in_maxtext_has_one_of_adapters():
    named = {name for name in families() if {"huggingface", "maxtext"} <= set(load_family(name).systems)}
    assert {name.removesuffix("-lora") for name in adapter_families()} == named
    assert not any(load_family(name).model_types for name in adapter_families())


@pytest.mark.parametrize("name", adapter_families())
def test_every_form_is_there_and_back_exact(name):
    family = load_family(name)
    sizes = {**SIZES, "shared_ffn": SIZES["expert_ffn"], **family.constants}
    choices = {
        key: one.always or one.choices[-1] for key, one in family.system("maxtext").conventions.items()
    }
    for source_forms in form_choices(family.system("huggingface"), {}):
        begun = made(family, "huggingface", source_forms, sizes=sizes)
        if not begun.tensors:
            continue
        for forms in form_choices(family.system("maxtext"), {}):
            there = convert_layout(
                begun.manifest, family, "huggingface", "maxtext",
                source_options=source_forms, options={**forms, **choices}, sizes=sizes, dtype="float64",
                facts={"residual_multiplier": 0.7},
            )  # fmt: skip
            moved = carried(there, begun.read, limit=600)
            back = convert_layout(
                moved.manifest, family, "maxtext", "huggingface",
                source_options={**forms, **choices}, options=source_forms, sizes=sizes, dtype="float32",
                facts={"residual_multiplier": 0.7},
            )  # fmt: skip
            assert same(carried(back, moved.read).tensors, begun.tensors)


def test_a_matrix_is_turned_with_its_projection():
    """With one row of the identity for A, the adapter of MaxText is the kernel of a base with B's columns."""
    base, family = load_family("llama"), load_family("llama-lora")
    options = {"rope": "interleaved", "query_scale": "folded", "scan_layers": "true", "param_scan_axis": "1"}
    sizes = {**SIZES, "rank": SIZES["embed"], "half": 2}
    whole = made(base, "huggingface", {}, sizes=sizes)
    eye = np.eye(sizes["embed"], dtype="f4")
    halves = made(family, "huggingface", {}, sizes=sizes)
    for path in halves.tensors:
        module, letter = path[0].removeprefix("base_model.model.").split(".lora_")
        if module.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj"):
            halves.tensors[path] = eye if letter[0] == "A" else whole.tensors[f"{module}.weight",]
    common = {"options": options, "sizes": sizes}
    kernels = carried(
        convert_layout(whole.manifest, base, "huggingface", "maxtext", **common), whole.read
    ).tensors
    pairs = carried(
        convert_layout(halves.manifest, family, "huggingface", "maxtext", **common), halves.read
    ).tensors
    for name in ("query", "key", "value"):
        at = ("decoder", "layers", "self_attention", name)
        down, up = (pairs[*at, f"kernel_lora_{one}", "value"] for one in "ab")
        kernel = kernels["params", "params", *at, "kernel"]
        product = np.einsum("elr,rlo->elo", down, up)
        np.testing.assert_array_equal(product, kernel.reshape(product.shape))


# ---- Conversions


@pytest.mark.parametrize("scan", ["true", "false"])
def test_there_and_back_is_bit_equal(base, scan, tmp_path):
    """The way back needs no config: the sizes of the base are recorded."""
    source, tensors = save_peft(tmp_path / "peft", target_parameters=None)
    step = tmp_path / "0"
    options = {"scan_layers": scan}
    receipt = wherry.convert(source, step, to="maxtext", options=options, config=base, lineage=False)
    assert receipt.lossless
    assert f"lora.lora_rank={RANK} lora.lora_alpha=12" in receipt.snippet
    assert metadata(step)["scan_layers"] is (scan == "true")
    assert metadata(step)["lora"] == {"enable_lora": True, "lora_rank": RANK, "lora_alpha": 12.0}
    assert wherry.verify(step, level="digest", against=str(source)).ok
    wherry.convert(step, tmp_path / "back", to="huggingface", lineage=False)
    back = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert {name: one.tobytes() for name, one in back.items()} == {
        name: one.tobytes() for name, one in tensors.items()
    }
    configs = [(one / "adapter_config.json").read_text() for one in (source, tmp_path / "back")]
    assert configs[0] == configs[1]


def test_the_names_and_shapes_are_those_of_maxtext(base, tmp_path):
    source, _tensors = save_peft(tmp_path / "peft")
    for scan, layers, shape in (
        ("true", "layers", (EMBED, LAYERS, RANK)),
        ("false", "layers_1", (EMBED, RANK)),
    ):
        step = tmp_path / scan
        options = {"scan_layers": scan}
        wherry.convert(source, step, to="maxtext", options=options, config=base, lineage=False)
        with wherry.open(step) as checkpoint:
            at = ("decoder", layers, "self_attention", "query", "kernel_lora_a", "value")
            assert checkpoint.manifest.tensors[at].shape == shape
            assert checkpoint.detection.format == "maxtext"


def test_a_factor_of_the_query_is_one_of_its_second_matrix(base, tmp_path):
    source, tensors = save_peft(tmp_path / "peft", {"self_attn.q_proj": MODULES["self_attn.q_proj"]})
    wherry.convert(source, tmp_path / "0", to="maxtext", config=base, lineage=False)
    with wherry.open(tmp_path / "0") as checkpoint:
        at = ("decoder", "layers", "self_attention", "query")
        down, up = (checkpoint.read((*at, f"kernel_lora_{one}", "value"))[:, 1] for one in "ab")
    matrices = [tensors[f"{START}.1.self_attn.q_proj.lora_{one}.weight"] for one in "AB"]
    np.testing.assert_array_equal(down, matrices[0].T)
    np.testing.assert_allclose(up, matrices[1].T / np.sqrt(DIM), rtol=1e-6)


def test_rows_are_those_of_llama_3_1(tmp_path):
    """Neighbouring elements turn together there, as MaxText's `to_maxtext` writes such an adapter."""
    source, tensors = save_peft(tmp_path / "peft")
    config = save_base(tmp_path, rope_scaling=LLAMA3)
    wherry.convert(source, tmp_path / "0", to="maxtext", config=config, lineage=False)
    with wherry.open(tmp_path / "0") as checkpoint:
        up = checkpoint.read(("decoder", "layers", "self_attention", "key", "kernel_lora_b", "value"))[:, 0]
    rows = tensors[f"{START}.0.self_attn.k_proj.lora_B.weight"].T.reshape(RANK, GROUPS, 2, DIM // 2)
    np.testing.assert_array_equal(up, rows.swapaxes(2, 3).reshape(RANK, -1))


def test_the_alpha_of_a_rank_stabilised_adapter_is_that_of_its_scale(base, tmp_path):
    source, _tensors = save_peft(tmp_path / "peft", use_rslora=True)
    wherry.convert(source, tmp_path / "0", to="maxtext", config=base, lineage=False)
    assert metadata(tmp_path / "0")["lora"]["lora_alpha"] / RANK == pytest.approx(12 / np.sqrt(RANK))


def test_an_adapter_of_maxtext_gets_a_config_of_peft(base, tmp_path):
    """As one that MaxText saved: no file of PEFT, no record of wherry's."""
    source, tensors = save_peft(tmp_path / "peft")
    step = tmp_path / "0"
    wherry.convert(source, step, to="maxtext", config=base, lineage=False)
    (step / "wherry.json").unlink()
    (step / "items" / "assets" / "adapter_config.json").unlink()
    options = {"config": base, "lineage": False}
    wherry.convert(step, tmp_path / "back", to="huggingface", **options)
    assert set(load_file(tmp_path / "back" / "adapter_model.safetensors")) == set(tensors)
    said = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert (said["peft_type"], said["r"], said["lora_alpha"]) == ("LORA", RANK, 12)
    assert said["target_modules"] == sorted(name.rpartition(".")[2] for name in MODULES)
    around = json.loads((step / "_CHECKPOINT_METADATA").read_text())
    del around["custom_metadata"]["lora"]
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps(around))
    with pytest.raises(UsageError, match="lora_alpha") as caught:
        wherry.convert(step, tmp_path / "more", to="huggingface", **options)
    assert "lora_alpha" in caught.value.cure
    stated = {"lora_alpha": 7.5}
    wherry.convert(step, tmp_path / "more", to="huggingface", options=stated, **options)
    assert json.loads((tmp_path / "more" / "adapter_config.json").read_text())["lora_alpha"] == 7.5


# ---- Refusals


WRONG = ["x", "", [], [1], {}, {"a": 1}, True, 2**70, -(2**70), float("inf"), float("nan")]


@pytest.fixture
def step(base, tmp_path):
    """An adapter of MaxText that wherry wrote, without PEFT's file."""
    source, _tensors = save_peft(tmp_path / "peft")
    wherry.convert(source, tmp_path / "0", to="maxtext", config=base, lineage=False)
    (tmp_path / "0" / "items" / "assets" / "adapter_config.json").unlink()
    return tmp_path / "0"


def rewritten(file, keys, change):
    data = table = json.loads(file.read_text())
    for key in keys:
        table = table[key]
    change(table)
    file.write_text(json.dumps(data))


def refused(step, base, tmp_path, **more):
    with pytest.raises(WherryError, match="alpha"):
        wherry.convert(step, tmp_path / "back", to="huggingface", config=base, lineage=False, **more)


@pytest.mark.parametrize("alpha", WRONG, ids=repr)
def test_an_alpha_in_the_metadata_that_is_no_number_is_refused(step, base, alpha, tmp_path):
    (step / "wherry.json").unlink()
    lora = ("custom_metadata", "lora")
    rewritten(step / "_CHECKPOINT_METADATA", lora, lambda table: table.update(lora_alpha=alpha))
    refused(step, base, tmp_path)


@pytest.mark.parametrize("alpha", WRONG, ids=repr)
def test_a_recorded_alpha_that_is_no_number_is_refused(step, base, alpha, tmp_path):
    rewritten(step / "_CHECKPOINT_METADATA", ("custom_metadata",), lambda table: table.pop("lora"))
    facts = ("manifest", "origin", "layout", "facts")
    rewritten(step / "wherry.json", facts, lambda table: table.update(lora_alpha=alpha))
    refused(step, base, tmp_path)


@pytest.mark.parametrize("alpha", WRONG, ids=repr)
def test_a_stated_alpha_that_is_no_number_is_refused(step, base, alpha, tmp_path):
    refused(
        step, base, tmp_path, options={"lora_alpha": alpha if isinstance(alpha, str) else json.dumps(alpha)}
    )


@pytest.mark.parametrize("custom", ["x", [], [1], 7, True], ids=repr)
def test_metadata_of_another_form_are_replaced(base, custom, tmp_path):
    source, _tensors = save_peft(tmp_path / "peft")
    with wherry.open(source) as checkpoint:
        checkpoint.manifest = replace(checkpoint.manifest, custom={"checkpoint": custom})
        projected = convert_layout(
            checkpoint.manifest, load_family("llama-lora"), "huggingface", "maxtext",
            config=json.loads(Path(base).read_text()), facts={"lora_alpha": 12},
        )  # fmt: skip
        notes = notes_of(projected, checkpoint)
    assert notes == {"checkpoint": {"lora": {"enable_lora": True, "lora_rank": RANK, "lora_alpha": 12.0}}}


@pytest.mark.parametrize("alpha", WRONG, ids=repr)
def test_an_alpha_of_peft_that_is_no_number_is_refused(base, alpha, tmp_path):
    source, _tensors = save_peft(tmp_path / "peft", lora_alpha=alpha)
    with pytest.raises(UnrepresentableError, match=r"lora_alpha is .*, not a number"):
        wherry.convert(source, tmp_path / "1", to="maxtext", config=base, lineage=False)


@pytest.mark.parametrize("rank", [*WRONG, 0, -1, None], ids=repr)
def test_a_rank_that_is_no_number_is_refused(base, rank, tmp_path):
    source, _tensors = save_peft(tmp_path / "peft", r=rank, use_rslora=True)
    with pytest.raises(WherryError, match=r"r is|rank"):
        wherry.convert(source, tmp_path / "0", to="maxtext", config=base, lineage=False)


@pytest.mark.parametrize("to", ["maxtext", "megatron"])
@pytest.mark.parametrize(("config", "words"), [
    ({"use_dora": True}, "use_dora is True"), ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
    ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern is"), ({"bias": "all"}, "bias is 'all'"),
    ({"init_lora_weights": "pissa"}, "which changes the base"), ({"peft_type": "IA3"}, "type IA3"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters is .*, which is not supported"),
])  # fmt: skip
def test_what_no_layout_has_is_refused_by_name(base, to, config, words, tmp_path):
    source, _tensors = save_peft(tmp_path / "peft", **config)
    with pytest.raises(UnrepresentableError, match=words) as caught:
        wherry.convert(source, tmp_path / "out", to=to, config=base, lineage=False)
    assert "merge the adapter into its base" in caught.value.cure
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["maxtext", "megatron"])
def test_adapters_of_single_experts_are_refused_with_the_reason(base, to, tmp_path):
    modules = {**MODULES, "block_sparse_moe.experts.1.w1": (EMBED, FFN)}
    source, _tensors = save_peft(tmp_path / "peft", modules)
    with pytest.raises(UnrepresentableError, match="adapters of experts have no layout") as caught:
        wherry.convert(source, tmp_path / "out", to=to, config=base, lineage=False)
    assert "experts.1.w1" in str(caught.value)
    assert "merge the adapter into its base" in caught.value.cure


def test_an_adapter_requires_the_config_of_its_base(tmp_path):
    source, _tensors = save_peft(tmp_path / "peft")
    with pytest.raises(AmbiguousError, match="llama-lora") as caught:
        wherry.convert(source, tmp_path / "out", to="maxtext", lineage=False)
    assert "config" in caught.value.cure


def test_another_rank_or_alpha_than_the_stated_one_is_refused(base, tmp_path):
    source, _tensors = save_peft(tmp_path / "peft", r=RANK + 1)
    with pytest.raises(MismatchError, match="the rank is 3 in the tensors, but 4 in adapter_config"):
        wherry.convert(source, tmp_path / "out", to="maxtext", config=base, lineage=False)
    good, _tensors = save_peft(tmp_path / "good")
    wherry.convert(good, tmp_path / "0", to="maxtext", config=base, lineage=False)
    place = tmp_path / "0" / "items" / "assets" / "adapter_config.json"
    place.write_text(place.read_text().replace('"lora_alpha": 12', '"lora_alpha": 13'))
    with pytest.raises(MismatchError, match=r"an alpha of 13, but the metadata of the step 12"):
        wherry.convert(tmp_path / "0", tmp_path / "back", to="huggingface", lineage=False)


@pytest.mark.parametrize(
    "alpha", ["x", [1], {}, True, float("inf"), float("nan"), 10**400], ids=lambda one: repr(one)[:9]
)
def test_an_alpha_of_the_metadata_that_is_no_number_is_refused(base, alpha, tmp_path):
    source, _tensors = save_peft(tmp_path / "peft")
    wherry.convert(source, tmp_path / "0", to="maxtext", config=base, lineage=False)
    (tmp_path / "0" / "items" / "assets" / "adapter_config.json").unlink()
    around = json.loads((tmp_path / "0" / "_CHECKPOINT_METADATA").read_text())
    around["custom_metadata"]["lora"]["lora_alpha"] = alpha
    (tmp_path / "0" / "_CHECKPOINT_METADATA").write_text(json.dumps(around))
    with pytest.raises(WherryError) as caught:
        wherry.convert(tmp_path / "0", tmp_path / "back", to="huggingface", config=base, lineage=False)
    assert "bug" not in str(caught.value)


def test_projections_of_another_system_are_refused_by_name(base, tmp_path):
    source, _tensors = save_peft(tmp_path / "peft", {**MODULES, "mlp.router": (EMBED, FFN)})
    with pytest.raises(UnrepresentableError, match=r"mlp\.router"):
        wherry.convert(source, tmp_path / "out", to="maxtext", config=base, lineage=False)


def test_the_layouts_say_what_judged_them():
    layouts = json.loads(command("layouts", "llama-lora", "--json").stdout)
    assert layouts["judged"]["maxtext"] == {"into": "own library", "out_of": "own library"}
    layouts = json.loads(command("layouts", "granite-lora", "--json").stdout)
    assert layouts["judged"]["maxtext"] == {"into": "not judged", "out_of": "not judged"}
