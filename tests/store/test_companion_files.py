"""Companion files of any length are digested and copied in pieces."""

from __future__ import annotations

import os

import pytest

import wherry
from tests.support.registry import model_folder
from wherry.errors import HostileError, NotFoundError
from wherry.store.local_store import locate
from wherry.store.location import Location

MOST = 8 << 20


@pytest.fixture
def long(tmp_path):
    folder = model_folder(tmp_path / "model")
    (folder / "data.jsonl").write_bytes(os.urandom(2 * MOST + 5))
    return folder


@pytest.fixture
def lengths(monkeypatch):
    """How many bytes of the long file each read requested."""
    found: list[int] = []
    original = Location.read

    def read(self, start, stop):
        if self.name == "data.jsonl":
            found.append(stop - start)
        return original(self, start, stop)

    monkeypatch.setattr(Location, "read", read)
    return found


def test_no_verb_holds_a_long_companion(tmp_path, long, lengths):
    digest = wherry.convert(long, tmp_path / "out", to="orbax").source.checkpoint_digest
    assert (tmp_path / "out" / "assets" / "data.jsonl").read_bytes() == (long / "data.jsonl").read_bytes()
    wherry.inspect(long, write=True)
    assert wherry.fetch(long, tmp_path / "copy").checkpoint_digest == digest
    assert wherry.verify(long, level="digest").ok
    assert len(lengths) >= 4 * 3
    assert max(lengths) <= MOST


def test_a_long_companion_that_was_altered_is_found(long):
    wherry.inspect(long, write=True)
    with (long / "data.jsonl").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read()
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    failed = wherry.verify(long, level="digest").failed
    assert [one.path for one in failed] == ["data.jsonl"]


@pytest.mark.parametrize("length", [0, 1, MOST, MOST + 1])
def test_pieces_are_the_file(tmp_path, length):
    data = os.urandom(length)
    (tmp_path / "file").write_bytes(data)
    assert b"".join(locate(tmp_path / "file").pieces()) == data
    store = locate("memory://pieces/file")
    store.put(data)
    assert b"".join(store.pieces()) == data


def test_a_sparse_companion_fills_no_disk(tmp_path, long):
    os.truncate(long / "data.jsonl", (32 << 30) + 1)
    with pytest.raises(HostileError, match="exceeds the limit of 34,359,738,368"):
        wherry.convert(long, tmp_path / "to" / "out", to="orbax")
    assert not (tmp_path / "to").exists()


def test_pieces_of_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(HostileError, match="FIFO"):
        list(locate(tmp_path / "fifo").pieces())
    for name in ("", "nothing"):
        with pytest.raises(NotFoundError):
            list(locate(tmp_path / name).pieces())
