"""Small tensors are read in batches, and get the same bytes and digests as when each is read alone."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.many import seconds
from wherry.converter import job
from wherry.core.algorithms import BLAKE3
from wherry.errors import MismatchError
from wherry.ledger.resolve import open_checkpoint
from wherry.mover import batch
from wherry.mover.hashing import hash_checkpoint
from wherry.mover.output import Output
from wherry.mover.pool import Pool
from wherry.storage.stores import PinnedStore

MEMORY = 64 << 20
TENSORS = {
    **{f"small.{number}": np.full((number % 7 + 1, 5), number, "f4") for number in range(300)},
    "large": np.arange(100_000, dtype="f4"),
    "scalar": np.float32(3),
}


@pytest.fixture
def source(tmp_path):
    save_file({name: np.asarray(value) for name, value in TENSORS.items()}, tmp_path / "s.safetensors")
    return tmp_path / "s.safetensors"


def hashed(path):
    with open_checkpoint(path) as checkpoint:
        return dict(hash_checkpoint(checkpoint, BLAKE3, memory=MEMORY).digests)


def test_digests_do_not_depend_on_batches(source, monkeypatch):
    together = hashed(source)
    monkeypatch.setattr(batch, "SMALL", 0)
    assert hashed(source) == together
    assert len(together) == len(TENSORS)


def test_neighbours_are_read_at_once(source, monkeypatch):
    reads = []
    plain = PinnedStore.readinto
    monkeypatch.setattr(
        PinnedStore, "readinto", lambda *given: reads.append(given[1:3]) or plain(*given), raising=True
    )
    hashed(source)
    assert len(reads) < 20


def test_items_of_dcp_are_read_together(source, tmp_path, monkeypatch):
    """Also with the frames of their archives between them, for the metadata and for the bytes."""
    wherry.convert(source, tmp_path / "out", to="dcp", lineage=False)
    reads = []
    for name in ("read", "readinto"):
        plain = getattr(PinnedStore, name)
        monkeypatch.setattr(
            PinnedStore, name, lambda *given, plain=plain: reads.append(given[1:3]) or plain(*given)
        )
    assert hashed(tmp_path / "out") == hashed(source)
    assert len([path for path, _ in reads if path.endswith(".distcp")]) < 20


@pytest.mark.parametrize("limit", ["_MOST_MOVES", "_MOST_BYTES"])
def test_batches_have_a_limit(source, monkeypatch, limit):
    together, sizes = hashed(source), []
    monkeypatch.setattr(batch, limit, {"_MOST_MOVES": 10, "_MOST_BYTES": 1024}[limit])
    buffer = Pool.buffer

    def seen(self, nbytes, *rest, **named):
        sizes.append(nbytes)
        return buffer(self, nbytes, *rest, **named)

    monkeypatch.setattr(Pool, "buffer", seen)
    assert hashed(source) == together
    assert len(sizes) > 8
    assert sorted(sizes)[-2] <= 10 * 7 * 5 * 4  # all but the large tensor


def test_a_small_tensor_that_storage_changed_is_named(source, tmp_path, monkeypatch):
    """What was read back is compared with what was hashed, though of a small tensor nothing else is kept."""
    finish = job.finish

    def spoiled(writer):
        finish(writer)
        (file,) = tmp_path.glob(".*/out")
        data = bytearray(file.read_bytes())
        at = data.index(np.full((7, 5), 6, "f4").tobytes())
        data[at] ^= 1
        file.write_bytes(data)

    monkeypatch.setattr(job, "finish", spoiled)
    with pytest.raises(MismatchError, match="read-back differs") as caught:
        wherry.convert(source, tmp_path / "out", to="safetensors", lineage=False)
    assert caught.value.path == "small.6"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["safetensors", "dcp"])
def test_a_resumed_run_writes_no_small_tensor_again(source, tmp_path, monkeypatch, to):
    """The journal has small tensors as columns; the next run takes them up, and reads them back."""
    undisturbed = wherry.convert(source, tmp_path / "whole", to=to, lineage=False)
    monkeypatch.setattr(batch, "_MOST_MOVES", 10)
    monkeypatch.setattr("wherry.mover.output._GROUP_BYTES", 1)
    deliver, left = Output.deliver_all, [12]

    def stopping(self, parts, losses):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        deliver(self, parts, losses)

    with monkeypatch.context() as inner, pytest.raises(KeyboardInterrupt):
        inner.setattr(Output, "deliver_all", stopping)
        wherry.convert(source, tmp_path / "out", to=to, lineage=False)
    written = []
    monkeypatch.setattr(
        Output,
        "deliver_all",
        lambda self, parts, losses: written.extend(parts) or deliver(self, parts, losses),
    )
    receipt = wherry.convert(source, tmp_path / "out", to=to, lineage=False)
    assert receipt.resumed_bytes > 0
    assert len(written) + 100 <= len(TENSORS) - 1
    assert receipt.target.checkpoint_digest == undisturbed.target.checkpoint_digest


@pytest.mark.parametrize("to", ["safetensors", "dcp", "orbax"])
def test_converted_and_back(source, tmp_path, to):
    wherry.convert(source, tmp_path / "out", to=to, lineage=False)
    wherry.convert(tmp_path / "out", tmp_path / "back", to="safetensors", lineage=False)
    found = load_file(tmp_path / "back")
    assert found.keys() == TENSORS.keys()
    assert all(np.array_equal(found[name], value) for name, value in TENSORS.items())


@pytest.mark.parametrize("to", ["safetensors", "dcp", "orbax"])
def test_a_conversion_grows_with_the_tensors(tmp_path, to):
    """Five times the tensors of a few bytes take about five times the processor time."""
    few, many = (
        seconds(lambda number=number: converted(tmp_path / str(number), number, to), times=4)
        for number in (400, 2000)
    )
    assert many < 8 * few


def converted(folder, number, to):
    folder.mkdir(exist_ok=True)
    tries = sum(1 for _ in folder.iterdir())
    if not tries:
        save_file({f"t.{at}": np.full((16, 8), at, "f4") for at in range(number)}, folder / "0.safetensors")
    wherry.convert(folder / "0.safetensors", folder / f"out{tries}", to=to, lineage=False)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["safetensors", "dcp", "orbax"])
def test_a_hundred_thousand_tiny_tensors(tmp_path, to):
    """The goal is 20 s of processor time; the limit allows for a busy machine."""
    tensors = {f"blocks.{at // 10}.part{at % 10}": np.full((16, 32), at, "f4") for at in range(100_000)}
    save_file(tensors, tmp_path / "s.safetensors")
    used = seconds(
        lambda: wherry.convert(tmp_path / "s.safetensors", tmp_path / "out", to=to, lineage=False), times=1
    )
    assert used < 60
