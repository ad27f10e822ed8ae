"""MaxText: exports the parameters of a Llama for serving, next to its own checkpoints; one line in `train_loop`.

After `checkpointing.maybe_save_checkpoint(checkpoint_manager, state, config, data_iterator, step)` add
`export_for_serving(state, config, step)`. wherry reads the facts of the model from the run's config, and the order of
its rotary positions, which MaxText has by `model_name` and `rope_type`. Another `decoder_block` than llama2 is refused.
"""

import json
import tempfile
from pathlib import Path

import wherry

READ_BY_LLAMA = (
    "decoder_block", "model_name", "base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "head_dim",
    "base_mlp_dim", "base_num_decoder_layers", "vocab_size", "mlp_activations", "normalization_layer_epsilon",
    "logits_via_embedding", "normalize_embedding_logits", "attn_logits_soft_cap", "final_logits_soft_cap",
    "rope_type", "rope_use_scale", "rope_max_timescale", "rope_linear_scaling_factor", "rope_factor", "beta_fast",
    "beta_slow", "rope_interleave", "rope_truncate", "rope_attention_scaling", "max_position_embeddings",
    "original_max_position_embeddings", "scan_layers", "param_scan_axis",
)  # fmt: skip


def export_for_serving(state, config, step, every=1000):
    """Export the parameters to Hugging Face in the background; a full disk does not stop training."""
    if step % every:
        return None
    stated = {name: getattr(config, name) for name in READ_BY_LLAMA}
    with tempfile.NamedTemporaryFile("w", suffix=".yml", delete=False) as file:
        json.dump({"override_model_config": True, **stated}, file, default=lambda one: one.value)
    return wherry.export(
        {"params": state.params},
        f"{config.base_output_directory}/{config.run_name}/huggingface/{step}",
        to="huggingface",
        system="maxtext",
        family="llama",
        config=file.name,
        step=step,
        name=config.run_name,
        on_done=lambda _: Path(file.name).unlink(),
    )
