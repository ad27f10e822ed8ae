"""What a PEFT adapter trains besides the matrices of modules, by the definition; PEFT itself judges in `test_peft`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.merging import START, delta, made, merged, pair, read, save, save_adapter
from wherry.errors import UnrepresentableError

Q = "model.layers.0.q"
SHAPES = {f"{Q}.weight": (8, 8), f"{Q}.bias": (8,), "score.weight": (3, 8), "score.bias": (3,),
          "model.norm.weight": (8,), "model.norm.bias": (8,), "model.embed_tokens.weight": (11, 8)}  # fmt: skip


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.fixture
def base(tmp_path):
    return save(tmp_path / "base", made(1, shapes=SHAPES), {"model_type": "opt"})


def test_tensors_that_were_trained_whole_replace_those_of_the_base(base, rng, tmp_path):
    """A classifier with its bias (SEQ_CLS), and the biases of modules with matrices and without."""
    own = {name: rng.standard_normal(SHAPES[name]).astype("f4")
           for name in ("score.weight", "score.bias", "model.norm.bias", f"{Q}.bias")}  # fmt: skip
    stored = {name.replace(f"{Q}.", f"{Q}.base_layer."): tensor for name, tensor in own.items()}
    tensors = pair(rng, Q, 8, 8) | {START + name: tensor for name, tensor in stored.items()}
    adapter = save_adapter(tmp_path / "adapter", tensors, bias="all", modules_to_save=["score"])
    _receipt, found = merged(base, adapter, tmp_path)
    for name, tensor in (made(1, shapes=SHAPES) | own).items():
        if name != f"{Q}.weight":
            np.testing.assert_array_equal(found[name], tensor)


def test_copies_with_the_names_of_a_wrapper_are_left_out(base, rng, tmp_path):
    """`bias="all"` saves the bias of a module that was trained whole under three names; PEFT reads the plain one."""
    own = rng.standard_normal(3).astype("f4")
    copies = {f"{START}score.{word}.bias": own + 1 for word in ("modules_to_save", "original_module")}
    tensors = pair(rng, Q, 8, 8) | copies
    with pytest.raises(UnrepresentableError, match="trained whole, which the adapter lacks"):
        merged(base, save_adapter(tmp_path / "lacking", tensors, bias="all"), tmp_path)
    adapter = save_adapter(tmp_path / "adapter", tensors | {f"{START}score.bias": own}, bias="all")
    receipt, found = merged(base, adapter, tmp_path)
    np.testing.assert_array_equal(found["score.bias"], own)
    assert any("score.original_module.bias" in one for one in receipt.warnings)


@pytest.mark.parametrize("below", [False, True])
def test_the_bias_of_b_is_scaled_and_added(base, rng, below, tmp_path):
    """To the bias of the base, or to that which was trained below the matrices."""
    bias, own = (rng.standard_normal(8).astype("f4") for _ in range(2))
    tensors = pair(rng, Q, 8, 8) | {f"{START}{Q}.lora_B.bias": bias}
    tensors |= {f"{START}{Q}.base_layer.bias": own} if below else {}
    adapter = save_adapter(tmp_path / "adapter", tensors, lora_bias=True, bias="lora_only")
    _receipt, found = merged(base, adapter, tmp_path)
    under = own if below else made(1, shapes=SHAPES)[f"{Q}.bias"]
    np.testing.assert_allclose(found[f"{Q}.bias"], under + 3 * bias, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "stated", [[7, 2], {"embed_tokens": [7, 2]}, {"model.embed_tokens": [7, 2]}], ids=str
)
def test_trained_tokens_replace_rows(base, rng, stated, tmp_path):
    rows = rng.standard_normal((2, 8)).astype("f4")
    tensors = {f"{START}model.embed_tokens.token_adapter.trainable_tokens_delta": rows}
    adapter = save_adapter(tmp_path / "adapter", tensors, trainable_token_indices=stated)
    _receipt, found = merged(base, adapter, tmp_path)
    wanted = made(1, shapes=SHAPES)["model.embed_tokens.weight"].copy()
    wanted[[7, 2]] = rows
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], wanted)


@pytest.mark.parametrize(("stated", "words"), [
    ([7], r"is \[2, 8\], but"), ([7, 11], "no row of the base"), ([7, 7], "a number twice"), ([-1, 2], "no row"),
    ([True, 2], "no row"), (None, "does not state which rows"), ({"other": [7, 2]}, "does not state which rows"),
    ("72", "does not state which rows"),
])  # fmt: skip
def test_rows_that_are_not_stated_are_refused(base, rng, stated, words, tmp_path):
    rows = rng.standard_normal((2, 8)).astype("f4")
    tensors = {f"{START}model.embed_tokens.token_adapter.trainable_tokens_delta": rows}
    adapter = save_adapter(tmp_path / "adapter", tensors, trainable_token_indices=stated)
    with pytest.raises(UnrepresentableError, match=words):
        merged(base, adapter, tmp_path)


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


def test_the_flag_is_not_used_for_embeddings(base, rng, tmp_path):
    tensors = pair(rng, "model.embed_tokens", 11, 8, kind="lora_embedding", end="")
    adapter = save_adapter(tmp_path / "adapter", tensors, fan_in_fan_out=True)
    _receipt, found = merged(base, adapter, tmp_path)
    added = delta(tensors, "model.embed_tokens", 3.0, "lora_embedding", "").T
    wanted = made(1, shapes=SHAPES)["model.embed_tokens.weight"] + added
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
