"""The stream that torch.save wrote before 1.6: the corpus, views, damage, and what is only recognised."""

from __future__ import annotations

import argparse
import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wherry
from tests.support.formats import assert_ends_well, canonical, mutated, opened
from tests.support.torch import as_bytes, every_dtype, same, torch
from wherry.errors import CorruptError, NotACheckpointError, UnsupportedError
from wherry.integrations.containers.torch.archive import PROTOCOL, read_legacy
from wherry.store.local_store import locate
from wherry.store.location import Location
from wherry.store.remote_store import FsspecStore, remote_store


def save(tmp_path, value, name="model.pt", **options) -> Path:
    path = tmp_path / name
    torch.save(value, path, _use_new_zipfile_serialization=False, **options)
    return path


def test_every_dtype_and_view(tmp_path):
    base = torch.arange(60.0).reshape(6, 10)
    tensors = {
        **every_dtype(),
        "base": base,
        "turned": base.T,
        "part": base[2:4, 3:9:2],
        "spread": base[:, :1].expand(6, 4),
    }
    found = opened(save(tmp_path, tensors), "torch-legacy")
    assert set(found.manifest.tensors) == {(name,) for name in tensors}
    for name, tensor in tensors.items():
        assert canonical(found, (name,)) == as_bytes(tensor), name
    assert found.reader.access(found.manifest.tensors["turned",]).extents is None
    (extent,) = found.reader.access(found.manifest.tensors["base",]).extents
    assert extent.crc32 is None


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_any_pickle_protocol(tmp_path, protocol):
    path = save(tmp_path, {"w": torch.arange(5.0), "n": 3}, pickle_protocol=protocol)
    assert wherry.detect(path).format == "torch-legacy"
    with wherry.open(path) as found:
        assert found.read("w").tolist() == [0, 1, 2, 3, 4]
        assert found.manifest.values["n",] == 3


def test_it_becomes_what_torch_loads_today(tmp_path):
    value = {
        "model": every_dtype(),
        "optimizer": {"state": {140_000_000_000_001: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.99)},
        "args": argparse.Namespace(lr=0.1, words=["a"], inner=argparse.Namespace(x=None)),
        "epoch": 3,
    }
    wherry.convert(save(tmp_path, value), tmp_path / "new.pt", to="torch-zip", lineage=False)
    back = torch.load(tmp_path / "new.pt", weights_only=False)
    assert same(back["model"], value["model"])
    assert list(back["optimizer"]["state"]) == [140_000_000_000_001]
    assert back["optimizer"]["betas"] == (0.9, 0.99)
    assert back["args"] == value["args"]
    assert back["epoch"] == 3


def test_storages_that_are_views_of_another(tmp_path):
    """As torch before 0.4 wrote them: the sixth part of a persistent id names the other storage."""
    path = save(tmp_path, {"w": torch.arange(8.0)})
    data = path.read_bytes()
    old = b"K\x08Nt"  # the number of elements, no view
    assert data.count(old) == 1
    key = data[data.index(b"X", data.index(b"FloatStorage")) :]
    key = key[: 5 + key[1]]
    shape = data.index(b"K\x00K\x08\x85", data.index(old))
    changed = (
        data[:shape].replace(old, b"K\x08(" + key + b"K\x02K\x03tt") + b"K\x00K\x03\x85" + data[shape + 5 :]
    )
    path.write_bytes(changed)
    found = opened(path, "torch-legacy")
    assert canonical(found, ("w",)) == as_bytes(torch.arange(2.0, 5.0))


def test_damage(tmp_path):
    path = save(tmp_path, {"a": torch.arange(6.0), "b": torch.ones(3, dtype=torch.int64)})
    data = path.read_bytes()
    for cut in (len(data) - 1, len(data) - 30, 200, 40, 20):
        path.write_bytes(data[:cut])
        assert wherry.detect(path).verdict == "corrupt", cut
    path.write_bytes(data + b"\0")
    with pytest.raises(CorruptError, match="after the last storage"):
        opened(path, "torch-legacy")
    count = data.rindex((3).to_bytes(8, "little"), 0, len(data) - 24)
    path.write_bytes(data[:count] + (1 << 60).to_bytes(8, "little") + data[count + 8 :])
    with pytest.raises(CorruptError, match="elements"):
        opened(path, "torch-legacy")


def test_what_is_not_read_is_named(tmp_path):
    with pytest.raises(NotACheckpointError):
        opened(save(tmp_path, {"a": 1}), "torch-legacy")
    with pytest.raises(UnsupportedError, match="module"):
        opened(save(tmp_path, torch.nn.Linear(2, 2)), "torch-legacy")
    path = save(tmp_path, {"a": torch.ones(2)})
    data = path.read_bytes()
    old = b"M" + PROTOCOL.to_bytes(2, "little") + b"."
    path.write_bytes(data.replace(old, b"M" + (1002).to_bytes(2, "little") + b".", 1))
    with pytest.raises(UnsupportedError, match="1002"):
        opened(path, "torch-legacy")
    little = data.index(b"little_endian")
    true = data.index(b"\x88", little)
    path.write_bytes(data[:true] + b"\x89" + data[true + 1 :])
    with pytest.raises(UnsupportedError, match="big-endian"):
        opened(path, "torch-legacy")


def test_the_tar_of_old_is_recognised_and_refused(tmp_path):
    path = tmp_path / "old.pt"
    with tarfile.open(path, "w:") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            data = b"\x80\x02N."
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    found = wherry.detect(path)
    assert (found.format, found.format_version, found.verdict) == ("torch-legacy", "tar", "unsupported")
    with pytest.raises(UnsupportedError, match="tar"):
        wherry.open(path)


def test_a_remote_file_is_read_in_pages(tmp_path):
    path = save(tmp_path, {"a": torch.arange(600_000.0), "b": torch.ones(3).to(torch.bfloat16)})
    store = remote_store("memory")
    assert isinstance(store, FsspecStore)
    store.put("/legacy/model.pt", path.read_bytes())
    remote, local = read_legacy(Location(store, "/legacy/model.pt")), read_legacy(locate(path))
    assert {key: one.start for key, one in remote.placed.items()} == {
        key: one.start for key, one in local.placed.items()
    }
    with wherry.open("memory://legacy/model.pt") as found:
        assert found.read("b").astype("f4").tolist() == [1, 1, 1]


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_streams_never_crash(data, tmp_path):
    kept, path = tmp_path / "kept.pt", tmp_path / "model.pt"
    if not kept.exists():  # once: keys of storages are addresses, so no two files are of one length
        value = {"a": torch.arange(6.0).reshape(2, 3).T, "b": [torch.ones(2), 3, {"c": "x"}]}
        save(tmp_path, value, kept.name)
    path.write_bytes(mutated(data, kept.read_bytes()))
    assert_ends_well(path, "torch-legacy")
