"""PEFT and mergekit, in an environment of their own, merge the same files: equal to what wherry merges."""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file

import wherry
from tests.support.generations import old_python
from tests.support.tiny_models import save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
pytest.importorskip("transformers")

# Makes adapters on a base, with random matrices and scales, and merges each into its base.
PEFT = """
import json, sys, torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
base, job = sys.argv[1], json.loads(sys.argv[2])
torch.manual_seed(0)
model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(**job["config"]))
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(torch.randn_like(parameter) * 0.3)
model.save_pretrained(job["adapter"])
again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), job["adapter"])
again.merge_and_unload().save_pretrained(job["out"])
"""
ADAPTERS = {
    "plain": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}),
    "rslora": ("llama", {"r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["v_proj", "o_proj"]}),
    "dora": ("llama", {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": ["q_proj", "down_proj"]}),
    "dora-rslora": ("llama", {"r": 4, "lora_alpha": 8, "use_dora": True, "use_rslora": True,
                              "target_modules": ["v_proj", "up_proj"]}),
    "patterns": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"],
                           "rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"up_proj": 3}}),
    "whole-modules": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "embedding": ("llama", {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "k_proj"]}),
    "inputs-first": ("gpt2", {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
}  # fmt: skip
GPT2 = """
import sys, torch, transformers
torch.manual_seed(0)
config = transformers.GPT2Config(vocab_size=60, n_positions=64, n_embd=32, n_layer=2, n_head=4)
transformers.GPT2LMHeadModel(config).save_pretrained(sys.argv[1])
"""


def ran(python, *words):
    env = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(python), *map(str, words)], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:]


def base_of(folder, kind, python):
    if kind == "gpt2":
        ran(python, "-c", GPT2, folder)
        return folder
    return save_tiny(folder, kind, drawn=True)


@pytest.mark.parametrize("label", ADAPTERS)
def test_peft_merges_the_same(label, tmp_path):
    python, (kind, config) = old_python("merges"), ADAPTERS[label]
    base = base_of(tmp_path / "base", kind, python)
    job = {"config": {**config, "task_type": "CAUSAL_LM"}, "adapter": str(tmp_path / "adapter"),
           "out": str(tmp_path / "peft")}  # fmt: skip
    ran(python, "-c", PEFT, base, json.dumps(job))
    wherry.merge([str(base), job["adapter"]], tmp_path / "out", to="huggingface", lineage=False)
    wanted, found = (
        load_file(tmp_path / "peft" / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    whole = load_file(base / "model.safetensors")
    assert set(found) == set(wanted)
    assert any(not np.array_equal(found[name], whole[name]) for name in found)
    for name, tensor in wanted.items():  # torch's matrix product and numpy's may differ in the last bit
        np.testing.assert_allclose(found[name], tensor, rtol=0, atol=2**-22 * np.abs(tensor).max())


MERGEKIT = """
import sys
from mergekit.config import MergeConfiguration
from mergekit.merge import MergeOptions, run_merge
import yaml
run_merge(MergeConfiguration.model_validate(yaml.safe_load(open(sys.argv[1]))), sys.argv[2],
          MergeOptions(cuda=False, copy_tokenizer=False, allow_crimes=True))
"""


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.7, -0.2, 0.3)])
def test_mergekit_merges_the_same(weights, tmp_path):
    python = old_python("merges")
    sources = [
        save_tiny(tmp_path / f"s{number}", "llama", drawn=bool(number), rms_norm_eps=1e-5)
        for number in range(len(weights))
    ]
    models = [
        {"model": str(one), "parameters": {"weight": weight}}
        for one, weight in zip(sources, weights, strict=True)
    ]
    config = {
        "merge_method": "linear",
        "dtype": "float32",
        "models": models,
        "parameters": {"normalize": False},
    }
    (tmp_path / "merge.yml").write_text(json.dumps(config))
    ran(python, "-c", MERGEKIT, tmp_path / "merge.yml", tmp_path / "kit")
    words = [f"{one}*{weight}" for one, weight in zip(sources, weights, strict=True)]
    wherry.merge(words, tmp_path / "out", to="huggingface", lineage=False)
    (file,) = (tmp_path / "kit").glob("*.safetensors")
    wanted, found = load_file(file), load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():  # of three terms torch may add the last two first
        allowed = 2**-22 * np.abs(tensor).max() if len(weights) > 2 else 0
        np.testing.assert_allclose(found[name], tensor, rtol=0, atol=allowed)
