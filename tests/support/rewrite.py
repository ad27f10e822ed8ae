"""What the tests of rewrites share: contents and files of a folder, and what Orbax restores of it."""

from __future__ import annotations

import hashlib

import jax
import numpy as np
import orbax.checkpoint as ocp

import wherry
from tests.support import orbax as support
from tests.support.orbax import expectation
from wherry.core.keypath import parse


def renamed(done):
    """Key path → new key path."""
    return {parse(old): parse(new) for old, new in done.rewriting.renamed.items()}


def hashes(folder):
    with wherry.open(folder) as checkpoint:
        return {path: checkpoint.read(path).tobytes() for path in checkpoint.manifest.tensors}


def snapshot(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wanted_hashes(case):
    return {tuple(row["path"]): row["sha256"] for row in expectation(case)["tensors"]}


def sha256(found):
    return {path: hashlib.sha256(data).hexdigest() for path, data in found.items()}


def restored(folder, like):
    """What Orbax restores as numpy arrays, whatever devices it was saved on."""
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    return ocp.PyTreeCheckpointer().restore(folder, restore_args=as_numpy)


def tree_of(folder):
    """The nested tree of an item, read by us."""
    with wherry.open(folder) as checkpoint:
        arrays = {path: checkpoint.read(path) for path in checkpoint.manifest.tensors}
        return support.nested(checkpoint.manifest, arrays)
