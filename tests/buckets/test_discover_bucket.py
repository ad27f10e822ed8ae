"""Checkpoints in a bucket are found as those on a disk, with few requests and in bounded memory."""

from __future__ import annotations

import shutil
from bisect import bisect_left
from itertools import islice, takewhile

import numpy as np
import pytest
from safetensors.numpy import save_file

from wherry.converter.convert import convert
from wherry.errors import NotFoundError
from wherry.formats.discover import discover, walk
from wherry.store.location import Location
from wherry.store.object_view import ListingView, view_for_walk
from wherry.store.store import S3, Entry


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Whole and damaged checkpoints of several formats, in folders of several depths."""
    root = tmp_path_factory.mktemp("tree")
    save_file({"w": np.ones((8, 4), np.float32)}, root / "one.safetensors")
    for to in ("dcp", "orbax"):
        convert(root / "one.safetensors", root / "runs" / to / "100", to=to, lineage=False)
    shutil.copytree(root / "runs" / "dcp" / "100", root / "runs" / "dcp" / "200")
    (root / "runs" / "dcp" / "200" / ".metadata").unlink()
    shutil.copytree(root / "runs" / "orbax" / "100", root / "a-b" / "c" / "7")
    (root / "notes").mkdir()
    (root / "notes" / "readme.txt").write_text("nothing")
    return root


def seen(root):
    skipped = []
    found = [
        (one.uri.removeprefix(str(root)), one.format, one.verdict)
        for one in discover(root, on_skip=skipped.append)
    ]
    return found, [(one.uri.removeprefix(str(root)), one.reason) for one in skipped]


def test_a_bucket_is_walked_as_a_disk(bucket, tree):
    bucket.upload(tree, "tree")
    found, skipped = seen(tree)
    assert seen(f"{bucket.uri}/tree") == (found, skipped)
    assert len(found) == 4
    assert dict(skipped)["/runs/dcp/200"] == "file not found: .metadata; the save was never committed"
    with pytest.raises(NotFoundError):
        list(discover(f"{bucket.uri}/none"))


@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)  # az:// lists each folder by itself
def test_many_folders_are_few_requests(bucket, tmp_path):
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "x")
    data = (tmp_path / "x").read_bytes()
    for number in range(25):
        for name in ("model.safetensors", "sub/notes.txt"):
            bucket.put(f"runs/r{number:03}/{name}", data if name[0] == "m" else b"x")
    bucket.requests()
    found = list(discover(f"{bucket.uri}/runs"))
    assert len(found) == 25
    requested_paths = [path for _method, path in bucket.requests()]
    lists = [path for path in requested_paths if "prefix=" in path]
    assert len(lists) <= 5
    assert len(requested_paths) <= 32, "one read for each checkpoint"


@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)  # az:// lists each folder by itself
def test_a_walk_forgets_what_it_has_left(bucket, monkeypatch):
    for number in range(15):
        bucket.put(f"runs/r{number:02}/deep/x.txt", b"x")
    for provider in ("amazon", "google"):
        monkeypatch.setattr(f"wherry.store.{provider}._PAGE", 8)
    root, most = view_for_walk(bucket.at("runs")), 0
    for number in range(15):
        folder = root.join(f"r{number:02}")
        assert root.entries()[number].name == f"r{number:02}"
        assert [one.name for one in folder.entries()] == ["deep"]
        assert [one.name for one in folder.join("deep").entries()] == ["x.txt"]
        store = folder.store
        most = max(most, len(store._folders) + len(store._ahead) + len(store._entries))
    assert most <= 3 + 2 * 8
    lists = [path for _method, path in bucket.requests() if "prefix=" in path]
    assert len(lists) <= 1 + 2 * 3


class Wide:
    """A store of 10,000 folders with two objects each; it holds only their keys, and counts its listings."""

    protocol, capabilities = "s3", S3

    def __init__(self, model):
        self.model, self.lists = model, 0
        rows = ((number, "logs/x.txt") for number in range(10_000))
        files = (
            (number, "model.safetensors" if number % 5_000 == 4_999 else "notes.txt")
            for number in range(10_000)
        )
        self.keys = sorted(f"bucket/runs/r{number:05}/{name}" for number, name in (*rows, *files))

    def data(self, path):
        return self.model if path.endswith(".safetensors") else b"x"

    def below(self, path):
        first = bisect_left(self.keys, f"{path}/")
        return takewhile(lambda key: key.startswith(f"{path}/"), islice(self.keys, first, None))

    def stat(self, path):
        if next(self.below(path), None):
            return Entry(path.rpartition("/")[2], 0, is_dir=True)
        there = path in self.keys[bisect_left(self.keys, path) :][:1]
        return Entry(path.rpartition("/")[2], len(self.data(path)), is_dir=False, mark="1") if there else None

    def entries(self, path):
        self.lists += 1
        names = dict.fromkeys(key[len(path) + 1 :].partition("/")[0] for key in self.below(path))
        return [self.stat(f"{path}/{name}") for name in names]

    def page(self, path, start):
        self.lists += 1
        found = list(islice(self.keys, bisect_left(self.keys, start), None))
        rows = [
            (key, Entry(key.rpartition("/")[2], len(self.data(key)), is_dir=False)) for key in found[:1000]
        ]
        return rows, len(found) > 1000

    def read(self, path, start, stop):
        return self.data(path)[start:stop]

    def readinto(self, path, start, buffer, _mark=""):
        data = self.read(path, start, start + len(buffer))
        buffer[: len(data)] = data
        return len(data)


@pytest.mark.slow
def test_ten_thousand_folders_are_walked_in_bounded_memory(tmp_path, monkeypatch):
    """Held are the entries of the widest folder, and of one page; the same whatever lies in the folders."""
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "x")
    store, held, real = Wide((tmp_path / "x").read_bytes()), [], ListingView.entries

    def entries(self, path):
        found = real(self, path)
        held.append(sum(map(len, [*self._folders.values(), *self._ahead.values()])) + len(self._entries))
        return found

    monkeypatch.setattr(ListingView, "entries", entries)
    found = list(walk(Location(store, "bucket/runs"), None, 0.0, newest=False))
    models = [f"s3://bucket/runs/r{number:05}" for number in (4_999, 9_999)]
    assert [one.uri for one in found] == models
    assert len(held) > 10_000
    assert max(held) <= 10_000 + 5 * 1000, "an object of the page, and the folders above it"
    assert store.lists <= 20_000 // 1000 + 50


@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)  # az:// lists each folder by itself
def test_a_folder_of_many_objects_is_listed_by_itself(bucket, monkeypatch):
    for folder in ("a", "b", "c"):
        for number in range(9):
            bucket.put(f"runs/{folder}/chunks/{number:02}", b"x")
        bucket.put(f"runs/{folder}/x.txt", b"x")
    for provider in ("amazon", "google"):
        monkeypatch.setattr(f"wherry.store.{provider}._PAGE", 8)
    root = view_for_walk(bucket.at("runs"))
    for entry in root.entries():
        assert [one.name for one in root.join(entry.name).entries()] == ["chunks", "x.txt"]
