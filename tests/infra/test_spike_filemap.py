"""The laws of the spike of FileMap: maps tile their files, and every way to write gives the same bytes."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wherry
from infra.spikes.filemap import maxtext, npz
from infra.spikes.filemap.engine import Intervals, Job, commit, work
from infra.spikes.filemap.log import FileLog, SignedLog
from infra.spikes.filemap.nouns import (
    ORDER,
    Grids,
    Late,
    Pack,
    Range,
    Raw,
    Scene,
    Segments,
    line_of,
    pieces,
    slices,
)
from infra.spikes.filemap.sinks import DiskSink, PartsSink
from infra.spikes.filemap.transform import FromArrays
from tests.support.infra import load
from wherry.core.digest import LeafHasher, weights_digest
from wherry.core.manifest import Companion, Manifest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.mover.hashing import hash_checkpoint
from wherry.storage.stores import locate
from wherry.store.memory import MemoryStore
from wherry.store.store import PartLimits

KEY = b"k" * 32
STEP = 512  # bytes of a piece and of a part
DTYPES = ("float32", "bfloat16", "uint8")
LAYOUTS = {"npz": npz.layout, "maxtext": maxtext.layout}
MEMBERS = {"config.json": b'{"layers": 2}', "empty.txt": b""}
names = itertools.count()


@st.composite
def targets(draw, to):
    """A manifest that a format accepts, with hints."""
    specs = {}
    for number in range(draw(st.integers(1, 4))):
        least = 0 if to == "npz" else 1
        shape = tuple(draw(st.lists(st.integers(least, 9), min_size=0, max_size=3)))
        chunks = tags = None
        if to == "maxtext":
            chunks = tuple(draw(st.integers(1, extent)) for extent in shape)
            order = draw(st.permutations(range(len(shape))))
            tags = {ORDER: "x".join(map(str, order))} if len(shape) > 1 else None
        path = (f"t{number}",) if to == "npz" else ("params", f"t{number}")
        specs[path] = TensorSpec(path, shape, draw(st.sampled_from(DTYPES)), chunks, tags=tags)
    companions = (
        tuple(Companion(name, len(data)) for name, data in MEMBERS.items()) if to == "maxtext" else ()
    )
    return to, Manifest(tensors=specs, companions=companions, kind="params")


def some_target():
    return st.sampled_from(sorted(LAYOUTS)).flatmap(targets)


def laid_out(to, manifest, file_bytes=600):
    return LAYOUTS[to](manifest, {"data_file_size": str(file_bytes), "ocdbt": True}, Scene("0", created_ns=7))


def made_of(manifest):
    """Arrays for a manifest; their values tell where they belong."""
    arrays = {}
    for number, (path, spec) in enumerate(manifest.tensors.items()):
        data = np.random.default_rng(number).integers(0, 8, spec.nbytes, "u1")
        width = {"float32": "f4", "bfloat16": "u2", "uint8": "u1"}[spec.dtype]
        arrays[path] = data.view(width).reshape(spec.shape)
    return FromArrays(manifest, arrays, MEMBERS)


# ---- maps ------------------------------------------------------------------------------------------------------------


@given(some_target())
@settings(max_examples=60, deadline=None)
def test_segments_tile_each_file_and_every_byte_is_found(target):
    file_map = laid_out(*target)
    assert set(file_map.commit_members) <= {file.name for file in file_map.files}
    for number, file in enumerate(file_map.files):
        found = list(pieces(file_map, Range(number, 0, file.length), STEP))
        assert [one.range[1:] for one in found] == list(
            itertools.pairwise([0, *(one.range.stop for one in found)])
        )
        assert (found[-1].range.stop if found else 0) == file.length
        if isinstance(file.body, Segments):
            assert all(file.body.at(one.range.start) == file.body.at(one.range.stop - 1) for one in found)


@given(some_target())
@settings(max_examples=60, deadline=None)
def test_a_tensor_lies_where_its_segments_are(target):
    to, manifest = target
    file_map = laid_out(to, manifest)
    for path, spec in manifest.tensors.items():
        if to == "npz":
            (place,) = file_map.places(path, Span(0, spec.nbytes))
            found = list(pieces(file_map, place, STEP))
            assert sum(one.within.nbytes for one in found) == spec.nbytes
            assert all(isinstance(one.segment, Raw) and one.segment.tensor == path for one in found)
    every = [
        (number, at, chunk)
        for number, file in enumerate(file_map.files)
        if isinstance(file.body, Pack)
        for at, chunk in enumerate(file.body.chunks)
    ]
    for number, at, chunk in every:
        assert list(file_map.places(chunk.tensor, chunk.region)) == [Range(number, at, at + 1)]


@given(targets("maxtext"), st.integers(1, 2000))
@settings(max_examples=60, deadline=None)
def test_packs_hold_every_chunk_once_and_are_as_full_as_they_may_be(target, most):
    to, manifest = target
    packs = [file.body for file in laid_out(to, manifest, most).files if isinstance(file.body, Pack)]
    grids = Grids(list(manifest.tensors.values()), maxtext.zstd())
    assert [(chunk.tensor, chunk.region) for pack in packs for chunk in pack.chunks] == [
        (grids[number].tensor, grids[number].region) for number in range(len(grids))
    ]
    assert all(pack.nbytes == sum(chunk.nbytes for chunk in pack.chunks) for pack in packs)
    assert all(pack.nbytes <= most or len(pack.chunks) == 1 for pack in packs)
    for first, second in itertools.pairwise(packs):
        chunk = second.chunks[0]
        line = chunk.nbytes * line_of(manifest.tensors[chunk.tensor])
        assert first.nbytes + (line if 2 * line <= most else chunk.nbytes) > most


@given(some_target(), st.integers(1, 5), st.sampled_from([1, 64, STEP]))
@settings(max_examples=60, deadline=None)
def test_slices_are_every_position_of_tensors_once(target, count, grain):
    file_map = laid_out(*target)
    found = slices(file_map, count, grain)
    assert len(found) == count
    ranges = [part for one in found for part in one]
    assert ranges == sorted(ranges)
    for number, file in enumerate(file_map.files):
        own = [part for part in ranges if part.file == number]
        assert sum(part.stop - part.start for part in own) == (file.length if file.weight else 0)
        assert all(part.start % grain == 0 for part in own if isinstance(file.body, Segments))


def test_a_map_takes_few_bytes_a_tensor_and_none_a_chunk():
    count = 5_000
    specs = [TensorSpec((f"layer.{at}.weight",), (8, 8), "float32") for at in range(count)]
    chunked = [TensorSpec((f"layer.{at}.weight",), (1 << 20, 8), "float32", (1, 8)) for at in range(count)]
    for layout, rows in ((npz.layout, specs), (maxtext.layout, chunked)):
        manifest = Manifest(tensors={spec.path: spec for spec in rows})
        if layout is maxtext.layout:  # of the whole map: its small files hold a text that names every tensor
            make = lambda manifest=manifest: Grids(list(manifest.tensors.values()), maxtext.zstd())  # noqa: E731
        else:
            make = lambda manifest=manifest: npz.layout(manifest, {}, Scene("0"))  # noqa: E731
        tracemalloc.start()
        held = make()
        nbytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert held
        assert nbytes / count < 200


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=20))
def test_intervals_know_what_is_missing(rows):
    found, there = Intervals(), set()
    for start, length in rows:
        found.add(start, start + length)
        there |= set(range(start, start + length))
    left = [at for gap in found.gaps(0, 50) for at in range(*gap)]
    assert left == [at for at in range(50) if at not in there]


# ---- the engine ------------------------------------------------------------------------------------------------------


class KilledError(BaseException):
    """The process has ended."""


class Moment:
    """Kills the process before its n-th step: a write, a sync, an end, a completion, a line of the log."""

    def __init__(self, number):
        self.left = number

    def step(self):
        self.left -= 1
        if not self.left:
            raise KilledError


class Volatile:
    """A sink of which unsynced writes are lost when it is killed."""

    def __init__(self, sink, moment):
        self._sink, self._moment, self._held = sink, moment, []

    def __getattr__(self, name):
        return getattr(self._sink, name)

    def write(self, file, offset, data):
        self._moment.step()
        self._held.append((file, offset, bytes(data)))
        if isinstance(self._sink, PartsSink):
            self._flush()

    def end(self, file, size):
        self._moment.step()
        self._flush()
        self._sink.end(file, size)

    def sync(self):
        self._moment.step()
        self._flush()
        return self._sink.sync()

    def complete(self, sizes):
        self._moment.step()
        self._flush()
        self._sink.complete(sizes)

    def _flush(self):
        for file, offset, data in self._held:
            self._sink.write(file, offset, memoryview(data))
        self._held.clear()


class Line:
    """Where lines are kept until the process is killed: before a line, or just after it."""

    def __init__(self, sink, moment):
        self._sink, self._moment = sink, moment

    def lines(self):
        return self._sink.lines()

    def append(self, line):
        self._moment.step()
        self._sink.append(line)
        self._moment.step()


def digests_of(transform):
    found = {}
    for path, spec in transform.manifest.tensors.items():
        hasher = LeafHasher(spec, ("blake3",))
        hasher.update(0, memoryview(transform.arrays[path].tobytes()))
        found[path] = hasher.digest("blake3")
    return found


class Target:
    """One conversion, in a folder or in a bucket in memory."""

    def __init__(self, folder, to, transform, *, bucket):
        self.map, self.transform = laid_out(to, transform.manifest), transform
        self.folder, self.names = Path(folder), [file.name for file in self.map.files]
        self.path = self.folder / "target"
        self.bucket = locate(f"memory://spike{next(names)}/target") if bucket else None
        self.uploads = {}
        if bucket:
            sink = self.sink()
            shared = (
                at
                for at, file in enumerate(self.map.files)
                if isinstance(file.body, Segments) and file.weight > STEP
            )
            self.uploads = {at: sink.begin(at) for at in shared}

    def job(self, group=700):
        return Job(self.map, self.transform, group=group, step=STEP, box_bytes=1200)

    def sink(self, room=1 << 20):
        if self.bucket is None:
            return DiskSink(self.folder / "job", self.path, self.names)
        sizes = {
            at: file.body.nbytes for at, file in enumerate(self.map.files) if isinstance(file.body, Segments)
        }
        staging, store = self.bucket.parent.join(".staging"), self.bucket.store
        sink = PartsSink(
            store, self.bucket, staging, self.names, self.map.commit_members, sizes, STEP, "0" * 16, room
        )
        sink.uploads |= self.uploads
        return sink

    def log(self, name, moment=None):
        (self.folder / "job").mkdir(exist_ok=True)
        sink = Line(FileLog(self.folder / "job" / f"log-{name}"), moment or Moment(0))
        return SignedLog(sink, KEY, {"name": name})

    def run(self, workers=1, kill=0, order=(), room=1 << 20):
        """Convert; the process that takes the n-th step of all is killed before it, and another one goes on."""
        moment = Moment(kill)

        def attempt(act):
            try:
                return act(Volatile(self.sink(room), moment))
            except KilledError:
                return act(Volatile(self.sink(room), moment))

        parts = slices(self.map, workers, STEP if self.bucket else 64)
        several = range(workers if workers > 1 else 0)
        for worker in order or several:
            attempt(lambda sink, at=worker: work(self.job(), parts[at], sink, self.log(at, moment)))
        return attempt(
            lambda sink: commit(
                self.job(), sink, self.log("commit", moment), [self.log(at) for at in several]
            )
        )

    def files(self):
        """Name → bytes of what has appeared."""
        if self.bucket is None:
            if self.path.is_file():
                return {".": self.path.read_bytes()}
            return {
                str(one.relative_to(self.path)): one.read_bytes()
                for one in self.path.rglob("*")
                if one.is_file()
            }
        if self.names == ["."]:
            return {".": self.bucket.read_whole(1 << 30)}
        return {name: self.bucket.join(name).read_whole(1 << 30) for name in self.names}


@pytest.fixture(scope="module", autouse=True)
def small_parts():
    before, MemoryStore.part_limits = MemoryStore.part_limits, PartLimits(1, 1 << 30, 1 << 20)
    yield
    MemoryStore.part_limits = before


def converted(target, transform, *, bucket, **how):
    with TemporaryDirectory() as folder:
        one = Target(folder, target, transform, bucket=bucket)
        outcome = one.run(**how)
        return outcome, one.files()


def check_every_way(target, workers, kill, order, bucket, room):
    to, manifest = target
    transform = made_of(manifest)
    expected, files = converted(to, transform, bucket=False)
    assert expected.digests == digests_of(transform)
    found, same = converted(
        to, transform, bucket=bucket, workers=workers, kill=kill, order=order[:workers], room=room
    )
    assert same == files
    assert found.digests == expected.digests


WAYS = {
    "target": some_target(),
    "workers": st.integers(1, 3),
    "kill": st.integers(0, 60),
    "bucket": st.booleans(),
    "room": st.sampled_from([0, 1 << 20]),
}


@given(**WAYS, seed=st.permutations(range(3)))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_way_gives_the_same_bytes_and_digests(target, workers, kill, bucket, room, seed):
    check_every_way(
        target, workers, kill, [at for at in seed if at < workers] if workers > 1 else [], bucket, room
    )


@pytest.mark.full
@given(**WAYS, seed=st.permutations(range(3)))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_way_gives_the_same_bytes_and_digests_often(target, workers, kill, bucket, room, seed):
    check_every_way(
        target, workers, kill, [at for at in seed if at < workers] if workers > 1 else [], bucket, room
    )


def some_spec(**options):
    path = ("t",)
    return TensorSpec(path, (40, 30), "float32", **options)


def test_numpy_loads_an_archive(tmp_path):
    transform = made_of(Manifest(tensors={("t",): some_spec()}))
    one = Target(tmp_path, "npz", transform, bucket=False)
    one.run(workers=3, kill=4)
    (one.folder / "target").rename(tmp_path / "a.npz")
    assert (np.load(tmp_path / "a.npz")["t"] == transform.arrays["t",]).all()


def test_read_back_finds_a_byte_that_storage_has_changed(tmp_path):
    transform = made_of(Manifest(tensors={("t",): some_spec()}))
    one = Target(tmp_path, "npz", transform, bucket=False)
    (part,) = slices(one.map, 1, 64)
    work(one.job(), part, one.sink(), one.log(0))
    staged = one.folder / "job" / "staged" / "file"
    data = bytearray(staged.read_bytes())
    data[1000] ^= 1
    staged.write_bytes(data)
    with pytest.raises(ValueError, match="differs"):
        commit(one.job(), one.sink(), one.log("commit"), [one.log(0)])
    assert not one.path.exists()


def test_a_log_that_was_altered_or_is_of_another_job_is_refused(tmp_path):
    file = tmp_path / "log"
    log = SignedLog(FileLog(file), KEY, {"codec": "zstd 1"})
    log.append({"done": []})
    with pytest.raises(ValueError, match="another job"):
        SignedLog(FileLog(file), KEY, {"codec": "zstd 2"})
    file.write_bytes(file.read_bytes().replace(b'"done": []', b'"done": 00'))
    with pytest.raises(ValueError, match="altered"):
        SignedLog(FileLog(file), KEY, {"codec": "zstd 1"})


def test_a_late_needs_only_what_lies_in_its_own_files():
    file_map = laid_out("npz", Manifest(tensors={("t",): some_spec()}))
    body = file_map.files[0].body
    lates = [body[at] for at in range(len(body)) if isinstance(body[at], Late)]
    assert [len(one.needs) for one in lates] == [1, 1]


@pytest.mark.full
@pytest.mark.parametrize("to", ["npz", "maxtext"])
def test_processes_that_are_killed_give_the_same_bytes_with_the_digests_of_today(to, tmp_path, monkeypatch):
    source = tmp_path / "source"
    load("benchmarks.inputs", monkeypatch).make_huggingface(source, 2_000_000)
    options = {"compression": "zstd", "chunks": "2x1x4", "data_file_size": "64KiB"} if to == "maxtext" else {}
    name, common = ("a.npz", {"family": "none"}) if to == "npz" else ("0", {})
    found = {}
    for kill in (0, 3):
        place = tmp_path / str(kill) / name
        job = {
            "source": str(source), "target": str(place), "to": to, "options": options, "common": common,
            "workers": 3, "group": 1,
        }  # fmt: skip
        (tmp_path / "job.json").write_text(json.dumps(job))
        run = [sys.executable, "-m", "infra.spikes.filemap.program", str(tmp_path / "job.json")]
        for worker in ("0", "1", "2"):
            if kill and worker == "1":
                assert subprocess.run([*run, worker, str(kill)], check=False).returncode == -signal.SIGKILL
            subprocess.run([*run, worker], check=True)
        subprocess.run([*run, "commit"], check=True)
        rows = [place] if place.is_file() else [one for one in place.rglob("*") if one.is_file()]
        found[kill] = {str(one.relative_to(place)): one.read_bytes() for one in rows}
    assert found[0] == found[3]
    today = wherry.convert(source, tmp_path / "today" / name, to=to, options=options, lineage=False, **common)
    with wherry.open(str(place)) as checkpoint:  # a reader of wherry reads what the spike has written
        hashes = hash_checkpoint(checkpoint, "blake3", memory=64 << 20)
    assert weights_digest(hashes.digests, "blake3") == today.target.weights_digest
    if to == "npz":
        assert (tmp_path / "today" / name).read_bytes() == found[0]["."]
