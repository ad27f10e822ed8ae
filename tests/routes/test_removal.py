"""Taking a checkpoint away: where something fails it is put back, durably, whatever happened on the way."""

from __future__ import annotations

import errno
import os

import pytest

from wherry.errors import StorageError
from wherry.routes import removal
from wherry.routes.removal import removing


@pytest.fixture
def file(tmp_path):
    """A checkpoint of a single file, with its sidecar."""
    path = tmp_path / "m.bin"
    path.write_text("data")
    path.with_name("m.bin.wherry.json").write_text("sidecar")
    return path


def names(file):
    return sorted(os.listdir(file.parent))


def remove_and_fail(file, error):
    with removing(str(file), str(file), "safetensors"):
        assert not file.exists()
        raise error


def test_what_is_put_back_is_durable(file, monkeypatch):
    synced, real = [], removal.sync_folder

    def sync_folder(folder):
        synced.append(names(file))
        real(folder)

    monkeypatch.setattr(removal, "sync_folder", sync_folder)
    with pytest.raises(ValueError, match="for the test"):
        remove_and_fail(file, ValueError("for the test"))
    assert {"m.bin", "m.bin.wherry.json"} <= set(synced[-1])
    assert names(file) == ["m.bin", "m.bin.wherry.json"]


def test_a_name_that_cannot_be_given_back_is_a_storage_error_and_the_others_are(file, monkeypatch):
    real = removal.rename_without_replacing

    def rename(source, target):
        if target.name.endswith(".json") and source.name.startswith(".wherry-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    monkeypatch.setattr(removal, "rename_without_replacing", rename)
    with pytest.raises(StorageError) as caught:
        remove_and_fail(file, ValueError("for the test"))
    assert caught.value.uri.endswith(".sidecar")
    assert file.read_text() == "data"


def test_a_stop_just_after_a_rename_puts_it_back(file, monkeypatch):
    real, stopped = removal.rename_without_replacing, []

    def rename(source, target):
        real(source, target)
        if not stopped:
            stopped.append(source)
            raise KeyboardInterrupt

    monkeypatch.setattr(removal, "rename_without_replacing", rename)
    with pytest.raises(KeyboardInterrupt), removing(str(file), str(file), "safetensors"):
        pytest.fail("it was stopped before")
    assert stopped == [file]
    assert names(file) == ["m.bin", "m.bin.wherry.json"]


def test_an_error_of_the_storage_has_no_cause_that_is_itself(file):
    error = StorageError("for the test")
    with pytest.raises(StorageError) as caught:
        remove_and_fail(file, error)
    assert caught.value is error
    assert error.__cause__ is None
