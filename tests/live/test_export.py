"""Exports of training states: what is exported, edges, and states of each kind."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

import wherry
from tests.support.export import held, state_of
from wherry.core import dtypes
from wherry.core.tensorspec import TensorSpec
from wherry.errors import (
    StorageError,
    TargetExistsError,
    UnrepresentableError,
    UnsupportedError,
    UsageError,
    WherryError,
)
from wherry.integrations.live.export import _jax_bytes
from wherry.live import run, snapshot
from wherry.live.checkpoint import LiveReader
from wherry.live.snapshot import Box, LiveTensor, PlacedBox, Snapshot
from wherry.mover.read import read_array
from wherry.store.local_store import locate
from wherry.target.clean import clean
from wherry.trace.lineage import show
from wherry.trace.stale import stale


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


# Edge cases of exports: tied weights, overlapping parts, threads that cannot start, unpublished outcomes.


def test_tied_weights_are_copied_once_and_said_to_be_tied(tmp_path):
    torch = pytest.importorskip("torch")
    model = torch.nn.ModuleDict(
        {"embed": torch.nn.Embedding(64, 16), "head": torch.nn.Linear(16, 64, bias=False)}
    )
    model["head"].weight = model["embed"].weight
    sizes = []
    real = Snapshot._make_room

    def seen(self):
        sizes.append(self.nbytes)
        real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, "_make_room", seen)
        receipt = wherry.export(model, tmp_path / "t.safetensors", to="safetensors").result(60)
    assert sizes == [64 * 16 * 4]
    found = held(tmp_path / "t.safetensors")
    assert set(found) == {("embed.weight",), ("head.weight",)}
    truth = model["embed"].weight.detach().numpy()
    assert all(np.array_equal(value, truth) for value in found.values())
    assert receipt.warnings == ["head.weight and embed.weight are the same tensor; both are written"]
    with wherry.open(tmp_path / "t.safetensors") as checkpoint:
        again = type(model)(
            {"embed": torch.nn.Embedding(64, 16), "head": torch.nn.Linear(16, 64, bias=False)}
        )
        again["head"].weight = again["embed"].weight
        restored = wherry.restore(checkpoint.uri, into=again).state
    assert restored["head"].weight is restored["embed"].weight
    assert np.array_equal(restored["head"].weight.detach().numpy(), truth)


def test_parts_that_overlap_are_no_whole():
    spec = TensorSpec(("w",), (4,), "float32")
    placed = {("w",): (PlacedBox((0,), (2,), "f", 0), PlacedBox((0,), (2,), "f", 8))}
    assert [piece.reason for piece in LiveReader({spec.path: spec}, placed, "m").absent()] == [
        "two processes provided the same part"
    ]


def test_a_thread_that_cannot_start_is_a_failure_like_any_other(tmp_path, monkeypatch):
    from wherry.live import handle as export_handle

    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(export_handle.threading.Thread, "start", refuse)
    handle = wherry.export(state_of(), tmp_path / "a.npz", to="npz", options={"join": "."})
    assert handle.done()
    assert "start new thread" in str(handle.error)


@pytest.mark.parametrize("committed", [True, False])
def test_a_spool_is_leased_and_an_outcome_that_cannot_be_published_changes_nothing(
    tmp_path, monkeypatch, committed
):
    from wherry.live import shares

    real, leases = run.convert_opened, []

    def convert(*given, **named):
        leases.extend(tmp_path.glob(".wherry-*.spool/writer.lease"))
        if not committed:
            raise StorageError("the disk is full")
        return real(*given, **named)

    def refuse(*_given):
        raise StorageError("there is no space for the outcome")

    monkeypatch.setattr(run, "convert_opened", convert)
    monkeypatch.setattr(shares, "_put", refuse)
    handle = wherry.export(state_of(), tmp_path / "a.npz", to="npz", options={"join": "."}, snapshot="disk")
    assert handle.wait(60)
    assert len(leases) == 1
    assert (handle.error is None) is committed
    assert committed or handle.error.what == "the disk is full"
    assert not list(tmp_path.glob(".wherry-*"))


def test_a_process_exports_alone_what_others_do_not_have(tmp_path):
    torch = pytest.importorskip("torch")
    target = tmp_path / "stage-0.safetensors"
    receipt = wherry.export({"w": torch.ones(3)}, target, to="safetensors", alone=True).result(60)
    assert receipt.target.uri == str(target)
    assert np.array_equal(held(target)["w",], np.ones(3, np.float32))


@pytest.mark.parametrize("name", ["source", "targets"])
def test_an_export_has_neither_source_nor_targets(tmp_path, name):
    with pytest.raises(UsageError, match=f"unknown argument '{name}' of wherry.export"):
        wherry.export({"w": np.ones(3)}, tmp_path / "x.npz", to="npz", **{name: "s"}).result(60)


# Export of what frameworks really hold (boxes, NNX, PRNG keys), read again by their own library; and what
# it costs.


jax = pytest.importorskip("jax")

MEMORY = """
import resource, sys
import numpy as np
import wherry
from wherry.converter import plan
from wherry.ledger import record
from wherry.mover import carrier  # what every conversion imports
state = {f"w{n}": np.full((8 << 20,), n, np.float32) for n in range(8)}
np.zeros(1).view("u1"); wherry.export({"a": np.ones(3)}, sys.argv[1] + "/warm", to="orbax").result(60)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
wherry.export(state, sys.argv[1] + "/out", to="orbax", snapshot="disk", memory="32MiB").result(120)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def restored(folder, like):
    ocp = pytest.importorskip("orbax.checkpoint")
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, like)


def same(found, truth):
    assert jax.tree.structure(found) == jax.tree.structure(truth)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, truth))


def test_linen_boxes_come_back_through_orbax(tmp_path):
    linen = pytest.importorskip("flax.linen")
    box = linen.LogicallyPartitioned(jax.numpy.arange(12.0).reshape(3, 4), ("embed", "mlp"))
    truth = {"params": {"dense": {"kernel": box, "bias": jax.numpy.ones(4, "bfloat16")}}}
    wherry.export(truth, tmp_path / "boxed", to="orbax").result(60)
    same(restored(tmp_path / "boxed", truth), truth)
    with wherry.open(tmp_path / "boxed") as checkpoint:
        assert ("params", "dense", "kernel", "value") in checkpoint.manifest.tensors


def test_nnx_state_comes_back_through_orbax(tmp_path):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(1)))
    truth = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    wherry.export(nnx.state(model, nnx.Param), tmp_path / "nnx", to="orbax").result(60)
    with wherry.open(tmp_path / "nnx") as checkpoint:
        found = {path: checkpoint.read(path) for path in checkpoint.manifest.tensors}
    leaves = jax.tree_util.tree_leaves_with_path(truth)
    assert len(found) == len(leaves)
    for path, value in leaves:
        name = tuple(str(getattr(part, "key", getattr(part, "idx", part))) for part in path)
        held = next(one for key, one in found.items() if key[: len(name)] == name)
        assert np.array_equal(held, value), name


def test_a_typed_prng_key_is_its_key_data(tmp_path):
    key = jax.random.key(3)
    wherry.export({"rng": key, "w": jax.numpy.ones(2)}, tmp_path / "k", to="orbax").result(60)
    with wherry.open(tmp_path / "k") as checkpoint:
        assert np.array_equal(checkpoint.read(("rng",)), jax.random.key_data(key))


def test_a_donated_array_is_named(tmp_path):
    gone = jax.numpy.ones(3)
    gone.delete()
    with pytest.raises(WherryError, match="donated") as refused:
        wherry.export({"w": gone}, tmp_path / "t", to="orbax")
    assert "w" in str(refused.value)


def test_stand_ins_are_refused(tmp_path):
    with pytest.raises(WherryError, match="placeholder without elements"):
        wherry.export({"w": jax.ShapeDtypeStruct((3,), "float32")}, tmp_path / "t", to="orbax")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "float8_e4m3fn"])
def test_the_bytes_are_read_through_another_array_over_the_buffer(dtype, monkeypatch):
    """JAX keeps the host copy with the array that is read; on a GPU, `test_gpu` finds none with the state's own."""
    array, converted, real = jax.numpy.arange(6).astype(dtype).reshape(2, 3), [], np.asarray
    with monkeypatch.context() as patch:
        patch.setattr(
            np, "asarray", lambda value, *how, **more: converted.append(value) or real(value, *how, **more)
        )
        found = bytes(_jax_bytes(array))
    assert found == np.asarray(array).tobytes()
    assert converted
    assert not any(one is array for one in converted)
    scalar = jax.numpy.zeros((), dtype)
    assert bytes(_jax_bytes(scalar)) == np.asarray(scalar).tobytes()


def test_memory_stays_bounded_with_a_snapshot_on_disk(tmp_path):
    """256 MiB of state through a budget of 32 MiB."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert int(done.stdout.splitlines()[-1]) < 160


def test_what_a_killed_process_leaves_is_found_and_removed(tmp_path):
    spool = tmp_path / ".wherry-step.0123abcd.spool"
    spool.mkdir()
    left = Snapshot(spool / "part-0")
    assert list(wherry.discover(tmp_path)) == []
    rows = clean(tmp_path, min_age=0)
    assert [row.removed for row in rows] == [True]
    left.close()
    assert list(tmp_path.iterdir()) == []
