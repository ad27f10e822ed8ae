"""A companion is copied whole and durably, or refused; nothing stays open."""

import errno
import hashlib
import os
from types import SimpleNamespace

import pytest

from wherry.core.manifest import Companion
from wherry.errors import HostileError, MismatchError, StorageError
from wherry.formats.companions import CompanionsReader, copy_companion
from wherry.storage import location
from wherry.storage.stores import locate
from wherry.target import files


def copy(data, target, size=None):
    checkpoint = SimpleNamespace(reader=CompanionsReader(SimpleNamespace(), {"notes": data}))
    companion = Companion("notes", len(data) if size is None else size)
    return copy_companion(checkpoint, companion, locate(target))


@pytest.mark.parametrize("size", [0, 1, 4096, 70_001, (8 << 20) + 5])
def test_every_size_is_copied_whole_and_synced_in_place_of_a_longer_file(tmp_path, monkeypatch, size):
    synced, real = [], os.fdatasync

    def sync(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    data, target = bytes(i % 251 for i in range(251)) * (size // 251 + 1), tmp_path / "out" / "deep" / "notes"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"x" * (size + 9000))
    assert copy(data[:size], target).sha256 == hashlib.sha256(data[:size]).hexdigest()
    assert target.read_bytes() == data[:size]
    assert target.stat().st_ino in synced


@pytest.mark.parametrize("planned", [50, 150, 9000])
def test_a_companion_of_another_size_than_planned_is_refused(tmp_path, planned):
    with pytest.raises(MismatchError, match=f"expected {planned} bytes, got 100"):
        copy(bytes(100), tmp_path / "notes", planned)


def test_one_that_is_too_large_is_refused_before_it_takes_space(tmp_path, monkeypatch):
    monkeypatch.setattr(location, "MOST_COMPANION", 100)
    with pytest.raises(HostileError):
        copy(bytes(101), tmp_path / "out" / "notes")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fails_leaves_nothing_open(tmp_path, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "pwrite", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StorageError, match="No space"):
        copy(bytes(100_000), tmp_path / "notes")
    assert os.listdir("/proc/self/fd") == before
