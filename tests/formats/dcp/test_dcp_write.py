"""Writing PyTorch DCP: what torch loads, there and back, resuming, reproducible bytes."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import wherry
from tests.support.formats import canonical, copy, create, opened, place
from tests.support.torch import as_bytes, every_dtype, meta, same, save, torch
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import (
    IncompleteError,
    UnrepresentableError,
)
from wherry.target.durable_move import DurableMove
from wherry.target.journal import open_journal

dcp = pytest.importorskip("torch.distributed.checkpoint")
metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
format_utils = pytest.importorskip("torch.distributed.checkpoint.format_utils")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def load(path, like: dict) -> dict:
    state = {
        name: torch.full_like(one, 0) if isinstance(one, torch.Tensor) else None for name, one in like.items()
    }
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state


def test_torch_save_to_dcp_and_back(tmp_path):
    tensors = every_dtype()
    torch.save(tensors, tmp_path / "a.pt")
    format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "a")
    receipt = wherry.convert(tmp_path / "a", tmp_path / "b", to="dcp", lineage=False)
    assert receipt.source.weights_digest == receipt.target.weights_digest
    format_utils.dcp_to_torch_save(tmp_path / "b", tmp_path / "b.pt")
    assert same(torch.load(tmp_path / "b.pt", weights_only=True), tensors)


@pytest.mark.parametrize("profile", ["default", "2.3"])
def test_equal_tensors_share_what_describes_them_but_not_what_a_loader_may_change(tmp_path, profile):
    torch.save({name: torch.ones(2, 3) for name in "abc"}, tmp_path / "a.pt")
    wherry.convert(tmp_path / "a.pt", tmp_path / "a", to="dcp", options={"for_torch": profile}, lineage=False)
    found = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    rows = list(found.state_dict_metadata.values())
    assert rows[0] == rows[1] == rows[2]
    assert len({id(row) for row in rows}) == len({id(row.chunks) for row in rows}) == 3
    assert len({id(row.properties) for row in rows}) == len({id(row.size) for row in rows}) == 1
    assert [key.fqn for key in found.storage_data] == [*found.state_dict_metadata] == [*"abc"]
    assert found.planner_data == {name: (name,) for name in "abc"}


@pytest.mark.parametrize("profile", ["default", "2.3"])
def test_torch_loads_what_we_wrote(tmp_path, profile):
    state = every_dtype() | {"lr": 0.5, "name": "ü", "list": [1, 2.5, None, "x"], "step": 3, "on": True}
    torch.save(state, tmp_path / "a.pt")
    options = {"for_torch": profile, "shard_size": "400B"}
    for name in ("one", "two"):
        wherry.convert(tmp_path / "a.pt", tmp_path / name, to="dcp", options=options, lineage=False)
    files = sorted(path.name for path in (tmp_path / "one").iterdir() if path.name != "wherry.json")
    assert len(files) > 3
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    found = load(tmp_path / "one", state)
    plain = {name for name, one in state.items() if not isinstance(one, torch.Tensor)}
    assert all(found.pop(name) == state.pop(name) for name in plain)
    assert same(found, state)
    old = "torch.distributed._shard.sharded_tensor.metadata"
    assert (old.encode() in (tmp_path / "one" / ".metadata").read_bytes()) == (profile == "2.3")


def test_nested_paths_survive(tmp_path):
    state = {"model": {"layers.0.w": torch.ones(2)}, "opt": [{"m": torch.zeros(3)}], "step": 4}
    wherry.convert(save(state, tmp_path / "a"), tmp_path / "b", to="dcp", lineage=False)
    assert meta(tmp_path / "b").planner_data == meta(tmp_path / "a").planner_data
    format_utils.dcp_to_torch_save(tmp_path / "b", tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert torch.equal(found["opt"][0]["m"], torch.zeros(3))
    assert (found["step"], list(found["model"])) == (4, ["layers.0.w"])


def test_there_and_back_through_every_container(tmp_path):
    tensors = {"a.weight": torch.randn(70, 9).bfloat16(), "b.weight": torch.arange(6), "s": torch.tensor(1.5)}
    torch.save(tensors, tmp_path / "0")
    digests = set()
    for number, to in enumerate(
        ["dcp", "safetensors", "dcp", "orbax", "dcp", "torch-zip", "orbax", "torch-zip"]
    ):
        receipt = wherry.convert(tmp_path / str(number), tmp_path / str(number + 1), to=to, lineage=False)
        digests |= {receipt.source.weights_digest, receipt.target.weights_digest}
    assert len(digests) == 1
    assert same(torch.load(tmp_path / "8", weights_only=True, mmap=True), tensors)


def test_resume_writes_only_the_rest(tmp_path):
    """The journal says what is done; a second writer on the same files must still commit right CRCs."""
    specs = [TensorSpec((name,), (5 << 20,), "uint8") for name in ("a", "b")]
    manifest = Manifest(tensors={spec.path: spec for spec in specs})
    data = {spec.path: np.random.default_rng(1).bytes(spec.nbytes) for spec in specs}
    spans = [(spec.path, span) for spec in specs for span in (Span(0, 3 << 20), Span(3 << 20, 5 << 20))]
    for part in (spans[:3], spans):
        journal = open_journal(tmp_path / "journal", {"plan": "p"})
        writer = create(tmp_path / "out", "dcp", manifest)
        for path, span in part:
            if not journal.has(path, span):
                writer.write(path, span, memoryview(data[path])[span.start : span.stop])
        writer.sync()
        journal.record(DurableMove(path, span, {}) for path, span in part)
        if part is spans:
            writer.finish()
        else:
            assert opened_or_none(tmp_path / "out") is None
        writer.close()
        journal.close()
    found = load(tmp_path / "out", {path[0]: torch.zeros(5 << 20, dtype=torch.uint8) for path in data})
    assert {(name,): as_bytes(tensor) for name, tensor in found.items()} == data
    whole = opened(tmp_path / "out", "dcp")
    assert all(canonical(whole, path) == data[path] for path in data)  # compares the CRC too


def opened_or_none(path):
    try:
        return opened(path, "dcp")
    except IncompleteError:
        return None


def test_companions_travel(tmp_path):
    save({"a.weight": torch.ones(3)}, tmp_path / "a")
    (tmp_path / "a" / "params.json").write_text("{}")
    wherry.convert(tmp_path / "a", tmp_path / "b", to="dcp", lineage=False)
    assert (tmp_path / "b" / "params.json").read_text() == "{}"
    assert [one.name for one in opened(tmp_path / "b", "dcp").manifest.companions] == ["params.json"]


def test_companions_in_folders_travel_and_states_of_others_do_not(tmp_path):
    source = tmp_path / "a"
    save({"w": torch.ones(4)}, source)
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    save({"w": torch.ones(4)}, source / "pytorch_model_fsdp_0")
    (source / "consolidated").mkdir()
    (source / "consolidated" / "params.json").write_text("{}")
    torch.save({"w": torch.ones(4)}, source / "consolidated" / "consolidated.pth")
    with pytest.raises(
        UnrepresentableError, match=r"consolidated \(a folder .*\), pytorch_model_fsdp_0 \(a folder"
    ):
        wherry.convert(source, tmp_path / "b", to="dcp", lineage=False)
    wherry.convert(source, tmp_path / "b", to="dcp", ignore=("others",), lineage=False)
    for name in "ab":
        companions = opened(tmp_path / name, "dcp").manifest.companions
        assert [one.name for one in companions] == ["1_Pooling/config.json"]
    assert wherry.verify(tmp_path / "b", level="digest").ok


def test_a_name_that_is_tensor_and_object(tmp_path):
    spec = TensorSpec(("a",), (2,), "int8")
    with pytest.raises(UnrepresentableError, match="leaf and a node"):
        create(tmp_path / "x", "dcp", Manifest(tensors={spec.path: spec}, values={("a", "b"): 1}))


def test_copies_of_the_corpus_load_in_torch(corpus, tmp_path):
    """FSDP2 by tensor parallelism: written anew as one chunk per tensor."""
    found = opened(place("dcp-tp2-fsdp2-w4-fp32"), "dcp")
    copy(found, tmp_path / "b", "dcp")
    described = meta(tmp_path / "b").state_dict_metadata
    like = {
        name: torch.zeros(one.size, dtype=one.properties.dtype)
        for name, one in described.items()
        if isinstance(one, metadata.TensorStorageMetadata)
    }
    state = {name: tensor.clone() for name, tensor in like.items()}
    dcp.load(state, checkpoint_id=str(tmp_path / "b"), no_dist=True, planner=flat_planner())
    assert all(as_bytes(state[name]) == canonical(found, (name,)) for name in like)


def flat_planner():
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    return DefaultLoadPlanner(flatten_state_dict=False)


def test_properties_of_torch_2_15(tmp_path, monkeypatch):
    """Six fields, as 2.15 writes them; torch 2.13 cannot read such a checkpoint, our rewrite of it can be."""
    path = save({"a": torch.ones(2)}, tmp_path / "a")
    kept = metadata.TensorProperties.__getstate__
    monkeypatch.setattr(metadata.TensorProperties, "__getstate__", lambda one: (*kept(one), (1,)))
    (path / ".metadata").write_bytes(pickle.dumps(meta(path)))
    monkeypatch.undo()
    assert opened(path, "dcp").detection.writer == "torch >= 2.15"
    wherry.convert(path, tmp_path / "b", to="dcp", lineage=False)
    assert same(load(tmp_path / "b", {"a": torch.ones(2)}), {"a": torch.ones(2)})
