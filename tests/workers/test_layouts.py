"""Units of a conversion between systems: each reads its part of the source, and their digests of the source merge."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.core.request import TargetRequest, convert_request
from wherry.workers.commit import commit
from wherry.workers.job import split
from wherry.workers.work import work

OPTIONS = {"max_shard_size": "100KB"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama of Hugging Face with four layers, and the same for MaxText."""
    folder = tmp_path_factory.mktemp("llama") / "hf"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "max_position_embeddings": 64, "hidden_act": "silu", "torch_dtype": "float32", "attention_bias": False,
        "mlp_bias": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (128, 64), "lm_head.weight": (128, 64), "model.norm.weight": (64,)}
    for layer in range(4):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (64, 64), f"{at}.self_attn.k_proj.weight": (32, 64),
            f"{at}.self_attn.v_proj.weight": (32, 64), f"{at}.self_attn.o_proj.weight": (64, 64),
            f"{at}.mlp.gate_proj.weight": (96, 64), f"{at}.mlp.up_proj.weight": (96, 64),
            f"{at}.mlp.down_proj.weight": (64, 96), f"{at}.input_layernorm.weight": (64,),
            f"{at}.post_attention_layernorm.weight": (64,),
        }  # fmt: skip
    tensors = {name: random.standard_normal(shape, dtype="f4") for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    wherry.convert(folder, folder.parent / "maxtext", to="maxtext", lineage=False)
    return folder


def test_a_scanned_model_becomes_shards_by_several_workers(llama, tmp_path):
    """Each layer of a scanned kernel is read by the unit that writes it."""
    target = str(tmp_path / "out")
    source = str(llama.parent / "maxtext")
    request = convert_request(source, [TargetRequest(target, "hf", OPTIONS)], lineage=False)
    job = split(request, 100_000)
    assert len(job.units) > 3
    work(target)
    [receipt] = commit(target).receipts
    one = wherry.convert(source, tmp_path / "one", to="hf", options=OPTIONS, lineage=False)
    assert receipt.target.checkpoint_digest == one.target.checkpoint_digest
    assert receipt.source.checkpoint_digest == one.source.checkpoint_digest
    assert receipt.source.weights_digest == one.source.weights_digest
    assert receipt.resumed_bytes == receipt.bytes_written
    assert wherry.verify(target, level="roundtrip", against=source).ok
