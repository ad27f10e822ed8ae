"""The stores of chunks: what is known of them after a kill, and what a store in objects notes and fills."""

from __future__ import annotations

import os
from unittest.mock import Mock

import numpy as np
import pytest
import tensorstore as ts

from tests.support.object_stores import Killed, PartLog
from wherry.core.tensorspec import TensorSpec
from wherry.errors import StorageError
from wherry.integrations.containers.zarr.layout import ArrayForm, lay_out
from wherry.mover.chunk_writer import open_chunks
from wherry.store.local_store import LocalStore, locate
from wherry.store.location import Location
from wherry.target.files import FlatFiles
from wherry.target.parts import Sender
from wherry.target.staged_objects import StagedObjects
from wherry.target.upload_run import UploadRun
from wherry.target.uploaded_file import UploadContext

SPECS = [TensorSpec((name,), (6,), "uint8", (2,)) for name in "ab"]
DATA = np.arange(12, dtype="u1")
CREATED = 1_700_000_000_000_000_000


def chunks_of(specs, compression="none", file_bytes=1 << 30):
    return lay_out(specs, ArrayForm(2, compression, file_bytes), lambda path: path[0], {}, CREATED)


def encoded(chunks, number):
    chunk = chunks.grids[number]
    return chunks.codec.encode(memoryview(DATA[2 * number : 2 * number + 2]), chunk.region, chunk.spec)


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def require_read(folder):
    """The library of the system reads all chunks."""
    kvstore = {"driver": "ocdbt", "base": f"file://{folder}/"}
    for number, spec in enumerate(SPECS):
        array = ts.open({"driver": "zarr", "kvstore": {**kvstore, "path": f"{spec.name}/"}}).result()
        assert array.read().result().tolist() == DATA[6 * number : 6 * number + 6].tolist()


@pytest.fixture
def packed():
    return chunks_of(SPECS, "zstd")


def test_what_a_killed_run_has_synced_is_known_and_not_appended_again(tmp_path, packed):
    first = open_chunks(locate(tmp_path), packed)
    for number in (4, 1):
        first.put(number, encoded(packed, number))
    first.sync()
    first.put(2, encoded(packed, 2))
    first.close()
    second = open_chunks(locate(tmp_path), packed)
    assert [second.place(number) for number in (4, 1)] == [first.place(number) for number in (4, 1)]
    assert second.place(2) is None
    size = sum(second.place(number).nbytes for number in (4, 1))
    for number in range(len(packed.grids)):
        second.put(number, encoded(packed, number))
        size += 0 if number in (4, 1) else second.place(number).nbytes
    second.finish()
    second.close()
    assert (tmp_path / packed.file(0)).stat().st_size == size
    require_read(tmp_path)


def test_a_chunk_is_appended_once_and_again_only_if_it_was_not_written(tmp_path, packed, monkeypatch):
    store = open_chunks(locate(tmp_path), packed)
    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(FlatFiles, "write", Mock(side_effect=StorageError("full")))
        store.put(0, encoded(packed, 0))
    assert store.place(0) is None
    for number in range(len(packed.grids)):
        store.put(number, encoded(packed, number))
    places = [store.place(number) for number in range(len(packed.grids))]
    store.put(0, encoded(packed, 0))
    assert [store.place(number) for number in range(len(packed.grids))] == places
    store.finish()
    store.close()
    require_read(tmp_path)


def test_chunks_of_a_sync_that_failed_are_unknown_to_the_next_run(tmp_path, packed, monkeypatch):
    first = open_chunks(locate(tmp_path), packed)
    first.put(0, encoded(packed, 0))
    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(os, "fdatasync", Mock(side_effect=OSError(5, "failed")))
        first.sync()
    first.put(0, encoded(packed, 0))
    with pytest.raises(StorageError):
        first.sync()
    first.close()
    second = open_chunks(locate(tmp_path), packed)
    assert second.place(0) is None
    second.close()


def test_a_log_that_ends_in_a_row_is_cut_there(tmp_path, packed):
    first = open_chunks(locate(tmp_path), packed)
    first.put(0, encoded(packed, 0))
    first.sync()
    first.close()
    (log,) = (path for path in tmp_path.iterdir() if path.is_file())
    whole = log.read_bytes()
    log.write_bytes(whole + whole[:-1])
    second = open_chunks(locate(tmp_path), packed)
    assert second.place(0) == first.place(0)
    second.close()
    assert log.read_bytes() == whole


@pytest.mark.parametrize("stopped", [1, 2])
def test_a_database_whose_completion_was_killed_is_completed(tmp_path, packed, monkeypatch, stopped):
    first, puts = open_chunks(locate(tmp_path), packed), []
    for number in range(len(packed.grids)):
        first.put(number, encoded(packed, number))
    real = LocalStore.put

    def put(self, path, data, **more):
        puts.append(path)
        real(self, path, data[:5] if len(puts) == stopped else data, **more)
        if len(puts) == stopped:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(LocalStore, "put", put)
        first.finish()
    first.close()
    second = open_chunks(locate(tmp_path), packed)
    second.finish()
    second.close()
    require_read(tmp_path)


def test_a_database_that_was_completed_before_a_kill_is_left_as_it_is(tmp_path, packed):
    first = open_chunks(locate(tmp_path), packed)
    for number in range(len(packed.grids)):
        first.put(number, encoded(packed, number))
    first.finish()
    first.close()
    before = files_of(tmp_path)
    assert len(before) == 3, "data, tree and manifest, and no log"
    second = open_chunks(locate(tmp_path), packed)
    assert second.place(0) is None
    second.finish()
    second.close()
    assert files_of(tmp_path) == before
    require_read(tmp_path)


def test_chunks_fill_several_data_files(tmp_path):
    packed = chunks_of(SPECS, "zstd", 30)
    store = open_chunks(locate(tmp_path), packed)
    for number in range(len(packed.grids)):
        store.put(number, encoded(packed, number))
    store.finish()
    store.close()
    sizes = [len(data) for name, data in files_of(tmp_path).items() if packed.number_of(name) is not None]
    assert len(sizes) > 1
    assert max(sizes) <= 30
    require_read(tmp_path)


@pytest.fixture
def run(tmp_path):
    place = locate(f"memory://chunks{tmp_path}/out")
    sender = Sender(1 << 20, 2)
    using = UploadContext(place.store, "run", sender, PartLog())
    yield UploadRun(place, f"{place.path}-area", using)
    sender.stop()


def test_gaps_between_chunks_are_filled_at_once(run):
    """Chunks of 64 KiB and more begin on a block; their parts are complete before the end of the run."""
    placed = chunks_of([TensorSpec((name,), (70_001,), "uint8", (70_001,)) for name in "abc"])
    store = open_chunks(Location(StagedObjects(run.target.store, run), run.target.path), placed)
    for number in range(3):
        store.put(number, memoryview(bytes(70_001)))
    run.using.sender.drain()
    assert [store.holds(number) for number in range(3)] == [True] * 3


@pytest.mark.parametrize("file_bytes", [None, 1 << 30])
def test_chunks_of_no_known_size_are_noted_once(run, file_bytes):
    chunks = chunks_of(SPECS, "zstd", file_bytes)
    store = open_chunks(Location(StagedObjects(run.target.store, run), run.target.path), chunks)
    for number in (3, 0):
        store.put(number, encoded(chunks, number))
    run.finish()
    assert sorted(run.new_notes()) == [[number, *store.place(number)[:3]] for number in (0, 3)]
    assert run.new_notes() == []
