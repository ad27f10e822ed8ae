"""Parts that are filled in an order that memory cannot hold: pieces wait in the store, and nothing of them is left."""

import random

import pytest

from tests.support.object_stores import small_parts
from wherry.errors import StorageError
from wherry.store.local_store import locate
from wherry.target.parts import Sender
from wherry.target.upload_run import UploadRun
from wherry.target.uploaded_file import UploadContext

PART, BUDGET, SENDERS = 64, 512, 2
FILES, SIZE = 5, 2000
DATA = {f"file-{n}": random.Random(n).randbytes(SIZE) for n in range(FILES)}


class Log:
    def part(self, upload, part):
        pass

    def whole(self, path, part):
        """Objects that are put at once do not count here."""


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    monkeypatch.setattr("wherry.target.upload_run.PART_BYTES", PART)
    with small_parts(PART):
        yield


@pytest.fixture
def run(tmp_path):
    place = locate(f"memory://bucket{tmp_path}/out")
    sender = Sender(BUDGET, SENDERS)
    using = UploadContext(place.store, "run", sender, Log())
    yield UploadRun(place, place.parent.join(".wherry-out.01234567").path, using)
    sender.stop()


def in_rounds(step):
    """Pieces of all files, so that every part is begun before any is complete."""
    return [
        (name, start + shift)
        for shift in range(0, PART, step)
        for name in DATA
        for start in range(0, SIZE, PART)
    ]


def shuffled(step):
    pieces = [(name, start) for name in DATA for start in range(0, SIZE, step)]
    random.Random(0).shuffle(pieces)
    return pieces


def names(run):
    return sorted(entry.name for entry in run.target.parent.walk())


@pytest.mark.parametrize("order", [in_rounds, shuffled])
@pytest.mark.parametrize(("step", "length"), [(16, 16), (8, 8), (16, 40)], ids=["", "small", "overlapping"])
def test_no_more_is_held_than_the_budget_and_what_is_loaded(run, order, step, length):
    files = {name: run.file(run.target.join(name).path, SIZE) for name in DATA}
    for name, start in order(step):
        files[name].write(start, memoryview(DATA[name])[start : start + length])
    run.finish()
    assert run.using.sender.peak <= BUDGET + PART
    assert {name: run.target.join(name).read(0, SIZE) for name in DATA} == DATA
    assert names(run) == [f"out/{name}" for name in DATA]


def test_bytes_are_put_aside_in_objects_as_large_as_a_part(run):
    files, calls = {name: run.file(run.target.join(name).path, SIZE) for name in DATA}, []
    real = run.using.store.put_object
    run.using.store.put_object = lambda path, data, one: (
        calls.append(sum(map(len, data))) or real(path, data, one)
    )
    for name, start in in_rounds(8):
        files[name].write(start, memoryview(DATA[name])[start : start + 8])
    run.finish()
    assert calls
    assert min(calls) >= PART


def test_what_is_put_aside_is_sent_in_pieces_and_no_longer_held(run):
    files, sent = {name: run.file(run.target.join(name).path, SIZE) for name in DATA}, []
    real = run.using.store.put_object
    run.using.store.put_object = lambda path, data, one: sent.append(data) or real(path, data, one)
    for name, start in in_rounds(8):
        files[name].write(start, memoryview(DATA[name])[start : start + 8])
    run.finish()
    assert sent
    assert all(len(piece) == 8 for data in sent for piece in data)
    assert all(one._pieces is None for one in run._aside)


def test_an_ended_run_leaves_no_bytes_aside(run, monkeypatch):
    files = {name: run.file(run.target.join(name).path, SIZE) for name in DATA}
    pieces = in_rounds(16)
    for name, start in pieces[: len(pieces) // 2]:
        files[name].write(start, memoryview(DATA[name])[start : start + 16])
    run.using.sender.drain()
    assert [one for one in names(run) if "overflow-" in one]
    run.drop_overflow()
    assert names(run) == []


def test_an_object_that_was_altered_is_an_error(run):
    files = {name: run.file(run.target.join(name).path, SIZE) for name in DATA}
    for name, start in in_rounds(32)[: FILES * SIZE // PART]:
        files[name].write(start, memoryview(DATA[name])[start : start + 32])
    run.using.sender.drain()
    for one in names(run):
        run.target.parent.join(one).put(b"")
    with pytest.raises(StorageError, match="altered or removed"):
        run.finish()
