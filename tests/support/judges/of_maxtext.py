"""MaxText computes, in float32: its own loader, and its own classes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from maxtext.common.common_types import MODEL_MODE_TRAIN
from maxtext.configs import pyconfig
from maxtext.utils import model_creation_utils
from serving import serve


def compute(job: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    rows, length = tokens.shape
    items = f"{job['folder']}/items"
    config = pyconfig.initialize([
        "", f"{items}/assets/maxtext_config.yml", *job["stated"], f"load_parameters_path={items}", "dtype=float32",
        "weight_dtype=float32", "matmul_precision=highest", "attention=dot_product", "sparse_matmul=false",
        f"per_device_batch_size={rows}", f"max_target_length={length}", "run_name=x",
        "skip_jax_distributed_system=true", "enable_dropout=false", "enable_checkpointing=false", "hardware=cpu",
        f"base_output_directory={job['out']}",
    ])  # fmt: skip
    model = model_creation_utils.from_pretrained(config)
    model = model[0] if isinstance(model, tuple) else model
    found = model(
        decoder_input_tokens=jnp.asarray(tokens),
        decoder_positions=jnp.broadcast_to(jnp.arange(length), (rows, length)),
        decoder_segment_ids=jnp.ones((rows, length), jnp.int32), enable_dropout=False, model_mode=MODEL_MODE_TRAIN,
    )  # fmt: skip
    return np.asarray(found[0] if isinstance(found, tuple) else found, np.float32)


serve(compute)
