"""Moves from a remote store are read by few requests, within the memory budget."""

from __future__ import annotations

from collections import Counter

import fsspec
import numpy as np
import pytest

from wherry.core.progress import Meter
from wherry.core.tensorspec import TensorSpec
from wherry.formats.contents import Contents, Extent, Stored
from wherry.mover import batch
from wherry.mover.carrier import Carrier, digest_moves
from wherry.mover.hashing import Hashes
from wherry.mover.move import Way
from wherry.mover.pool import Pool
from wherry.mover.source import Source
from wherry.storage.ranges import LARGEST
from wherry.storage.stores import locate

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
    assert [batch.worker_count(budget) for budget in (MIB, 64 * MIB, 128 * MIB, 1 << 40)] == [
        1, 8, 10, 10,
    ]  # fmt: skip


def test_local_files_are_read_as_before(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    spec = TensorSpec(("w",), (100,), "uint8")
    reader = Scattered({spec.path: (Extent(locate(tmp_path / "a"), 0, 100),)})
    way = Way.of(reader.access(spec))
    (move,) = way.moves(spec, ())
    assert batch.ranged_move(move, spec, way) is None


def test_one_buffer_larger_than_a_move_is_read_in_parts(files):
    from wherry.mover.read import fill_range

    made, reads = files
    content = bytes_of(2 * LARGEST + 3)
    buffer = bytearray(len(content) - 2)
    fill_range(made(a=content)["a"], 2, memoryview(buffer), TensorSpec(("w",), (1,), "uint8"), straight=True)
    assert buffer == content[2:]
    assert reads["a"] == 3
