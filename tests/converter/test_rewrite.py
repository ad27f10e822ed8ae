"""The verb `rewrite`: staged, proved, undone and recorded, whatever the format; and its command."""

from __future__ import annotations

import errno
import json
import os
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.torch import as_bytes, save, torch
from wherry.cli import main
from wherry.converter import in_place
from wherry.converter.rewrite import plan_rewrite
from wherry.core.request import RewriteRequest, SourceRequest
from wherry.errors import (
    CorruptError,
    MismatchError,
    StorageError,
    TargetExistsError,
    TargetInUseError,
    UnsupportedError,
    UsageError,
)
from wherry.formats.registry import formats, rewrites
from wherry.store import copy
from wherry.store.local_store import locate
from wherry.target.lease import Lease, LeaseFile

pytest.importorskip("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
STATE = {"a": torch.arange(3000.0), "b": torch.ones(3, dtype=torch.bfloat16), "step": 12}
FOR_TORCH = "for-torch=2.3"


@pytest.fixture
def source(tmp_path):
    return save(STATE, tmp_path / "a")


def files(path):
    return {one.relative_to(path).as_posix(): one.read_bytes() for one in path.rglob("*") if one.is_file()}


def names(path):
    return sorted(one.name for one in path.iterdir())


def run(*words):
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return caught.value.code


def flipped(monkeypatch):
    """A storage that carries files over with one byte wrong."""
    real = copy.carry_file

    def carry_file(one, other, *more):
        found = real(one, other, *more)
        if other.suffix == ".distcp":
            data = bytearray(other.read_bytes())
            at = data.find(as_bytes(STATE["a"])[:64])
            data[at + 5] ^= 1
            other.write_bytes(data)
        return found

    monkeypatch.setattr(copy, "carry_file", carry_file)


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(tmp_path, source, capsys):
    before = files(tmp_path)
    planned = plan_rewrite(
        RewriteRequest(source=SourceRequest(str(source)), target=str(tmp_path / "b"), as_=FOR_TORCH)
    )
    assert (planned.files, planned.tensors, planned.carried[0]) == ((".metadata",), 2, 1)
    assert run("rewrite", source, tmp_path / "b", "--as", FOR_TORCH, "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(planned.to_json()))
    assert run("rewrite", source, "--in-place", "--as", FOR_TORCH, "--dry-run") == 0
    assert "in place" in capsys.readouterr().out
    assert files(tmp_path) == before


def test_the_command_makes_a_target_with_manifest_and_lineage(tmp_path, source, capsys):
    before = files(source)
    assert run("rewrite", source, tmp_path / "b", "--as", FOR_TORCH, "--meta", "who=me", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["receipt"]["lineage"] == "recorded"
    assert shown["receipt"]["source"]["weights_digest"] == shown["receipt"]["target"]["weights_digest"]
    assert sum(shown["carried_by"].values()) == shown["carried"]["bytes"]
    assert files(source) == before
    assert names(tmp_path) == ["a", "b"]
    sidecar = json.loads((tmp_path / "b" / "wherry.json").read_text())
    assert sidecar["manifest"]["origin"]["meta"] == {"who": "me"}
    assert run("verify", tmp_path / "b", "--level", "digest") == 0
    assert run("lineage", "show", tmp_path / "b", "--json") == 0
    capsys.readouterr()
    stamp = (tmp_path / "b" / ".metadata").stat().st_mtime_ns
    assert run("rewrite", source, tmp_path / "b", "--as", FOR_TORCH) == 0
    assert "already rewritten" in capsys.readouterr().out
    assert (tmp_path / "b" / ".metadata").stat().st_mtime_ns == stamp
    assert run("rewrite", source, tmp_path / "b", "--as", "for-torch=default") == 8
    assert run("rewrite", source, tmp_path / "b", "--as", FOR_TORCH, "--if-exists", "fail") == 8


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["SOURCE", "--as", FOR_TORCH], 2),
        (["SOURCE", "TARGET", "--as", FOR_TORCH, "--in-place"], 2),
        (["SOURCE", "TARGET", "--as", "merge"], 2),
        (["SOURCE", "SOURCE/inside", "--as", FOR_TORCH], 2),
        (["SOURCE", "TARGET", "--as", "for-torch=9"], 2),
        (["SOURCE", "TARGET"], 2),
        (["NOTHING", "TARGET", "--as", FOR_TORCH], 3),
        (["SOURCE", "memory://x/b", "--as", FOR_TORCH], 4),
    ],
)
def test_what_makes_no_sense_says_so(tmp_path, source, capsys, words, code):
    places = {"SOURCE": source, "TARGET": tmp_path / "b", "NOTHING": tmp_path / "none"}
    full = [str(places.get(word, word)).replace("SOURCE", str(source)) for word in words]
    before = files(tmp_path)
    assert run("rewrite", *full, "--json") == code
    captured = capsys.readouterr()
    assert json.loads(captured.out)["stage"] == "rewrite"
    assert "error:" in captured.err
    assert files(tmp_path) == before


def test_the_formats_list_their_rewrites(capsys):
    assert run("formats", "dcp") == 0
    assert "rewrite --as for-torch[=VALUE]" in capsys.readouterr().out
    assert run("formats", "orbax", "--json") == 0
    assert set(json.loads(capsys.readouterr().out)["rewrites"]) == {"merge", "commit", "unbox", "box"}
    assert set(rewrites("lingua")) == set(rewrites("dcp"))
    assert not rewrites("safetensors")
    for name in formats():
        assert all(one.help for one in rewrites(name).values())


def test_metadata_of_the_user_is_stored_without_credentials(tmp_path, source):
    wherry.rewrite(source, tmp_path / "b", as_=FOR_TORCH, meta={"api_token": "hunter2", "run": "7"})
    text = (tmp_path / "b" / "wherry.json").read_text()
    assert "hunter2" not in text
    assert json.loads(text)["manifest"]["origin"]["meta"] == {"api_token": "***", "run": "7"}


def test_a_byte_that_was_carried_wrongly_is_found(tmp_path, source, monkeypatch):
    flipped(monkeypatch)
    with pytest.raises((MismatchError, CorruptError)):
        wherry.rewrite(source, tmp_path / "b", as_=FOR_TORCH)
    assert names(tmp_path) == ["a"]
    done = wherry.rewrite(source, tmp_path / "b", as_=FOR_TORCH, verify="none")
    assert done.receipt is None
    assert not (tmp_path / "b" / "wherry.json").exists()


def altered_on_the_way(monkeypatch, name):
    """A storage that carries one file over with its last byte wrong."""
    real = copy.carry_file

    def carry_file(one, other, *more):
        found = real(one, other, *more)
        if other.name == name:
            data = other.read_bytes()
            other.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return found

    monkeypatch.setattr(copy, "carry_file", carry_file)


def test_a_companion_that_was_carried_wrongly_is_found(tmp_path, source, monkeypatch):
    (source / "tokenizer.json").write_text('{"model": "bytes"}')
    with wherry.open(source) as checkpoint:
        assert [one.name for one in checkpoint.manifest.companions] == ["tokenizer.json"]
    altered_on_the_way(monkeypatch, "tokenizer.json")
    with pytest.raises(MismatchError, match=r"the companion file tokenizer\.json differs from the source"):
        wherry.rewrite(source, tmp_path / "b", as_=FOR_TORCH)
    assert names(tmp_path) == ["a"]


def test_a_byte_that_no_checksum_covers_is_compared(tmp_path, monkeypatch):
    """Raw chunks of Orbax have no CRC: what was carried wrongly is found by the digests alone."""
    save_file({"w": np.arange(6000, dtype="f4")}, tmp_path / "a.safetensors")
    wherry.convert(tmp_path / "a.safetensors", tmp_path / "a", to="orbax")
    [chunk] = [one for one in (tmp_path / "a" / "d").iterdir() if one.stat().st_size >= 24_000]
    altered_on_the_way(monkeypatch, chunk.name)
    with pytest.raises(MismatchError, match="read-back differs from the source"):
        wherry.rewrite(tmp_path / "a", tmp_path / "b", as_="box")
    assert names(tmp_path) == ["a", "a.safetensors"]


def test_without_reading_the_record_of_the_source_counts(tmp_path, source):
    wherry.rewrite(source, tmp_path / "b", as_=FOR_TORCH)
    done = wherry.rewrite(tmp_path / "b", tmp_path / "c", as_="for-torch=default", verify="none")
    assert done.receipt.verification is None
    first = done.receipt.source.weights_digest
    assert first == done.receipt.target.weights_digest
    assert wherry.verify(tmp_path / "c", level="digest").ok
    (tmp_path / "b" / ".metadata").touch()
    again = wherry.rewrite(tmp_path / "b", tmp_path / "d", as_="for-torch=default", verify="none")
    assert again.receipt is None


def test_a_source_that_is_not_what_was_recorded(tmp_path, source):
    wherry.rewrite(source, tmp_path / "b", as_=FOR_TORCH)
    path = next((tmp_path / "b").glob("*.distcp"))
    data = path.read_bytes().replace(as_bytes(STATE["b"]), as_bytes(STATE["b"] * 2))
    path.write_bytes(data)
    with pytest.raises((MismatchError, CorruptError)):
        wherry.rewrite(tmp_path / "b", tmp_path / "c", as_="for-torch=default")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("step", ["prove", "replace_file"])
def test_in_place_everything_is_put_back_where_something_fails(source, monkeypatch, step):
    before = files(source)

    def refuse(*_args, **_more):
        if step == "prove":
            raise MismatchError("for the test")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    module = "wherry.converter.rewrite" if step == "prove" else "wherry.converter.in_place"
    monkeypatch.setattr(sys.modules[module], step, refuse)
    with pytest.raises((MismatchError, StorageError)):
        wherry.rewrite(source, as_=FOR_TORCH, in_place=True)
    assert files(source) == before
    assert names(source.parent) == ["a"]


def test_in_place_twice_keeps_both_records(source):
    wherry.rewrite(source, as_="for-torch=default", in_place=True)
    first = (source / "wherry.json").read_bytes()
    (source / ".metadata.before").unlink()
    wherry.rewrite(source, as_="for-torch=2.3", in_place=True)
    assert (source / f".wherry.json{in_place.BEFORE}").read_bytes() == first
    assert wherry.verify(source, level="digest").ok
    assert wherry.detect(source).verdict == "ok"
    with wherry.open(source) as checkpoint:
        assert not checkpoint.manifest.companions


def test_in_place_after_a_kill_between_keeping_and_replacing(source):
    os.link(source / ".metadata", source / ".metadata.before")
    before = (source / ".metadata").read_bytes()
    wherry.rewrite(source, as_=FOR_TORCH, in_place=True)
    assert (source / ".metadata.before").read_bytes() == before != (source / ".metadata").read_bytes()


def test_in_place_without_links(source, monkeypatch):
    def cannot(*_args, **_more):
        raise OSError(errno.EPERM, "no links here")

    before = (source / ".metadata").read_bytes()
    monkeypatch.setattr(os, "link", cannot)
    in_place.keep(source / ".metadata")
    assert (source / ".metadata.before").read_bytes() == before
    assert not (source / ".metadata.before").samefile(source / ".metadata")


def test_a_held_target_and_a_held_source(tmp_path, source):
    for name, arguments in (("b", {"target": tmp_path / "b"}), ("a", {"in_place": True})):
        with Lease(LeaseFile(tmp_path / f".wherry-{name}.lease"), name), pytest.raises(TargetInUseError):
            wherry.rewrite(source, as_=FOR_TORCH, **arguments)
    assert ".metadata.before" not in files(source)


def test_an_existing_target_is_never_touched(tmp_path, source):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes").write_text("unrelated")
    with pytest.raises(TargetExistsError):
        wherry.rewrite(source, tmp_path / "b", as_=FOR_TORCH)
    assert files(tmp_path / "b") == {"notes": b"unrelated"}


@pytest.mark.parametrize("way", ["reflink", "kernel", "here"])
def test_the_ways_of_carrying(tmp_path, monkeypatch, way):
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "a").write_bytes(data)

    def ioctl(writing, _request, reading):
        if way != "reflink":
            raise OSError(errno.EOPNOTSUPP, "no")
        os.pwrite(writing, os.pread(reading, len(data), 0), 0)

    def cannot(*_args):
        raise OSError(errno.EXDEV, "no")

    monkeypatch.setattr(copy.fcntl, "ioctl", ioctl)
    if way == "here":
        monkeypatch.setattr(os, "copy_file_range", cannot)
    wanted = ("reflink" if way == "reflink" else "copy", len(data))
    assert copy.carry_file(locate(tmp_path / "a"), tmp_path / "b") == wanted
    assert (tmp_path / "b").read_bytes() == data
    with pytest.raises(FileExistsError):
        copy.carry_file(locate(tmp_path / "a"), tmp_path / "b")


def test_a_full_disk_leaves_nothing(tmp_path, source, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(copy.fcntl, "ioctl", full)
    with pytest.raises(StorageError, match="No space"):
        wherry.rewrite(source, tmp_path / "b", as_=FOR_TORCH)
    assert names(tmp_path) == ["a"]


def test_a_link_that_leads_nowhere_is_named(tmp_path, source):
    (source / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(CorruptError, match="broken symbolic link"):
        wherry.rewrite(source, tmp_path / "b", as_=FOR_TORCH)


def test_a_format_without_rewrites(tmp_path, source):
    wherry.convert(source, tmp_path / "b.npz", to="npz", ignore=("values", "empties"), lineage=False)
    with pytest.raises(UsageError, match="unknown rewrite"):
        wherry.rewrite(tmp_path / "b.npz", tmp_path / "c", as_=FOR_TORCH)
    with pytest.raises((UnsupportedError, UsageError)):
        wherry.rewrite(tmp_path / "b.npz", tmp_path / "c", as_="")


def test_in_place_leaves_a_folder_that_another_run_took_over(tmp_path):
    from types import SimpleNamespace

    from wherry.converter.in_place import change_in_place
    from wherry.store.local_store import locate

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config").write_text("old")
    change = SimpleNamespace(files={"config": b"new"}, made=(), finish=lambda _folder: None)
    lease = tmp_path / ".wherry-checkpoint.lease"
    with (
        pytest.raises(TargetInUseError, match="another run took over"),
        change_in_place(locate(folder), change, lambda: None),
    ):
        lease.unlink()
        lease.write_text("other")
        (folder / "config").write_text("other")
        raise ValueError("the proof failed")
    assert (folder / "config").read_text() == "other"
    assert (folder / "config.before").read_text() == "old"
    assert lease.read_text() == "other"


def replacing(monkeypatch, step, act):
    """A run that does something after a step of the rewrite."""
    module = sys.modules["wherry.converter.rewrite"]
    real = getattr(module, step)

    def call(*arguments):
        found = real(*arguments)
        act()
        return found

    monkeypatch.setattr(module, step, call)


@pytest.mark.parametrize("verify", ["digest", "none"])
def test_in_place_a_run_that_lost_its_lease_while_it_proved_writes_nothing_more(source, monkeypatch, verify):
    lease = source.parent / ".wherry-a.lease"

    def take_over():
        lease.unlink()
        lease.write_text("other")
        (source / "wherry.json").write_text("other")
        (source / ".metadata").write_text("other")

    replacing(monkeypatch, "prove", take_over)
    with pytest.raises(TargetInUseError, match="another run took over"):
        wherry.rewrite(source, as_=FOR_TORCH, in_place=True, verify=verify)
    assert (source / "wherry.json").read_text() == (source / ".metadata").read_text() == "other"
    assert not (source / ".wherry.json.before").exists()


def test_in_place_a_source_that_changed_since_the_plan_is_left(source, monkeypatch):
    changed = (source / ".metadata").read_bytes() + b"."
    replacing(monkeypatch, "know", lambda: (source / ".metadata").write_bytes(changed))
    with pytest.raises(MismatchError, match="was modified"):
        wherry.rewrite(source, as_=FOR_TORCH, in_place=True)
    assert (source / ".metadata").read_bytes() == changed
    assert ".metadata.before" not in files(source)


@pytest.fixture
def change(tmp_path):
    """A change that adds a folder `d`, and the checkpoint that it is for."""
    from types import SimpleNamespace

    (tmp_path / "checkpoint").mkdir()
    finish = lambda folder: (tmp_path / "checkpoint" / "d").mkdir(exist_ok=True)  # noqa: E731
    return tmp_path / "checkpoint", SimpleNamespace(files={}, made=("d",), finish=finish)


def test_in_place_what_another_run_made_before_the_lease_was_taken_is_not_undone(change, monkeypatch):
    folder, what = change
    real = in_place.lease_of

    def lease_of(*arguments):
        (folder / "d").mkdir()
        (folder / "d" / "file").write_text("other")
        return real(*arguments)

    monkeypatch.setattr(in_place, "lease_of", lease_of)
    with (
        pytest.raises(ValueError, match="proof"),
        in_place.change_in_place(locate(folder), what, lambda: None),
    ):
        raise ValueError("the proof failed")
    assert (folder / "d" / "file").read_text() == "other"


def test_in_place_an_undo_that_fails_is_a_storage_error(change, monkeypatch):
    folder, what = change

    def refuse(_path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(in_place, "remove", refuse)
    with pytest.raises(StorageError), in_place.change_in_place(locate(folder), what, lambda: None):
        raise ValueError("the proof failed")
