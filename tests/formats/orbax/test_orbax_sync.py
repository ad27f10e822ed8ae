"""What `sync` of the Orbax writer promises: contents and names are durable, also when two threads call it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.support import orbax as support
from wherry.mover.read import read_array

PLACES = ("fsync", "fdatasync")
HELD = "held back"


@pytest.fixture
def synced(monkeypatch):
    """Paths whose contents or names were made durable, in order; `gate` holds one thread back while it is unset."""

    class Record(list):
        gate = threading.Event()
        entered = threading.Event()

    record = Record()
    record.gate.set()
    for name in PLACES:
        real = getattr(os, name)

        def watched(descriptor, real=real):
            if threading.current_thread().name == HELD:
                record.entered.set()
                record.gate.wait(10)
            real(descriptor)
            record.append(Path(f"/proc/self/fd/{descriptor}").readlink())

        monkeypatch.setattr(os, name, watched)
    return record


def writer_of(folder, arrays, **options):
    manifest = support.small_chunks(support.manifest_of(arrays))
    return support.writer_at(folder, manifest, **options)


def write_some(writer, arrays, count=None):
    jobs = [
        (path, region)
        for path, array in arrays.items()
        for region in support.regions(array.shape, writer.grid(path))
    ]
    for path, region in jobs[:count]:
        data = np.ascontiguousarray(arrays[path][region])
        writer.write(path, region, memoryview(data.reshape(-1).view("u1")))


@pytest.mark.parametrize(
    "options", [{}, {"ocdbt": False}, {"ocdbt": False, "zarr": "3"}, {"compression": "zstd"}]
)
def test_files_and_the_folders_that_name_them(tmp_path, synced, options):
    arrays = support.sample()
    folder = tmp_path / "item"
    writer = writer_of(folder, arrays, **options)
    write_some(writer, arrays)
    writer.sync()
    files = [
        path for path in folder.rglob("*") if path.is_file() and path.name not in (".zarray", "zarr.json")
    ]
    assert files
    done = set(synced)
    assert {path for path in files if path not in done} == set()
    folders = {parent for path in files for parent in path.parents if parent.is_relative_to(folder)}
    assert folders - done == set()
    writer.finish()
    writer.close()
    found = support.opened(folder)
    assert list(found.reader.absent()) == []


@pytest.mark.parametrize("options", [{}, {"ocdbt": False}, {"compression": "zstd"}])
def test_no_call_returns_before_what_came_before_it_is_durable(tmp_path, synced, options):
    arrays = {("w",): np.random.default_rng(0).standard_normal((30, 40)).astype(np.float32)}
    writer = writer_of(tmp_path / "item", arrays, **options)
    write_some(writer, arrays)
    synced.entered.clear()
    synced.gate.clear()
    first = threading.Thread(target=writer.sync, name=HELD)
    second = threading.Thread(target=writer.sync)
    first.start()
    assert synced.entered.wait(10)
    second.start()
    second.join(0.3)
    assert second.is_alive(), "the second call returned while the first was still at work"
    synced.gate.set()
    first.join(10)
    second.join(10)
    assert not first.is_alive()
    assert not second.is_alive()
    writer.finish()
    writer.close()
    found = support.opened(tmp_path / "item")
    spec = found.manifest.tensors[("w",)]
    assert read_array(found.reader, spec, spec.whole).tobytes() == arrays[("w",)].tobytes()


def test_many_threads_write_and_sync(tmp_path):
    arrays = support.sample()
    for ocdbt in (True, False):
        writer = writer_of(tmp_path / f"{ocdbt}", arrays, ocdbt=ocdbt)

        def work(writer=writer):
            write_some(writer, arrays)
            writer.sync()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        writer.finish()
        writer.close()
        found = support.opened(tmp_path / f"{ocdbt}")
        assert list(found.reader.absent()) == []
