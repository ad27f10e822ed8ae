"""Checkpoints in a bucket are found as those on a disk, with few requests and in bounded memory."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from wherry.converter.convert import convert
from wherry.errors import NotFoundError
from wherry.formats.discover import discover
from wherry.objects.listing_view import walked


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
    asked = [path for _method, path in bucket.requests()]
    lists = [path for path in asked if "prefix=" in path]
    assert len(lists) <= 5
    assert len(asked) <= 32, "one read for each checkpoint"


@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)  # az:// lists each folder by itself
def test_a_walk_forgets_what_it_has_left(bucket, monkeypatch):
    for number in range(15):
        bucket.put(f"runs/r{number:02}/deep/x.txt", b"x")
    monkeypatch.setattr("wherry.remote.listings._PAGE", 8)
    root, most = walked(bucket.at("runs")), 0
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


@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)  # az:// lists each folder by itself
def test_a_folder_of_many_objects_is_listed_by_itself(bucket, monkeypatch):
    for folder in ("a", "b", "c"):
        for number in range(9):
            bucket.put(f"runs/{folder}/chunks/{number:02}", b"x")
        bucket.put(f"runs/{folder}/x.txt", b"x")
    monkeypatch.setattr("wherry.remote.listings._PAGE", 8)
    root = walked(bucket.at("runs"))
    for entry in root.entries():
        assert [one.name for one in root.join(entry.name).entries()] == ["chunks", "x.txt"]
