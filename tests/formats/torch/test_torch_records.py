"""Torch archives below and beyond tensors: checksums, alignment, and objects of a class that are written again."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import pathlib

import numpy as np
import pytest

import wherry
from tests.support.formats import canonical, opened
from tests.support.torch import as_bytes, torch
from wherry.errors import CorruptError, UnrepresentableError


def saved(tmp_path, value) -> pathlib.Path:
    torch.save(value, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_a_flipped_bit_of_any_tensor_is_found_by_reading(tmp_path):
    """Whole storages by the CRC of their extent, views by that of their storage."""
    base = torch.arange(64.0).reshape(8, 8)
    path = saved(tmp_path, {"whole": base, "turned": (base + 1).T})
    data = path.read_bytes()
    for name, at in (("whole", base), ("turned", base + 1)):
        bad = bytearray(data)
        bad[data.index(at.numpy().tobytes()) + 40] ^= 1
        path.write_bytes(bad)
        with pytest.raises(CorruptError) as caught:
            wherry.inspect(path, digest=True)
        assert caught.value.path == name


def test_crcs_that_were_switched_off(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path, {"a": torch.arange(6.0), "t": torch.ones(2, 3).T})
    finally:
        torch.serialization.set_crc32_options(True)
    found = opened(path, "torch-zip")
    assert [extent.crc32 for extent in found.reader.access(found.manifest.tensors["a",]).extents] == [None]
    assert canonical(found, ("a",)) == as_bytes(torch.arange(6.0))
    assert canonical(found, ("t",)) == as_bytes(torch.ones(2, 3).T)


@pytest.mark.parametrize("alignment", [1, 64, 4096])
def test_any_alignment(tmp_path, alignment):
    from torch.utils.serialization import config

    with config.patch({"save.storage_alignment": alignment}):
        path = saved(tmp_path, {"a": torch.arange(7.0), "b": torch.arange(3)})
    found = opened(path, "torch-zip")
    assert canonical(found, ("a",)) == as_bytes(torch.arange(7.0))
    assert canonical(found, ("b",)) == as_bytes(torch.arange(3))
    assert found.reader.access(found.manifest.tensors["b",]).extents[0].offset % alignment == 0


def test_keys_and_classes_come_back_as_they_were(tmp_path):
    value = {
        "tensor": torch.ones(2),
        "state": {0: {"step": 1}, 7: {}, True: 2, None: "none"},
        "tuple": (1, (2.5, "x"), ()),
        "bytes": b"\x00\xff",
        "array": bytearray(b"ab"),
        "set": {3, 4},
        "frozen": frozenset("a"),
        "empty set": set(),
        "size": torch.Size([2, 3]),
        "device": [torch.device("cpu"), torch.device("cuda:1")],
        "dtype": torch.bfloat16,
        "layout": torch.strided,
        "args": argparse.Namespace(lr=0.5, betas=(0.9, 0.99), inner=argparse.Namespace()),
        "path": pathlib.PurePosixPath("/data/runs/1"),
        "relative": pathlib.PurePosixPath("a/b"),
        "when": dt.datetime.fromisoformat("2024-02-29T13:05:07.123456"),
        "day": dt.date(2024, 2, 29),
        "clock": dt.time(1, 2, 3, 4),
        "exact": decimal.Decimal("1.10"),
        "complex": 1 - 2j,
        "deque": collections.deque([1, [2]]),
        "counter": collections.Counter("aab"),
        "default": collections.defaultdict(list, {"a": [1]}),
        "number": np.float32(0.1),
        "whole": np.int64(7),
    }
    torch.save(value, tmp_path / "a.pt")
    wherry.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch-zip", lineage=False)
    found = torch.load(tmp_path / "b.pt", weights_only=False)
    assert torch.equal(found.pop("tensor"), value.pop("tensor"))
    assert found == value
    exact = {name: type(one) for name, one in value.items() if name not in ("number", "whole")}
    assert {name: type(found[name]) for name in exact} == exact
    assert set(map(type, found["state"])) == {int, bool, type(None)}


@pytest.mark.parametrize(
    "one",
    [
        dt.timedelta(days=1),
        dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
        int,
        bytes(2_000_000),
    ],
)
def test_what_is_read_but_not_written_is_named(tmp_path, one):
    torch.save({"w": torch.ones(2), "odd": one}, tmp_path / "a.pt")
    with pytest.raises(UnrepresentableError, match="odd"):
        wherry.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch-zip", lineage=False)
    wherry.convert(
        tmp_path / "a.pt", tmp_path / "b.pt", to="torch-zip", ignore=["values", "empties"], lineage=False
    )
    assert torch.load(tmp_path / "b.pt")["w"].tolist() == [1, 1]


def test_weights_only_loads_what_it_allows(tmp_path):
    value = {
        "w": torch.ones(2),
        "b": b"x",
        "s": {1},
        "t": (1, 2),
        "z": torch.Size([1]),
        "k": {1: 2},
        "d": torch.int8,
    }
    torch.save(value, tmp_path / "a.pt")
    wherry.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch-zip", lineage=False)
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert {key: one for key, one in found.items() if key != "w"} == {
        k: v for k, v in value.items() if k != "w"
    }
