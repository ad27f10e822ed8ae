"""Merges of any container into any format, within the memory budget."""

from __future__ import annotations

import numpy as np
import pytest

import wherry
from tests.support.large import make_source, measured
from tests.support.merging import made, read, save
from tests.support.tiny_models import save_tiny

CODE = """
import sys, wherry
a, b, out = sys.argv[1:]
result = wherry.merge([f"{a}*0.5", f"{b}*0.5"], out, to="huggingface", memory="64MiB", lineage=False).bytes_written
"""


def test_a_merge_becomes_another_system(tmp_path):
    """The layout of the target lies over the merge: equal to a conversion of the merged checkpoint."""
    pytest.importorskip("transformers")
    a = save_tiny(tmp_path / "a", "llama")
    b = save_tiny(tmp_path / "b", "llama", drawn=True)
    words = [f"{a}*0.25", f"{b}*0.75"]
    wherry.merge(words, tmp_path / "hf", to="huggingface")
    wherry.convert(tmp_path / "hf", tmp_path / "wanted", to="maxtext")
    receipt = wherry.merge(words, tmp_path / "found", to="maxtext")
    wanted, found = read(tmp_path / "wanted"), read(tmp_path / "found")
    assert set(wanted) == set(found)
    for path, tensor in wanted.items():
        np.testing.assert_array_equal(found[path], tensor)
    assert receipt.family == "llama"
    assert len(receipt.parents) == 2


def test_sources_may_lie_in_different_containers(tmp_path):
    """Compressed chunks are decoded once; the sums are those of plain files."""
    a, b = made(1), made(2)
    one, other = save(tmp_path / "a", a), save(tmp_path / "b", b)
    options = {"compression": "zstd", "chunks": "65536"}
    wherry.convert(other, tmp_path / "zarr", to="orbax", options=options)
    receipt = wherry.merge([f"{one}*0.5", f"{tmp_path / 'zarr'}*0.5"], tmp_path / "out", to="npz")
    assert [one.format for one in receipt.sources] == ["huggingface", "orbax"]
    for name, tensor in a.items():
        np.testing.assert_array_equal(
            read(tmp_path / "out")[(name,)], tensor * np.float32(0.5) + b[name] * np.float32(0.5)
        )


def test_memory_does_not_grow_with_the_tensors(tmp_path):
    """256 MiB from each of two sources in a budget of 64 MiB, above what the interpreter takes."""
    for name in "ab":
        make_source(tmp_path / name, {"w": (8192, 16384)}, "bfloat16")
    written, peak = measured(CODE, tmp_path / "a", tmp_path / "b", tmp_path / "out")
    assert written == 256 << 20
    assert peak < 300 << 20
