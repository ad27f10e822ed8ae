"""Lingua: sends an event for its own checkpoint and exports to Hugging Face, in `apps/main/train.py`.

After `saved = checkpoint.save(model, optimizer, train_state, args, device_mesh=world_mesh)` add
`if saved: handle = after_save(checkpoint, model, train_state, args)`, on all ranks: each provides its shards.
"""

import torch.distributed as dist

import wherry


def after_save(checkpoint, model, train_state, args):
    """Announce the checkpoint, and export the live model in the background."""
    folder = f"{checkpoint.path}/{train_state.step:010d}"
    if not dist.is_initialized() or dist.get_rank() == 0:
        wherry.emit(folder, step=train_state.step, strict=False)
    return wherry.export(
        {"model": model},
        f"{args.dump_dir}/huggingface/{train_state.step:010d}",
        to="huggingface",
        system="lingua",
        config=f"{folder}/params.json",
        step=train_state.step,
    )
