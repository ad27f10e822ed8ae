"""Files that the checksums of the store prove: nothing is copied, and nothing is there before the commit."""

from contextlib import suppress

import pytest

import wherry
from tests.support.object_stores import (
    Killed,
    leftover_names,
    model,
    release,
    small_parts,
    uploads_below,
    waiting_parts,
    watched,
)
from wherry.errors import CorruptError, MismatchError, TargetExistsError
from wherry.storage.stores import locate
from wherry.store.memory import MemoryStore
from wherry.target.journal import GROUPS
from wherry.target.upload_run import UploadRun

TARGETS = ["safetensors", "torch-zip", "npz"]
PART = 32 << 10


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return model(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(autouse=True)
def parts():
    with waiting_parts(PART):
        yield


@pytest.fixture
def target(tmp_path):
    return f"memory://bucket{tmp_path}/out"


def convert(source, target, to="safetensors", verify="store"):
    return wherry.convert(source, target, to=to, verify=verify, ignore=("companions",), lineage=False)


@pytest.mark.parametrize("part", [PART, 16 << 20], ids=["parts", "one part"])
@pytest.mark.parametrize("to", TARGETS)
def test_the_last_act_makes_the_file_of_its_parts(source, target, to, part):
    copied = convert(source, f"{target}-copied", to, "digest").target
    with small_parts(part), watched() as calls:
        made = convert(source, target, to).target
    lasting = [(name, arguments) for name, arguments in calls if not str(arguments[0]).endswith(".lease")]
    names = [name for name, _arguments in lasting]
    creating = [name for name in names if name in ("put_object", "copy_object", "put_part", "assemble")]
    assert creating[-1] == "assemble"
    assert "copy_object" not in names
    assert (made.checkpoint_digest, made.fingerprint) == (copied.checkpoint_digest, copied.fingerprint)
    assert wherry.verify(target, level="digest").ok
    assert [
        name for name in leftover_names(target) if not name.startswith(("out-copied", ".out-copied"))
    ] == []
    assert uploads_below(target) == []


def test_nothing_is_there_before_the_commit(source, target, monkeypatch):
    real, seen = MemoryStore.assemble, []

    def assemble(self, *arguments, **options):
        seen.append(locate(target).exists())
        return real(self, *arguments, **options)

    monkeypatch.setattr(MemoryStore, "assemble", assemble)
    convert(source, target)
    assert seen == [False]


def test_a_file_waits_until_its_checksums_were_compared(source, target, monkeypatch):
    def refused(run):
        assert all(file.is_sent for file in run._files.values())
        assert not locate(target).exists()
        raise MismatchError("another checksum")

    monkeypatch.setattr(UploadRun, "compare_checksums", refused)
    with pytest.raises(MismatchError):
        convert(source, target)
    assert not locate(target).exists()
    assert leftover_names(target) == []
    assert uploads_below(target) == []


def test_killed_at_every_call_of_the_store_then_run_again(source, target, tmp_path):
    whole = convert(source, tmp_path / "disk", "safetensors", "digest").target.checkpoint_digest
    with watched() as calls:
        convert(source, target)
    total = len(calls)
    points = {1, 2, 3, *range(4, total, total // 12), *range(total - 8, total + 1)}
    for point in sorted(points):
        again = f"{target}-at-{point}"
        with suppress(Killed), watched(fatal=point):  # the number of calls differs a little
            convert(source, again)
        release(again)
        assert convert(source, again).target.checkpoint_digest == whole
        assert wherry.verify(again, level="digest").ok
        assert uploads_below(again) == []
        assert [name for name in leftover_names(again) if name.startswith(f".wherry-out-at-{point}.")] == []


def test_a_killed_run_sends_only_what_it_had_not_sent(source, target):
    with watched(only=("put_part",)) as calls:
        convert(source, f"{target}-whole")
    total = len(calls)
    # At the last part: how soon a part is recorded after it was sent depends on what else the machine does.
    with watched(fatal=total, only=("put_part",)), pytest.raises(Killed):
        convert(source, target)
    release(target)
    with watched(only=("put_part",)) as calls:
        assert convert(source, target).resumed_bytes > 0
    assert len(calls) <= total - total * 2 // 3 + 1 + 2 * 4 + total * 2 // 100


def test_the_file_of_somebody_else_is_not_replaced(source, target, monkeypatch):
    place, real = locate(target), MemoryStore.assemble

    def assemble(self, upload, *arguments, **options):
        self.put_object(place.path, b"of somebody else", "another run")
        return real(self, upload, *arguments, **options)

    monkeypatch.setattr(MemoryStore, "assemble", assemble)
    with pytest.raises(TargetExistsError):
        convert(source, target)
    assert place.read_whole(100) == b"of somebody else"
    assert leftover_names(target) == []
    assert uploads_below(target) == []


@pytest.mark.parametrize("error", [MismatchError("another shape"), CorruptError("no header")])
def test_a_file_that_is_not_what_the_plan_says_is_removed_again(source, target, monkeypatch, error):
    def refused(*_arguments):
        assert locate(target).exists()
        raise error

    monkeypatch.setattr("wherry.converter.job._require_structure", refused)
    with pytest.raises(type(error)):
        convert(source, target)
    assert not locate(target).exists()
    assert leftover_names(target) == []
    assert uploads_below(target) == []


def test_the_journal_is_written_for_each_fiftieth_and_removed_together(source, target):
    with small_parts(4 << 10), watched() as calls:
        convert(source, target)
    written = [args for name, args in calls if name == "put_object" and "/journal-" in args[0]]
    removals = [args[0] for name, args in calls if name == "remove_many"]
    assert len([1 for name, _args in calls if name == "put_part"]) > 4 * GROUPS
    assert GROUPS * 3 // 5 <= len(written) <= GROUPS * 5 // 4 + 2
    assert [len(one) for one in removals] == [len(written) - 1, 1]
