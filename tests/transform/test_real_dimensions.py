"""Layers with the dimensions of DeepSeek-V3 in fp8, to MaxText and back, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest

import wherry
from tests.support.infra import load
from tests.support.large import measured

MOST = 300_000_000  # bytes of resident memory of the whole process
CONVERT = """
import wherry
wherry.convert(sys.argv[1], sys.argv[2], to=sys.argv[3], lineage=False, memory=sys.argv[4])
result = None
"""
CASES = {
    # 32 of 256 experts; every other dimension is the real one.
    "real": ({}, "128MiB", MOST),
    # Each tensor is larger than the whole budget, so that keeping one twice would show.
    "reduced": ({"experts": 4, "heads": 16, "dense": 9216}, "32MiB", 190_000_000),
}


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", CASES)
def test_a_dense_layer_and_a_layer_of_experts_go_to_maxtext_and_back_in_bounded_memory(
    case, tmp_path, monkeypatch
):
    changed, memory, most = CASES[case]
    inputs = load("benchmarks.inputs", monkeypatch)
    dimensions = inputs.Dimensions(**changed)
    source, there, back = tmp_path / "fp8", tmp_path / "maxtext", tmp_path / "bfloat16"
    inputs.make_layers(source, dimensions)
    peaks = [
        measured(CONVERT, source, there, "maxtext", memory)[1],
        measured(CONVERT, there, back, "huggingface", memory)[1],
    ]
    print("peaks in MB:", [round(peak / 1e6) for peak in peaks])
    require_values(source, back, inputs.BLOCK, dimensions.experts - 1)
    assert max(peaks) <= most


def require_values(source, back, block, last):
    """Compare a part of the last expert, and of a projection whose rows are not whole blocks, with numpy."""
    rows = (slice(500, 516), slice(1000, 1512))
    names = (f"model.layers.1.mlp.experts.{last}.down_proj", "model.layers.0.self_attn.kv_a_proj_with_mqa")
    with wherry.open(source) as codes, wherry.open(back) as plain:
        for name in names:
            scales = codes.read(f"{name}.weight_scale_inv")
            blocks = scales[np.arange(500, 516) // block][:, np.arange(1000, 1512) // block]
            wanted = codes.read(f"{name}.weight", rows).astype("f4") * blocks
            np.testing.assert_array_equal(
                plain.read(f"{name}.weight", rows), wanted.astype(plain[f"{name}.weight"].dtype)
            )
