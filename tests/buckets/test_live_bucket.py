"""Live states in buckets: exported, restored, and the steps of a run, also when a save is interrupted."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import wherry
from tests.support.bucket_fixtures import on_both
from tests.support.buckets import forget_filesystems
from tests.support.faults import ALWAYS, status
from wherry.errors import StorageError
from wherry.store.waits import RetryPolicy
from wherry.target.clean import clean

BUSY = status(503, b"busy")


def jax_states():
    jax = pytest.importorskip("jax", reason="jax is not installed")
    truth = {"params": {"w": jax.numpy.arange(6000.0).reshape(60, 100), "b": jax.numpy.ones(100)}}
    return truth, jax.tree.map(jax.numpy.zeros_like, truth)


def torch_states():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    torch.manual_seed(0)
    truth = torch.nn.Linear(60, 100).state_dict()
    return truth, {name: torch.zeros_like(value) for name, value in truth.items()}


def leaves(state):
    return {
        name: leaves(value) if isinstance(value, dict) else np.asarray(value) for name, value in state.items()
    }


def same(one, other):
    return all(
        same(value, other[name]) if isinstance(value, dict) else np.array_equal(value, other[name])
        for name, value in one.items()
    )


def scaled(state, factor):
    return {
        name: scaled(value, factor) if isinstance(value, dict) else value * factor
        for name, value in state.items()
    }


@on_both("s3")
@pytest.mark.parametrize(
    ("states", "to"), [(jax_states, "orbax"), (torch_states, "orbax"), (torch_states, "dcp")]
)
def test_a_live_state_is_exported_to_a_bucket_and_restored(bucket, states, to):
    truth, empty = states()
    receipt = wherry.export(truth, f"{bucket.uri}/live/out", to=to).result(120)
    assert receipt.verification["ok"]
    assert wherry.verify(f"{bucket.uri}/live/out", level="digest").ok
    assert same(leaves(truth), leaves(wherry.restore(f"{bucket.uri}/live/out", into=empty).state))


@pytest.fixture
def quick(bucket, monkeypatch):
    """Retries that wait for milliseconds."""
    policy = partial(RetryPolicy, pause=0.01, longest_pause=0.05)
    monkeypatch.setattr("wherry.store.remote_store.RetryPolicy", policy)
    forget_filesystems()
    return bucket


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("states", "to"), [(jax_states, "orbax"), (torch_states, "dcp")])
def test_the_steps_of_a_run_in_a_bucket_and_a_save_that_is_interrupted(bucket, states, to):
    truth, empty = states()
    run = wherry.Store(f"{bucket.uri}/run", to=to)
    for step, loss in ((10, 0.5), (20, 0.25)):
        run.save(scaled(truth, step), step, metrics={"loss": loss}).result(120)
    bucket.requests()
    run.save(scaled(truth, 30), 30, metrics={"loss": 0.75}).result(120)
    count = len(bucket.requests())
    for after in (count // 3, count * 2 // 3, count - 12):
        bucket.proxy.inject(BUSY, ALWAYS, after=after)
        interrupted = run.save(scaled(truth, 40), 40, metrics={"loss": 0.125})
        assert interrupted.wait(120)
        bucket.proxy.clear()
        assert isinstance(interrupted.error, StorageError) == (run.latest() == 30), interrupted.error
        assert run.latest() in (30, 40)
        assert run.best("loss") == (40 if run.latest() == 40 else 20)
    if run.latest() == 30:
        run.save(scaled(truth, 40), 40, metrics={"loss": 0.125}).result(120)
    assert run.steps() == [10, 20, 30, 40]
    assert same(leaves(scaled(truth, 40)), leaves(run.restore(empty).state))
    assert same(leaves(scaled(truth, 10)), leaves(run.restore(empty, step=10).state))
    clean(f"{bucket.uri}/run", min_age=0)
    assert run.steps() == [10, 20, 30, 40]
