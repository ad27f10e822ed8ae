"""MaxText: exports parameters for serving, next to its own checkpoints; one line in `train_loop`.

After `checkpointing.maybe_save_checkpoint(checkpoint_manager, state, config, data_iterator, step)` add
`export_for_serving(state, config, step)`. The options state what a state does not: facts of the model, from MaxText's
config, and what MaxText does not store; see `wherry layouts llama`.
"""

import wherry


def export_for_serving(state, config, step, every=1000):
    """Export the parameters to Hugging Face in the background; a full disk does not stop training."""
    if step % every:
        return None
    return wherry.export(
        {"params": state.params},
        f"{config.base_output_directory}/{config.run_name}/huggingface/{step}",
        to="huggingface",
        system="maxtext",
        family="llama",
        step=step,
        name=config.run_name,
        options={
            "rope": "interleaved",
            "query_scale": "apart",
            "rope_scaling": "llama3.1" if config.rope_use_scale else "default",
            "rope_theta": config.rope_max_timescale,
            "norm_eps": config.normalization_layer_epsilon,
            "activation": config.mlp_activations[0],
        },
    )
