"""A key path is that of one leaf: metadata that gives it two is corrupt, whichever kinds of leaves they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.errors import CorruptError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.format import Opened


@pytest.mark.parametrize(
    "leaves",
    [
        {"values": {("w",): 1}},
        {"empties": {("w",): "none"}},
        {"values": {("v",): 1}, "empties": {("v",): "none"}},
    ],
    ids=["tensor-value", "tensor-empty", "value-empty"],
)
def test_two_leaves_of_one_path_are_corrupt(tmp_path, leaves):
    save_file({"w": np.ones(3, "f4")}, tmp_path / "a.safetensors")
    with wherry.open(tmp_path / "a.safetensors") as checkpoint:
        manifest = replace(checkpoint.manifest, **leaves)
        with pytest.raises(CorruptError, match=r"two leaves have the key path [wv]") as caught:
            Checkpoint(Opened(checkpoint.detection, manifest, checkpoint.reader))
    assert caught.value.uri == checkpoint.uri
