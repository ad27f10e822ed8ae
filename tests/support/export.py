"""A small training state, and what an exported checkpoint holds."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import wherry


def state_of(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "params": {
            "kernel": rng.normal(size=(33, 17)).astype(np.float32),
            "half": rng.normal(size=(5, 4)).astype(ml_dtypes.bfloat16),
            "layers": [np.arange(6, dtype=np.int64), np.array(3, np.uint8)],
        },
        "opt": {"mu": rng.normal(size=(33, 17)).astype(np.float32)},
    }


def held(uri):
    with wherry.open(uri) as checkpoint:
        return {path: checkpoint.read(path) for path in checkpoint.manifest.tensors}
