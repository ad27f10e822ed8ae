"""Steps of accelerate, and pieces of safetensors that every rank saves."""

from __future__ import annotations

import json
import subprocess
import time

import numpy as np
import pytest

import wherry
from tests.support.formats import assert_as_expected, canonical, expected, opened, place
from tests.support.generations import old_python
from tests.support.ranks import two_ranks
from tests.support.torch import save, torch
from wherry.errors import AmbiguousError, CorruptError, HostileError, IncompleteError, NotFoundError
from wherry.testing.readers import check_reader

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

STATES = {"exp_avg": torch.ones(2, 3), "exp_avg_sq": torch.ones(2, 3), "step": torch.tensor(1.0)}


@pytest.fixture
def step(tmp_path):
    """A step as `save_state` of accelerate writes it with sharded state dicts, by torch's own DCP."""
    path = tmp_path / "run" / "checkpoint-7"
    save({"model": {"l.weight": torch.ones(2, 3), "l.bias": torch.zeros(2)}}, path / "pytorch_model_fsdp_0")
    for number in (0, 1):
        save({"optimizer": {"state": {"l.weight": STATES}}}, path / f"optimizer_{number}")
    torch.save({"last_epoch": 1}, path / "scheduler.bin")
    torch.save({"step": 1}, path / "random_states_0.pkl")
    (path / "trainer_state.json").write_text("{}")
    return path


def names(found):
    return sorted(path[0] for path in found.manifest.tensors)


@pytest.mark.parametrize("of_run", [False, True])
def test_the_model_is_meant_and_the_others_are_named(step, of_run):
    uri = step.parent if of_run else step
    found = wherry.detect(uri)
    assert (found.uri, found.format, found.step, found.kind) == (
        str(step / "pytorch_model_fsdp_0"), "dcp", 7, "params",
    )  # fmt: skip
    seen = {one.file: one.seen for one in found.evidence}
    assert seen["../pytorch_model_fsdp_0"] == "the model of a step of accelerate's FSDP"
    assert seen["../optimizer_1"] == "optimizer state, not converted: one item of a step is converted"
    with wherry.open(uri) as opened:
        assert names(opened) == ["model.l.bias", "model.l.weight"]
        assert {entry.name: entry.what for entry in opened.ignored} == {
            "../optimizer_0": "optimizer state", "../optimizer_1": "optimizer state",
            "../scheduler.bin": "state of the learning rate schedule", "../random_states_0.pkl": "random states",
            "../trainer_state.json": "a file",
        }  # fmt: skip


def test_an_item_chooses_another(step, tmp_path):
    with wherry.open(step, item="optimizer_1") as opened:
        assert opened.detection.step == 7
        assert names(opened) == [f"optimizer.state.l.weight.{name}" for name in sorted(STATES)]
    assert wherry.detect(step.parent, item="optimizer_0").uri == str(step / "optimizer_0")
    with pytest.raises(NotFoundError, match="optimizer_2"):
        wherry.open(step, item="optimizer_2")
    receipt = wherry.convert(step, tmp_path / "out", to="safetensors", item="optimizer_0")
    assert {"../pytorch_model_fsdp_0", "../optimizer_1"} <= {row["path"] for row in receipt.ignored}


def test_the_model_is_converted_and_the_optimizer_needs_no_option(step, tmp_path):
    receipt = wherry.convert(step.parent, tmp_path / "out", to="safetensors")
    assert (receipt.target.tensors, receipt.source.step) == (2, 7)
    assert {row["path"] for row in receipt.ignored} >= {"../optimizer_0", "../optimizer_1"}


def test_discover_finds_one_checkpoint(step):
    assert [found.uri for found in wherry.discover(step.parent)] == [str(step / "pytorch_model_fsdp_0")]


def test_several_models_are_a_choice(step, tmp_path):
    save({"model": {"w": torch.ones(2)}}, step / "pytorch_model_fsdp_1")
    with pytest.raises(
        AmbiguousError, match="several models: pytorch_model_fsdp_0, pytorch_model_fsdp_1"
    ) as error:
        wherry.open(step)
    assert error.value.cure == "pass --item pytorch_model_fsdp_0"
    assert wherry.convert(step, tmp_path / "out", to="dcp", item="pytorch_model_fsdp_1").target.tensors == 1
    rows = wherry.plan(step / "pytorch_model_fsdp_1", tmp_path / "b", to="dcp").ignored
    [other] = [one for one in rows if one.name == "../pytorch_model_fsdp_0"]
    assert (other.what, other.weights) == ("another model of the step", False)
    assert "not part of the source" in other.reason


def test_a_step_without_its_model_is_incomplete(step):
    for path in (step / "pytorch_model_fsdp_0").iterdir():
        path.unlink()
    for uri in (step, step.parent):
        with pytest.raises(
            IncompleteError, match="pytorch_model_fsdp_0; the step has only optimizer_0, optimizer_1"
        ):
            wherry.open(uri)


def test_folders_of_these_names_without_torchs_files_are_no_step(tmp_path):
    (tmp_path / "a" / "optimizer_0").mkdir(parents=True)
    (tmp_path / "a" / "optimizer_0" / "notes.txt").write_text("")
    assert wherry.detect(tmp_path / "a").verdict == "not-a-checkpoint"


def test_a_model_of_hugging_face_next_to_them_comes_first(step):
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, step / "model.safetensors")
    found = wherry.detect(step)
    assert (found.format, found.uri) == ("huggingface", str(step))
    seen = {one.file: one.seen for one in found.evidence}
    assert seen["optimizer_0"].startswith("optimizer state, not converted")
    assert seen["pytorch_model_fsdp_0"].startswith("a folder with other weights, not converted")


def test_a_full_state_dict_of_fsdp(tmp_path):
    torch.save({"l.weight": torch.ones(2, 3)}, tmp_path / "pytorch_model_fsdp.bin")
    torch.save({"state": {0: STATES}, "param_groups": []}, tmp_path / "optimizer.bin")
    with wherry.open(tmp_path) as found:
        assert (found.detection.format, sorted(found.manifest.tensors)) == ("huggingface", [("l.weight",)])
        assert [entry.name for entry in found.ignored] == ["optimizer.bin"]


_ACCELERATE = """
import sys, types, torch
from torch.distributed.fsdp import fully_shard
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
model = fully_shard(torch.nn.Linear(4, 2), mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
PartialState(cpu=True)
accelerator = types.SimpleNamespace(num_processes=1, process_index=0)
for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    save_fsdp_model(plugin, accelerator, model, f"{sys.argv[1]}/{kind}")
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, f"{sys.argv[1]}/{kind}")
torch.save({k: v.full_tensor() for k, v in model.state_dict().items()}, f"{sys.argv[1]}/model.pt")
"""


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_what_accelerate_itself_saves(tmp_path, kind):
    subprocess.run([old_python("hub"), "-c", _ACCELERATE, tmp_path], check=True, capture_output=True)
    receipt = wherry.convert(tmp_path / kind, tmp_path / "out", to="safetensors")
    expected = torch.load(tmp_path / "model.pt", weights_only=True)
    with wherry.open(tmp_path / "out") as found:
        got = {path[0].removeprefix("model."): found.read(path) for path in found.manifest.tensors}
    assert {name: value.tolist() for name, value in got.items()} == {
        name: value.tolist() for name, value in expected.items()
    }
    assert any(row["what"] == "optimizer state" for row in receipt.ignored)


# Pieces of safetensors that torch's HuggingFaceStorageWriter saves from every rank.


torch_of_safetensors = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.checkpoint.hf_storage")
safetensors = pytest.importorskip("safetensors.numpy")

WHOLE = np.arange(9 * 6, dtype="f4").reshape(9, 6)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """Row and column sharding and a replicated tensor by two processes; returned read only."""
    folder = tmp_path_factory.mktemp("hf")
    script = """
        from torch.distributed.checkpoint import HuggingFaceStorageWriter
        whole = torch.arange(54, dtype=torch.float32).reshape(9, 6)
        place = {"rows": Shard(0), "columns": Shard(1), "same": Replicate()}
        state = {name: distribute_tensor(whole, mesh, [one]) for name, one in place.items()}
        writer = HuggingFaceStorageWriter(f"{folder}/a", save_distributed=True)
        dcp.save(state, storage_writer=writer)
    """
    two_ranks(script, folder)
    return folder / "a"


def test_pieces_make_up_tensors(pieces):
    detection = wherry.detect(pieces)
    assert (detection.format, detection.verdict) == ("dcp-safetensors", "ok")
    assert "huggingface" in detection.also
    assert any("inferred" in one.seen for one in detection.evidence)
    found = opened(pieces, "dcp-safetensors")
    for name, extents in {"rows": 2, "columns": None, "same": 1}.items():
        spec = found.manifest.tensors[name,]
        assert (spec.shape, canonical(found, spec.path)) == ((9, 6), WHOLE.tobytes())
        raw = found.reader.access(spec).extents
        assert (raw and len(raw)) == extents
    check_reader(found, regions=3)


def test_pieces_become_an_ordinary_folder(pieces, tmp_path):
    receipt = wherry.convert(pieces, tmp_path / "b", to="hf", family="none", lineage=False)
    assert receipt.source.weights_digest == receipt.target.weights_digest
    written = safetensors.load_file(tmp_path / "b" / "model.safetensors")
    assert all(np.array_equal(tensor, WHOLE) for tensor in written.values())


def shard(path, rank, tensors, offsets):
    path.mkdir(exist_ok=True)
    info = {name: {"saved_offsets": list(offset)} for name, offset in offsets.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
    file = path / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
    safetensors.save_file(tensors, file, metadata=metadata)


def test_a_missing_piece_is_never_zeros(tmp_path):
    for rank in range(3):
        rows = np.ascontiguousarray(WHOLE[3 * rank : 3 * rank + 3])
        shard(tmp_path / "a", rank + 1, {"w": rows}, {"w": (3 * rank, 0)})
    assert wherry.detect(tmp_path / "a").verdict == "ok"
    (tmp_path / "a" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    found = wherry.detect(tmp_path / "a")
    assert found.verdict == "incomplete"
    assert "3:6" in (found.reason or "")
    assert any("rank 2" in one.seen for one in found.evidence)
    with pytest.raises(IncompleteError):
        canonical(opened(tmp_path / "a", "dcp-safetensors"), ("w",))


def test_a_piece_that_is_a_link_to_nothing_is_named(tmp_path):
    for rank in range(2):
        rows = np.ascontiguousarray(WHOLE[3 * rank : 3 * rank + 3])
        shard(tmp_path / "a", rank + 1, {"w": rows}, {"w": (3 * rank, 0)})
    lost = tmp_path / "a" / "shard-00002-model-00001-of-00001.safetensors"
    lost.unlink()
    lost.symlink_to("nowhere")
    found = wherry.detect(tmp_path / "a")
    assert (found.verdict, found.reason) == ("incomplete", f"broken link: {lost.name}")


@pytest.mark.parametrize(
    "second",
    [({"w": WHOLE.astype("f8")}, {"w": (9, 0)}), ({"w": WHOLE}, {"w": (9,)}), ({"w": WHOLE}, {"w": (4, 0)})],
)
def test_pieces_that_contradict_each_other(tmp_path, second):
    shard(tmp_path / "a", 1, {"w": WHOLE}, {"w": (0, 0)})
    shard(tmp_path / "a", 2, *second)
    assert wherry.detect(tmp_path / "a").verdict == "corrupt"
    with pytest.raises(CorruptError):
        wherry.convert(tmp_path / "a", tmp_path / "b", to="hf", lineage=False)


def test_consolidated_by_torch_is_a_hugging_face_folder(corpus):
    row = expected("hf-dcp-writer-consolidated")
    assert_as_expected(opened(place("hf-dcp-writer-consolidated"), "huggingface"), row)
    assert wherry.detect(place("hf-dcp-writer-consolidated")).format == "huggingface"


def test_many_pieces_of_a_tensor_are_collected_in_linear_time():
    from wherry.integrations.containers.safetensors.header import HeaderEntry
    from wherry.integrations.formats import dcp_safetensors as shards
    from wherry.integrations.formats.dcp.metadata import Chunk
    from wherry.store.local_store import locate

    found, count, where = {}, 100_000, locate("/tmp")
    began = time.process_time()
    for at in range(count):
        shards._add(found, HeaderEntry("a", "U8", (1,), 0, 1), Chunk((at,), (1,)), where)
    assert time.process_time() - began < 5
    assert (found["a"].shape, len(found["a"].chunks)) == ([count], count)


def test_pieces_are_limited(tmp_path, monkeypatch):
    from wherry.integrations.formats import dcp_safetensors as shards

    monkeypatch.setattr(shards, "MOST_CHUNKS", 3)
    for at in range(4):
        stated = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": [at]}})}
        name = f"shard-{at + 1:05d}-model-00001-of-00001.safetensors"
        safetensors.save_file({"a": np.ones(1, "u1")}, tmp_path / name, metadata=stated)
        if at == 2:
            assert wherry.detect(tmp_path).verdict == "ok"
    with pytest.raises(HostileError, match="limit of 3 pieces"):
        wherry.open(tmp_path)
