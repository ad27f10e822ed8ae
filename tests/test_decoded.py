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


def test_digests_are_those_of_a_pass_over_the_bytes(compressed):
    checkpoint, grid, expected = compressed
    decoded, took = Decoded(checkpoint.reader), []
    reader = CanonicalReader(checkpoint.reader, decoded)
    try:
        early = reader.digests(
            checkpoint.manifest.tensors.values(), lambda nbytes, name: took.append((nbytes, name))
        )
        assert [path[-1] for path in early] == ([] if grid == "2x3" else ["w"])
        assert took == [(hasher.spec.nbytes, hasher.spec.name) for hasher in early.values()]
        view = Checkpoint(Opened(checkpoint.detection, checkpoint.manifest, reader))
        assert hash_checkpoint(view, memory=64 << 20).digests == expected
    finally:
        decoded.close()


def test_an_interrupt_ends_all_threads(compressed):
    checkpoint, grid, _expected = compressed
    decoded = Decoded(checkpoint.reader)

    def stop(_nbytes, _name):
        raise KeyboardInterrupt

    try:
        if grid == "2x3":
            assert decoded.digests([checkpoint.spec("w")], stop) == {}
            return
        with pytest.raises(KeyboardInterrupt):
            decoded.digests([checkpoint.spec("w")], stop)
        decoded.close()
        with pytest.raises(StoppedError):
            decoded.digests([checkpoint.spec("w")], stop)
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
