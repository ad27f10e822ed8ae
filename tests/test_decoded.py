"""What does not lie raw is hashed while it is decoded, where its chunks come in order, and to the same digests."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.band import StoppedError
from wherry.checkpoint import Checkpoint
from wherry.decoded import CanonicalReader, Decoded
from wherry.format import Opened
from wherry.hashing import hash_checkpoint

SHAPE = (1024, 768)  # 3 MiB: more than is decoded again and again


@pytest.fixture(params=["1x1", "4x1", "2x3"])
def compressed(request, tmp_path):
    """A checkpoint in zstd chunks: one, bands of rows, and boxes whose bytes do not follow one another."""
    values = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    save_file({"w": values, "small": values[:4, :4].copy()}, tmp_path / "a.safetensors")
    options = {"compression": "zstd", "chunks": request.param}
    wherry.convert(tmp_path / "a.safetensors", tmp_path / "orbax", to="orbax", options=options)
    with wherry.open(tmp_path / "orbax") as checkpoint:
        yield checkpoint, request.param, wherry.inspect(tmp_path / "orbax", digest=True).manifest.digests


@pytest.mark.parametrize("kept", [False, True], ids=["file", "memory"])
def test_digests_are_those_of_a_pass_over_the_bytes(compressed, kept):
    checkpoint, grid, expected = compressed
    decoded, spec = Decoded(checkpoint.reader), checkpoint.spec("w")
    decoded.hashed, decoded.kept = {}, {spec.path} if kept else set()
    reader = CanonicalReader(checkpoint.reader, decoded)
    try:
        assert [one.path for one in checkpoint.manifest.tensors.values() if reader.decodes(one)] == [("w",)]
        decoded.prepare(spec)
        assert set(decoded.hashed) == (set() if grid == "2x3" else {spec.path})
        assert all(hasher.digest() == expected[path] for path, hasher in decoded.hashed.items())
        view = Checkpoint(Opened(checkpoint.detection, checkpoint.manifest, reader))
        assert hash_checkpoint(view, memory=64 << 20).digests == expected
    finally:
        decoded.close()


@pytest.mark.parametrize("kept", [False, True], ids=["file", "memory"])
def test_a_region_is_that_of_the_tensor(compressed, kept):
    checkpoint, _grid, _expected = compressed
    decoded, spec = Decoded(checkpoint.reader), checkpoint.spec("w")
    decoded.kept = {spec.path} if kept else set()
    whole = checkpoint.reader.read(spec, spec.whole)
    try:
        for region in (
            (slice(100, 900), slice(3, 700)),
            (slice(0, 1024), slice(0, 768)),
            (slice(7, 7), slice(0, 1)),
        ):
            memory = bytearray(whole[region].nbytes)
            decoded.fill(spec, region, memoryview(memory))
            assert memory == whole[region].tobytes()
            array = decoded.array(spec, region)
            assert np.array_equal(array, whole[region]) if kept else array is None
    finally:
        decoded.close()


@pytest.mark.parametrize("kept", [False, True], ids=["file", "memory"])
def test_a_stop_ends_decoding_between_two_pieces(compressed, kept):
    checkpoint, grid, _expected = compressed
    decoded, spec = Decoded(checkpoint.reader), checkpoint.spec("w")
    decoded.kept = {spec.path} if kept else set()
    decoded.stopped.set()
    try:
        if not (kept and grid == "2x3"):  # these chunks are decoded whole
            with pytest.raises(StoppedError):
                decoded.prepare(spec)
    finally:
        decoded.close()


def test_what_was_dropped_is_decoded_again(compressed):
    checkpoint, _grid, expected = compressed
    decoded, spec = Decoded(checkpoint.reader), checkpoint.spec("w")
    reader = CanonicalReader(checkpoint.reader, decoded)
    view = Checkpoint(Opened(checkpoint.detection, checkpoint.manifest, reader))
    try:
        for _again in range(2):
            assert hash_checkpoint(view, memory=64 << 20).digests == expected
            decoded.drop([spec.path])
    finally:
        decoded.close()


def test_threads_find_numpy_whole(tmp_path):
    """A process that has imported nothing yet reads compressed chunks in many threads, again and again."""
    values = {f"w{number}": np.ones((64, 512), np.float32) for number in range(12)}
    save_file(values, tmp_path / "a.safetensors")
    options = {"compression": "zstd"}
    wherry.convert(tmp_path / "a.safetensors", tmp_path / "orbax", to="orbax", options=options)
    program = "import sys, wherry; assert wherry.verify(sys.argv[1], level='digest').ok"
    for _again in range(3):
        subprocess.run([sys.executable, "-c", program, str(tmp_path / "orbax")], check=True)
