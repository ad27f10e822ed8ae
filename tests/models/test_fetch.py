"""Fetching: faithful copies of every shape of checkpoint, proved; what is resumed and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import wherry
from tests.support.forms import options_for
from tests.support.object_stores import (
    Killed,
    leftover_names,
    model,
    release,
    small_parts,
    uploads_below,
    watched,
)
from tests.support.registry import converted, flip_a_bit, model_folder
from wherry.cli import cli
from wherry.errors import MismatchError, NotFoundError, NotRecordedError, StorageError, TargetExistsError
from wherry.store import copy
from wherry.store.local_store import locate
from wherry.store.remote_store import FsspecStore
from wherry.trace.lineage import show


@pytest.fixture
def source(tmp_path):
    return Path(converted(tmp_path / "from").target.uri)


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def leftovers(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".wherry-")]


def test_a_folder_comes_over_as_it_is(source, tmp_path):
    seen = []
    done = wherry.fetch(source, tmp_path / "copy", progress=seen.append)
    assert contents(tmp_path / "copy") == contents(source)
    assert (done.uri, done.already, done.resumed_bytes, done.lineage) == (
        str(tmp_path / "copy"),
        False,
        0,
        "recorded",
    )
    assert done.files == len(contents(source))
    assert done.nbytes == sum(map(len, contents(source).values()))
    assert {row.stage for row in seen} == {"fetch", "verify"}
    assert wherry.verify(done.uri, level="digest").ok
    assert leftovers(tmp_path) == []
    places = {place.uri for place in show(done.checkpoint_digest).nodes[done.checkpoint_digest].places}
    assert {str(source), done.uri} <= places


def test_again_it_is_only_verified(source, tmp_path):
    wherry.fetch(source, tmp_path / "copy")
    assert wherry.fetch(source, tmp_path / "copy").already
    flip_a_bit(tmp_path / "copy")
    with pytest.raises(MismatchError, match="the copy differs from the record"):
        wherry.fetch(source, tmp_path / "copy")


@pytest.mark.parametrize(
    ("to", "name"), [("safetensors", "x.safetensors"), ("npz", "x.npz"), ("flax-msgpack", "checkpoint_7")]
)
def test_a_single_file_stays_one(tmp_path, to, name):
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3)}, tmp_path / "s.safetensors")
    made = wherry.convert(tmp_path / "s.safetensors", tmp_path / "run" / name, to=to)
    done = wherry.fetch(made.target.uri, tmp_path / "there" / name)
    assert Path(done.uri).read_bytes() == Path(made.target.uri).read_bytes()
    assert wherry.verify(done.uri, level="digest").ok
    assert done.checkpoint_digest == made.target.checkpoint_digest
    assert sorted(contents(tmp_path / "there")) == sorted(contents(tmp_path / "run"))


@pytest.mark.parametrize("to", ["orbax", "dcp", "maxtext", "t5x"])
def test_other_systems_come_over_too(tmp_path, to):
    save_file({"a": np.arange(6, dtype=np.float32).reshape(2, 3)}, tmp_path / "s.safetensors")
    source, options = tmp_path / "s.safetensors", options_for(to)
    made = wherry.convert(source, tmp_path / "run", to=to, as_step=3, options=options)
    done = wherry.fetch(made.target.uri, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(Path(made.target.uri))
    assert wherry.verify(done.uri, level="digest").ok


def test_an_altered_source_is_refused_and_nothing_is_left(source, tmp_path):
    flip_a_bit(source)
    with pytest.raises(MismatchError, match="the copy differs from the record") as failure:
        wherry.fetch(source, tmp_path / "copy")
    assert failure.value.path in {"a", "b"}
    assert not (tmp_path / "copy").exists()
    assert leftovers(tmp_path) == []


def test_a_swapped_companion_is_refused(source, tmp_path):
    (source / "tokenizer.json").write_text("{}")
    with pytest.raises(MismatchError, match="companion") as failure:
        wherry.fetch(source, tmp_path / "copy")
    assert failure.value.path == "tokenizer.json"


def test_a_file_that_nobody_recorded_does_not_come_along(source, tmp_path):
    (source / "modeling_tiny.py").write_text("import os")
    with pytest.raises(MismatchError, match="has no recorded digest") as failure:
        wherry.fetch(source, tmp_path / "copy")
    assert failure.value.path == "modeling_tiny.py"
    assert not (tmp_path / "copy").exists()


def test_a_signature_comes_along_even_after_a_kill(tmp_path):
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "s.safetensors")
    made = wherry.convert(tmp_path / "s.safetensors", tmp_path / "run" / "x.safetensors", to="safetensors")
    (tmp_path / "run" / "x.safetensors.wherry.sig").write_text("signed")
    copy = tmp_path / "there" / "x.safetensors"
    wherry.fetch(made.target.uri, copy)
    signature = copy.with_name("x.safetensors.wherry.sig")
    assert signature.read_text() == "signed"
    signature.unlink()
    assert wherry.fetch(made.target.uri, copy).already
    assert signature.read_text() == "signed"


def test_an_altered_manifest_is_refused(source, tmp_path):
    data = json.loads((source / "wherry.json").read_text())
    data["manifest"]["tensors"][0]["digest"] = f"blake3:{'0' * 64}"
    (source / "wherry.json").write_text(json.dumps(data))
    with pytest.raises(MismatchError, match="digest mismatch in the sidecar: its manifest was altered"):
        wherry.fetch(source, tmp_path / "copy")


def test_what_has_no_record_cannot_be_proved(tmp_path):
    with pytest.raises(NotFoundError, match="so it cannot be verified"):
        wherry.fetch(model_folder(tmp_path / "bare"), tmp_path / "copy")


def test_another_target_is_left_alone(source, tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "notes.txt").write_text("unrelated")
    with pytest.raises(TargetExistsError):
        wherry.fetch(source, tmp_path / "copy")
    assert contents(tmp_path / "copy") == {"notes.txt": b"unrelated"}


def test_a_copy_that_broke_off_is_taken_up_again(source, tmp_path, monkeypatch):
    real, calls = copy._append, []

    def breaks(source, file, entry, done, copying):
        if entry.name == "model.safetensors":
            file.write(source.read(0, 1000))
            raise TimeoutError(110, "timed out")
        real(source, file, entry, done, copying)

    monkeypatch.setattr(copy, "_append", breaks)
    with pytest.raises(StorageError) as failure:
        wherry.fetch(source, tmp_path / "copy")
    assert failure.value.retryable
    assert not (tmp_path / "copy").exists()
    assert leftovers(tmp_path)

    def counted(source, file, entry, done, copying):
        calls.append((entry.name, done))
        real(source, file, entry, done, copying)

    monkeypatch.setattr(copy, "_append", counted)
    done = wherry.fetch(source, tmp_path / "copy")
    assert dict(calls)["model.safetensors"] == 1000
    assert done.resumed_bytes >= 1000
    assert contents(tmp_path / "copy") == contents(source)
    assert leftovers(tmp_path) == []


def test_what_was_torn_meanwhile_is_found_and_the_next_run_is_whole(source, tmp_path, monkeypatch):
    """A loss of power may leave a file of the right size with other bytes; only the proof sees that."""

    def torn(source, file, entry, done, copying):
        file.write(bytes(entry.size))

    with monkeypatch.context() as patch:
        patch.setattr(copy, "_append", torn)
        with pytest.raises(wherry.WherryError):
            wherry.fetch(source, tmp_path / "copy")
    assert not wherry.fetch(source, tmp_path / "copy").resumed_bytes


def test_from_and_to_an_object_store(source, tmp_path):
    pytest.importorskip("fsspec")
    up = wherry.fetch(source, "memory://bucket/model")
    assert up.uri == "memory://bucket/model"
    shutil.rmtree(source)
    down = wherry.fetch("memory://bucket/model", tmp_path / "copy")
    assert down.checkpoint_digest == up.checkpoint_digest
    assert wherry.verify(tmp_path / "copy", level="digest").ok


@pytest.fixture
def parts(monkeypatch):
    """Parts of 64 KiB, so that a small checkpoint has many."""
    monkeypatch.setattr("wherry.target.object_staging._PROVED_BYTES", 8 << 10)
    with small_parts(64 << 10):
        yield


@pytest.fixture
def large(tmp_path):
    """A checkpoint of one file, or of two, each of many parts."""
    made = model(tmp_path / "model", rows=300, count=6)
    wherry.convert(made, tmp_path / "file", to="safetensors", ignore=("companions",))
    wherry.convert(made, tmp_path / "folder", to="hf", options={"max_shard_size": "1MB"})
    return {name: str(tmp_path / name) for name in ("file", "folder")}


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_copy_to_a_store_streams_and_is_taken_up_again(large, tmp_path, monkeypatch, kind):
    monkeypatch.setattr("tempfile.mkdtemp", None)
    target = f"memory://fetched{tmp_path}/{kind}"
    with watched(fatal=20, only=("put_part",)), pytest.raises(Killed):
        wherry.fetch(large[kind], target)
    release(target)
    with watched(only=("put_part",)) as calls:
        done = wherry.fetch(large[kind], target)
    assert not done.already
    assert 0 < done.resumed_bytes < done.nbytes
    assert 0 < len(calls) < 29 - 20 + 10, "of 29 parts; those that were in flight are sent again"
    assert wherry.verify(target, level="digest").ok
    assert leftover_names(target) == []
    assert uploads_below(target) == []
    assert wherry.fetch(large[kind], target).already


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_in_one_bucket_the_store_copies(large, tmp_path, kind):
    first, second = f"memory://bucket{tmp_path}/{kind}", f"memory://bucket{tmp_path}/again/{kind}"
    wherry.fetch(large[kind], first)
    with watched(fatal=2, only=("copy_object",)), pytest.raises(Killed):
        wherry.fetch(first, second)
    release(second)
    with watched() as calls:
        done = wherry.fetch(first, second)
    assert {"put_part", "begin", "assemble"}.isdisjoint(name for name, _arguments in calls)
    assert done.resumed_bytes > 0
    assert wherry.verify(second, level="digest").ok
    assert leftover_names(second) == []


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("name", ["0001-of-00002.safetensors", "wherry.json"])
def test_a_wrong_byte_of_a_copy_in_a_store_is_found(large, tmp_path, monkeypatch, name):
    real, target = FsspecStore.read, f"memory://altered{tmp_path}/folder"

    def read(self, path, start, stop):
        data = bytearray(real(self, path, start, stop))
        if path.endswith(name):
            data[-1:] = bytes([data[-1] ^ 1])
        return bytes(data)

    monkeypatch.setattr(FsspecStore, "read", read)
    with pytest.raises(wherry.WherryError):
        wherry.fetch(large["folder"], target)
    assert not locate(target).exists()
    assert leftover_names(target) == []


def test_a_ledger_that_fails_does_not_undo_the_copy(source, tmp_path, monkeypatch):
    (tmp_path / "no-folder").write_text("")
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path / 'no-folder' / 'ledger.db'}")
    with pytest.raises(NotRecordedError, match="not recorded") as failure:
        wherry.fetch(source, tmp_path / "copy")
    assert failure.value.result.lineage.startswith("not recorded: the ledger cannot be used")
    assert contents(tmp_path / "copy") == contents(source)


def test_the_copy_keeps_the_recorded_fingerprint(source, tmp_path):
    done = wherry.fetch(source, tmp_path / "copy")
    times = {name: (source / name).stat().st_mtime_ns for name in contents(source)}
    assert times == {name: (Path(done.uri) / name).stat().st_mtime_ns for name in times}


def test_the_command_line(source, tmp_path):
    done = CliRunner().invoke(cli, ["fetch", str(source), str(tmp_path / "copy"), "--json"])
    assert json.loads(done.stdout)["uri"] == str(tmp_path / "copy")
    again = CliRunner().invoke(cli, ["fetch", str(source), str(tmp_path / "copy")])
    assert "the copy already exists" in again.stdout
