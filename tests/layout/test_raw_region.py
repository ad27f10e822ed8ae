"""Regions read from raw bytes, and what gathering a band of a target holds."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.families import SIZES, made
from wherry.core.tensorspec import TensorSpec, region_shape
from wherry.families import convert_layout, load_family
from wherry.layout.copies import copies, gather, part_bytes
from wherry.layout.cuts import bands
from wherry.mover.regions import fill_region


@st.composite
def regions(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))
    if shape and draw(st.booleans()):
        shape = (*shape[:-1], shape[-1] * draw(st.sampled_from([1, 100, 5000, 40000])))
    bounds = [sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent)))) for extent in shape]
    return shape, tuple(slice(*pair) for pair in bounds)


@settings(max_examples=200, deadline=None)
@given(regions(), st.sampled_from(["uint8", "bfloat16", "float64"]))
def test_regions_of_raw_bytes(drawn, dtype):
    shape, region = drawn
    spec = TensorSpec(("t",), shape, dtype)
    size = spec.nbytes // max(spec.size, 1)
    whole = np.random.default_rng(0).integers(0, 256, spec.nbytes, "u1")
    calls = []

    def read(offset, buffer):
        assert 0 <= offset <= offset + len(buffer) <= len(whole)
        calls.append(len(buffer))
        buffer[:] = whole[offset : offset + len(buffer)].tobytes()

    wanted = np.ascontiguousarray(whole.reshape((*shape, size))[region]).tobytes()
    out = bytearray(len(wanted))
    fill_region(spec, region, read, memoryview(out))
    assert bytes(out) == wanted
    assert sum(calls) <= 16 * max(len(wanted), 1)


def test_short_runs_are_read_together():
    spec, calls = TensorSpec(("t",), (4096, 4096), "bfloat16"), []
    region = (slice(0, 4096), slice(64, 1024))
    out = memoryview(bytearray(math.prod(region_shape(region)) * 2))
    fill_region(spec, region, lambda _offset, buffer: calls.append(len(buffer)), out)
    assert len(calls) == 32  # 32 MiB at one go would be too much, 4096 calls too many
    calls.clear()
    fill_region(
        spec, (slice(0, 128), slice(64, 1024)), lambda _offset, buffer: calls.append(len(buffer)), out
    )
    assert len(calls) == 1


def test_bands_tile_their_target_and_stay_within_memory():
    family = load_family("llama")
    sizes = {**SIZES, "embed": 64, "ffn": 96}
    begun = made(family, "huggingface", {}, sizes=sizes)
    projected = convert_layout(
        begun.manifest, family, "huggingface", "maxtext", sizes=sizes, options={"rope": "interleaved"}
    )
    for stored in projected.targets.values():
        seen = np.zeros(stored.spec.shape, int)
        for region, span in bands(stored, 2048, projected.pieces):
            seen[region] += 1
            largest = []

            def read(path, part, largest=largest):
                largest.append(math.prod(region_shape(part)) * 4)
                return begun.read(path, part)

            out = gather(stored, region, projected.pieces, read)
            assert out.nbytes == span.nbytes
            planned = sum(copy.nbytes for copy in copies(stored, region, projected.pieces))
            assert sum(largest) == planned <= 4 * max(out.nbytes, 64)
            held = [part_bytes(copy, stored.spec.dtype) for copy in copies(stored, region, projected.pieces)]
            assert max(largest, default=0) <= max(held, default=0)
        assert (seen == 1).all()
