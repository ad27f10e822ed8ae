"""Edge cases of exports: tied weights, overlapping parts, threads that cannot start, unpublished outcomes."""

from __future__ import annotations

import numpy as np
import pytest

import wherry
from tests.support.export import held, state_of
from wherry.core.tensorspec import TensorSpec
from wherry.errors import StorageError, UsageError
from wherry.live import run
from wherry.live.checkpoint import LiveReader
from wherry.live.snapshot import PlacedBox, Snapshot


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
