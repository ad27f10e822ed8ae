"""Fixtures of the tests of faults and of kills, made once a module."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.crash_support import PRELOAD, WRITTEN, convert
from wherry.testing.children import Children


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Six small tensors, and one of more than a move."""
    folder = tmp_path_factory.mktemp("source") / "model"
    folder.mkdir()
    generator = np.random.default_rng(0)
    tensors = {f"layer.{n}.weight": generator.standard_normal((50, 101), dtype="f4") for n in range(6)}
    tensors |= {f"table.{n}": generator.integers(0, 255, (9, 1_000_003), dtype="u1") for n in range(1)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def children():
    with Children(PRELOAD) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(source, tmp_path_factory):
    """Checkpoint digest of a conversion that nothing disturbs, by format."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {to: convert(source, folder / to)["target"]["checkpoint_digest"] for to in WRITTEN}
