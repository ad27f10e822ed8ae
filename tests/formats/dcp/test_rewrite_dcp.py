"""Older torch reads newer metadata: `.metadata` is pickled anew, the data files go over, and torch itself loads it."""

from __future__ import annotations

import json
import pickle
import pickletools
import shutil
import sys

import pytest

import wherry
from tests.support.formats import canonical, opened
from tests.support.orbax import CORPUS, cases, expectation, needs_corpus
from tests.support.ranks import two_ranks
from tests.support.torch import as_bytes, every_dtype, meta, same, save, torch
from wherry.errors import IncompleteError, TargetExistsError, UnsupportedError, UsageError

dcp = pytest.importorskip("torch.distributed.checkpoint")
metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
CASES = [case for case in cases("dcp", "lingua") if expectation(case)["verdict"] == "ok"]
OLD = "torch.distributed._shard.sharded_tensor.metadata"


def of_torch_2_15(path, monkeypatch):
    """Properties of six fields, which torch before 2.15 cannot read."""
    kept = metadata.TensorProperties.__getstate__
    root = meta(path)
    monkeypatch.setattr(metadata.TensorProperties, "__getstate__", lambda one: (*kept(one), (1,)))
    (path / ".metadata").write_bytes(pickle.dumps(root))
    monkeypatch.undo()
    return path


def load(path, like):
    found = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
        for name, value in like.items()
    }
    dcp.load(found, checkpoint_id=str(path), no_dist=True)
    return found


def globals_of(path):
    """Every global that a pickle of protocol 2 names."""
    ops = pickletools.genops((path / ".metadata").read_bytes())
    return {value.replace(" ", ".") for opcode, value, _ in ops if opcode.name == "GLOBAL"}


def files(path):
    return {one.relative_to(path).as_posix(): one.read_bytes() for one in path.rglob("*") if one.is_file()}


@pytest.mark.parametrize("profile", ["", "=2.3", "=default"])
def test_a_save_of_torch_2_15_is_loaded_by_this_torch(tmp_path, monkeypatch, profile):
    state = every_dtype()
    source = of_torch_2_15(save(state, tmp_path / "a"), monkeypatch)
    with pytest.raises(BaseException, match="too many values to unpack"):  # torch raises no Exception here
        load(source, state)
    before = files(source)
    done = wherry.rewrite(source, tmp_path / "b", as_=f"for-torch{profile}")
    assert files(source) == before
    assert same(load(tmp_path / "b", state), state)
    assert sum(done.ways.values()) == sum(len(data) for name, data in before.items() if name != ".metadata")
    named = globals_of(tmp_path / "b")
    assert (f"{OLD}.TensorProperties" in named) is (profile != "=default")
    assert not {name for name in named if name.endswith(".StorageMeta")}
    assert done.receipt.source.weights_digest == done.receipt.target.weights_digest
    assert done.receipt.verification["tensors"] == len(state)
    assert wherry.verify(tmp_path / "b", level="digest").ok
    assert wherry.verify(tmp_path / "b", against=source).ok


def test_what_the_metadata_says_besides_is_kept(tmp_path, monkeypatch):
    state = {
        "model": {"a.b": torch.ones(2, 3), "list": [torch.ones(1), torch.zeros(2)]},
        "step": 7,
        "opt": {"lr": 0.5},
    }
    path = save(state, tmp_path / "a")
    shutil.copytree(path, tmp_path / "newer")
    source, root = of_torch_2_15(tmp_path / "newer", monkeypatch), meta(path)
    wherry.rewrite(source, tmp_path / "b", as_="for-torch=default")
    found = meta(tmp_path / "b")
    assert found.planner_data == root.planner_data
    assert found.state_dict_metadata.keys() == root.state_dict_metadata.keys()
    for name, one in root.state_dict_metadata.items():
        assert type(found.state_dict_metadata[name]) is type(one)
        assert getattr(found.state_dict_metadata[name], "chunks", None) == getattr(one, "chunks", None)
        assert getattr(found.state_dict_metadata[name], "properties", None) == getattr(
            one, "properties", None
        )
    placed = meta(path).storage_data
    assert {(key.fqn, key.offset, key.index): info for key, info in found.storage_data.items()} == {
        (key.fqn, key.offset, key.index): info for key, info in placed.items()
    }


@needs_corpus
@pytest.mark.parametrize("case", CASES)
def test_every_case_of_the_corpus(tmp_path, case):
    source = CORPUS / case / "checkpoint" / expectation(case)["uri"]
    if not (source / ".metadata").exists():
        pytest.skip("no .metadata: a consolidated checkpoint")
    name = source.name
    wherry.rewrite(source, tmp_path / name, as_="for-torch=2.3", lineage=False)
    first, second = wherry.detect(source), wherry.detect(tmp_path / name)
    assert (second.verdict, second.format, second.step, second.kind) == (
        "ok", first.format, first.step, first.kind,
    )  # fmt: skip
    rows = {tuple(row["path"]): row["sha256"] for row in expectation(case)["tensors"]}
    shown = json.loads(json.dumps(wherry.inspect(tmp_path / name, sha256=True).to_json()))["tensors"]
    found = {row["sha256"] for row in shown}
    assert {digest for digest in rows.values() if digest} <= found
    root = meta(tmp_path / name)  # the installed torch unpickles it
    assert {
        one.properties.layout for one in root.state_dict_metadata.values() if hasattr(one, "properties")
    } == {torch.strided}


def test_ranks_that_saved_without_collectives_get_one_metadata(tmp_path):
    script = """
        whole = torch.arange(42, dtype=torch.float32).reshape(7, 6)
        state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), f"of.{rank}": torch.full((2,), float(rank))}
        dcp.save(state, checkpoint_id=f"{folder}/a", use_collectives=False)
    """
    two_ranks(script, tmp_path)
    done = wherry.rewrite(tmp_path / "a", tmp_path / "b", as_="for-torch")
    assert [one.name for one in done.rewriting.ignored] == ["__0.metadata", "__1.metadata"]
    state = {"w": torch.arange(42.0).reshape(7, 6), "of.0": torch.zeros(2), "of.1": torch.ones(2)}
    assert same(load(tmp_path / "b", state), state)


def test_in_place_keeps_the_old_file(tmp_path, monkeypatch):
    state = every_dtype()
    source = of_torch_2_15(save(state, tmp_path / "a"), monkeypatch)
    before = files(source)
    done = wherry.rewrite(source, as_="for-torch", in_place=True)
    after = files(source)
    assert after[".metadata.before"] == before[".metadata"]
    assert set(after) == {*before, ".metadata.before", "wherry.json"}
    assert {name for name in before if after[name] != before[name]} == {".metadata"}
    assert same(load(source, state), state)
    assert done.receipt.options["in_place"] is True
    assert wherry.verify(source, level="digest").ok
    with pytest.raises(UsageError, match="already has this form"):
        wherry.rewrite(source, as_="for-torch", in_place=True)
    with pytest.raises(TargetExistsError, match="backup file already exists"):
        wherry.rewrite(source, as_="for-torch=default", in_place=True)
    assert files(source) == after


def test_zstd_items_are_refused_with_the_cure(tmp_path):
    extension = pytest.importorskip("torch.distributed.checkpoint._extension")
    pytest.importorskip("zstandard" if sys.version_info < (3, 14) else "compression.zstd")
    try:
        writer = dcp.FileSystemWriter(str(tmp_path / "a"), _extensions=[extension.ZStandard()])
        dcp.save({"a": torch.ones(64)}, storage_writer=writer, no_dist=True)
    except (TypeError, ImportError) as error:
        pytest.skip(f"this torch writes no zstd items: {error}")
    with pytest.raises(UnsupportedError, match="zstd") as caught:
        wherry.rewrite(tmp_path / "a", tmp_path / "b", as_="for-torch")
    assert "wherry convert" in caught.value.cure
    assert not (tmp_path / "b").exists()


def test_a_missing_data_file_is_found_first(tmp_path):
    source = save({"a": torch.ones(2)}, tmp_path / "a")
    next(source.glob("*.distcp")).unlink()
    for arguments in ({"target": tmp_path / "b"}, {"in_place": True}):
        with pytest.raises(IncompleteError, match="file not found"):
            wherry.rewrite(source, as_="for-torch", **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    assert sorted(path.name for path in source.iterdir()) == [".metadata"]


def test_stale_data_files_stay_behind(tmp_path):
    source = save({"a": torch.arange(3.0)}, tmp_path / "a")
    (source / "__7_0.distcp").write_bytes(b"of an older, wider save")
    (source / "notes.txt").write_text("a companion")
    done = wherry.rewrite(source, tmp_path / "b", as_="for-torch")
    assert [one.to_json() for one in done.rewriting.ignored] == done.receipt.ignored
    assert done.receipt.ignored == [{
        "path": "__7_0.distcp", "rule": "files", "what": "a file of another save",
        "reason": ".metadata does not name it",
    }]  # fmt: skip
    assert (tmp_path / "b" / "notes.txt").read_text() == "a companion"
    assert canonical(opened(tmp_path / "b", "dcp"), ("a",)) == as_bytes(torch.arange(3.0))


def test_an_unknown_profile(tmp_path):
    source = save({"a": torch.ones(2)}, tmp_path / "a")
    with pytest.raises(UsageError, match="invalid value for for-torch") as caught:
        wherry.rewrite(source, tmp_path / "b", as_="for-torch=1.0")
    assert "2.3" in caught.value.cure
