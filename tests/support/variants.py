"""Every written format with every choice of its options: what the contract suite and the durability suite run over."""

from __future__ import annotations

import pytest

from wherry.formats.registry import find_format, formats
from wherry.testing import samples

WRITTEN = [name for name, row in formats().items() if row.is_written]
# Options that have no list of choices, or only matter together.
FURTHER = {
    "dcp": [{"shard_size": "4MB"}],
    "huggingface": [{"max_shard_size": "8MB"}],
    "orbax": [{"ocdbt": False, "zarr": "3", "compression": "zstd"}, {"chunks": "1"}, {"chunks": "whole"}],
}
# The types of GGUF that hold the values and shapes of a sample; tests/oracles/test_gguf_written.py has models for all.
FITTING = {"gguf": (None, "f32", "bf16")}
CASES = [
    (name, options) for name in WRITTEN for options in [*samples.variants(find_format(name)), *FURTHER.get(name, [])]
    if name not in FITTING or options.get("type") in FITTING[name]
]  # fmt: skip


def words(options) -> str:
    return ",".join(f"{name}={value}" for name, value in options.items()) or "default"


each_variant = pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[f"{name}-{words(options)}" for name, options in CASES]
)
each_container = pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=[pytest.mark.slow] if options and find_format(name).refines else [])
        for name, options in CASES
    ],
    ids=each_variant.kwargs["ids"],
)
"""Every variant; options of a format that writes through the container of another one are slow."""
