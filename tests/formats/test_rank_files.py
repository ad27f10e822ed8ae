"""Files of one rank are no checkpoints of their own: nanotron, vLLM's sharded_state, layers of a DeepSpeed pipeline."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.errors import UnsupportedError


def nanotron(run):
    folder = run / "10/model/model/decoder/0/pp_block/attn/qkv_proj"
    folder.mkdir(parents=True)
    (run / "10/checkpoint_metadata.json").write_text(json.dumps({"version": "1.4"}))
    (run / "10/model_config.json").write_text("{}")
    (run / "latest.txt").write_text("10")
    for rank in range(2):
        name = f"model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors"
        save_file({"data": np.ones((48, 32), np.float32)}, folder / name)
    return run / "10", folder / name


def vllm(run):
    folder = run / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for rank in range(2):
        name = f"model-rank-{rank}-part-0.safetensors"
        save_file({"model.norm.weight": np.ones(4, np.float32)}, folder / name)
    return folder, folder / name


def layers(run):
    folder = run / "global_step10"
    folder.mkdir(parents=True)
    (run / "latest").write_text("global_step10")
    for layer in (0, 2):
        (folder / f"layer_{layer:02d}-model_00-model_states.pt").write_bytes(b"PK\x03\x04")
    return folder, folder / "layer_00-model_00-model_states.pt"


@pytest.mark.parametrize(
    ("make", "words", "way"),
    [(nanotron, "nanotron", "convert_nanotron_to_hf.py"), (vllm, "vLLM", "the model from which vLLM loaded it"),
     (layers, "pipeline layers", "convert_neox_to_hf.py")],
)  # fmt: skip
def test_it_is_named_and_no_file_of_it_is_a_checkpoint(tmp_path, make, words, way):
    step, file = make(tmp_path / "run")
    skipped = []
    assert list(wherry.discover(tmp_path, on_skip=skipped.append)) == []
    found = wherry.detect(step)
    assert found.verdict == "unsupported"
    assert words in found.reason
    assert way in found.cure
    assert wherry.detect(file).verdict == "unsupported"
    with pytest.raises(UnsupportedError):
        wherry.convert(step, tmp_path / "never", to="orbax")
    assert make is layers or any(words in one.reason for one in skipped)


def test_a_part_is_read_where_its_format_is_chosen(tmp_path):
    _, file = nanotron(tmp_path / "run")
    assert wherry.detect(file, format="safetensors").verdict == "ok"
