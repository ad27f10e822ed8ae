"""Files of torch.save: every kind of view, classes, records, byte order, and archives made to deceive."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import pathlib
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wherry
from tests.support.command import typed
from tests.support.formats import assert_ends_well, canonical, either, mutated, opened, place
from tests.support.torch import as_bytes, torch
from wherry.errors import (
    CorruptError,
    HostileError,
    NotACheckpointError,
    UnrepresentableError,
    UnsupportedError,
)
from wherry.formats.format import Glimpse
from wherry.formats.registry import find_format
from wherry.integrations.containers.flat import strides as flat_strides
from wherry.mover.read import read_array
from wherry.store.local_store import locate
from wherry.store.location import Location


def save(tmp_path, value, name="model.pt") -> Path:
    path = tmp_path / name
    torch.save(value, path)
    return path


@pytest.mark.parametrize(
    ("case", "error"),
    either(
        ("defect-torch-zip-truncated", CorruptError),
        ("hostile-deflated-pt", HostileError),
        ("hostile-os-system-pt", HostileError),
        ("torch-whole-module", UnsupportedError),
        ("made-torch-zip-truncated", CorruptError),
        ("made-hostile-deflated-pt", HostileError),
        ("made-hostile-os-system-pt", HostileError),
        ("made-torch-whole-module", UnsupportedError),
    ),
)
def test_refusals(case, error):
    with pytest.raises(error):
        opened(place(case), "torch-zip")


@pytest.mark.parametrize("case", either("torchscript-silero-vad", "made-torchscript"))
def test_torchscript(case):
    with pytest.raises(UnsupportedError, match="TorchScript"):
        opened(place(case), "torchscript")
    with pytest.raises(UnsupportedError, match="TorchScript"):
        opened(place(case), "torch-zip")


def test_every_kind_of_view(tmp_path):
    base = torch.arange(600, dtype=torch.float32).reshape(20, 30)
    parts = {
        "base": base,
        "slice": base[3:7],
        "transposed": base.T,
        "stepped": base[::3, 1::2],
        "expanded": base[:, :1].expand(20, 5),
        "scalar": base[2, 2],
        "none": base[:0],
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "complex": torch.randn(4, 5, dtype=torch.complex64).T,
        "double": torch.randn(3, 3, dtype=torch.complex128),
        "half": torch.randn(6, 7).to(torch.bfloat16).T,
    }
    found = opened(save(tmp_path, parts), "torch-zip")
    assert set(found.manifest.tensors) == {(name,) for name in parts}
    for name, tensor in parts.items():
        assert canonical(found, (name,)) == as_bytes(tensor), name
        raw = found.reader.access(found.manifest.tensors[name,]).extents is not None
        assert raw == (tensor.is_contiguous() or tensor.numel() == 0), name
    spec = found.manifest.tensors["transposed",]
    part = read_array(found.reader, spec, (slice(2, 9), slice(5, 6)))
    assert np.array_equal(part, base.T[2:9, 5:6].numpy())


STRIDED = {  # shape, strides, elements of the storage
    "transposed": ((40, 30), (1, 40), 1200),
    "column": ((30,), (40,), 1200),
    "every other row of a block": ((10, 5, 8), (80, 8, 1), 800),
    "wide span, narrow stride": ((300, 2), (10, 11), 3002),
    "overlapping": ((20, 20), (1, 1), 39),
    "expanded": ((4, 5), (0, 3), 13),
    "scalar": ((), (), 7),
}


@pytest.mark.parametrize("gap", [4, 1 << 20])
@pytest.mark.parametrize("name", STRIDED)
def test_a_view_is_read_in_parts_that_span_little(tmp_path, monkeypatch, name, gap):
    shape, strides, count = STRIDED[name]
    monkeypatch.setattr(flat_strides, "_SLAB", 256)
    monkeypatch.setattr(flat_strides, "_GAP", gap)
    tensor = torch.arange(count, dtype=torch.float32).as_strided(shape, strides, 0 if shape else 3)
    path = save(tmp_path, {"w": tensor, "base": torch.ones(3)})
    found = opened(path, "torch-zip")
    spec = found.manifest.tensors[("w",)]
    lengths, original = [], Location.read
    monkeypatch.setattr(Location, "read", lambda self, a, b: lengths.append(b - a) or original(self, a, b))
    out = np.zeros(shape, np.float32)
    flat_strides._fill_words(found.reader.placed[("w",)], spec.whole, spec, out.reshape(-1).view("u1").data)
    assert np.array_equal(out, tensor.numpy())
    assert max(lengths) <= 256
    if gap == 4 and name == "column":
        assert set(lengths) == {4}


CUT = """
import os, sys
import numpy as np
import wherry
frombuffer = np.frombuffer
def cut(data, *rest):
    if isinstance(data, bytes):  # of the file
        os.truncate(sys.argv[1], 100)
    return frombuffer(data, *rest)
with wherry.open(sys.argv[1]) as checkpoint:
    np.frombuffer = cut
    assert checkpoint.read("w").sum() == 1 << 20
    try:
        checkpoint.read("w")
    except wherry.errors.CorruptError as error:
        print(error.what)
"""


def test_a_file_that_is_cut_while_a_view_is_read_ends_no_process(tmp_path):
    path = save(tmp_path, {"w": torch.ones(1 << 10, 1 << 10).t()})
    done = subprocess.run([sys.executable, "-c", CUT, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert re.fullmatch(r"the file is truncated: expected \d+ bytes at \d+, got \d+\n", done.stdout)


def test_tied_weights_are_two_tensors_and_say_so(tmp_path):
    weight = torch.randn(4, 3)
    found = opened(save(tmp_path, {"a": weight, "b": weight, "c": weight[:2]}), "torch-zip")
    tags = {path[0]: spec.tags for path, spec in found.manifest.tensors.items()}
    assert tags == {"a": None, "b": {"shares": "a"}, "c": None}


def test_big_endian_storages(tmp_path):
    tensors = {"w": torch.randn(5, 6), "t": torch.randn(5, 6).T, "c": torch.randn(3, dtype=torch.complex64)}
    tensors["h"], tensors["i"] = torch.randn(7).to(torch.float16), torch.arange(9)
    plain, swapped = save(tmp_path, tensors), tmp_path / "big.pt"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(swapped, "w", zipfile.ZIP_STORED) as target:
        words = {"w": 4, "t": 4, "c": 4, "h": 2, "i": 8}
        for index, width in enumerate(words.values()):
            name = f"model/data/{index}"
            target.writestr(name, np.frombuffer(source.read(name), f"<u{width}").byteswap().tobytes())
        target.writestr("model/byteorder", "big")
        for name in ("model/data.pkl", "model/version"):
            target.writestr(name, source.read(name))
    found = opened(swapped, "torch-zip")
    for name, tensor in tensors.items():
        assert canonical(found, (name,)) == as_bytes(tensor), name


def test_a_trainer_dict(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    value = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "args": argparse.Namespace(lr=0.5, name="run"),
        "parameter": model.weight,
        "epoch": 7,
        "none": None,
        "nothing": {},
        "shape": torch.Size([2, 3]),
        "dtype": torch.float16,
        "raw": b"\xff\x00",
        "seen": {1, 2},
        "device": torch.device("cpu"),
        3: "three",
    }
    found = opened(save(tmp_path, value), "torch-zip").manifest
    assert found.kind == "train-state"
    assert canonical(
        opened(tmp_path / "model.pt", "torch-zip"), ("optimizer", "state", "0", "exp_avg")
    ) == as_bytes(optimizer.state_dict()["state"][0]["exp_avg"])
    assert found.values["args", "name"] == "run"
    assert found.values["epoch",] == 7
    assert found.values["3",] == "three"
    assert found.values["optimizer", "param_groups", "0", "betas", "1"] == 0.999
    assert ("optimizer", "param_groups") in found.lists
    assert found.empties["none",] == "none"
    assert found.empties["nothing",] == "dict"
    assert found.values["shape", "0"] == 2
    assert found.values["dtype",] == "torch.float16"
    assert found.values["raw",] == "\xff\x00"
    assert found.values["seen", "1"] == 2
    assert found.values["device",] == "cpu"
    types = found.custom["pickle"]["types"]
    assert types == {
        "args": "argparse.Namespace",
        "optimizer/param_groups/0/betas": "tuple",
        "shape": "torch.Size",
        "dtype": "global",
        "raw": "bytes",
        "seen": "set",
        "device": "torch.device",
    }
    assert found.custom["pickle"]["keys"] == {"3": 3, "optimizer/state/0": 0, "optimizer/state/1": 1}


def test_a_bare_tensor_has_the_empty_path(tmp_path):
    found = opened(save(tmp_path, torch.ones(3)), "torch-zip")
    assert set(found.manifest.tensors) == {()}
    assert canonical(found, ()) == as_bytes(torch.ones(3))


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"a": 1}, NotACheckpointError),
        ({"s": torch.eye(3).to_sparse()}, HostileError),
        ({"n": np.ones(3), "t": torch.ones(2)}, UnsupportedError),
        ({"c": torch.ones(2, dtype=torch.complex64).conj()}, UnsupportedError),
        ({"f4": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, UnsupportedError),
        ({"d": collections.UserDict(a=1)}, HostileError),
        ({1.5: torch.ones(1)}, UnsupportedError),
        ({(1, 2): torch.ones(1)}, UnsupportedError),
        ({1: torch.ones(1), "1": torch.ones(2)}, CorruptError),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, value, error):
    with pytest.raises((error, UnsupportedError) if error is HostileError and "s" in value else error):
        opened(save(tmp_path, value), "torch-zip")


def test_an_archive_of_something_else_is_not_claimed(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.ones(3))
    assert find_format("torch-zip").detect(Glimpse(locate(tmp_path / "a.npz"))) is None
    shutil.copy(save(tmp_path, {"a": torch.ones(2)}), tmp_path / "model.safetensors")
    assert find_format("safetensors").detect(Glimpse(locate(tmp_path / "model.safetensors"))) is None


def rewritten(source: Path, target: Path, **members: bytes) -> Path:
    """The same archive with some members changed or added."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            new.writestr(name, members.pop(name.removeprefix("model/"), None) or old.read(name))
        for name, data in members.items():
            new.writestr(f"model/{name}", data)
    return target


TENSOR = (
    b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\n"
    b"FloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ%s\x89ccollections\nOrderedDict\n)RtRs."
)


@pytest.mark.parametrize(
    "view",
    [
        b"K\x01K\x04\x85K\x01\x85",  # one element too far
        b"K\x00K\x02K\x02\x86K\x04K\x01\x86",  # stride beyond the end
        b"K\x00J\xff\xff\xff\xff\x85K\x01\x85",  # negative extent
        b"K\x00K\x02K\x02\x86K\x01\x85",  # ranks differ
    ],
)
def test_views_outside_their_storage(tmp_path, view):
    source = save(tmp_path, {"a": torch.ones(4)})
    with pytest.raises(CorruptError):
        opened(rewritten(source, tmp_path / "b.pt", **{"data.pkl": TENSOR.replace(b"%s", view)}), "torch-zip")


def test_a_stride_of_zero_cannot_claim_terabytes(tmp_path):
    source = save(tmp_path, {"a": torch.ones(4)})
    view = b"K\x00\x8a\x06\x00\x00\x00\x00\x00\x01\x85K\x00\x85"
    with pytest.raises(HostileError, match="claim"):
        opened(rewritten(source, tmp_path / "b.pt", **{"data.pkl": TENSOR.replace(b"%s", view)}), "torch-zip")


def test_members_are_what_they_seem(tmp_path):
    source = save(tmp_path, {"a": torch.ones(4)})
    assert canonical(opened(rewritten(source, tmp_path / "ok.pt"), "torch-zip"), ("a",)) == as_bytes(
        torch.ones(4)
    )
    with pytest.raises(CorruptError, match="bytes"):
        opened(rewritten(source, tmp_path / "short.pt", **{"data/0": b"123"}), "torch-zip")
    with pytest.raises(HostileError, match="2 pickles"):
        opened(rewritten(source, tmp_path / "two.pt", **{"x/data.pkl": b"N."}), "torch-zip")
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(tmp_path / "ok.pt", "a") as archive:
        archive.writestr("model/data/0", b"0" * 16)
    with pytest.raises(HostileError, match="duplicate zip member"):
        opened(tmp_path / "ok.pt", "torch-zip")


def test_a_local_header_of_another_member(tmp_path):
    path = save(tmp_path, {"a": torch.ones(4)})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"model/data/0", b"model/data/1", 1))
    with pytest.raises(HostileError, match="local header"):
        opened(path, "torch-zip")


def test_a_flipped_bit_of_the_pickle(tmp_path):
    path = save(tmp_path, {"name": torch.ones(4)})
    path.write_bytes(path.read_bytes().replace(b"\x04\x00\x00\x00name", b"\x04\x00\x00\x00nbme", 1))
    with pytest.raises(CorruptError, match="checksum"):
        opened(path, "torch-zip")


def test_a_small_pickle_of_a_huge_tree(tmp_path):
    """A list that holds the list below twice, sixty times over."""
    source = save(tmp_path, {"a": torch.ones(4)})
    laughs = b"]q\x05" + b"".join(b"0]h\x05ah\x05aq\x05" for _ in range(60))
    data = TENSOR.replace(b"%s", b"K\x00K\x04\x85K\x01\x85")[:-1] + b"X\x01\x00\x00\x00b" + laughs + b"s."
    began = time.process_time()
    with pytest.raises(HostileError, match="tree"):
        opened(rewritten(source, tmp_path / "b.pt", **{"data.pkl": data}), "torch-zip")
    assert time.process_time() - began < 5


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_archives_never_crash(data, tmp_path):
    kept, path = tmp_path / "kept.pt", tmp_path / "model.pt"
    if not kept.exists():  # once: what is mutated must not change from one example to the next
        value = {"a": torch.arange(6.0).reshape(2, 3).T, "b": [torch.ones(2), 3, {"c": "x"}]}
        save(tmp_path, value, kept.name)
    path.write_bytes(mutated(data, kept.read_bytes()))
    assert_ends_well(path, "torch-zip")


# Tensors of harmless kinds in a file of torch.save: read, or refused with the name of the class and a
# way.


torch_of_classes = pytest.importorskip("torch")


class Sub(torch_of_classes.Tensor):
    """A subclass that adds nothing."""


NAME = f"{Sub.__module__}.Sub"


def saved(tmp_path, value, *, legacy=False):
    file = tmp_path / "a.pt"
    torch_of_classes.save({"w": value}, file, _use_new_zipfile_serialization=not legacy)
    return file


def with_attribute(value):
    tensor = torch_of_classes.arange(6.0).reshape(2, 3)
    tensor.note = value
    return tensor


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        with_attribute("hello"), with_attribute({"a": [1, 2.0, None]}),
        torch_of_classes.nn.Buffer(torch_of_classes.arange(6.0).reshape(2, 3)),
        torch_of_classes.nn.Parameter(with_attribute(1)),
        torch_of_classes.nn.Buffer(torch_of_classes.arange(12.0).reshape(2, 6)[:, :3], persistent=False),
    ],
    ids=["attribute", "nested", "buffer", "parameter", "view"],
)  # fmt: skip
def test_a_dense_tensor_with_attributes_is_read(tmp_path, value, legacy):
    with wherry.open(saved(tmp_path, value, legacy=legacy)) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(("w",)), value.detach().numpy())


@pytest.mark.parametrize("legacy", [False, True])
def test_a_subclass_is_named_and_the_cure_reads_its_tensor(tmp_path, capfd, legacy):
    tensor = torch_of_classes.arange(6.0).reshape(2, 3)
    file = saved(tmp_path, tensor.as_subclass(Sub), legacy=legacy)
    assert wherry.detect(file).verdict == "unsupported"
    with pytest.raises(UnsupportedError, match=r"unsupported class of a tensor") as caught:
        wherry.convert(file, tmp_path / "never", to="orbax")
    assert NAME in caught.value.what
    assert f"--allow-opaque {NAME}" in (caught.value.cure or "")
    assert (
        typed(f"convert {file} {tmp_path / 'out'} --to orbax --allow-opaque {NAME}", tmp_path, capfd)[0] == 0
    )
    with wherry.open(tmp_path / "out") as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(("w",)), tensor.numpy())


def test_an_attribute_that_is_a_tensor_is_not_lost(tmp_path):
    with pytest.raises(UnsupportedError, match="attribute note is a tensor"):
        wherry.convert(
            saved(tmp_path, with_attribute([torch_of_classes.ones(2)])), tmp_path / "never", to="orbax"
        )


def test_a_class_of_the_interpreter_is_still_hostile(tmp_path):
    """Where a subclass is expected, another global than a class of tensors is refused as everywhere."""
    import zipfile

    file = saved(tmp_path, torch_of_classes.ones(3).as_subclass(Sub))
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(name, data.replace(f"c{Sub.__module__}\nSub\n".encode(), b"cposix\nsystem\n"))
    with pytest.raises(HostileError):
        wherry.convert(file, tmp_path / "never", to="orbax")


@pytest.mark.parametrize("legacy", [False, True])
def test_a_tuple_as_a_key_names_file_and_key(tmp_path, legacy):
    file = tmp_path / "keys.pt"
    torch_of_classes.save(
        {0: torch_of_classes.ones(2), (1, "a"): torch_of_classes.ones(3)},
        file,
        _use_new_zipfile_serialization=not legacy,
    )
    with pytest.raises(UnsupportedError) as caught:
        wherry.convert(file, tmp_path / "never", to="orbax")
    assert "(1, 'a')" in caught.value.what
    assert caught.value.uri == str(file)


def test_a_sharded_tensor_is_named_with_a_way(tmp_path):
    import torch.distributed as dist
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.metadata import ShardMetadata

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        value = torch_of_classes.ones(4, 2)
        shard = sharded_tensor.Shard(value, ShardMetadata([0, 0], [4, 2], "rank:0/cpu"))
        file = saved(tmp_path, sharded_tensor.init_from_local_shards([shard], 4, 2))
    finally:
        dist.destroy_process_group()
    with pytest.raises(UnsupportedError, match="ShardedTensor") as caught:
        wherry.convert(file, tmp_path / "never", to="orbax")
    assert "FULL_STATE_DICT" in (caught.value.cure or "")


# Torch archives below and beyond tensors: checksums, alignment, and objects of a class that are written
# again.


def saved_of_records(tmp_path, value) -> pathlib.Path:
    torch.save(value, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def test_a_flipped_bit_of_any_tensor_is_found_by_reading(tmp_path):
    """Whole storages by the CRC of their extent, views by that of their storage."""
    base = torch.arange(64.0).reshape(8, 8)
    path = saved_of_records(tmp_path, {"whole": base, "turned": (base + 1).T})
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
        path = saved_of_records(tmp_path, {"a": torch.arange(6.0), "t": torch.ones(2, 3).T})
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
        path = saved_of_records(tmp_path, {"a": torch.arange(7.0), "b": torch.arange(3)})
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
    "one", [dt.timedelta(days=1), dt.datetime(2024, 1, 1, tzinfo=dt.UTC), int, bytes(2_000_000)]
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
