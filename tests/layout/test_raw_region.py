"""Regions read from raw bytes, and what gathering a band of a target holds."""

from __future__ import annotations

import math
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.families import SIZES, made
from wherry.core.tensorspec import TensorSpec, region_shape
from wherry.errors import CorruptError
from wherry.families import convert_layout, load_family
from wherry.formats.contents import Extent
from wherry.layout.copies import copies, gather, part_bytes
from wherry.layout.cuts import bands
from wherry.mover.read import RawBytes, fill_region
from wherry.storage.stores import locate


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
    assert sum(calls) <= spec.nbytes, "no byte is read twice"


@settings(max_examples=300, deadline=None)
@given(regions(), st.sampled_from(["uint8", "bfloat16", "float64"]), st.integers(0, 5), st.booleans())
def test_regions_of_a_file_into_an_array_with_strides(drawn, dtype, before, wider):
    """By the kernel, or without: every byte of the region, and no other byte of the memory."""
    shape, region = drawn
    spec = TensorSpec(("t",), shape, dtype)
    size = spec.nbytes // max(spec.size, 1)
    whole = np.random.default_rng(0).integers(0, 256, spec.nbytes, "u1")
    extents = region_shape(region)
    room = tuple(extent + wider for extent in extents)
    out = np.full((*room, size), 7, "u1")
    wanted = out.copy()
    inside = tuple(slice(0, extent) for extent in extents)
    wanted[inside] = whole.reshape((*shape, size))[region]
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(before) + whole.tobytes())
        file.flush()
        read = RawBytes((Extent(locate(file.name), before, spec.nbytes),), spec)
        fill_region(spec, region, read, out.reshape(-1).data, out.strides[:-1])
        assert (out == wanted).all()
        if not wider:
            plain = np.zeros_like(out)
            fill_region(spec, region, read, plain.reshape(-1).data)
            assert (plain == wanted).all()


def test_a_file_that_ends_inside_of_a_region_is_truncated(tmp_path):
    spec = TensorSpec(("t",), (64, 64), "uint8")
    file = tmp_path / "short"
    file.write_bytes(bytes(60 * 64))
    read = RawBytes((Extent(locate(str(file)), 0, spec.nbytes),), spec)
    region, out = (slice(0, 64), slice(8, 56)), memoryview(bytearray(64 * 48))
    with pytest.raises(CorruptError, match="expected 4088 bytes or more, got 3840"):
        fill_region(spec, region, read, out)
    file.write_bytes(bytes(64 * 64))
    beyond = RawBytes((Extent(locate(str(file)), 0, 60 * 64),), spec)
    with pytest.raises(CorruptError, match="the tensor is truncated"):
        fill_region(spec, region, beyond, out)


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
