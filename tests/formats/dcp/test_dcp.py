"""Reading PyTorch DCP: the corpus, what torch writes, and how chunks make up a tensor."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import wherry
from tests.support.formats import assert_as_expected, canonical, cases, expected, opened, place
from tests.support.ranks import two_ranks
from tests.support.torch import as_bytes, every_dtype, meta, save, torch
from wherry.integrations.formats.dcp.metadata import Chunk, in_order, uncovered_regions, with_elements
from wherry.mover.read import read_array, read_bytes

dcp = pytest.importorskip("torch.distributed.checkpoint")
metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
format_utils = pytest.importorskip("torch.distributed.checkpoint.format_utils")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("case", cases("dcp", "lingua"))
def test_corpus(case):
    found, row = opened(place(case), "dcp"), expected(case)
    assert_as_expected(found, row)
    assert (found.detection.kind, found.detection.step) == (row["kind"], row["step"])
    assert not list(found.reader.absent())
    nested = found.manifest.custom["planner_data"]
    for tensor in row["tensors"]:
        if "nested_path" in tensor:
            name = tensor["path"][0]
            assert [str(part) for part in nested.get(name, [name])] == [str(p) for p in tensor["nested_path"]]


@pytest.mark.parametrize(
    ("case", "writer"),
    [
        ("dcp-torch-2-0-1", "torch 2.0 to 2.2"),
        ("dcp-torch-2-3-1", "torch >= 2.3"),
        ("dcp-torch-2-6-0", "torch >= 2.4"),
        ("dcp-torch-2-8-0", "torch >= 2.7"),
        ("dcp-torch-2-13-0", "torch >= 2.9"),
    ],
)
def test_the_writer_by_evidence(corpus, case, writer):
    assert opened(place(case), "dcp").detection.writer == writer


def test_what_torch_writes(tmp_path):
    base = torch.randn(6, 8)
    tensors = every_dtype() | {
        "transposed": base.T,
        "slice": base[1:4, 2:6],
        "expanded": base[:, :1].expand(6, 5),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    state = {"model": tensors, "many": [torch.ones(2), {"x": torch.zeros(1)}], "pair": (torch.ones(3), 4)}
    state |= {"step": 12, "groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": ["a", "b"]}], "no": None}
    found = opened(save(state, tmp_path / "a"), "dcp")
    for name, tensor in tensors.items():
        spec = found.manifest.tensors[f"model.{name}",]
        assert (spec.shape, canonical(found, spec.path)) == (tuple(tensor.shape), as_bytes(tensor)), name
        assert read_bytes(found.reader, spec) == as_bytes(tensor)
    assert found.reader.access(found.manifest.tensors["model.transposed",]).extents is None
    assert canonical(found, ("many.1.x",)) == as_bytes(torch.zeros(1))
    assert canonical(found, ("pair", "0")) == as_bytes(torch.ones(3))  # a tuple is one object to torch
    values = found.manifest.values
    assert (values["step",], values["pair", "1"], values["groups.0.lr",]) == (12, 4, 0.5)
    assert (values["groups.0.betas", "1"], values["groups.0.params", "0"]) == (0.99, "a")
    assert found.manifest.empties["no",] == "none"
    assert found.manifest.custom["planner_data"]["groups.0.lr"] == ["groups", 0, "lr"]
    assert found.manifest.step == 12
    assert np.array_equal(
        read_array(found.reader, found.manifest.tensors["model.transposed",], (slice(2, 5), slice(1, 6))),
        base.T[2:5, 1:6].numpy(),
    )


def test_two_ranks(tmp_path):
    """Row, column and uneven sharding by DTensor, written by two processes."""
    script = """
        whole = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
        place = {"rows": Shard(0), "columns": Shard(1), "same": Replicate()}
        state = {name: distribute_tensor(whole, mesh, [one]) for name, one in place.items()}
        state["one"] = distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)])
        dcp.save(state, checkpoint_id=f"{folder}/a")
    """
    two_ranks(script, tmp_path)
    found = opened(tmp_path / "a", "dcp")
    whole = np.arange(42, dtype="f4").reshape(7, 6)
    for name in ("rows", "columns", "same"):
        assert canonical(found, (name,)) == whole.tobytes(), name
        spec = found.manifest.tensors[name,]
        raw = found.reader.access(spec).extents
        assert len(raw or ()) == {"rows": 2, "columns": 0, "same": 1}[name]
        assert np.array_equal(read_array(found.reader, spec, (slice(3, 5), slice(1, 5))), whole[3:5, 1:5])
    assert canonical(found, ("one",)) == as_bytes(torch.ones(1, 3))
    receipt = wherry.convert(tmp_path / "a", tmp_path / "b", to="dcp", lineage=False)
    assert receipt.source.weights_digest == receipt.target.weights_digest


def test_metadata_of_single_ranks(tmp_path):
    save({"a": torch.ones(3), "b": torch.zeros(2)}, tmp_path / "a")
    whole = meta(tmp_path / "a")
    for rank, name in enumerate(("a", "b")):
        part = metadata.Metadata({name: whole.state_dict_metadata[name]}, None, {})
        part.storage_data = {key: info for key, info in whole.storage_data.items() if key.fqn == name}
        (tmp_path / "a" / f"__{rank}.metadata").write_bytes(pickle.dumps(part))
    (tmp_path / "a" / ".metadata").unlink()
    found = opened(tmp_path / "a", "dcp")
    assert canonical(found, ("a",)) + canonical(found, ("b",)) == as_bytes(torch.ones(3)) + bytes(8)


def test_a_stale_file_of_a_wider_save_is_not_ours(tmp_path):
    save({"a": torch.ones(3)}, tmp_path / "a")
    (tmp_path / "a" / "__7_0.distcp").write_bytes(b"old")
    found = opened(tmp_path / "a", "dcp")
    assert {entry.name for entry in found.reader.members()} == {".metadata", "__0_0.distcp"}


@pytest.mark.parametrize(
    ("chunks", "ordered", "holes"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (2, 4))], True, 0),
        ([((0, 0), (4, 2)), ((0, 2), (4, 2))], False, 0),
        ([((0, 0), (1, 2)), ((0, 2), (1, 2)), ((1, 0), (3, 4))], True, 0),
        ([((0, 0), (2, 4)), ((3, 0), (1, 4)), ((2, 0), (0, 4))], False, 1),
        ([], False, 1),
    ],
)
def test_how_chunks_make_up_a_tensor(chunks, ordered, holes):
    found = with_elements([Chunk(*chunk) for chunk in chunks])
    assert in_order((4, 4), found) == ordered
    assert len(list(uncovered_regions((4, 4), found))) == holes


def test_objects_keep_their_classes_and_keys(tmp_path):
    """Dicts become items; inside a tuple, which is one object to torch, keys may be numbers."""
    state = {"a": torch.ones(2), "pair": ("x", {1: 2.5, None: (3, 4)}), "lists": [1, [2, (3,)]]}
    wherry.convert(save(state, tmp_path / "a"), tmp_path / "b", to="dcp", lineage=False)
    found = {"a": torch.zeros(2), "pair": None, "lists": None}
    dcp.load(found, checkpoint_id=str(tmp_path / "b"), no_dist=True)
    assert (found["pair"], found["lists"]) == (state["pair"], state["lists"])


def test_the_class_of_olmo_core_is_data(tmp_path):
    """Its writer has a class of its own for a path, an offset and a length; it is known by its exact name alone."""
    import dataclasses
    import pickle
    import sys
    import types

    import torch
    import torch.distributed.checkpoint as dcp

    state = {"model": {"w": torch.arange(12.0).reshape(3, 4)}, "optim": {"w": torch.ones(3)}}
    dcp.save(state, checkpoint_id=tmp_path / "step")
    name = "olmo_core.distributed.checkpoint.filesystem"
    modules = {".".join(name.split(".")[:depth]): types.ModuleType("m") for depth in range(1, 5)}
    kind = dataclasses.make_dataclass(
        "_StorageInfo", [("relative_path", str), ("offset", int), ("length", int)]
    )
    kind.__module__, modules[name]._StorageInfo = name, kind
    file = tmp_path / "step" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    stored = {
        key: kind(one.relative_path, one.offset, one.length) for key, one in metadata.storage_data.items()
    }
    metadata.storage_data = stored
    with pytest.MonkeyPatch.context() as patch:
        for module, found in modules.items():
            patch.setitem(sys.modules, module, found)
        data = pickle.dumps(metadata)
    file.write_bytes(data)
    assert wherry.detect(tmp_path / "step").verdict == "ok"
    with wherry.open(tmp_path / "step") as checkpoint:
        assert checkpoint.read(("model.w",)).tolist() == state["model"]["w"].tolist()
    file.write_bytes(data.replace(b"checkpoint.filesystem", b"checkpoint.otherwhere"))
    assert wherry.detect(tmp_path / "step").verdict == "malicious"
