"""Regions of one blob of az://, in Azurite: blocks of several workers, of which each may begin an upload of its own."""

from __future__ import annotations

import pytest

import wherry
from tests.support import buckets, store_rules
from tests.support.jobs import receipts, worker_named
from tests.support.large_files import MB, alone, job_of
from wherry.store.azure import AzureStore
from wherry.store.local_store import locate
from wherry.workers import records, tasks
from wherry.workers.commit import commit
from wherry.workers.job import opened_job
from wherry.workers.work import work

pytestmark = pytest.mark.slow
UNIT = 8 * MB  # a block of 8 MiB: the model of 20 MB has three units


@pytest.fixture(scope="module")
def container():
    """The URI of a container of Azurite; the environment of this process leads to it."""
    with buckets.az() as proxy, pytest.MonkeyPatch.context() as patch:
        buckets.create_bucket("az", proxy, "units")
        proxy.rules = store_rules.azure
        for name, value in buckets.variables("az", proxy.url).items():
            patch.setenv(name, value)
        yield "az://units"


def require_same(target, source, tmp_path, to):
    """Commit, and compare with what one process makes; nothing is left next to it."""
    [receipt] = commit(target).receipts
    one, file = alone(source, tmp_path, to)
    assert receipt.target.checkpoint_digest == one.target.checkpoint_digest
    assert locate(target).read_whole(1 << 30) == file.read_bytes()
    assert wherry.verify(target, level="digest").ok
    place = locate(target)
    assert list(place.store.uploads(place.parent.path)) == []
    assert {entry.name for entry in place.parent.entries()} <= {"out", "out.wherry.json"}
    return receipt


@pytest.mark.parametrize("to", ["safetensors", "torch-zip"])
def test_workers_send_the_blocks_of_one_blob(model, container, tmp_path, to):
    target = f"{container}/{to}/out"
    job = job_of(model, target, to, UNIT)
    assert len(job.units) == 3
    assert all(unit.region is not None for unit in job.units)
    report = work(target)
    assert len(report.made) == 3
    assert report.proved == ()
    with worker_named("another"):
        assert work(target).proved == ()  # blocks cannot be read before the blob is there
    receipt = require_same(target, model, tmp_path, to)
    assert (receipt.resumed_bytes == receipt.bytes_written) == (to == "safetensors")


def test_a_worker_that_begins_an_upload_too_late_removes_no_block_of_the_others(
    model, container, tmp_path, monkeypatch
):
    """On Azure an upload cannot be aborted without all others to the same blob."""
    target = f"{container}/late/out"
    job_of(model, target, unit=UNIT)
    real, calls = AzureStore.begin, []

    def begin(self, path, run):
        calls.append(path)
        if len(calls) == 1:
            make_unit(target, 1)  # by somebody who begins the upload meanwhile
        return real(self, path, run)

    with monkeypatch.context() as patch:
        patch.setattr(AzureStore, "begin", begin)
        work(target)
    assert len(calls) == 2
    assert len(receipts(target)) == 3
    receipt = require_same(target, model, tmp_path, "safetensors")
    assert receipt.resumed_bytes == receipt.bytes_written  # every block that was sent counts


def make_unit(target, number):
    with opened_job(target) as opened:
        unit = opened.units[number]
        claim = records.Claims(opened.records).take(opened.tasks[unit.number], opened.records.names())
        receipt = tasks.make_unit(opened, unit, claim)
        opened.records.create(receipt.name, receipt, claim.token)
