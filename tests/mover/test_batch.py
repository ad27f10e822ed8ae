"""Small tensors and remote ranges are read in batches, with the bytes and digests of each alone."""

from __future__ import annotations

from collections import Counter

import fsspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.many import seconds
from wherry.converter import job
from wherry.core.digest import BLAKE3
from wherry.core.progress import Meter
from wherry.core.tensorspec import TensorSpec
from wherry.errors import MismatchError
from wherry.formats.format import Contents, Extent, Stored
from wherry.ledger.resolve import open_checkpoint
from wherry.mover import carrier
from wherry.mover.carrier import Carrier, digest_moves
from wherry.mover.hashing import Hashes, hash_checkpoint
from wherry.mover.move import Way
from wherry.mover.output import Output
from wherry.mover.pool import Pool
from wherry.mover.source import Source
from wherry.store.local_store import PinnedStore, locate
from wherry.store.ranges import LARGEST

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
    monkeypatch.setattr(carrier, "SMALL", 0)
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
    monkeypatch.setattr(carrier, limit, {"_MOST_MOVES": 10, "_MOST_BYTES": 1024}[limit])
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
    monkeypatch.setattr(carrier, "_MOST_MOVES", 10)
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


# Moves from a remote store are read by few requests, within the memory budget.


MIB = 1 << 20


class Scattered(Contents):
    """Tensors whose bytes are in extents of files."""

    def __init__(self, places):
        self.places = places

    def access(self, spec):
        return Stored(self.places[spec.path])

    def companion(self, name):
        raise NotImplementedError

    def members(self):
        return ()


@pytest.fixture
def files(monkeypatch):
    """A function that makes files in a store in memory, and the reads of them: file → list of sizes."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    folder, reads = locate("memory://bucket"), Counter()
    real = type(folder.store).read

    def read(store, path, start, stop):
        reads[path.rpartition("/")[2]] += 1
        return real(store, path, start, stop)

    monkeypatch.setattr(type(folder.store), "read", read)

    def made(**contents):
        for name, data in contents.items():
            memory.pipe_file(f"/bucket/{name}", data)
        return {name: folder.join(name) for name in contents}

    yield made, reads
    memory.store.clear()


def digests(places, data, budget=64 * MIB):
    """The digests of tensors of bytes: of what is read, and of what should be; and the pool."""
    specs = {path: TensorSpec(path, (len(data[path]),), "uint8") for path in places}
    pool = Pool(budget)
    with Source(Scattered(places), pool) as source:
        carrier = Carrier(source, specs, Meter("verify", 0, None), ("sha256",))
        carrier.carry(digest_moves(specs.values(), source))
        found = Hashes.of(specs, carrier.leaves, "sha256").digests
    expected = {}
    for path, spec in specs.items():
        from wherry.core.digest import LeafHasher, tensor_digest

        hasher = LeafHasher(spec, ("sha256",))
        hasher.update(0, memoryview(data[path]))
        expected[path] = tensor_digest(spec, hasher.hashes("sha256"), "sha256")
    return found, expected, pool


def bytes_of(count):
    return np.random.default_rng(count).bytes(count)


def test_many_tensors_of_one_file_are_a_few_requests(files):
    made, reads = files
    content = bytes_of(20 * MIB)
    file = made(a=content)["a"]
    size, gap = 100_000, 700
    starts = list(range(0, 20 * MIB - size, size + gap))
    names = np.random.default_rng(0).permutation(len(starts))  # tensors are not in the order of their bytes
    data = {(f"{name:03}",): content[start : start + size] for name, start in zip(names, starts, strict=True)}
    places = {
        (f"{name:03}",): (Extent(file, start, size),) for name, start in zip(names, starts, strict=True)
    }
    found, expected, _pool = digests(dict(sorted(places.items())), data)
    assert found == expected
    assert reads["a"] == 3


def test_a_gap_of_a_mebibyte_is_not_read(files):
    made, reads = files
    content = bytes_of(5 * MIB)
    file = made(a=content)["a"]
    starts = (0, 2 * MIB, 4 * MIB)
    data = {(str(start),): content[start : start + 1000] for start in starts}
    found, expected, _pool = digests({(str(start),): (Extent(file, start, 1000),) for start in starts}, data)
    assert (found, reads["a"]) == (expected, 3)


def test_a_tensor_in_several_files_is_put_together(files):
    made, reads = files
    contents = {"a": bytes_of(3 * MIB), "b": bytes_of(3 * MIB + 1)}
    locations = made(**contents)
    data, places = {}, {}
    for number in range(30):
        path, at = (f"{number:02}",), number * 100_000
        data[path] = contents["b"][at + 5 : at + 60_000] + contents["a"][at : at + 90_000]
        places[path] = (Extent(locations["b"], at + 5, 59_995), Extent(locations["a"], at, 90_000))
    found, expected, _pool = digests(places, data)
    assert found == expected
    assert dict(reads) == {"a": 1, "b": 1}


def test_a_large_tensor_is_read_in_parts_within_the_budget(files):
    made, reads = files
    content = bytes_of(3 * LARGEST + 17)
    file = made(a=content)["a"]
    path = ("w",)
    found, expected, pool = digests(
        {path: (Extent(file, 1, len(content) - 1),)}, {path: content[1:]}, 2 * LARGEST
    )
    assert (found, reads["a"]) == (expected, 4)
    assert pool.peak <= 2 * LARGEST


def test_as_many_workers_as_the_budget_allows():
    assert [carrier.ranged_workers(budget) for budget in (MIB, 64 * MIB, 128 * MIB, 1 << 40)] == [
        1, 8, 10, 10,
    ]  # fmt: skip


def test_local_files_are_read_as_before(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    spec = TensorSpec(("w",), (100,), "uint8")
    reader = Scattered({spec.path: (Extent(locate(tmp_path / "a"), 0, 100),)})
    way = Way.of(reader.access(spec))
    (move,) = way.moves(spec, ())
    assert carrier.ranged_move(move, spec, way) is None


def test_one_buffer_larger_than_a_move_is_read_in_parts(files):
    from wherry.mover.read import fill_range

    made, reads = files
    content = bytes_of(2 * LARGEST + 3)
    buffer = bytearray(len(content) - 2)
    fill_range(made(a=content)["a"], 2, memoryview(buffer), TensorSpec(("w",), (1,), "uint8"), straight=True)
    assert buffer == content[2:]
    assert reads["a"] == 3
