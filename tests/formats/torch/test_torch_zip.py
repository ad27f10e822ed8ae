"""Files of torch.save: the corpus, every kind of view, byte order, and archives made to deceive."""

from __future__ import annotations

import argparse
import collections
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

from tests.support.formats import (
    assert_as_expected,
    assert_ends_well,
    canonical,
    cases,
    either,
    expected,
    mutated,
    opened,
    place,
)
from tests.support.torch import as_bytes, torch
from wherry.errors import CorruptError, HostileError, NotACheckpointError, UnsupportedError
from wherry.formats.format import Glimpse
from wherry.formats.registry import find_format
from wherry.integrations.containers.flat import strides as flat_strides
from wherry.mover.read import read_array
from wherry.storage.location import Location
from wherry.storage.stores import locate


def save(tmp_path, value, name="model.pt") -> Path:
    path = tmp_path / name
    torch.save(value, path)
    return path


@pytest.mark.parametrize("case", cases("torch-zip"))
def test_corpus(case):
    found, row = opened(place(case), "torch-zip"), expected(case)
    assert_as_expected(found, row)
    assert found.detection.format_version == row["layout_version"]
    assert found.detection.kind == found.manifest.kind == row["kind"]


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
