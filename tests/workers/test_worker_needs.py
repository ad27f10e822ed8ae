"""A worker shows what it has before it takes a unit, whoever has started it."""

from __future__ import annotations

import sys

import pytest

from tests.support.jobs import claimed, made_job
from tests.support.worker_pools import ImaginaryPool, coordinated, job_of
from wherry.errors import MissingExtraError, StorageError
from wherry.workers import job as job_module
from wherry.workers import work as working
from wherry.workers.work import work


def test_a_worker_without_memory_for_a_unit_takes_none(source, target, monkeypatch):
    """Under Kubernetes and Slurm there is no coordinator that would leave it out."""
    made_job(source, target)
    monkeypatch.setattr(job_module, "available_memory", lambda: 1 << 20)
    with pytest.raises(
        StorageError, match=r"has 1\.0 MB of free memory; a unit needs 1\d\d\.\d MB"
    ) as caught:
        work(target)
    assert caught.value.retryable, "a pod is started again, maybe on another machine"
    assert claimed(target) == []
    monkeypatch.setattr(job_module, "available_memory", lambda: None)  # unknown
    assert len(work(target).made) == 6


@pytest.mark.parametrize("package", job_module._CODECS)
def test_a_worker_without_a_codec_says_which(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=f"this worker lacks the package {package}") as caught:
        job_module.require_able(None)
    assert f"pip install {package}`" in caught.value.cure


def test_a_worker_of_an_engine_without_a_codec_is_named_and_left_out(source, target, monkeypatch):
    def faults(worker, function, _call):
        if worker != "b" or function != "prove":
            return None
        token = next(name.split("-")[1] for name in made.records.names() if name.startswith("challenge"))
        with monkeypatch.context() as patch:
            patch.setattr(job_module, "_CODECS", ("a_codec_that_is_missing",))
            return working.prove(made.uri, token)

    made, pool = job_of(source, target), ImaginaryPool("ab", faults)
    found = coordinated(made, pool)
    assert pool.units_of("b") == []
    assert "lacks the package a_codec_that_is_missing" in found.left_out["b"]
