"""Bad input: one clear error, its exit code, nothing at the destination, the source untouched."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

TENSORS = {"a.weight": np.arange(12, dtype="f4").reshape(3, 4), "b.weight": np.arange(5, dtype="i8")}


def wherry(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "wherry.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def snapshot(folder):
    return {
        str(path.relative_to(folder)): path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).rglob("*"))
    }


def header_edit(path, change):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    header, body = change(header, body)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def overlapping(folder):
    def change(header, body):
        header["b.weight"]["data_offsets"] = [8, 48]
        return header, body[:48]

    header_edit(folder / "model.safetensors", change)


def with_a_hole(folder):
    def change(header, body):
        last = max(
            header,
            key=lambda name: header[name].get("data_offsets", [0])[0] if name != "__metadata__" else -1,
        )
        header[last]["data_offsets"] = [offset + 8 for offset in header[last]["data_offsets"]]
        start = header[last]["data_offsets"][0] - 8
        return header, body[:start] + bytes(8) + body[start:]

    header_edit(folder / "model.safetensors", change)


def with_a_duplicate_key(folder):
    def change(header, body):
        text = json.dumps(header).encode()
        twice = text[:-1] + b', "a.weight": ' + json.dumps(header["a.weight"]).encode() + b"}"
        return twice, body

    header_edit(folder / "model.safetensors", change)


def with_a_huge_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes((200_000_000).to_bytes(8, "little") + path.read_bytes()[8:])


def escaping_index(folder):
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(TENSORS, "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def missing_shard(folder):
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(TENSORS, "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


SAFETENSORS = [
    (truncated, 5), (overlapping, 5), (with_a_hole, 5), (with_a_duplicate_key, 5), (with_a_huge_header, 5),
    (escaping_index, 6), (missing_shard, 5),
]  # fmt: skip


@pytest.fixture
def model(tmp_path):
    """A whole Hugging Face folder."""
    folder = tmp_path / "in" / "model"
    folder.mkdir(parents=True)
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def orbax(model, tmp_path):
    """The same as an Orbax item, one file per chunk."""
    import wherry

    wherry.convert(model, tmp_path / "in" / "orbax", to="orbax", options={"ocdbt": "false"})
    return tmp_path / "in" / "orbax"


def refused(source, target, code, *more):
    before = snapshot(source)
    done = wherry("convert", source, target, "--to", "orbax", "--json", *more)
    assert done.returncode == code, done.stderr + done.stdout
    assert json.loads(done.stdout)["exit_code"] == code
    assert json.loads(done.stdout)["stage"] == "convert"
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert snapshot(source) == before
    return done.stderr


@pytest.mark.parametrize(("damage", "code"), SAFETENSORS, ids=lambda value: getattr(value, "__name__", value))
def test_damaged_safetensors(model, tmp_path, damage, code):
    damage(model)
    refused(model, tmp_path / "to" / "out", code)
    assert not (tmp_path / "to").exists()
    assert wherry("detect", model).returncode == code


def without_metadata(folder):
    (folder / "_METADATA").unlink()


def without_a_chunk(folder):
    next((folder / "a.weight").glob("[0-9]*")).unlink()


def with_empty_metadata(folder):
    (folder / "_METADATA").write_text("")


@pytest.mark.parametrize("damage", [without_metadata, without_a_chunk, with_empty_metadata])
def test_damaged_orbax(orbax, tmp_path, damage):
    damage(orbax)
    refused(orbax, tmp_path / "to" / "out", 5)
    assert not (tmp_path / "to").exists()


def test_uncommitted_orbax(orbax, tmp_path):
    left = orbax.rename(orbax.with_name("orbax.orbax-checkpoint-tmp-3"))
    assert "not committed" in refused(left, tmp_path / "to" / "out", 5)


def test_empty_orbax_step(orbax, tmp_path):
    run = tmp_path / "run"
    (run / "1").mkdir(parents=True)
    shutil.copytree(orbax, run / "1" / "default")
    (run / "2").mkdir()
    assert "empty" in refused(run / "2", tmp_path / "to" / "out", 5)
    assert wherry("detect", run, "--json").returncode == 0


def test_nothing_there_and_not_a_checkpoint(tmp_path):
    refused(tmp_path / "none", tmp_path / "out", 3)
    (tmp_path / "readme").mkdir()
    (tmp_path / "readme" / "README.md").write_text("hello")
    refused(tmp_path / "readme", tmp_path / "out", 4)


def test_target_exists(model, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "foreign").write_text("precious")
    refused(model, target, 8)
    assert os.listdir(target) == ["foreign"]
    assert (target / "foreign").read_text() == "precious"


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 1 MB, where mounting is allowed."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", mount], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


@pytest.mark.parametrize("to", ["hf", "orbax", "safetensors"])
def test_full_disk(tiny_disk, tmp_path, to):
    source = tmp_path / "big.safetensors"
    save_file({"w": np.random.default_rng(0).standard_normal((1000, 1000), dtype="f4")}, source)
    done = wherry("convert", source, tiny_disk / "deep" / "out", "--to", to, "--family", "none")
    assert done.returncode == 10, done.stderr
    assert "the disk is too small" in done.stderr
    assert os.listdir(tiny_disk) == []


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_disk_that_fills_up_while_writing(model, tmp_path, to, monkeypatch):
    """The same without mounting: the system call that would fail on a full disk fails."""
    import wherry as library
    from wherry.errors import StorageError
    from wherry.store import local_store as stores

    def full(*_arguments, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(stores.os, "fdatasync", full)
    with pytest.raises(StorageError, match="No space") as caught:
        library.convert(model, tmp_path / "to" / "out", to=to)
    assert not caught.value.retryable
    assert not (tmp_path / "to").exists()


def test_read_only_target(tiny_disk, model):
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    done = wherry("convert", model, tiny_disk / "out", "--to", "orbax")
    assert done.returncode == 10, done.stderr
    assert "ead-only" in done.stderr
    assert os.listdir(tiny_disk) == []


def test_usage_errors_end_with_2(model, tmp_path):
    for arguments in (
        ["convert"],
        ["convert", model, tmp_path / "o", "--to", "zzz"],
        ["detect", model, "--step", "x"],
    ):
        done = wherry(*arguments)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("error: ")
