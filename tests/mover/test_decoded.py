"""What does not lie raw is hashed while it is decoded, where its chunks come in order, and to the same digests."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from threading import Event

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry import kernels
from wherry.core.digest import BLAKE3
from wherry.core.threads import StoppedError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.format import Opened
from wherry.mover.decode import DecodedReader
from wherry.mover.hashing import hash_checkpoint
from wherry.mover.read import read_array
from wherry.store import open_file

SHAPE = (1024, 768)  # 3 MiB: more than is decoded again and again


def values():
    return np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


@pytest.fixture(params=["1x1", "4x1", "2x3"])
def compressed(request, tmp_path):
    """A checkpoint in zstd chunks: one, bands of rows, and boxes whose bytes do not follow one another."""
    save_file({"w": values(), "small": values()[:4, :4].copy()}, tmp_path / "a.safetensors")
    options = {"compression": "zstd", "chunks": request.param}
    wherry.convert(tmp_path / "a.safetensors", tmp_path / "orbax", to="orbax", options=options)
    with wherry.open(tmp_path / "orbax") as checkpoint:
        yield checkpoint, request.param, wherry.inspect(tmp_path / "orbax", digest=True).manifest.digests


@pytest.fixture(params=["file", "memory"])
def decoded(request, compressed):
    """The decoded tensors of that checkpoint, of which the large one lies in a file or in memory."""
    soon = {("w",)} if request.param == "memory" else set()
    with closing(
        DecodedReader(compressed[0].reader, soon=soon, algorithms=(BLAKE3,), stopped=Event())
    ) as made:
        yield made


def view(checkpoint, decoded):
    return Checkpoint(Opened(checkpoint.detection, checkpoint.manifest, decoded))


def test_digests_are_those_of_a_pass_over_the_bytes(compressed, decoded):
    checkpoint, grid, expected = compressed
    seen = view(checkpoint, decoded)
    assert [one.path for one in checkpoint.manifest.tensors.values() if decoded.decodes(one)] == [("w",)]
    decoded.prepare(checkpoint.spec("w"))
    assert set(decoded.hashed) == (set() if grid == "2x3" else {("w",)})
    assert all(hasher.digest(BLAKE3) == expected[path] for path, hasher in decoded.hashed.items())
    assert hash_checkpoint(seen, BLAKE3, memory=64 << 20).digests == expected


def test_a_region_is_that_of_the_tensor(compressed, decoded):
    checkpoint, _grid, _expected = compressed
    spec, whole = checkpoint.spec("w"), values()
    for region in (
        (slice(100, 900), slice(3, 700)),
        (slice(0, 1024), slice(0, 768)),
        (slice(7, 7), slice(0, 1)),
    ):
        assert np.array_equal(read_array(decoded, spec, region), whole[region])


@pytest.mark.skipif(kernels.load() is None, reason="no kernels on this machine")
def test_short_runs_of_a_decoded_tensor_take_one_call(compressed, decoded, monkeypatch):
    """A scanned kernel holds each layer in short runs: a call of Python for each would cost more than decoding."""
    checkpoint, _grid, _expected = compressed
    region, calls = (slice(0, 1024), slice(3, 35)), []
    spec, read = checkpoint.spec("w"), open_file._fill
    decoded.prepare(spec)
    monkeypatch.setattr(open_file, "_fill", lambda *given: calls.append(given) or read(*given))
    assert np.array_equal(read_array(decoded, spec, region), values()[region])
    assert len(calls) <= 8


def test_a_stop_ends_decoding_between_two_pieces(compressed, decoded):
    checkpoint, grid, _expected = compressed
    decoded.stopped.set()
    if not (decoded.keeps(checkpoint.spec("w")) and grid == "2x3"):  # these chunks are decoded whole
        with pytest.raises(StoppedError):
            decoded.prepare(checkpoint.spec("w"))


def test_what_was_dropped_is_decoded_again(compressed, decoded):
    checkpoint, _grid, expected = compressed
    for _again in range(2):
        assert hash_checkpoint(view(checkpoint, decoded), BLAKE3, memory=64 << 20).digests == expected
        decoded.drop([("w",)])


def test_threads_find_numpy_whole(tmp_path):
    """A process that has imported nothing yet reads compressed chunks in many threads, again and again."""
    values = {f"w{number}": np.ones((64, 512), np.float32) for number in range(12)}
    save_file(values, tmp_path / "a.safetensors")
    options = {"compression": "zstd"}
    wherry.convert(tmp_path / "a.safetensors", tmp_path / "orbax", to="orbax", options=options)
    program = "import sys, wherry; assert wherry.verify(sys.argv[1], level='digest').ok"
    for _again in range(3):
        subprocess.run([sys.executable, "-c", program, str(tmp_path / "orbax")], check=True)
