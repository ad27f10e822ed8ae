"""Store: steps of one run by number, the newest and the best, from nothing but what is committed."""

from __future__ import annotations

import numpy as np
import pytest

import wherry
from tests.support.object_stores import watched
from wherry.errors import CorruptError, NotFoundError, UnsupportedError, UsageError


def state_of(value):
    return {"params": {"w": np.full((4, 3), value, np.float32), "b": np.full(3, -value, np.float32)}}


@pytest.fixture(params=["orbax", "safetensors", "t5x-orbax", "huggingface"])
def store(request, tmp_path):
    options = {} if request.param in ("orbax", "t5x-orbax") else {"options": {"join": "."}}
    return wherry.Store(tmp_path / "run", to=request.param, family="none", **options)


def test_steps_newest_and_best(store, tmp_path):
    assert (store.steps(), store.latest(), store.best("loss")) == ([], None, None)
    for step, loss in ((10, 0.5), (20, 0.25), (30, float("nan")), (40, 0.25), (100, 0.75)):
        store.save(state_of(step), step, metrics={"loss": loss})
    store.save(state_of(110), 110)
    assert store.wait(60)
    assert store.steps() == [10, 20, 30, 40, 100, 110]
    assert store.latest() == 110
    assert (store.best("loss"), store.best("loss", "max"), store.best("other")) == (40, 100, None)
    assert store.metrics(20) == {"loss": 0.25}
    with wherry.open(store.at(40).uri) as checkpoint:
        found = next(path for path in checkpoint.manifest.tensors if "w" in path[-1])
        assert (checkpoint.read(found) == 40).all()
    (tmp_path / "run" / "step_120").mkdir()
    assert wherry.Store(tmp_path / "run", to=store.to, family="none").latest() == 110


def test_what_is_not_there_is_said(store):
    with pytest.raises(NotFoundError, match="step 3 not found"):
        store.at(3)
    with pytest.raises(UsageError, match="min or max"):
        store.best("loss", "least")
    with pytest.raises(NotFoundError, match="no saved step found"):
        store.restore(into=state_of(0))


def test_a_failed_save_does_not_count(store, monkeypatch):
    def full(*_arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("wherry.live.snapshot.Snapshot.take", full)
        assert "No space left" in str(store.save(state_of(1), 1).error)
    assert store.wait(10)
    assert store.steps() == []


def test_a_state_that_no_save_can_write_raises_at_once(store):
    with pytest.raises(UnsupportedError):
        store.save({"w": object()}, 1)
    assert store.wait(10)
    assert store.steps() == []


def test_restore_gives_back_what_was_saved(tmp_path):
    jax = pytest.importorskip("jax")
    store = wherry.Store(tmp_path / "run")
    truth = jax.tree.map(jax.numpy.asarray, state_of(7))
    store.save(truth, 7)
    store.save(jax.tree.map(lambda one: one * 2, truth), 8)
    store.wait(60)
    found = store.restore(into=jax.tree.map(jax.numpy.zeros_like, truth), step=7)
    assert found.step in (None, 7)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found.state, truth))


def _is_of_the_checkpoint(path):
    """Leases and journals are written as often as time passes."""
    return not path.endswith(".lease") and "/journal-" not in path


def test_a_step_in_a_store_that_was_killed_before_its_commit_does_not_count(store, tmp_path):
    """At every one of the last writes of the checkpoint; before them the sidecar is not even there."""
    run = wherry.Store(f"memory://killed{tmp_path}/run", to=store.to, **store.common)
    run.save(state_of(1), 1).result()
    writes = {"only": ("put_object", "copy_object", "assemble"), "at": _is_of_the_checkpoint}
    with watched(**writes) as calls:
        run.save(state_of(2), 2).result()
    for number, point in enumerate(range(max(len(calls) - 4, 1), len(calls) + 1)):
        step = 10 + number
        with watched(fatal=point, **writes):
            run.save(state_of(step), step).wait(60)
        assert run.latest() == 2, f"killed at call {point} of {len(calls)}"
        assert run.best("loss") is None
        with pytest.raises(NotFoundError):
            run.at(step)


@pytest.mark.parametrize("text", ["", "x", "***", "1,5"])
def test_a_metric_that_is_no_number_is_damage(text, tmp_path):
    store = wherry.Store(tmp_path / "run", to="orbax")
    store.save(state_of(1), 1, metrics={"loss": 0.5})
    assert store.wait(60)
    file = next((tmp_path / "run").rglob("wherry.json"))
    file.write_text(file.read_text().replace('"metric.loss": "0.5"', f'"metric.loss": "{text}"'))
    with pytest.raises(CorruptError, match=r"metric\.loss in the sidecar is"):
        store.metrics(1)
