"""Objects whose bytes are all known: what earlier runs have sent is kept only where it is the same."""

import random

import pytest

from tests.support.object_stores import PartLog, small_parts, watched
from wherry.storage.stores import locate
from wherry.target.parts import Sender
from wherry.target.upload_run import UploadRun
from wherry.target.uploaded_file import SentBefore, UploadContext, agreeing

DATA = random.Random(0).randbytes(64 * 4 + 10)
OTHER = DATA[:70] + b"another byte" + DATA[82:]  # differs in the second part only


@pytest.fixture(autouse=True)
def parts():
    with small_parts(64):
        yield


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
