"""Uploads: parts in any order, twice, with gaps, resumed, and within bounded memory."""

import random
import threading
import time

import pytest

from tests.support.object_stores import PartLog, small_parts, watched
from wherry.errors import StorageError, TargetExistsError
from wherry.store.local_store import locate
from wherry.store.memory import MemoryStore
from wherry.store.store import PartLimits
from wherry.target.parts import PartPieces, Sender
from wherry.target.upload_run import UploadRun
from wherry.target.uploaded_file import (
    GrowingFile,
    SentBefore,
    UploadContext,
    UploadedFile,
    agreeing,
    part_size,
    without_gaps,
)

pytest_plugins = ["tests.support.turns"]

SIZE = 1000


@pytest.fixture(autouse=True)
def parts():
    with small_parts(64):
        yield


@pytest.fixture
def place(tmp_path):
    return locate(f"memory://bucket{tmp_path}/file")


@pytest.fixture
def sending(place):
    sender = Sender(256, 2)
    yield UploadContext(place.store, "run", sender, PartLog())
    sender.stop()


def test_any_order_of_writes_makes_the_object(place, sending):
    data, chance = random.Random(0).randbytes(SIZE), random.Random(1)
    file, starts = UploadedFile(place.path, SIZE, sending), list(range(0, SIZE, 30))
    chance.shuffle(starts)
    for start in starts:
        file.write(start, memoryview(data)[start : start + 30])
    sending.sender.drain()
    assert file.stored.nbytes == SIZE
    assert place.read(0, SIZE) == data
    assert sorted(sending.log) == list(range(16))


class _Interrupted:
    """A lock; when it is given back, another thread runs."""

    def __init__(self, lock, other):
        self._lock, self._other = lock, other

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *error):
        self._lock.__exit__(*error)
        other, self._other = self._other, None
        if other is not None:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()


def test_a_part_that_another_thread_completes_meanwhile_is_sent_once(place, sending):
    data = random.Random(0).randbytes(SIZE)
    file = UploadedFile(place.path, SIZE, sending)
    file._lock = _Interrupted(file._lock, lambda: file.write(40, memoryview(data)[40:]))
    file.write(0, memoryview(data)[:40])
    sending.sender.drain()
    assert place.read(0, SIZE) == data
    assert sorted(sending.log) == list(range(16))


def test_bytes_of_a_part_that_was_sent_while_they_waited_for_memory_are_dropped(place, sending, monkeypatch):
    data = random.Random(0).randbytes(SIZE)
    file, reserve = UploadedFile(place.path, SIZE, sending), sending.sender.reserve

    def wait(nbytes):
        monkeypatch.setattr(sending.sender, "reserve", reserve)
        file.write(0, memoryview(data)[:64])  # another writer has the same bytes
        reserve(nbytes)

    monkeypatch.setattr(sending.sender, "reserve", wait)
    file.write(0, memoryview(data))
    sending.sender.drain()
    assert place.read(0, SIZE) == data
    assert sorted(sending.log) == list(range(16))
    assert sending.sender._held == 0


def test_bytes_that_nobody_wrote_are_zeros(place, sending):
    file = UploadedFile(place.path, SIZE, sending)
    file.write(500, memoryview(b"in the middle"))
    assert not file.has_bytes(500, 513)
    file.complete()
    sending.sender.drain()
    assert file.has_bytes(500, 513)
    assert place.read(0, SIZE) == bytes(500) + b"in the middle" + bytes(SIZE - 513)


def test_a_range_is_there_when_each_part_with_a_byte_of_it_is(place, sending):
    file = UploadedFile(place.path, SIZE, sending)
    file.write(0, memoryview(bytes(64)))
    sending.sender.drain()
    assert file.has_bytes(0, 64)
    assert file.has_bytes(63, 63)
    assert not file.has_bytes(0, 65)
    assert not file.has_bytes(63, 65)
    assert not file.has_bytes(64, 70)


@pytest.mark.parametrize("size", [0, 1, 64])
def test_a_small_file_is_one_put(place, sending, size):
    file = UploadedFile(place.path, size, sending)
    file.write(0, memoryview(bytes(size)))
    file.complete()
    sending.sender.drain()
    assert place.stat().size == size
    assert sending.log == []


def test_parts_of_an_earlier_run_are_not_sent_again(place, sending):
    data = random.Random(0).randbytes(SIZE)
    first = UploadedFile(place.path, SIZE, sending)
    first.write(0, memoryview(data)[:640])
    sending.sender.drain()
    upload = next(place.store.uploads(place.path))
    known = {part.number: part for part in sending.store.parts(upload)}
    del sending.log[:]
    again = UploadedFile(place.path, SIZE, sending, SentBefore(upload, known))
    assert again.has_bytes(0, 640)
    sending.sender.peak = 0
    again.write(0, memoryview(data)[:640])
    assert sending.sender.peak == 0, "its bytes wait for no memory"
    again.write(640, memoryview(data)[640:])
    sending.sender.drain()
    assert sorted(sending.log) == list(range(10, 16))
    assert place.read(0, SIZE) == data


def test_an_object_of_somebody_else_is_not_replaced(place, sending):
    file = UploadedFile(place.path, SIZE, sending)
    file.write(0, memoryview(bytes(SIZE - 1)))
    place.put(b"other")
    file.complete()
    with pytest.raises(TargetExistsError):
        sending.sender.drain()
    assert place.read(0, 9) == b"other"


def test_no_more_is_held_than_the_budget_while_parts_are_sent(place, sending, monkeypatch):
    real = MemoryStore.put_part

    def slow(self, *args):
        time.sleep(0.005)
        return real(self, *args)

    monkeypatch.setattr(MemoryStore, "put_part", slow)
    file = UploadedFile(place.path, 20 * SIZE, sending)
    for start in range(0, 20 * SIZE, 64):
        file.write(start, memoryview(bytes(64)))
    sending.sender.drain()
    assert 64 < sending.sender.peak <= 256


def test_open_parts_beyond_the_budget_do_not_stop_the_run(place, sending):
    file, done = UploadedFile(place.path, SIZE, sending), threading.Event()

    def write():
        for start in (*range(0, 960, 64), *range(32, 992, 64)):  # first one half of each part, then the other
            file.write(start, memoryview(bytes(32)))
        file.complete()
        done.set()

    threading.Thread(target=write, daemon=True).start()
    assert done.wait(120)
    sending.sender.drain()
    assert sending.sender.peak > 256


def test_the_first_error_of_sending_ends_every_later_write(place, sending, monkeypatch):
    def refused(*_args):
        raise StorageError("no answer", uri="memory://", cure="retry")

    monkeypatch.setattr(MemoryStore, "put_part", refused)
    file = UploadedFile(place.path, SIZE, sending)
    with pytest.raises(StorageError, match="no answer"):
        for start in range(0, SIZE, 20):
            file.write(start, memoryview(bytes(20)))
            time.sleep(0.001)


def test_parts_grow_with_the_object():
    limits = PartLimits(most=10_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wherry.target.uploaded_file.PART_BYTES", 8 << 20)
        assert part_size(1 << 30, limits) == 8 << 20
        for size in (80 << 30, 100 << 30, 5 << 40):
            part = part_size(size, limits)
            assert part % (1 << 20) == 0
            assert -(-size // part) <= 10_000
        assert part_size(1 << 30, PartLimits(smallest=16 << 20)) == 16 << 20


# Files to which bytes are appended: their size is known at the end, and an interrupted one is kept up to
# a gap.


ROOM = 64 * 20


class Log(list):
    def part(self, upload, part):
        self.append((upload, part))

    def whole(self, path, part):
        """Objects that are put at once do not count here."""


@pytest.fixture
def sending_of_file(place):
    sender = Sender(1 << 20, 2)
    yield UploadContext(place.store, "run", sender, Log())
    sender.stop()


def append(file, data):
    offset = file.reserve(len(data))
    file.write(offset, memoryview(data))
    return offset


@pytest.mark.parametrize("size", [1, 63, 64, 65, 127, 128, 129, ROOM - 1, ROOM])
def test_the_object_has_the_size_at_which_the_file_ends(place, sending_of_file, size):
    data, file, at = random.Random(size).randbytes(size), GrowingFile(place.path, ROOM, sending_of_file), 0
    while at < size:
        assert append(file, data[at : at + 50]) == at
        at += 50
    file.complete()
    file.complete()
    sending_of_file.sender.drain()
    assert file.stored.nbytes == size
    assert place.read(0, ROOM) == data
    assert file.proved
    assert list(sending_of_file.store.uploads(place.path)) == []


def test_a_full_file_takes_no_more(place, sending_of_file):
    file = GrowingFile(place.path, 100, sending_of_file)
    assert file.reserve(60) == 0
    assert file.reserve(60) is None
    assert file.reserve(40) == 60
    file.end()
    assert file.reserve(0) is None


@pytest.mark.parametrize("size", [40, 64, 100, 128])
def test_bytes_that_are_written_after_the_end_was_declared_are_in_the_object(place, sending_of_file, size):
    file = GrowingFile(place.path, ROOM, sending_of_file)
    assert (file.reserve(20), file.reserve(size - 20)) == (0, 20)
    file.write(0, memoryview(bytes(20)))
    file.end()
    sending_of_file.sender.drain()
    assert file.stored is None
    file.write(20, memoryview(b"x" * (size - 20)))
    sending_of_file.sender.drain()
    assert place.read(0, ROOM) == bytes(20) + b"x" * (size - 20)


@pytest.mark.parametrize("seed", range(10))
def test_what_threads_append_is_at_the_returned_offsets(place, sending_of_file, seed):
    chance, file, found, turn = (
        random.Random(seed),
        GrowingFile(place.path, ROOM, sending_of_file),
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
    sending_of_file.sender.drain()
    assert place.read(0, ROOM) == b"".join(found[offset] for offset in sorted(found))


def test_bytes_after_a_gap_are_not_held(place, sending_of_file):
    file = GrowingFile(place.path, ROOM, sending_of_file)
    file.reserve(200)
    file.write(64, memoryview(bytes(64)))
    sending_of_file.sender.drain()
    assert not file.has_bytes(64, 128)
    file.write(0, memoryview(bytes(64)))
    sending_of_file.sender.drain()
    assert file.has_bytes(64, 128)
    assert not file.has_bytes(100, 150)


def test_the_parts_up_to_a_gap_become_the_object_of_an_interrupted_file(place, sending_of_file):
    data = random.Random(0).randbytes(64 * 5)
    first = GrowingFile(place.path, ROOM, sending_of_file)
    first.reserve(64 * 5)
    for number in (0, 1, 3, 4):
        first.write(number * 64, memoryview(data)[number * 64 : number * 64 + 64])
    sending_of_file.sender.drain()
    upload = sending_of_file.log[0][0]
    size, kept = without_gaps(
        SentBefore(upload, {part.number: part for _upload, part in sending_of_file.log})
    )
    assert (size, sorted(kept.parts)) == (128, [0, 1])
    again = UploadedFile(place.path, size, sending_of_file, kept)
    sending_of_file.sender.drain()
    assert again.stored.nbytes == 128
    assert place.read(0, ROOM) == data[:128]


def test_nothing_is_kept_without_the_first_part(place, sending_of_file):
    first = GrowingFile(place.path, ROOM, sending_of_file)
    first.reserve(192)
    first.write(64, memoryview(bytes(64)))
    sending_of_file.sender.drain()
    ((upload, part),) = sending_of_file.log
    assert without_gaps(SentBefore(upload, {part.number: part}))[0] == 0


def test_a_complete_object_is_kept_whole(place, sending_of_file):
    found = sending_of_file.store.put_object(place.path, b"all of it", "run")
    assert without_gaps(SentBefore(found=found)) == (9, SentBefore(found=found))


# Objects whose bytes are all known: what earlier runs have sent is kept only where it is the same.


DATA = random.Random(0).randbytes(64 * 4 + 10)
OTHER = DATA[:70] + b"another byte" + DATA[82:]  # differs in the second part only


@pytest.fixture
def target(tmp_path):
    return locate(f"memory://bucket{tmp_path}/out")


@pytest.fixture
def runs(target):
    """Runs that continue others."""
    store, senders = target.store, []

    def run(**before):
        senders.append(Sender(1 << 20, 2))
        using = UploadContext(store, "run", senders[-1], PartLog())
        past = {target.join(name).path: one for name, one in before.items()}
        return UploadRun(target, f"{target.path}-area", using, (), past)

    yield run
    for sender in senders:
        sender.stop()


def sent(run, target, data):
    """What the store has of a file after a run that was killed before the object was assembled."""
    upload = run.using.store.begin(target.join("a").path, "run")
    cut = [data[start : start + 64] for start in range(0, len(data), 64)]
    return SentBefore(
        upload, {n: run.using.store.put_part(upload, n, [memoryview(one)]) for n, one in enumerate(cut)}
    )


def test_parts_of_the_same_bytes_are_not_sent_again(runs, target):
    before = sent(runs(), target, DATA)
    run = runs(a=before)
    with watched(only=("put_part",)) as calls:
        run.whole(target.join("a").path, [memoryview(DATA)])
        run.finish()
    assert calls == []
    assert target.join("a").read(0, 1000) == DATA


@pytest.mark.parametrize("cut", [[], [0], [1, 64, 65, 200]])
def test_parts_of_other_bytes_are_sent_again(runs, target, cut):
    before = sent(runs(), target, OTHER)
    run = runs(a=before)
    ends = [*cut, len(DATA)]
    pieces = [memoryview(DATA)[start:stop] for start, stop in zip([0, *cut], ends, strict=True)]
    with watched(only=("put_part",)) as calls:
        run.whole(target.join("a").path, pieces)
        run.finish()
    assert [args[1] for _name, args in calls] == [1]
    assert target.join("a").read(0, 1000) == DATA


@pytest.mark.parametrize("data", [OTHER, DATA[:100], b""])
def test_an_object_of_other_bytes_is_replaced(runs, target, data):
    found = runs().using.store.put_object(target.join("a").path, data, "run")
    run = runs(a=SentBefore(found=found))
    run.whole(target.join("a").path, [memoryview(DATA)])
    run.finish()
    assert target.join("a").read(0, 1000) == DATA


def test_an_object_of_the_same_bytes_is_kept(runs, target):
    found = runs().using.store.put_object(target.join("a").path, DATA, "run")
    run = runs(a=SentBefore(found=found))
    with watched(only=("put_part", "put_object", "remove_object")) as calls:
        run.whole(target.join("a").path, [memoryview(DATA)])
        run.finish()
    assert calls == []


def test_an_object_without_a_checksum_is_not_trusted(runs, target):
    found = runs().using.store.put_object(target.join("a").path, DATA, "run")
    unknown = SentBefore(found=type(found)(found.nbytes, found.mark, found.run))
    assert agreeing(unknown, [memoryview(DATA)], 64).found is None


def test_an_empty_object_is_made(runs, target):
    run = runs()
    run.whole(target.join("a").path, [])
    run.finish()
    assert target.join("a").stat().size == 0


def test_a_large_text_is_not_mixed_with_that_of_an_earlier_run(runs, target):
    before = sent(runs(), target, OTHER)
    run = runs(a=before)
    run.put(target.join("a").path, DATA)
    run.finish()
    assert target.join("a").read(0, 1000) == DATA


def test_parts_of_an_object_that_is_replaced_are_not_kept(runs, target):
    """An interrupted run has assembled the object, so its log names parts that no upload has any more."""
    before = sent(runs(), target, OTHER)
    found = runs().using.store.assemble(before.upload, list(before.parts.values()))
    run = runs(a=SentBefore(parts=before.parts, found=found))
    run.put(target.join("a").path, DATA)
    run.finish()
    assert target.join("a").read(0, 1000) == DATA


# Memory of parts: given in the order in which it was requested, and exceeded by one part at most.


@pytest.fixture
def sender():
    made = Sender(100, 2)
    yield made
    made.stop()


def started(count, act):
    """Threads that run at the same time, each begun when the one before it waits or has ended."""
    threads = [threading.Thread(target=act, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
        thread.join(0.05)
    return threads


def test_who_waits_for_memory_is_not_overtaken(sender, asking):
    order, sent = [], threading.Event()
    sender.reserve(90)
    sender.send(90, lambda: sent.wait(120))

    def reserve(number):
        sender.reserve([80, 10, 10][number])
        order.append(number)

    threads = [asking(reserve, number) for number in range(3)]
    assert order == []
    sent.set()
    for thread in threads:
        thread.join(120)
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]
    assert sender.peak == 100


def test_the_memory_is_exceeded_only_while_nothing_is_sent_and_nothing_can_be_put_aside(sender):
    relief_calls, relieved, sent = [], threading.Event(), threading.Event()
    sender.reserve(90)

    def relieve():
        relief_calls.append(1)
        sender.send(0, lambda: sent.wait(120))  # another thread begins to send meanwhile
        relieved.set()
        return False

    sender.relieve = relieve
    (thread,) = started(1, lambda _number: sender.reserve(20))
    assert relieved.wait(120)
    assert relief_calls == [1]
    assert sender.peak == 90  # it waits for what is sent
    sent.set()
    thread.join(120)
    assert sender.peak == 110


def test_parts_that_were_put_aside_come_back_one_at_a_time_beyond_the_memory(sender):
    sender.reserve(90)

    def load(_number):
        with sender.loaded(30):
            time.sleep(0.15)  # longer than the next one takes to begin

    for thread in started(4, load):
        thread.join(120)
    assert sender.peak == 120
    sender.release(90)
    with sender.loaded(30), sender.loaded(30):
        assert sender.peak == 120  # several, where there is room


def test_all_who_wait_learn_that_sending_has_failed(sender):
    failed, errors = threading.Event(), []
    sender.reserve(100)

    def fail():
        failed.wait(120)
        raise StorageError("the store is gone", uri="memory://x", cure="try again")

    sender.send(50, fail)

    def reserve(_number):
        try:
            sender.reserve(60)
        except StorageError as error:
            errors.append(error)

    threads = started(3, reserve)
    failed.set()
    for thread in threads:
        thread.join(120)
    assert len(errors) == 3


# The pieces of a part, in any order, twice, and with gaps.


def joined(part):
    return b"".join(part.views)


@pytest.mark.parametrize("seed", range(20))
def test_any_pieces_are_as_bytes_written_to_a_file(seed):
    chance, part, file = random.Random(seed), PartPieces(40), bytearray(40)
    known = set()
    for _ in range(30):
        start = chance.randrange(40)
        data = chance.randbytes(chance.randint(1, 40 - start))
        before = part.held
        dropped = part.add(start, memoryview(data))
        file[start : start + len(data)] = data
        known |= set(range(start, start + len(data)))
        assert part.held == len(known) == before + len(data) - dropped
    filled = part.fill()
    assert filled == 40 - len(known)
    assert joined(part) == bytes(file)
