"""Chunks of any size go through in bounded memory, and spill files are gone afterwards, whatever happened."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import wherry
from tests.support.large_chunks import (
    BLOSC,
    BYTES3,
    GZIP,
    MIB,
    NONE,
    ZSTD,
    ZSTD3,
    converted,
    shards,
    stored,
    values,
)
from wherry.core.tensorspec import Span
from wherry.errors import CorruptError, StorageError, UsageError
from wherry.mover.map_writer import MapWriter
from wherry.mover.pool import Pool
from wherry.mover.source import Source, spans_of

BIG = (4096, 8192)  # 64 MiB of bfloat16


@pytest.mark.parametrize(
    ("name", "version", "ocdbt", "changes"),
    [
        ("zarr2", 2, False, ZSTD),
        ("zarr2-ocdbt", 2, True, ZSTD),
        ("zarr3", 3, False, {"codecs": [BYTES3, ZSTD3]}),
        ("zarr3-shards-ocdbt", 3, True, shards((BIG[0], BIG[1] // 2), ZSTD3)),
        ("gzip", 2, False, GZIP),
    ],
)
def test_a_chunk_of_64_mib_in_a_budget_of_32(tmp_path, name, version, ocdbt, changes):
    array, tiny = values(BIG), values((4, 8))
    source = stored(tmp_path / name, array, BIG, version=version, ocdbt=ocdbt, **changes)
    if "shards" in name:
        changes = shards((4, 4), ZSTD3)
    small = stored(tmp_path / "tiny", tiny, tiny.shape, version=version, ocdbt=ocdbt, **changes)
    found = wherry.plan(source, tmp_path / "out.safetensors", to="safetensors", memory="32MiB")
    spilled = array.nbytes if "shards" in name else 0  # the others come in order
    assert found.spill == found.to_json()["spill"] == spilled
    base, _digest, _seconds = converted(small, tmp_path / "tiny.safetensors")
    peak, _digest, _seconds = converted(source, tmp_path / "out.safetensors")
    assert base < 90 * MIB, "the base: interpreter, numpy, tensorstore"
    assert peak < base + 32 * MIB + 4 * MIB
    with safe_open(tmp_path / "out.safetensors", "np") as file:
        assert file.get_tensor("w").tobytes() == array.tobytes()
    assert not [left for left in os.listdir(tmp_path) if left.startswith(".wherry")]


@pytest.mark.slow
def test_a_chunk_of_512_mib_in_the_default_budget(tmp_path):
    array = np.concatenate([values((2048, 8192), seed=seed) for seed in range(16)])
    assert array.nbytes == 512 * MIB
    source = stored(tmp_path / "in", array, array.shape, ocdbt=True, **ZSTD)
    small = stored(tmp_path / "tiny", array[:2, :2], (2, 2), ocdbt=True, **ZSTD)
    base, _digest, _seconds = converted(small, tmp_path / "tiny.safetensors", "128MiB")
    peak, _digest, _seconds = converted(source, tmp_path / "out.safetensors", "128MiB")
    assert peak < base + 128 * MIB
    with safe_open(tmp_path / "out.safetensors", "np") as file:
        assert file.get_tensor("w").tobytes() == array.tobytes()


def test_verify_and_inspect_spill_too_and_leave_nothing(tmp_path, monkeypatch):
    array = values((4096, 3000))
    folder = stored(tmp_path / "in", array, (4096, 1500), **ZSTD)
    place_for = tmp_path / "spill"
    place_for.mkdir()
    monkeypatch.setenv("WHERRY_SPILL", str(place_for))
    used = watched(monkeypatch)
    found = wherry.inspect(folder, sha256=True, digest=True, memory="16MiB")
    assert found.sha256["w",] == hashlib.sha256(array.tobytes()).hexdigest()
    plain = wherry.inspect(folder, digest=True, memory="1GiB")
    assert found.manifest.digests == plain.manifest.digests
    assert wherry.verify(folder, against=folder, memory="16MiB").ok
    assert {Path(path).parents[1] for path in used} == {place_for}
    assert os.listdir(place_for) == []


def watched(monkeypatch):
    """Names of the spill files that are opened."""
    from wherry.mover import decode

    used, real = [], decode.writing
    monkeypatch.setattr(decode, "writing", lambda path: (used.append(str(path)), real(path))[1])
    return used


def test_small_chunks_and_raw_ones_are_not_spilled(tmp_path, monkeypatch):
    used = watched(monkeypatch)
    small = stored(tmp_path / "small", values((4096, 3000)), (512, 3000), **ZSTD)
    raw = stored(tmp_path / "raw", values((4096, 3000)), (4096, 3000), **NONE)
    for folder in (small, raw):
        target = tmp_path / f"{folder.name}.safetensors"
        assert wherry.plan(folder, target, to="safetensors", memory="16MiB").spill == 0
        wherry.convert(folder, target, to="safetensors", memory="16MiB", lineage=False)
    assert used == []


def test_the_plan_says_what_goes_through_spill_files(tmp_path, capsys):
    from wherry.cli import main

    folder = stored(tmp_path / "in", values((1024, 6000)), (1024, 3000), **ZSTD)
    command = ["plan", str(folder), str(tmp_path / "o.safetensors"), "--to", "safetensors", "--memory"]
    for memory, shown in (("16MiB", True), ("1GiB", False)):
        with pytest.raises(SystemExit) as end:
            main([*command, memory])
        assert end.value.code in (0, None)
        assert ("spill" in capsys.readouterr().out) == shown
    assert os.listdir(tmp_path) == ["in"]


def read_by_its_own_library(path, to):
    if to == "safetensors":
        with safe_open(path, "np") as file:
            return file.get_tensor("w")
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return np.asarray(checkpointer.restore(path)["w"])


def test_one_chunk_goes_without_a_file(tmp_path, monkeypatch):
    used = watched(monkeypatch)
    array = values((4096, 3000))
    folder = stored(tmp_path / "in", array, array.shape, **ZSTD)
    for to, chunks in (("safetensors", None), ("orbax", "4x1"), ("orbax", "2x2")):
        options = {"chunks": chunks} if chunks else {}
        target = tmp_path / f"{to}{chunks}"
        wherry.convert(folder, target, to=to, options=options, memory="16MiB", lineage=False)
        assert read_by_its_own_library(target, to).tobytes() == array.tobytes()
        assert wherry.verify(target, against=folder, memory="16MiB").ok
    assert used == []


def test_a_chunk_that_flows_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    array = values((4096, 3000))
    folder = stored(tmp_path / "in", array, array.shape, **ZSTD)
    target, written = tmp_path / "out.safetensors", []
    real = MapWriter.write

    def failing(self, path, where, data):
        if where.start >= 8 * MIB:
            raise KeyboardInterrupt
        real(self, path, where, data)

    monkeypatch.setattr(MapWriter, "write", failing)
    with pytest.raises(KeyboardInterrupt):
        wherry.convert(folder, target, to="safetensors", memory="16MiB", lineage=False)
    monkeypatch.setattr(MapWriter, "write", lambda *a: (written.append(a[2].start), real(*a)))
    done = wherry.convert(folder, target, to="safetensors", memory="16MiB", lineage=False)
    assert done.resumed_bytes == 8 * MIB
    assert written == [8 * MIB, 16 * MIB]
    assert read_by_its_own_library(target, "safetensors").tobytes() == array.tobytes()


@pytest.mark.parametrize("damage", ["cut", "longer"])
def test_a_chunk_that_flows_is_looked_at_to_its_end(tmp_path, damage):
    array = values((4096, 3000))
    folder = stored(tmp_path / "in", array, array.shape, **ZSTD)
    (chunk,) = (folder / "w").glob("0.0")
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-5] if damage == "cut" else data + zstandard.compress(b"more"))
    with pytest.raises(CorruptError, match=r"cannot be decoded|more"):
        wherry.convert(folder, tmp_path / "o.safetensors", to="safetensors", memory="16MiB", lineage=False)
    assert os.listdir(tmp_path) == ["in"]


@given(st.lists(st.binary(max_size=9), max_size=12), st.data())
def test_spans_are_cut_out_of_pieces(pieces, data):
    whole, spans, at = b"".join(pieces), [], 0
    while at < len(whole) and data.draw(st.booleans()):
        start = data.draw(st.integers(at, len(whole)))
        at = data.draw(st.integers(start, len(whole)))
        spans.append(Span(start, at))
    flow, buffer = iter([memoryview(piece) for piece in pieces]), memoryview(bytearray(len(whole)))
    assert [bytes(part) for part in spans_of(flow, spans, buffer)] == [whole[s.start : s.stop] for s in spans]
    assert next(flow, None) is None
    with pytest.raises(ValueError, match="truncated: it ends at byte 0"):
        list(spans_of(iter([]), [Span(0, 1)], memoryview(bytearray(1))))


def test_a_codec_that_cannot_stream_is_refused_and_the_memory_named(tmp_path):
    array = values((2048, 3000), "float32")
    folder = stored(tmp_path / "in", array, array.shape, **BLOSC)
    target = tmp_path / "out.safetensors"
    for refused in (wherry.plan, wherry.convert):
        with pytest.raises(UsageError, match="cannot be decoded in pieces") as caught:
            refused(folder, target, to="safetensors", memory="64MiB")
        assert caught.value.cure == "pass --memory 94MiB"
    assert sorted(os.listdir(tmp_path)) == ["in"]
    assert wherry.plan(folder, target, to="safetensors", memory="94MiB").spill == 0
    wherry.convert(folder, target, to="safetensors", memory="94MiB", lineage=False)


def test_a_codec_that_remembers_more_than_the_budget_is_refused(tmp_path):
    array = values((2048, 3000), "float32")
    folder = stored(tmp_path / "in", array, array.shape, **ZSTD)
    wide = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    engine = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    (folder / "w" / "0.0").write_bytes(engine.compress(array.tobytes()) + engine.flush())
    with pytest.raises(UsageError, match="its codec needs") as caught:
        wherry.plan(folder, tmp_path / "out.safetensors", to="safetensors", memory="64MiB")
    memory = caught.value.cure.split()[-1]
    wherry.convert(folder, tmp_path / "o.safetensors", to="safetensors", memory=memory, lineage=False)
    assert wherry.open(tmp_path / "o.safetensors").read("w").tobytes() == array.tobytes()


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    array = values((1024, 6000))
    folder = stored(tmp_path / "in", array, (1024, 3000), **ZSTD)
    real = os.pwrite

    def full(descriptor, data, offset):
        if ".wherry-spill/" in str(Path(f"/proc/self/fd/{descriptor}").readlink()) and offset > MIB:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        wherry.convert(folder, tmp_path / "o.safetensors", to="safetensors", memory="16MiB", lineage=False)
    assert not caught.value.retryable
    assert os.listdir(tmp_path) == ["in"]


KILLED = """
import os, sys
real, calls = os.pwrite, 0
def deadly(descriptor, data, offset):
    global calls
    calls += 1
    if calls == 5:
        os.kill(os.getpid(), 9)
    return real(descriptor, data, offset)
os.pwrite = deadly
from wherry.converter.convert import convert
convert(sys.argv[1], sys.argv[2], to="safetensors", memory="16MiB", lineage=False)
"""


def test_what_a_kill_leaves_goes_with_the_next_run_or_with_clean(tmp_path):
    from wherry.target.clean import clean

    array = values((1024, 6000))
    folder = stored(tmp_path / "in", array, (1024, 3000), **ZSTD)
    (tmp_path / "to").mkdir()
    target = tmp_path / "to" / "out.safetensors"

    def killed():
        done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(target)], check=False)
        assert done.returncode == -signal.SIGKILL
        assert list(target.parent.glob(".wherry-out.safetensors.*/.wherry-spill/0"))

    killed()
    assert all(row.removed for row in clean(tmp_path, min_age=0))
    assert os.listdir(target.parent) == []
    killed()
    wherry.convert(folder, target, to="safetensors", memory="1GiB", lineage=False)
    assert sorted(os.listdir(target.parent)) == ["out.safetensors", "out.safetensors.wherry.json"]


def test_a_stopped_pass_ends_between_two_pieces(tmp_path):
    from wherry.core.threads import StoppedError

    folder = stored(tmp_path / "in", values((1024, 6000)), (1024, 6000), **ZSTD)
    stopped = threading.Event()
    stopped.set()
    pool = Pool(16 * MIB)
    with wherry.open(folder) as checkpoint, Source(checkpoint.reader, pool, stopped=stopped) as source:
        assert source.access(checkpoint.spec("w")).decoder is not None
        with pytest.raises(StoppedError), source.at(checkpoint.spec("w"), Span(0, 8)):
            pytest.fail("nothing is there")
