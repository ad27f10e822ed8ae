"""hf:// as a source: one commit, and few requests by range."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from wherry.errors import NotFoundError
from wherry.storage.stores import locate
from wherry.store.hub import HubPath, parse_hub_path


def pushed(server, branch="main", **files):
    """Commit files to a branch of owner/model."""
    head = server.head("owner/model", branch)
    known = server.commits[head][2]
    server.branches["owner/model"][branch] = server.add_commit(head, "more", {**known, **files})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("owner/model", HubPath("model", "owner/model", "", "")),
        ("models/owner/model/a/b", HubPath("model", "owner/model", "", "a/b")),
        ("datasets/owner/data@v1/x", HubPath("dataset", "owner/data", "v1", "x")),
        ("owner/model@refs/pr/3/x", HubPath("model", "owner/model", "refs/pr/3", "x")),
        ("owner/model@step%2F10/x", HubPath("model", "owner/model", "step/10", "x")),
        ("model", None),
    ],
)
def test_the_parts_of_a_path(text, place):
    assert parse_hub_path(text) == place
    if place is not None:
        assert parse_hub_path(place.text) == place


def test_bytes_are_read_by_range_with_one_request_each(server):
    pushed(server, **{"x.bin": bytes(range(256))})
    place = locate("hf://owner/model/x.bin")
    assert place.stat().size == 256
    server.requests.clear()
    assert place.read(10, 20) == bytes(range(10, 20))
    assert place.read(250, 300) == bytes(range(250, 256))
    assert place.read(256, 300) == b""
    assert len(server.requests) == 3


def test_a_branch_that_moves_is_read_as_it_was(server):
    pushed(server, **{"x.bin": b"before", "y.bin": b"before"})
    place = locate("hf://owner/model/x.bin")
    assert place.read(0, 9) == b"before"
    pushed(server, **{"x.bin": b"after!", "y.bin": b"after!"})
    assert place.read(0, 9) == b"before"
    assert place.parent.join("y.bin").read(0, 9) == b"before"
    assert locate("hf://owner/model/x.bin").read(0, 9) == b"after!"


def test_what_does_not_exist(server):
    assert locate("hf://owner/model/x").stat() is None
    assert locate("hf://owner/none/x").stat() is None
    assert locate("hf://owner/model@none/x").stat() is None
    with pytest.raises(NotFoundError):
        wherry.detect("hf://owner/none")


def test_a_checkpoint_is_converted_from_there(server, tmp_path):
    save_file(
        {f"layers.{n}.w": np.full((64, 64), n, np.float32) for n in range(40)}, tmp_path / "m.safetensors"
    )
    pushed(server, **{"model.safetensors": (tmp_path / "m.safetensors").read_bytes()})
    wherry.convert(
        "hf://owner/model/model.safetensors", tmp_path / "out.safetensors", to="safetensors", lineage=False
    )
    converted, source = load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "m.safetensors")
    assert {name: value.tobytes() for name, value in converted.items()} == {
        name: value.tobytes() for name, value in source.items()
    }
    reads = [path for path in server.sent("GET") if "/resolve/" in path]
    assert len(reads) < 12
    assert all("/resolve/main/" not in path for path in reads), "a commit, not a branch"
