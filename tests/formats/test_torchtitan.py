"""torchtitan's steps: recognised by their names, read with and without the states of the run, and written."""

from __future__ import annotations

import json

import pytest

import wherry
from tests.support import torchtitan
from tests.support.oracles import judge
from wherry.errors import AmbiguousError, IncompleteError, UnrepresentableError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def tensors(uri):
    with wherry.open(uri) as checkpoint:
        return {path: checkpoint.read(path).tobytes() for path in checkpoint.manifest.tensors}


@pytest.mark.parametrize("release", ["0.3", "0.2"])
@pytest.mark.parametrize("label", ["llama", "qwen3-moe", "deepseek-v3", "gpt-oss"])
def test_a_step_becomes_the_model_that_it_was_made_of(label, release, tmp_path):
    hf, run = judge.source(label), tmp_path / "checkpoint"
    step = torchtitan.step(hf, run, release=release)
    detection = wherry.detect(run)
    assert (detection.format, detection.step) == ("torchtitan", 7)
    receipt = wherry.convert(
        step, tmp_path / "back", to="huggingface", config=tmp_path / "model.json", lineage=False
    )
    assert tensors(tmp_path / "back") == tensors(hf)
    assert {"values"} < {row["rule"] for row in receipt.ignored}


def test_moments_go_to_maxtext_and_back(tmp_path):
    step = torchtitan.step(judge.source("deepseek-v3"), tmp_path / "checkpoint")
    wherry.convert(step, tmp_path / "jax", to="maxtext", config=tmp_path / "model.json", lineage=False)
    wherry.convert(tmp_path / "jax", tmp_path / "back", to="torchtitan", lineage=False)
    before, after = tensors(step), tensors(tmp_path / "back")
    moments = {path for path in before if path[0].endswith((".exp_avg", ".exp_avg_sq"))}
    assert len(moments) > 50
    assert {path: after[path] for path in moments} == {path: before[path] for path in moments}


def test_fused_moments_stay_behind_by_name(tmp_path):
    step = torchtitan.step(judge.source("llama"), tmp_path / "checkpoint", fused=True)
    receipt = wherry.convert(
        step, tmp_path / "jax", to="maxtext", config=tmp_path / "model.json", lineage=False
    )
    (row,) = [one for one in receipt.ignored if "fuse_qkv" in one["reason"]]
    assert row["rule"] == "torchtitan: optimizer.state.*"


def test_a_copy_keeps_the_states_of_the_run(tmp_path):
    step = torchtitan.step(judge.source("llama"), tmp_path / "checkpoint")
    wherry.convert(step, tmp_path / "copy", to="torchtitan", lineage=False)
    assert tensors(tmp_path / "copy") == tensors(step)
    with wherry.open(tmp_path / "copy") as copy, wherry.open(step) as own:
        assert dict(copy.manifest.values) == dict(own.manifest.values)
        assert copy.manifest.values["train_state.ntokens_seen",] == 1234
    state = {"train_state": {"step": 0}, "lr_scheduler": {"last_epoch": 0}}
    torch.distributed.checkpoint.load(state, checkpoint_id=tmp_path / "copy")
    assert state == {"train_state": {"step": 7}, "lr_scheduler": {"last_epoch": 7}}


def test_the_model_alone_needs_its_config(tmp_path):
    step = torchtitan.step(judge.source("llama"), tmp_path / "checkpoint", trained=False)
    with pytest.raises(AmbiguousError, match="pass the model's config with config=FILE"):
        wherry.convert(
            step, tmp_path / "out", to="maxtext", options={"rope": "half"}, family="llama", lineage=False
        )


def test_other_folders_of_torch_stay_what_they_are(tmp_path):
    import torch.distributed.checkpoint as dcp

    rows = {
        "below": {"model.tok_embeddings.weight": torch.ones(3, 2), "model.layers.0.x": torch.ones(2)},
        "step-9": {"layers.0.weight": torch.ones(3, 2)},
        "other": {"tok_embeddings.weight": torch.ones(3, 2), "head": torch.ones(2)},
    }
    for name, state in rows.items():
        dcp.save(state, checkpoint_id=tmp_path / name)
        assert wherry.detect(tmp_path / name).format == "dcp"


def test_a_missing_file_is_named(tmp_path):
    step = torchtitan.step(judge.source("llama"), tmp_path / "checkpoint")
    (step / "__0_0.distcp").unlink()
    with pytest.raises(IncompleteError, match=r"__0_0\.distcp"):
        wherry.convert(step, tmp_path / "out", to="dcp", lineage=False)
    assert not (tmp_path / "out").exists()


def test_what_torchtitan_cannot_hold_is_refused(tmp_path):
    for label, reason in (("qwen2", "no layout for parameter key_bias"), ("mistral", "no layout")):
        with pytest.raises(UnrepresentableError, match=reason):
            wherry.plan(judge.source(label), tmp_path / "out", to="torchtitan")


def test_a_config_of_another_model_is_refused(tmp_path):
    step = torchtitan.step(judge.source("llama"), tmp_path / "checkpoint", trained=False)
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**torchtitan.config(tmp_path / "checkpoint"), "model": "qwen3"}))
    with pytest.raises(wherry.WherryError, match="not torchtitan's llama3"):
        wherry.convert(step, tmp_path / "out", to="huggingface", family="llama", config=other, lineage=False)


def test_a_tied_model_says_that_it_is_tied(tmp_path):
    wherry.convert(judge.source("llama-tied"), tmp_path / "out", to="torchtitan", lineage=False)
    said = json.loads((tmp_path / "out" / "torchtitan_config.json").read_text())
    found = tensors(tmp_path / "out")
    assert said["enable_weight_tying"] is True
    assert found["lm_head.weight",] == found["tok_embeddings.weight",]


def test_a_tree_without_layers_is_refused(tmp_path):
    """The target would be taken for another folder of torch."""
    torch.save({"tok_embeddings.weight": torch.ones(3, 2), "head": torch.ones(2)}, tmp_path / "in.pt")
    with pytest.raises(UnrepresentableError, match=r"missing parameter layers\.0: "):
        wherry.convert(tmp_path / "in.pt", tmp_path / "out", to="torchtitan")
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]
