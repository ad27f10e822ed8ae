"""Checkpoints with the model types and config attributes under which their publishers release them."""

from __future__ import annotations

import json
from functools import partial

import pytest
from safetensors.torch import load_file

import wherry
from tests.support.oracles import huggingface, judge
from tests.support.quantized import FP8, INT4, fp8, int4, save_quantized
from tests.support.torch import torch
from wherry.errors import UnrepresentableError

convert = partial(wherry.convert, lineage=False)
# What the config.json of Kimi-K2-Instruct states beyond a model's sizes; MLA turns neighbouring elements.
KIMI = {
    "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "ep_size": 1,
    "moe_layer_freq": 1, "num_nextn_predict_layers": 0, "pretraining_tp": 1, "routed_scaling_factor": 2.827,
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 16, "type": "yarn"},
    "rope_theta": 50000.0, "scoring_func": "sigmoid", "seq_aux": True, "topk_method": "noaux_tc",
}  # fmt: skip
DROPPED = (
    "rope_parameters",
    "rope_interleave",
    "head_dim",
    "qk_head_dim",
)  # as only transformers 5 writes them
RELEASES = {"fp8": (FP8, fp8(16, 16)), "int4": (INT4, int4(8))}
SMALL = {"q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}  # whole groups of eight


def as_kimi(folder):
    """The config of a tiny DeepSeek-V3 as Kimi K2 states it."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({name: one for name, one in config.items() if name not in DROPPED} | KIMI))
    return folder


@pytest.mark.parametrize("release", sorted(RELEASES))
def test_kimi_k2_goes_to_maxtext_and_comes_back_as_it_was_released(release, tmp_path):
    source = as_kimi(save_quantized(tmp_path / "kimi", "deepseek-v3", *RELEASES[release], **SMALL))
    convert(source, tmp_path / "maxtext", to="maxtext")
    convert(tmp_path / "maxtext", tmp_path / "back", to="huggingface")
    convert(source, tmp_path / "plain", to="huggingface", options={"dequantize": "bfloat16"})
    back, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "plain"))
    assert back.keys() == plain.keys()
    assert all(torch.equal(back[name], plain[name]) for name in plain)
    for name in ("back", "plain"):
        file = tmp_path / name / "config.json"
        config = json.loads(file.read_text())
        assert config["model_type"] == "kimi_k2"
        # Its own code is DeepSeek-V3's, which transformers has under that name.
        file.write_text(json.dumps({**config, "model_type": "deepseek_v3"}))
    judge.require_equal(huggingface.logits(tmp_path / "back"), huggingface.logits(tmp_path / "plain"))


def test_deepseek_v3_2_in_fp8_keeps_its_indexer(tmp_path):
    source = save_quantized(tmp_path / "v32", "deepseek-v3.2", FP8, fp8(16, 16))
    stored = load_file(source / "model.safetensors")
    assert stored["model.layers.0.self_attn.indexer.wk.weight"].dtype == torch.float8_e4m3fn
    for scan in ("true", "false"):
        convert(source, tmp_path / scan, to="maxtext", options={"scan_layers": scan})
        convert(tmp_path / scan, tmp_path / f"back-{scan}", to="huggingface")
    convert(source, tmp_path / "plain", to="huggingface", options={"dequantize": "bfloat16"})
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for scan in ("true", "false"):
        back = load_file(tmp_path / f"back-{scan}" / "model.safetensors")
        assert back.keys() == plain.keys()
        assert all(torch.equal(back[name], plain[name]) for name in plain)
        found = huggingface.logits(tmp_path / f"back-{scan}")
        judge.require_equal(found, huggingface.logits(tmp_path / "plain"))


def test_an_indexer_that_the_config_does_not_state_is_refused_by_name(tmp_path):
    source = save_quantized(tmp_path / "v32", "deepseek-v3.2", FP8, fp8(16, 16))
    file = source / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "deepseek_v3"}))
    with pytest.raises(UnrepresentableError, match=r"indexer"):
        convert(source, tmp_path / "out", to="maxtext")
    assert not (tmp_path / "out").exists()
