"""A source that changes while it is converted: nothing is committed, nothing recorded, and the member is named."""

from __future__ import annotations

import os
import shutil
import threading
import time
from functools import cache
from importlib import import_module

import fsspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.processes import open_descriptors
from tests.support.waits import waits_reported_at_once
from wherry.cli import main
from wherry.converter.convert import convert_all
from wherry.core.request import LayoutRequest, TargetRequest, convert_request
from wherry.errors import MismatchError, UsageError
from wherry.formats import checkpoint as checkpoints
from wherry.formats.registry import find_format, formats
from wherry.ledger.nodes import conversions
from wherry.ledger.record import open_ledger
from wherry.mover.output import Output
from wherry.store.local_store import locate
from wherry.testing import samples, writers

WRITTEN = [name for name, row in formats().items() if row.is_written]
ROWS, COLUMNS = 5, 1 << 18


def tensors(seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {f"t{row}": generator.standard_normal(COLUMNS).astype("float32") for row in range(ROWS)}


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "source" / "model.safetensors"
    file.parent.mkdir()
    save_file(tensors(0), file)
    return file


def during(monkeypatch, act, method=Output, name="deliver") -> list[str]:
    """Call `act` once, when the first part of the first target is delivered."""
    called: list[str] = []

    def hooked(original):
        def hook(*arguments, **options):
            if not called:
                called.append(name)
                act()
            return original(*arguments, **options)

        return hook

    for attribute in (
        (name, "deliver_all") if name == "deliver" else (name,)
    ):  # parts are delivered alone or in batches
        monkeypatch.setattr(method, attribute, hooked(getattr(method, attribute)))
    return called


def exit_code(line) -> int:
    with pytest.raises(SystemExit) as ended:
        main(line)
    return int(ended.value.code or 0)


def flip_in_place(file) -> None:
    """Change bytes of a file and give it the times that it had: only the inode's own time tells."""
    times = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        last = opened.read(4)
        opened.seek(-4, os.SEEK_END)
        opened.write(bytes(byte ^ 0x15 for byte in last))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def publish(file) -> None:
    """Replace a file by another one of its size and times, as `rename` does."""
    new = file.with_name(f"new-{file.name}")
    shutil.copyfile(file, new)
    flip_in_place(new)
    times = file.stat()
    os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
    new.replace(file)


def append(file) -> None:
    with file.open("ab") as opened:
        opened.write(b"\0" * 4096)


CHANGES = {
    "in place": flip_in_place,
    "rename": publish,
    "append": append,
    "remove": lambda file: file.unlink(),
}


def assert_nothing(folder) -> None:
    """Not even the folder that was made for the target is left, and the ledger knows of nothing."""
    assert not folder.exists()
    with open_ledger() as ledger:
        assert conversions(ledger) == ()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint of a format, made once."""

    @cache
    def make(name):
        sample = samples.source(find_format(name))
        place = tmp_path_factory.mktemp(name) / ("one.bin" if sample.row.single_file else "7")
        writers.make(sample, locate(place))
        return place

    return make


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", WRITTEN)
def test_no_format_commits_a_source_that_changed(monkeypatch, tmp_path, made, name, change):
    place = tmp_path / "source" / made(name).name
    shutil.copytree(made(name).parent, place.parent)
    files = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    called = during(monkeypatch, lambda: CHANGES[change](largest))
    target = tmp_path / "targets" / "8"
    with pytest.raises(MismatchError) as caught:
        wherry.convert(place, target, to=name, format=name)
    assert called
    assert caught.value.exit_code == 9
    assert "again" in caught.value.cure
    assert_nothing(target.parent)


@pytest.mark.parametrize("change", ["in place", "rename"])
def test_the_command_ends_with_9_and_runs_well_afterwards(monkeypatch, capsys, tmp_path, source, change):
    target = tmp_path / "target"
    line = ["convert", str(source), str(target), "--to", "huggingface", "--family", "none", "--quiet"]
    with monkeypatch.context() as patch:
        during(patch, lambda: CHANGES[change](source))
        assert exit_code(line) == 9
    assert "cure: " in capsys.readouterr().err
    assert not target.exists()
    assert exit_code(line) == 0
    found = load_file(target / "model.safetensors")
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in load_file(source).items()
    }


def test_every_target_is_refused(monkeypatch, tmp_path, source):
    during(monkeypatch, lambda: publish(source))
    targets = [
        TargetRequest(str(tmp_path / "a"), "huggingface", layout=LayoutRequest("none")),
        TargetRequest(str(tmp_path / "b.pt"), "torch-zip"),
    ]
    with pytest.raises(MismatchError):
        convert_all(convert_request(source, targets))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_change_just_before_the_commit_is_seen(monkeypatch, tmp_path, source):
    from wherry.converter import job

    original = job.finish

    def finish(writer):
        original(writer)
        flip_in_place(source)

    monkeypatch.setattr(job, "finish", finish)
    with pytest.raises(MismatchError):
        wherry.convert(source, tmp_path / "out", to="huggingface", family="none", verify="none")
    assert not (tmp_path / "out").exists()


def test_a_companion_that_changes_is_refused(monkeypatch, tmp_path, source):
    folder = source.parent
    (folder / "config.json").write_text('{"model_type": "x"}')
    during(monkeypatch, lambda: flip_in_place(folder / "config.json"))
    with pytest.raises(MismatchError, match="source"):
        wherry.convert(folder, tmp_path / "out", to="orbax")
    assert not (tmp_path / "out").exists()


def test_a_companion_that_appears_is_refused(monkeypatch, tmp_path, source):
    (source.parent / "config.json").write_text('{"model_type": "x"}')
    new = source.parent / "tokenizer.json"
    during(monkeypatch, lambda: new.write_text("{}"))
    with pytest.raises(MismatchError, match="was added") as caught:
        wherry.convert(source.parent, tmp_path / "out", to="orbax")
    assert caught.value.uri == str(new)


def test_a_fifo_that_appears_is_a_change(monkeypatch, tmp_path, source):
    """With it the source does not open any more."""
    folder = source.parent
    (folder / "config.json").write_text('{"model_type": "x"}')
    during(monkeypatch, lambda: os.mkfifo(folder / "tokenizer.json"))
    with pytest.raises(MismatchError, match="were added") as caught:
        wherry.convert(folder, tmp_path / "out", to="orbax")
    assert caught.value.uri == str(folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("moment", ["inside", "source_references"])
def test_a_companion_that_is_gone_is_a_change_at_any_moment(monkeypatch, tmp_path, source, moment):
    """Before the pass, where companions are copied, and after it, where the source's digest is made."""
    from wherry.converter import job

    (source.parent / "config.json").write_text('{"model_type": "x"}')
    notes = source.parent / "notes.txt"
    notes.write_text("of no use to the reader, which has not opened it")
    original = getattr(job, moment)

    def lose(*arguments):
        notes.unlink()
        if moment == "source_references":
            locate(notes).read(0, 1)
        return original(*arguments)

    monkeypatch.setattr(job, moment, lose)
    with pytest.raises(MismatchError, match="removed") as caught:
        wherry.convert(source.parent, tmp_path / "out", to="orbax")
    assert caught.value.uri == str(notes)
    assert not (tmp_path / "out").exists()


def test_a_file_that_belongs_to_nothing_is_no_change(monkeypatch, tmp_path, source):
    (source.parent / "config.json").write_text('{"model_type": "x"}')
    during(monkeypatch, lambda: (source.parent / ".events").write_text("log"))
    assert wherry.convert(source.parent, tmp_path / "out", to="orbax").lineage == "recorded"


def test_a_new_file_next_to_the_source_is_no_change(monkeypatch, tmp_path, source):
    during(monkeypatch, lambda: (source.parent / "other.safetensors").write_bytes(b"0"))
    assert wherry.convert(source, tmp_path / "out", to="huggingface", family="none").lineage == "recorded"


def test_a_source_that_changed_and_cannot_be_read_any_more_is_called_changed(monkeypatch, tmp_path, source):
    during(monkeypatch, lambda: os.truncate(source, 4096))
    with pytest.raises(MismatchError, match="modified"):
        wherry.convert(source, tmp_path / "out", to="huggingface", family="none")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["in place", "rename"])
def test_a_resumed_run_starts_anew_where_the_source_changed_meanwhile(monkeypatch, tmp_path, source, change):
    target = tmp_path / "out"

    def stop():
        raise KeyboardInterrupt

    parts = iter(range(10))
    original = Output.deliver

    def deliver(self, move, *data):
        if next(parts) == 3:
            stop()
        original(self, move, *data)

    with monkeypatch.context() as patch:
        patch.setattr(Output, "deliver", deliver)
        with pytest.raises(KeyboardInterrupt):
            wherry.convert(source, target, to="huggingface", family="none")
    CHANGES[change](source)
    receipt = wherry.convert(source, target, to="huggingface", family="none")
    assert receipt.resumed_bytes == 0
    found, wanted = load_file(target / "model.safetensors"), load_file(source)
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


def test_files_are_opened_once(monkeypatch, tmp_path, source):
    opened: list[str] = []
    original = os.open

    def count(path, *rest, **options):
        if str(path) == str(source):
            opened.append(str(path))
        return original(path, *rest, **options)

    with wherry.open(source) as checkpoint:
        monkeypatch.setattr(os, "open", count)
        for name in checkpoint.manifest.tensors:
            checkpoint.read(name)
    assert opened == []


def test_an_opened_checkpoint_reads_the_file_that_it_opened(source):
    with wherry.open(source) as checkpoint:
        publish(source)
        last = checkpoint.read(f"t{ROWS - 1}")
    assert last.tobytes() == tensors(0)[f"t{ROWS - 1}"].tobytes()


def test_no_descriptor_is_left(source):
    before = open_descriptors()
    for _ in range(3):
        with wherry.open(source) as checkpoint:
            checkpoint.read("t0")
    assert open_descriptors() == before


# ---- Objects


def test_an_object_that_is_replaced_is_refused(monkeypatch, tmp_path, source):
    store = fsspec.filesystem("memory")
    store.pipe_file("/changing/model.safetensors", source.read_bytes())
    publish(source)
    during(monkeypatch, lambda: store.pipe_file("/changing/model.safetensors", source.read_bytes()))
    with pytest.raises(MismatchError, match="modified"):
        wherry.convert(
            "memory://changing/model.safetensors", tmp_path / "out", to="huggingface", family="none"
        )
    assert not (tmp_path / "out").exists()


# ---- Views, rewrites and sidecars


def test_stock_is_not_taken_of_what_changes(monkeypatch, source):
    module = import_module("wherry.prove.inspect")
    during(monkeypatch, lambda: flip_in_place(source), module, "flat_hashes")
    with pytest.raises(MismatchError):
        wherry.inspect(source, write=True, sha256=True)
    assert [path.name for path in source.parent.iterdir()] == [source.name]


def test_the_fingerprint_of_a_stock_is_that_of_what_was_read(monkeypatch, source):
    """It is taken before the files are compared, so that no change comes in between."""
    from wherry.prove import inspect

    original = inspect.present_fingerprint

    def late(checkpoint):
        append(source)
        return original(checkpoint)

    monkeypatch.setattr(inspect, "present_fingerprint", late)
    with pytest.raises(MismatchError):
        wherry.inspect(source, write=True, sha256=True)
    assert [path.name for path in source.parent.iterdir()] == [source.name]


# ---- Files that were modified a moment ago


@pytest.mark.parametrize("text", ["inf", "nan", "-1", "1e300", "soon"])
def test_how_long_is_waited_is_a_number(monkeypatch, tmp_path, source, text):
    monkeypatch.setenv(checkpoints.SETTLE_VARIABLE, text)
    with pytest.raises(UsageError, match=f"'{text}'; expected seconds from 0 to 86400"):
        wherry.convert(source, tmp_path / "out", to="huggingface", family="none")


def test_a_fresh_file_is_waited_for_and_read_again(monkeypatch, tmp_path, source):
    monkeypatch.setenv(checkpoints.SETTLE_VARIABLE, "2")
    waits: list[float] = []
    really = time.sleep

    def sleep(seconds):
        if threading.current_thread() is not threading.main_thread():
            really(seconds)  # of threads that tell what is waited for
            return
        waits.append(seconds)
        if len(waits) == 1:
            publish(source)

    monkeypatch.setattr(checkpoints.time, "sleep", sleep)
    wherry.convert(source, tmp_path / "out", to="huggingface", family="none")
    assert len(waits) == 2
    assert all(0 < wait <= 2 for wait in waits)
    found, wanted = load_file(tmp_path / "out" / "model.safetensors"), load_file(source)
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


def test_who_waits_for_a_file_says_for_which(monkeypatch, tmp_path, source):
    monkeypatch.setenv(checkpoints.SETTLE_VARIABLE, "0.5")
    publish(source)
    with waits_reported_at_once(monkeypatch) as lines:
        wherry.convert(source, tmp_path / "out", to="huggingface", family="none", lineage=False)
    assert f"{source}: waiting for its files to stay unchanged for 0.5 s" in lines


def test_an_old_file_is_not_waited_for(monkeypatch, tmp_path, source):
    monkeypatch.setenv(checkpoints.SETTLE_VARIABLE, "2")
    monkeypatch.setattr(checkpoints.time, "time", lambda: source.stat().st_ctime + 3)
    really = time.sleep

    def sleep(seconds):
        assert threading.current_thread() is not threading.main_thread(), "waited"
        really(seconds)

    monkeypatch.setattr(checkpoints.time, "sleep", sleep)
    wherry.convert(source, tmp_path / "out", to="huggingface", family="none")
    found, wanted = load_file(tmp_path / "out" / "model.safetensors"), load_file(source)
    assert found.keys() == wanted.keys()
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


def test_a_file_that_is_written_all_the_time_is_an_error(monkeypatch, tmp_path, source):
    monkeypatch.setenv(checkpoints.SETTLE_VARIABLE, "2")
    really = time.sleep

    def sleep(seconds):
        if threading.current_thread() is threading.main_thread():
            publish(source)
        else:
            really(seconds)

    monkeypatch.setattr(checkpoints.time, "sleep", sleep)
    with pytest.raises(MismatchError, match="being written"):
        wherry.convert(source, tmp_path / "out", to="huggingface", family="none")
