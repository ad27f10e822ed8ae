"""Orbax CheckpointManager: sends an event for each step when Orbax has committed it."""

import jax
import orbax.checkpoint as ocp

import wherry


def wherry_manager(root, **options):
    """A CheckpointManager that announces every step to Prefect; `options` are those of CheckpointManagerOptions."""

    def committed():
        if jax.process_index() == 0:
            wherry.emit(f"{root}/{manager.latest_step()}", strict=False)

    async_options = ocp.AsyncOptions(post_finalization_callback=committed)
    manager = ocp.CheckpointManager(
        root, options=ocp.CheckpointManagerOptions(async_options=async_options, **options)
    )
    return manager
