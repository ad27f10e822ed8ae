"""Targets in a store of objects: nothing on a local disk, one owner, proved before the commit, resumed after a kill."""

import itertools
import tempfile
import threading
import time
from dataclasses import replace

import pytest

import wherry
from tests.support.object_stores import (
    Killed,
    leftover_names,
    model,
    release,
    uploads_below,
    waiting_parts,
    watched,
)
from wherry.converter import job
from wherry.errors import (
    CorruptError,
    MismatchError,
    StorageError,
    TargetExistsError,
    TargetInUseError,
    UsageError,
)
from wherry.formats.registry import formats
from wherry.mover.output import Output
from wherry.store.local_store import locate
from wherry.store.memory import MemoryStore
from wherry.store.remote_store import FsspecStore
from wherry.target.journal import Journal
from wherry.target.lease import LeaseObject, lease_of
from wherry.target.staged_objects import run_of

SHARDS = {"max_shard_size": "500KB"}
TARGETS = ["safetensors", "hf", "orbax"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return model(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(autouse=True)
def parts():
    with waiting_parts():
        yield


@pytest.fixture
def target(tmp_path):
    return f"memory://bucket{tmp_path}/out"


def convert(source, target, to="hf", **more):
    options = SHARDS if to == "hf" else {}
    ignore = ("companions",) if to == "safetensors" else ()
    return wherry.convert(source, target, to=to, options=options, ignore=ignore, lineage=False, **more)


def digest_of(source, folder, to):
    return convert(source, folder / "undisturbed", to).target.checkpoint_digest


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("to", ["hf", "orbax", "dcp"])
def test_objects_that_the_pass_completes_are_read_back_in_it(source, target, monkeypatch, to, slow):
    monkeypatch.setattr("wherry.converter.job.LARGEST", 0)  # tensors of every size by themselves
    if slow:
        _slow_down(monkeypatch, "put_object", "assemble")
    rest, real = [], job.read_back

    def reading(*arguments, paths, **more):
        rest.append(len(paths))
        return real(*arguments, paths=paths, **more)

    monkeypatch.setattr("wherry.converter.job.read_back", reading)
    options = {"ocdbt": False} if to == "orbax" else {}
    receipt = wherry.convert(source, target, to=to, options=options, ignore=("companions",), lineage=False)
    assert receipt.verification["ok"]
    assert rest == [0], "nothing is left for the end"


def _slow_down(monkeypatch, *names):
    """Let objects be sent long after their bytes were written."""
    for name in names:
        real = getattr(MemoryStore, name)

        def call(self, *args, real=real, **kwargs):
            time.sleep(0.05)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(MemoryStore, name, call)


@pytest.mark.parametrize("to", TARGETS)
def test_a_target_is_uploaded_without_a_byte_on_a_local_disk(source, target, tmp_path, monkeypatch, to):
    def refused(*_args, **_kwargs):
        raise AssertionError("a file was made on a local disk")

    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    with watched() as calls:
        receipt = convert(source, target, to)
    assert receipt.verification["level"] == "digest"
    assert [name for name, _ in calls].count("put_part") > 10
    assert wherry.verify(target, level="digest").ok
    assert leftover_names(target) == []
    assert uploads_below(target) == []
    assert convert(source, target, to).already


def test_no_part_is_copied_into_one_buffer(source, target):
    with watched() as calls:
        convert(source, target, "safetensors")
    sent = [args[2] for name, args in calls if name == "put_part"]
    assert max(len(pieces) for pieces in sent) > 1


def test_every_format_in_folders_has_a_commit_member():
    rows = [row for row in formats().values() if row.is_written and not row.single_file]
    assert rows
    assert [row.name for row in rows if not row.commit_members] == []


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_the_commit_member_comes_last(source, target, to):
    def committed():
        place = locate(target)
        return (place if to == "safetensors" else place.join("model.safetensors.index.json")).exists()

    with watched() as calls:
        convert(source, target, to)
    last = max(n for n, (name, _) in enumerate(calls) if name in ("put_object", "copy_object", "assemble"))
    again = f"{target}-2"
    with watched(fatal=1, only=("copy_object",)), pytest.raises(Killed):
        convert(source, again, to)
    assert calls[last][0] == "put_object"  # by which that store copies
    assert calls[last][1][0].endswith("index.json" if to == "hf" else "out")
    assert not locate(again).exists() or not locate(again).join("model.safetensors.index.json").exists()


@pytest.mark.parametrize(("to", "verify"), [*((to, "digest") for to in TARGETS), ("safetensors", "store")])
def test_killed_at_every_call_of_the_store_then_run_again(source, target, tmp_path, to, verify):
    whole = digest_of(source, tmp_path, to)
    with watched() as calls:
        convert(source, target, to, verify=verify)
    total = len(calls)
    copies = [n + after for n, (name, _) in enumerate(calls, 1) if name == "copy_object" for after in (0, 1)]
    points = sorted(
        {1, 2, 3, 4, total - 3, total - 2, total - 1, total, *copies, *range(5, total, max(total // 12, 1))}
    )
    for point in points:
        again = f"{target}-at-{point}"
        try:
            with watched(fatal=point):
                convert(source, again, to, verify=verify)
        except Killed:
            pass
        release(again)
        if locate(again).exists() and wherry.detect(again).verdict == "ok":
            assert wherry.verify(again, level="digest").ok
        receipt = convert(source, again, to, verify=verify)
        assert receipt.target.checkpoint_digest == whole
        assert wherry.verify(again, level="digest").ok
        assert uploads_below(again) == []
        assert [name for name in leftover_names(again) if name.startswith(f".wherry-out-at-{point}.")] == []


def _record_what_is_sent(monkeypatch):
    """Let a move be recorded when its parts are sent: under load, none may be sent before all are computed."""
    real = Output.delivered
    monkeypatch.setattr("wherry.mover.output._GROUP_SECONDS", 0.0)

    def delivered(output, moves, leaves):
        run_of(output.writer._folder).using.sender.drain()
        real(output, moves, leaves)

    monkeypatch.setattr(Output, "delivered", delivered)


@pytest.mark.parametrize("verify", ["digest", "store"])
def test_a_killed_run_sends_only_what_it_had_not_sent(source, target, monkeypatch, verify):
    _record_what_is_sent(monkeypatch)
    with watched(only=("put_part",)) as calls:
        convert(source, f"{target}-whole", "safetensors", verify=verify)
    total = len(calls)
    with watched(fatal=total * 2 // 3, only=("put_part",)) as calls, pytest.raises(Killed):
        convert(source, target, "safetensors", verify=verify)
    release(target)
    with watched(only=("put_part",)) as calls:
        receipt = convert(source, target, "safetensors", verify=verify)
    assert len(calls) <= total - total * 2 // 3 + 1 + 2 * 4 + total * 2 // 100  # in flight: twice the senders
    assert 0 < receipt.resumed_bytes < receipt.bytes_written


def test_an_error_that_no_retry_fixes_leaves_nothing(source, target, monkeypatch):
    def refused(_self, _upload, parts, **_kwargs):
        raise MismatchError(f"{len(parts)} parts are wrong")

    monkeypatch.setattr(MemoryStore, "assemble", refused)
    with pytest.raises(MismatchError, match="are wrong"):
        convert(source, target, "safetensors")
    assert leftover_names(target) == []
    assert uploads_below(target) == []
    assert not locate(target).exists()


def test_an_error_that_a_retry_fixes_leaves_a_resumable_state(source, target, monkeypatch):
    real, seen = MemoryStore.put_part, []

    def once(self, *args):
        seen.append(args)
        if len(seen) == 20:
            raise StorageError("no answer", uri="memory://", cure="retry", retryable=True)
        return real(self, *args)

    monkeypatch.setattr(MemoryStore, "put_part", once)
    with pytest.raises(StorageError, match="no answer"):
        convert(source, target, "safetensors")
    assert any("journal-" in name for name in leftover_names(target))
    with watched(only=("put_part",)) as calls:
        convert(source, target, "safetensors")
    assert (
        len(calls) <= 37 - 12
    )  # of 37 parts, 19 were sent before the error, and four of these may be unknown
    assert leftover_names(target) == []


@pytest.fixture
def altered(monkeypatch):
    """Large reads of a store get one wrong byte."""
    real = FsspecStore.read

    def read(self, path, start, stop):
        data = bytearray(real(self, path, start, stop))
        if len(data) > 50_000:
            data[-1] ^= 1
        return bytes(data)

    monkeypatch.setattr(FsspecStore, "read", read)


@pytest.mark.usefixtures("altered")
def test_a_wrong_byte_in_the_store_is_found_before_the_commit(source, target):
    with pytest.raises(MismatchError, match="read-back differs"):
        convert(source, target, "safetensors")
    assert not locate(target).exists()
    assert leftover_names(target) == []


def test_a_wrong_byte_in_a_small_object_is_found_before_the_commit(source, target, monkeypatch):
    real = MemoryStore.put_object

    def flipped(self, path, data, run, *, replaces=""):
        return real(self, path, b"[]" if path.endswith("/wherry.json") else data, run, replaces=replaces)

    monkeypatch.setattr(MemoryStore, "put_object", flipped)
    with pytest.raises(MismatchError, match="read-back differs"):
        convert(source, target, "hf")
    assert not locate(target).exists()


def test_objects_of_somebody_else_are_never_touched(source, target):
    locate(target).join("notes.txt").put(b"kept")
    with pytest.raises(TargetExistsError):
        convert(source, target, "hf")
    assert locate(target).join("notes.txt").read(0, 9) == b"kept"
    assert leftover_names(target) == []


def test_an_object_that_appears_meanwhile_is_not_committed_with_the_others(source, target, monkeypatch):
    real = MemoryStore.assemble

    def put_intruder(self, *args, **kwargs):
        locate(target).join("intruder.json").put(b"{}")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(MemoryStore, "assemble", put_intruder)
    with pytest.raises(TargetExistsError, match="during the conversion"):
        convert(source, target, "hf")
    assert [entry.name for entry in locate(target).walk()] == ["intruder.json"]


def test_a_second_run_is_refused_and_names_the_first(source, target):
    with (
        lease_of(locate(target)),
        pytest.raises(TargetInUseError, match=r"process .* is writing this target"),
    ):
        convert(source, target, "hf")
    assert not convert(source, target, "hf").already


def test_a_checkpoint_is_fetched_into_a_store_and_back(source, target, tmp_path):
    made = convert(source, tmp_path / "made", "hf").target
    wherry.fetch(made.uri, target)
    assert wherry.verify(target, level="digest").ok
    assert leftover_names(target) == []


def test_the_checksums_of_the_store_are_a_proof_without_reading(source, target, monkeypatch):
    monkeypatch.setattr("wherry.converter.job.read_back", None)
    receipt = convert(source, target, "safetensors", verify="store")
    assert receipt.verification == {"level": "store", "ok": True, "tensors": 12, "checksum": "crc32c"}
    monkeypatch.undo()
    assert wherry.verify(target, level="digest").ok


@pytest.mark.parametrize("noted", [True, False])
def test_the_checksums_of_objects_that_a_killed_run_completed_are_a_proof_too(
    source, target, monkeypatch, noted
):
    moves_noted, assembled = threading.Event(), itertools.count(1)

    real_part, real_record = Journal.part, Journal.record

    def part(self, *given):
        real_part(self, *given)
        self.flush()

    def record(self, rows):
        """A run resumes the moves that were noted after their parts; a group may be empty."""
        group = list(rows)
        real_record(self, group)
        self.flush()
        if group:
            moves_noted.set()

    def at_the_third(fatal):
        """The call that kills, once moves of another object are noted."""

        def assemble(self, *given, **options):
            if next(assembled) == 3 and noted:
                assert moves_noted.wait(60)
            return fatal(self, *given, **options)

        return assemble

    with pytest.MonkeyPatch.context() as patch:
        if noted:
            patch.setattr(Journal, "part", part)
            patch.setattr(Journal, "record", record)
        else:
            patch.setattr(Journal, "_flush", lambda _self: None)
        with (
            watched(fatal=3, only=("assemble",)),
            pytest.MonkeyPatch.context() as inner,
            pytest.raises(Killed),
        ):
            inner.setattr(MemoryStore, "assemble", at_the_third(MemoryStore.assemble))
            convert(source, target, "hf", verify="store")
    release(target)
    monkeypatch.setattr("wherry.converter.job.read_back", None)
    receipt = convert(source, target, "hf", verify="store")
    assert (receipt.resumed_bytes > 0) == noted
    assert receipt.verification["level"] == "store"
    monkeypatch.undo()
    assert wherry.verify(target, level="digest").ok


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_a_store_that_computes_other_checksums_has_other_bytes(source, target, monkeypatch, to):
    real = MemoryStore.put_part

    def flipped(self, upload, number, data):
        sent = bytearray(b"".join(data))
        sent[0] ^= number == 2
        return real(self, upload, number, [memoryview(sent)])

    monkeypatch.setattr(MemoryStore, "put_part", flipped)
    with pytest.raises(CorruptError, match="other bytes of part 2"):
        convert(source, target, to, verify="store")
    assert not locate(target).exists()


def test_a_store_without_checksums_proves_nothing(source, target, monkeypatch):
    real = MemoryStore.put_part
    monkeypatch.setattr(MemoryStore, "put_part", lambda self, *args: replace(real(self, *args), checksum=""))
    monkeypatch.setattr(MemoryStore, "_join_parts", lambda _self, *_args: b"")
    with pytest.raises(MismatchError):
        convert(source, target, "safetensors", verify="store")


def test_checksums_of_a_store_are_refused_where_there_are_none(source, tmp_path):
    with pytest.raises(UsageError, match="no store computes checksums"):
        convert(source, tmp_path / "out", "hf", verify="store")


def test_another_conversion_to_the_target_of_a_killed_run_starts_over(source, target, tmp_path):
    with watched(fatal=25, only=("put_part",)), pytest.raises(Killed):
        convert(source, target, "hf")
    release(target)
    other = model(tmp_path / "other", seed=1)
    receipt = convert(other, target, "hf")
    assert receipt.resumed_bytes == 0
    assert "a different source" in receipt.note
    assert wherry.verify(target, level="digest").ok
    assert leftover_names(target) == []
    assert uploads_below(target) == []


def test_a_journal_that_somebody_has_altered_is_not_used(source, target):
    with watched(fatal=25, only=("put_part",)), pytest.raises(Killed):
        convert(source, target, "safetensors")
    release(target)
    name = next(name for name in leftover_names(target) if name.endswith("journal-000001"))
    place = locate(target).parent.join(name)
    place.put(place.read(0, 1 << 20).replace(b"done", b"dome"))
    receipt = convert(source, target, "safetensors")
    assert receipt.resumed_bytes == 0
    assert "altered" in receipt.note
    assert wherry.verify(target, level="digest").ok


def test_a_lease_that_is_not_renewed_is_taken_over_and_its_owner_ends(source, target, monkeypatch):
    monkeypatch.setattr(LeaseObject, "expiry", 0.2)
    monkeypatch.setattr("wherry.target.lease.LOOK_SECONDS", 0.05)
    monkeypatch.setattr("wherry.target.lease.lease_text", lambda _owner, _beat: b"not of this machine")
    with lease_of(locate(target)) as silent:
        assert convert(source, target, "hf").resumed_bytes == 0
        assert not silent.holds()
        with pytest.raises(TargetInUseError, match="took over"):
            silent.require_held()
    assert leftover_names(target) == []
