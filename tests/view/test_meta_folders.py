"""A folder of Meta's `consolidated.NN.pth` without `params.json`: the cure of the refusal leads to a whole model."""

from __future__ import annotations

import json

import numpy as np
import pytest

import wherry
from tests.support.families import PLAIN_LLAMA, SIZES, made
from tests.support.torch import torch
from wherry.core.request import LayoutRequest
from wherry.errors import AmbiguousError
from wherry.families import load_family

SIZED = {**SIZES, "embed": 32, "ffn": 24}
PARAMS = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 20, "multiple_of": 24,
          "ffn_dim_multiplier": 0.2, "norm_eps": 1e-5, "rope_theta": 10000.0}  # fmt: skip
CONFIG = {**PLAIN_LLAMA, "hidden_size": 32, "intermediate_size": 24, "head_dim": 8}


@pytest.fixture
def folder(tmp_path):
    tensors = made(load_family("llama"), "meta", {}, sizes=SIZED).tensors
    (tmp_path / "meta").mkdir()
    flat = {path[0]: torch.from_numpy(array) for path, array in tensors.items()}
    torch.save(flat, tmp_path / "meta/consolidated.00.pth")
    return tmp_path / "meta"


def test_without_sizes_the_cure_names_the_files_that_state_them(folder, tmp_path):
    with pytest.raises(AmbiguousError, match="cannot determine the size of axis group") as caught:
        wherry.plan(folder, tmp_path / "out", to="huggingface")
    assert caught.value.cure == "pass the model's config with --config FILE (its params.json or config.json)"


@pytest.mark.parametrize("source", ["meta", "meta/consolidated.00.pth"])
@pytest.mark.parametrize(("name", "config"), [("params.json", PARAMS), ("config.json", CONFIG)])
def test_the_cure_leads_to_the_model(source, name, config, folder, tmp_path):
    (tmp_path / name).write_text(json.dumps(config))
    layout = LayoutRequest(config=str(tmp_path / name))
    wherry.convert(tmp_path / source, tmp_path / "out", to="huggingface", layout=layout, lineage=False)
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert (found["num_key_value_heads"], found["num_attention_heads"], found["intermediate_size"]) == (
        2,
        4,
        24,
    )
    (folder / "params.json").write_text(json.dumps(PARAMS))
    wherry.convert(folder, tmp_path / "with-params", to="huggingface", lineage=False)
    for path in ("model.layers.2.self_attn.q_proj.weight", "lm_head.weight"):
        with wherry.open(tmp_path / "out") as one, wherry.open(tmp_path / "with-params") as other:
            np.testing.assert_array_equal(one.read(path), other.read(path))
