"""MaxText's own model classes, on the processor, load what wherry wrote and compute what transformers computes.

This judges the forward passes of `tests.support.oracles` too. MaxText 0.2.5 needs Python 3.12, hence an environment of
its own (`tests.support.generations`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

import wherry
from tests.support.oracles import huggingface, judge
from tests.support.oracles.cases import FORMS, ITSELF_PAIRS
from tests.support.oracles.huggingface import TOKENS
from tests.support.oracles.maxtext_itself import SINGLE, round_embedding, run_pairs, stated

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys, traceback
import jax.numpy as jnp, numpy as np
from maxtext.common.common_types import MODEL_MODE_TRAIN
from maxtext.configs import pyconfig
from maxtext.utils import model_creation_utils

def logits(job):
    tokens = jnp.asarray(job["tokens"])
    rows, length = tokens.shape
    config = pyconfig.initialize([
        "", job["config"], f"load_parameters_path={job['items']}", "dtype=float32", "weight_dtype=float32",
        "matmul_precision=highest", "attention=dot_product", "sparse_matmul=false", f"per_device_batch_size={rows}",
        f"max_target_length={length}", "run_name=x", "skip_jax_distributed_system=true", "enable_dropout=false",
        "enable_checkpointing=false", "hardware=cpu", f"base_output_directory={job['out']}", *job["stated"],
    ])
    model = model_creation_utils.from_pretrained(config)
    model = model[0] if isinstance(model, tuple) else model
    found = model(
        decoder_input_tokens=tokens, decoder_positions=jnp.broadcast_to(jnp.arange(length), (rows, length)),
        decoder_segment_ids=jnp.ones((rows, length), jnp.int32), enable_dropout=False, model_mode=MODEL_MODE_TRAIN,
    )
    return np.asarray(found[0] if isinstance(found, tuple) else found, np.float32)

for job in json.load(sys.stdin):
    try:
        np.save(job["out"], logits(job))
    except Exception:
        open(job["out"] + ".txt", "w").write(traceback.format_exc())
"""


def job(folder: Path, label: str, form: str) -> dict:
    """Convert a model, and return the input of the script."""
    target = folder / "there"
    wherry.convert(judge.source(label), target, to="maxtext", options=FORMS[form], lineage=False)
    file = target / "items" / "assets" / "maxtext_config.yml"
    return {
        "tokens": TOKENS.tolist(), "config": str(file), "items": str(target / "items"),
        "out": str(folder / "logits.npy"), "stated": stated(label, yaml.safe_load(file.read_text())),
    }  # fmt: skip


@pytest.fixture(scope="module")
def folders(request, tmp_path_factory):
    """A folder with MaxText's logits, or its error, for each pair that is tested: one process for all of them."""
    return run_pairs(request, tmp_path_factory, SCRIPT, job)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("label", "form"), ITSELF_PAIRS)
def test_maxtext_itself_computes_what_transformers_computed(folders, label, form):
    folder = folders[label, form]
    error = folder / "logits.npy.txt"
    assert not error.exists(), error.read_text()[-1500:]
    wanted = huggingface.logits(judge.source(label), TOKENS, round_embedding)
    single = judge.ALLOWED_DELTA if label.startswith("qwen3-next") else SINGLE
    judge.require_equal(np.load(folder / "logits.npy"), wanted, single)
