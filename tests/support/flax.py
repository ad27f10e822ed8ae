"""What the tests of Flax trees share: checkpoints saved and restored by Orbax, compared leaf by leaf."""

from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint as ocp

import wherry


def saved(folder, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
    return folder


def restored(folder, target=None):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, target) if target is not None else checkpointer.restore(folder)


def same_leaves(first, second):
    first_leaves, first_tree = jax.tree.flatten(first)
    second_leaves, second_tree = jax.tree.flatten(second)
    assert first_tree == second_tree
    for one, other in zip(first_leaves, second_leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def hashes(folder):
    with wherry.open(folder) as checkpoint:
        return {path: checkpoint.read(path).tobytes() for path in checkpoint.manifest.tensors}
