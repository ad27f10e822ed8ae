"""Export from a live state: a true copy, the engine's own plan and commit, and errors of storage kept in the handle."""

from __future__ import annotations

import json
import logging
import threading

import ml_dtypes
import numpy as np
import pytest

import wherry
from tests.support.export import held, state_of
from wherry.core import dtypes
from wherry.core.tensorspec import TensorSpec
from wherry.errors import StorageError, TargetExistsError, UnrepresentableError, UnsupportedError, UsageError
from wherry.lineage.lineage import show
from wherry.lineage.stale import stale
from wherry.live import run, snapshot
from wherry.live.checkpoint import LiveReader
from wherry.live.snapshot import Box, LiveTensor, Snapshot
from wherry.mover.read import read_array
from wherry.storage.stores import locate


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_snapshot_is_a_true_copy(tmp_path, monkeypatch, where):
    gate = threading.Event()
    convert = run.convert_opened
    monkeypatch.setattr(run, "convert_opened", lambda *a, **k: gate.wait(30) and convert(*a, **k))
    state, truth = state_of(), state_of()
    handle = wherry.export(state, tmp_path / "run" / "step", to="orbax", snapshot=where, step=12)
    assert not handle.done()
    assert [path.name.endswith(".spool") for path in tmp_path.iterdir()] == (
        [True] if where == "disk" else []
    )
    state["params"]["kernel"][...] = 0  # training goes on in place
    state["params"]["layers"][0][...] = 0
    gate.set()
    receipt = handle.result(60)
    found = held(tmp_path / "run" / "step")
    assert np.array_equal(found["params", "kernel"], truth["params"]["kernel"])
    assert np.array_equal(found["params", "layers", "0"], truth["params"]["layers"][0])
    assert found["params", "half"].dtype == ml_dtypes.bfloat16
    assert receipt.verification["ok"]
    assert (handle.step, receipt.target.step, receipt.source.kind) == (12, 12, "train-state")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_the_receipt_is_lineage_like_any_other(tmp_path):
    handle = wherry.export(state_of(), tmp_path / "a.npz", to="npz", options={"join": "."}, step=3,
                           meta={"run": "r1"}, name="llama")  # fmt: skip
    receipt = handle.result(60)
    assert receipt.source.uri.startswith("live://")
    assert receipt.source.uri.endswith("/llama@3")
    assert receipt.source.format == "live"
    tree = show(receipt.target.checkpoint_digest)
    assert [edge.source for edge in tree.edges] == [receipt.source.checkpoint_digest]
    with wherry.open(tmp_path / "a.npz") as checkpoint:
        assert checkpoint.detection.verdict == "ok"
    sidecar = json.loads((tmp_path / "a.npz.wherry.json").read_text())
    assert sidecar["manifest"]["origin"]["meta"] == {"run": "r1"}
    assert wherry.verify(tmp_path / "a.npz", level="digest").ok
    assert list(stale(tmp_path / "a.npz")) == []  # memory that is gone is no reason to do anything again


def test_only_params_and_the_states_own_step(tmp_path):
    state = {**state_of(), "step": np.int32(77), "name": "r", "nothing": None}
    handle = wherry.export(state, tmp_path / "p", to="orbax", only="params")
    receipt = handle.result(60)
    assert handle.step == receipt.target.step == 77
    assert {path[0] for path in held(tmp_path / "p")} == {"params"}
    whole = wherry.export(state, tmp_path / "w", to="orbax").result(60)
    assert whole.target.tensors == receipt.target.tensors + 2
    with wherry.open(tmp_path / "w") as checkpoint:
        assert checkpoint.manifest.values["name",] == "r"


@pytest.mark.parametrize(
    ("change", "expected", "words"),
    [
        ({"to": "npz"}, UnrepresentableError, "key path of"),
        ({"to": "nonsense"}, UsageError, "unknown format"),
        ({"snapshot": "tape"}, UsageError, "choose host or disk"),
        ({"colour": "red"}, UsageError, "colour"),
        ({"state": {"w": object()}}, UnsupportedError, "w"),
    ],
)
def test_a_request_that_can_never_be_fulfilled_raises_at_once(tmp_path, change, expected, words):
    arguments = {"state": state_of(), "uri": tmp_path / "t", "to": "orbax", **change}
    with pytest.raises(expected, match=words):
        wherry.export(**arguments)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_storage_is_in_the_handle_and_in_the_log(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.ERROR, "wherry.export"):
        handle = wherry.export(state_of(), tmp_path / "file" / "t", to="orbax")
        assert handle.wait(60)
    assert "file" in caplog.text
    with pytest.raises(StorageError):
        handle.result()


def test_an_existing_target_is_reported_before_anything_is_copied(tmp_path, monkeypatch):
    first = wherry.export(state_of(), tmp_path / "t", to="orbax").result(60)
    monkeypatch.setattr(Snapshot, "take", lambda *_: pytest.fail("copied"))
    again = wherry.export(state_of(1), tmp_path / "t", to="orbax")
    assert isinstance(again.error, TargetExistsError)
    same = wherry.export(state_of(), tmp_path / "t", to="orbax", if_exists="skip").result(60)
    assert same.already
    assert same.target.checkpoint_digest == first.target.checkpoint_digest


def test_a_failure_in_the_background_leaves_nothing(tmp_path, monkeypatch, caplog):
    def broken(*_, **__):
        raise StorageError("storage failed: No space left on device", cure="free some space")

    monkeypatch.setattr(run, "convert_opened", broken)
    ended = []
    handle = wherry.export(state_of(), tmp_path / "t", to="orbax", snapshot="disk", on_done=ended.append)
    assert handle.wait(30)
    assert ended == [handle]
    assert "free some space" in caplog.text
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(StorageError):
        handle.result()


def test_a_callback_that_fails_changes_nothing(tmp_path, caplog):
    def broken(_handle):
        raise ValueError("from the callback")

    assert wherry.export(state_of(), tmp_path / "t", to="orbax", on_done=broken).result(60)
    assert "ValueError: from the callback" in caplog.text


def test_memory_that_is_not_there_is_said_before_the_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "available_memory", lambda: 1000)
    handle = wherry.export(state_of(), tmp_path / "t", to="orbax")
    with pytest.raises(StorageError, match="not enough memory for a snapshot") as failure:
        handle.result()
    assert 'snapshot="disk"' in failure.value.cure
    assert wherry.export(state_of(), tmp_path / "t", to="orbax", snapshot="disk").result(60)


def test_result_has_a_bound(tmp_path, monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(run, "convert_opened", lambda *_, **__: gate.wait(30))
    handle = wherry.export(state_of(), tmp_path / "t", to="orbax")
    assert not handle.wait(0.01)
    with pytest.raises(TimeoutError, match="timed out"):
        handle.result(0.01)
    gate.set()
    assert handle.wait(30)


def boxes_of(value, cuts):
    """A tensor as a grid of boxes, in the given number of parts along each axis."""
    found = []
    for index in np.ndindex(*cuts):
        bounds = [
            (at * extent // parts, (at + 1) * extent // parts)
            for at, extent, parts in zip(index, value.shape, cuts, strict=True)
        ]
        part = np.ascontiguousarray(value[tuple(slice(a, b) for a, b in bounds)])
        found.append(
            Box(
                tuple(a for a, _ in bounds),
                part.shape,
                lambda part=part: memoryview(part.reshape(-1).view("u1")),
            )
        )
    return tuple(found)


@pytest.mark.parametrize("cuts", [(1, 1, 1), (4, 1, 1), (1, 3, 1), (1, 1, 5), (2, 3, 2)])
@pytest.mark.parametrize("where", ["host", "disk"])
def test_regions_of_sharded_tensors(tmp_path, cuts, where):
    value = np.arange(7 * 9 * 10, dtype=np.int16).reshape(7, 9, 10)
    spec = TensorSpec(("t",), value.shape, "int16")
    shot = Snapshot(tmp_path / "part" if where == "disk" else None)
    shot.take([LiveTensor(spec, boxes_of(value, cuts)[::-1])])
    reader = LiveReader({spec.path: spec}, shot.placed, "m")
    assert list(reader.absent()) == []
    assert (reader.access(spec).extents is not None) == (cuts[1:] == (1, 1))
    for region in [
        spec.whole,
        (slice(1, 6), slice(2, 3), slice(0, 10)),
        (slice(6, 7), slice(8, 9), slice(9, 10)),
    ]:
        assert np.array_equal(read_array(reader, spec, region), value[region])
    reader.close()
    shot.close()
    shot.close()
    assert not (tmp_path / "part").exists()


def test_a_share_that_is_missing_is_incomplete(tmp_path):
    value = np.arange(12, dtype=np.int16).reshape(3, 4)
    spec = TensorSpec(("t",), value.shape, "int16")
    shot = Snapshot(None)
    shot.take([LiveTensor(spec, boxes_of(value, (3, 1))[1:])])
    reader = LiveReader({spec.path: spec}, shot.placed, "m")
    assert [piece.reason for piece in reader.absent()] == ["the processes provided 8 of 12 elements"]
    shot.close()


def test_torch_states(tmp_path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 6, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    truth = {name: value.clone() for name, value in model.state_dict().items()}
    handle = wherry.export(
        {"model": model, "optim": optimizer}, tmp_path / "t", to="dcp", options={"join": "."}
    )
    optimizer.step()
    handle.result(60)
    found = held(tmp_path / "t")
    for name, value in truth.items():
        key = (f"model.{name}",)
        assert found[key].tobytes() == value.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), name
    assert any("exp_avg" in path[0] for path in found)
    transposed = {"w": torch.arange(12.0).reshape(3, 4).T}
    wherry.export(transposed, tmp_path / "v.safetensors", to="safetensors").result(60)
    assert np.array_equal(held(tmp_path / "v.safetensors")["w",], transposed["w"].numpy())


@pytest.mark.parametrize(("make", "words"), [
    (lambda torch: torch.ones(3, device="meta"), "on the meta device has no data"),
    (lambda torch: torch.eye(3).to_sparse(), "sparse"),
    (lambda torch: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "qint8"),
])  # fmt: skip
def test_torch_tensors_that_have_no_plain_bytes(tmp_path, make, words):
    torch = pytest.importorskip("torch")
    with pytest.raises((UnrepresentableError, UnsupportedError), match=words) as refused:
        wherry.export({"odd": make(torch)}, tmp_path / "t", to="dcp")
    assert "odd" in str(refused.value)


def test_a_hugging_face_model_from_a_torch_module(tmp_path):
    """Same names, another container: what transformers itself loads."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    config.save_pretrained(tmp_path / "config")
    handle = wherry.export(
        model, tmp_path / "lingua", to="lingua", system="huggingface", family="llama",
        config=str(tmp_path / "config" / "config.json"), step=4,
    )  # fmt: skip
    assert handle.result(60).lossless
    back = wherry.convert(tmp_path / "lingua", tmp_path / "hf", to="huggingface", options={}).target.uri
    loaded = transformers.LlamaForCausalLM.from_pretrained(back).eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, loaded(tokens).logits)


def test_live_places_are_names_only():
    place = locate("live://host/run@3")
    assert place.uri == "live://host/run@3"
    assert not place.exists()
    assert place.entries() == []
    with pytest.raises(StorageError, match="cannot write to live://"):
        place.put(b"")
    assert dtypes.is_known("bfloat16")
