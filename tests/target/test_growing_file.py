"""Files to which bytes are appended: their size is known at the end, and an interrupted one is kept up to a gap."""

import random
import threading

import pytest

from tests.support.object_stores import small_parts
from wherry.storage.stores import locate
from wherry.target.parts import Sender
from wherry.target.uploaded_file import GrowingFile, SentBefore, UploadContext, UploadedFile, without_gaps

ROOM = 64 * 20


class Log(list):
    def part(self, upload, part):
        self.append((upload, part))

    def whole(self, path, part):
        """Objects that are put at once do not count here."""


@pytest.fixture(autouse=True)
def parts():
    with small_parts(64):
        yield


@pytest.fixture
def place(tmp_path):
    return locate(f"memory://bucket{tmp_path}/file")


@pytest.fixture
def sending(place):
    sender = Sender(1 << 20, 2)
    yield UploadContext(place.store, "run", sender, Log())
    sender.stop()


def append(file, data):
    offset = file.reserve(len(data))
    file.write(offset, memoryview(data))
    return offset


@pytest.mark.parametrize("size", [1, 63, 64, 65, 127, 128, 129, ROOM - 1, ROOM])
def test_the_object_has_the_size_at_which_the_file_ends(place, sending, size):
    data, file, at = random.Random(size).randbytes(size), GrowingFile(place.path, ROOM, sending), 0
    while at < size:
        assert append(file, data[at : at + 50]) == at
        at += 50
    file.complete()
    file.complete()
    sending.sender.drain()
    assert file.stored.nbytes == size
    assert place.read(0, ROOM) == data
    assert file.proved
    assert list(sending.store.uploads(place.path)) == []


def test_a_full_file_takes_no_more(place, sending):
    file = GrowingFile(place.path, 100, sending)
    assert file.reserve(60) == 0
    assert file.reserve(60) is None
    assert file.reserve(40) == 60
    file.end()
    assert file.reserve(0) is None


@pytest.mark.parametrize("size", [40, 64, 100, 128])
def test_bytes_that_are_written_after_the_end_was_declared_are_in_the_object(place, sending, size):
    file = GrowingFile(place.path, ROOM, sending)
    assert (file.reserve(20), file.reserve(size - 20)) == (0, 20)
    file.write(0, memoryview(bytes(20)))
    file.end()
    sending.sender.drain()
    assert file.stored is None
    file.write(20, memoryview(b"x" * (size - 20)))
    sending.sender.drain()
    assert place.read(0, ROOM) == bytes(20) + b"x" * (size - 20)


@pytest.mark.parametrize("seed", range(10))
def test_what_threads_append_is_at_the_returned_offsets(place, sending, seed):
    chance, file, found, turn = (
        random.Random(seed),
        GrowingFile(place.path, ROOM, sending),
        {},
        threading.Lock(),
    )

    def write(number):
        data = bytes([number]) * chance.randint(1, 90)
        offset = append(file, data)
        with turn:
            found[offset] = data

    threads = [threading.Thread(target=write, args=(number,)) for number in range(12)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    file.complete()
    sending.sender.drain()
    assert place.read(0, ROOM) == b"".join(found[offset] for offset in sorted(found))


def test_bytes_after_a_gap_are_not_held(place, sending):
    file = GrowingFile(place.path, ROOM, sending)
    file.reserve(200)
    file.write(64, memoryview(bytes(64)))
    sending.sender.drain()
    assert not file.holds(64, 128)
    file.write(0, memoryview(bytes(64)))
    sending.sender.drain()
    assert file.holds(64, 128)
    assert not file.holds(100, 150)


def test_the_parts_up_to_a_gap_become_the_object_of_an_interrupted_file(place, sending):
    data = random.Random(0).randbytes(64 * 5)
    first = GrowingFile(place.path, ROOM, sending)
    first.reserve(64 * 5)
    for number in (0, 1, 3, 4):
        first.write(number * 64, memoryview(data)[number * 64 : number * 64 + 64])
    sending.sender.drain()
    upload = sending.log[0][0]
    size, kept = without_gaps(SentBefore(upload, {part.number: part for _upload, part in sending.log}))
    assert (size, sorted(kept.parts)) == (128, [0, 1])
    again = UploadedFile(place.path, size, sending, kept)
    sending.sender.drain()
    assert again.stored.nbytes == 128
    assert place.read(0, ROOM) == data[:128]


def test_nothing_is_kept_without_the_first_part(place, sending):
    first = GrowingFile(place.path, ROOM, sending)
    first.reserve(192)
    first.write(64, memoryview(bytes(64)))
    sending.sender.drain()
    ((upload, part),) = sending.log
    assert without_gaps(SentBefore(upload, {part.number: part}))[0] == 0


def test_a_complete_object_is_kept_whole(place, sending):
    found = sending.store.put_object(place.path, b"all of it", "run")
    assert without_gaps(SentBefore(found=found)) == (9, SentBefore(found=found))
