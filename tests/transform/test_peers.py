"""mergekit, in an environment of its own, merges the same files: equal to what wherry merges."""

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


def ran(python, *words):
    env = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(python), *map(str, words)], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr[-2000:]


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
