"""MaxText itself applies adapters that wherry wrote, and wherry reads what MaxText saved: the outputs are the same.

Of each model, MaxText restores the adapter with `restore_lora_from_path`, which takes rank and alpha from the metadata,
and computes; then it draws its matrices anew, computes again, and saves them as its `to_maxtext` saves an adapter.
transformers computes both from base and adapter by PEFT's definition, W + alpha / rank · B · A.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file

import wherry
from tests.support.oracles import judge
from tests.support.oracles.adapters import merge_by_definition, save_adapter
from tests.support.oracles.cases import ADAPTER_PAIRS, FORMS
from tests.support.oracles.huggingface import TOKENS, logits
from tests.support.oracles.maxtext_itself import SINGLE, round_embedding, run_pairs, stated

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys, traceback
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from maxtext.checkpoint_conversion.utils.utils import save_weights_to_checkpoint
from maxtext.common.common_types import MODEL_MODE_TRAIN
from maxtext.configs import pyconfig
from maxtext.utils import lora_utils, model_creation_utils

MODULES = "decoder/.*/(query|key|value|out|wi_0|wi_1|wo|wq_a|wq_b|wkv_a|wkv_b)"

def logits(model, job):
    tokens = jnp.asarray(job["tokens"])
    rows, length = tokens.shape
    found = model(
        decoder_input_tokens=tokens, decoder_positions=jnp.broadcast_to(jnp.arange(length), (rows, length)),
        decoder_segment_ids=jnp.ones((rows, length), jnp.int32), enable_dropout=False, model_mode=MODEL_MODE_TRAIN,
    )
    return np.asarray(found[0] if isinstance(found, tuple) else found, np.float32)

def run(job):
    rows, length = np.shape(job["tokens"])
    config = pyconfig.initialize([
        "", job["config"], f"load_parameters_path={job['items']}", "dtype=float32", "weight_dtype=float32",
        "matmul_precision=highest", "attention=dot_product", "sparse_matmul=false", f"per_device_batch_size={rows}",
        f"max_target_length={length}", "run_name=x", "skip_jax_distributed_system=true", "enable_dropout=false",
        "enable_checkpointing=false", "hardware=cpu", f"base_output_directory={job['out']}",
        "lora.enable_lora=true", f"lora.lora_restore_path={job['adapter']}", f"lora.lora_module_path={MODULES}",
        *job["stated"],
    ])
    lora_utils.sync_lora_metadata(config)  # rank and alpha
    model = model_creation_utils.from_pretrained(config)
    model = model[0] if isinstance(model, tuple) else model
    model = lora_utils.apply_lora_to_model(model, getattr(model, "mesh", None), config)
    model = lora_utils.restore_lora_from_path(model, config)
    np.save(job["out"] + "/restored.npy", logits(model, job))
    rng = np.random.default_rng(9)
    draw = lambda one: jnp.asarray(0.2 * rng.standard_normal(one.shape), jnp.float32)
    nnx.update(model, jax.tree.map(draw, nnx.state(model, nnx.LoRAParam)))
    np.save(job["out"] + "/drawn.npy", logits(model, job))
    tree = jax.tree.map(lambda one: {"value": np.asarray(one)}, nnx.to_pure_dict(nnx.state(model, nnx.LoRAParam)))
    save_weights_to_checkpoint(job["out"] + "/saved", tree, 1, True, True, config=config)

for job in json.load(sys.stdin):
    try:
        run(job)
    except Exception:
        open(job["out"] + "/error.txt", "w").write(traceback.format_exc())
"""


def job(folder: Path, label: str, form: str) -> dict:
    """Convert a model and an adapter of it, and return the input of the script."""
    source, base, adapter = judge.source(label), folder / "base", folder / "adapter"
    wherry.convert(source, base, to="maxtext", options=FORMS[form], lineage=False)
    peft = save_adapter(source, folder / "peft")
    receipt = wherry.convert(
        peft, adapter, to="maxtext", options=FORMS[form], config=str(source / "config.json"), lineage=False
    )
    assert "lora_rank=4" in receipt.snippet
    assert "lora_alpha=6" in receipt.snippet
    file = base / "items" / "assets" / "maxtext_config.yml"
    return {
        "tokens": TOKENS.tolist(), "config": str(file), "items": str(base / "items"),
        "adapter": str(adapter / "items"), "out": str(folder),
        "stated": stated(label, yaml.safe_load(file.read_text())),
    }  # fmt: skip


@pytest.fixture(scope="module")
def folders(request, tmp_path_factory):
    """A folder with what MaxText computed and saved, or its error, for each pair: one process for all of them."""
    return run_pairs(request, tmp_path_factory, SCRIPT, job)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("label", "form"), ADAPTER_PAIRS)
def test_maxtext_computes_what_peft_defines(folders, label, form, tmp_path):
    folder = folders[label, form]
    error = folder / "error.txt"
    assert (folder / "restored.npy").exists(), error.read_text()[-1500:]
    whole = merge_by_definition(judge.source(label), folder / "peft", tmp_path / "whole")
    wanted = logits(whole, change=round_embedding)
    assert np.abs(wanted - judge.wanted(label)).max() > 0.01 * np.abs(wanted).max(), (
        "the adapter changes nothing"
    )
    judge.require_equal(np.load(folder / "restored.npy"), wanted, SINGLE)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("label", "form"), ADAPTER_PAIRS)
def test_what_maxtext_saved_is_peft_s(folders, label, form, tmp_path):
    folder, source = folders[label, form], judge.source(label)
    saved = folder / "saved" / "0"
    assert saved.exists(), (folder / "error.txt").read_text()[-1500:]
    back = tmp_path / "back"
    wherry.convert(saved, back, to="huggingface", config=str(source / "config.json"), lineage=False)
    config = json.loads((back / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6)
    names = load_file(folder / "peft" / "adapter_model.safetensors")
    assert set(load_file(back / "adapter_model.safetensors")) == set(names)
    whole = merge_by_definition(source, back, tmp_path / "whole")
    judge.require_equal(np.load(folder / "drawn.npy"), logits(whole, change=round_embedding), SINGLE)
