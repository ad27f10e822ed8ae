"""`verify` and `audit` with an engine: what one process finds, whoever reads, and whoever dies meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import wherry
from tests.support.command import command
from tests.support.worker_pools import ImaginaryPool
from wherry.core.digest import LEAF, leaf_count
from wherry.core.request import SourceRequest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import StorageError, UsageError
from wherry.formats.checkpoint import open_source
from wherry.mover.hashing import hash_checkpoint
from wherry.prove.audit import audit
from wherry.workers import hash_on
from wherry.workers.hash_on import read_bytes, read_units

UNIT = 8 << 20
HANGS = ImaginaryPool.HANGS
MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of Orbax with a tensor of 30 MB in chunks that do not respect leaves, and small ones."""
    folder = tmp_path_factory.mktemp("model")
    random = np.random.default_rng(0)
    save_file({"big.w": random.random((5000, 1500), "f4"), "a.w": random.random(7, "f4"),
               "b.w": random.random((1000, 300), "f4")}, folder / "m.safetensors")  # fmt: skip
    wherry.convert(
        folder / "m.safetensors", folder / "out", to="orbax", options={"chunks": "3"}, lineage=False
    )
    return folder / "out"


class _Pool(ImaginaryPool):
    """Answers hold hashes, so they are larger than those about units of a job."""

    def submit(self, worker, title, function, *arguments):
        json.dumps(arguments)
        return super().submit(worker, title, lambda *_: json.loads(json.dumps(function(*arguments))))


@pytest.fixture
def pools(monkeypatch):
    """Verifications use this pool, in place of one of an engine."""
    monkeypatch.setattr("tests.support.worker_pools.MOST_BYTES", 1 << 20)

    def use(pool):
        class Opened:
            def __enter__(self):
                return pool

            def __exit__(self, *_):
                return None

        monkeypatch.setattr(hash_on, "pool_of", lambda _on: Opened())
        return pool

    return use


def hashed(model, on="dask", unit=UNIT, algorithm="blake3"):
    source = SourceRequest(str(model))
    with open_source(source) as checkpoint:
        expected = hash_checkpoint(checkpoint, algorithm, memory=64 * MIB)
        how = hash_on.ReadOrder(hash_on.source_of(source), unit, algorithm, 64 * MIB)
        return hash_on.hash_on(checkpoint, how, on), expected


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
def test_workers_find_the_digests_of_one_process(model, pools, algorithm):
    pool = pools(_Pool("abc"))
    found, expected = hashed(model, algorithm=algorithm)
    assert found == expected
    assert sum(title.startswith("unit-") for _worker, title in pool.calls) > 3


def test_what_a_lost_worker_was_reading_goes_to_another(model, pools):
    def faults(worker, _function, _call):
        if worker == "b" and pool.calls[-1][1].startswith("unit-"):
            pool.workers.discard("b")
            return HANGS
        return None

    pool = pools(_Pool("ab", faults))
    found, expected = hashed(model)
    assert found == expected
    assert len(pool.units_of("b")) == 1


@pytest.mark.parametrize("field", ["version", "units", "state"])
def test_a_worker_that_sees_something_else_is_left_out(model, pools, monkeypatch, caplog, field):
    real = hash_on.prove_reading

    def faults(worker, _function, call):
        return {**real(pool.reading), field: "other"} if worker == "b" and call <= 2 else None

    pool = pools(_Pool("ab", faults))
    pool.reading = asdict(hash_on.ReadOrder(SourceRequest(str(model)), UNIT, "blake3", 64 * MIB))
    found, expected = hashed(model)
    assert found == expected
    assert pool.units_of("b") == []
    assert "worker b is left out: it " in caplog.text


def test_a_worker_that_answers_with_other_hashes_does_not_get_through(model, pools):
    """Its hashes are not those of the record."""
    pool = pools(_Pool("a"))
    real = hash_on.read_unit

    def lies(*arguments):
        answer = real(*arguments)
        return {**answer, "hashes": ["AAAA" + text[4:] for text in answer["hashes"]]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hash_on, "read_unit", lies)
        outcome = wherry.verify(model, level="digest", on="dask:1", unit=UNIT)
    assert outcome.verdict == "altered"
    assert pool.units_of("a")


def test_damage_that_workers_find_is_the_verdict_of_one_process(model, pools, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    pools(_Pool("ab"))
    assert wherry.verify(copy, level="digest", on="dask:2", unit=UNIT).ok
    file = max((copy / "d").iterdir(), key=lambda path: path.stat().st_size)
    stat = file.stat()
    with file.open("r+b") as opened:
        opened.seek(20 * MIB)
        opened.write(b"damage")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    alone = wherry.verify(copy, level="digest")
    spread = wherry.verify(copy, level="digest", on="dask:2", unit=UNIT)
    assert spread.verdict == alone.verdict == "altered"
    assert spread.failed == alone.failed
    assert spread.failed[0].leaf is not None


def test_a_worker_that_is_wrong_about_damage_is_not_believed(model, pools):
    pool = pools(_Pool("a"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hash_on, "read_unit", lambda *_: {"hashes": None, "seconds": 0.1})
        found, expected = hashed(model)
    assert found == expected
    assert pool.units_of("a")


def test_without_workers_there_is_no_verdict(model, pools, monkeypatch):
    monkeypatch.setenv("WHERRY_WORKER_WAIT", "0.1")
    pools(_Pool(""))
    with pytest.raises(StorageError, match="no worker can make units"):
        wherry.verify(model, level="digest", on="dask:1")


def test_processes_of_this_machine_read_and_one_that_is_killed_is_replaced(model, monkeypatch, caplog):
    real, killed = hash_on.child.child_process, []

    def started(*arguments, **more):
        opened = real(*arguments, **more)

        class Killing:
            def __enter__(self):
                child = opened.__enter__()
                if more["purpose"].startswith("unit-") and not killed:
                    killed.append(child.pid)
                    os.killpg(child.pid, signal.SIGKILL)
                return child

            def __exit__(self, *what):
                return opened.__exit__(*what)

        return Killing()

    monkeypatch.setattr(hash_on.child, "child_process", started)
    outcome = wherry.verify(model, level="digest", on="processes:2", unit=16 * MIB)
    assert outcome.ok
    assert len(killed) == 1
    assert "was lost while it wrote unit" in caplog.text


@pytest.mark.slow
def test_a_dask_cluster_reads(model):
    outcome = wherry.verify(model, level="digest", on="dask:2", unit=UNIT)
    assert outcome.ok
    assert outcome.nbytes > 3 * UNIT


def test_the_command_reads_with_an_engine(model):
    done = command(
        "verify", str(model), "--level", "digest", "--on", "processes:2", "--unit", "32MiB", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ok"]


def test_an_audit_reads_with_an_engine(model, pools, tmp_path):
    target = tmp_path / "out"
    wherry.convert(model, target, to="orbax")
    pool = pools(_Pool("ab"))
    report = audit([str(tmp_path)], level="digest", on="dask:2", unit=UNIT)
    assert report.exit_code == 0
    assert [row.level for row in report.checkpoints if row.uri == str(target)] == ["digest"]
    assert len([title for _worker, title in pool.calls if title.startswith("unit-")]) > 3


@pytest.mark.parametrize(
    "more", [{"level": "present"}, {"level": "digest", "against": "x"}, {"level": "digest", "on": "spark"}]
)
def test_an_engine_is_refused_where_it_would_not_read(model, more):
    with pytest.raises(UsageError):
        wherry.verify(model, **{"on": "processes:2", **more})
    with pytest.raises(UsageError, match="--on requires level digest"):
        audit(on="processes:2")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be loaded
@given(
    st.lists(st.tuples(st.integers(0, 40 * MIB), st.integers(0, 90 * MIB)), max_size=20),
    st.integers(1, 64 * MIB),
)
def test_every_leaf_is_read_by_one_unit(tensors, unit):
    """Also of tensors in large chunks, which are read by one worker."""
    specs = {}
    for number, (size, chunk) in enumerate(tensors):
        path = (f"t{number}",)
        specs[path] = TensorSpec(path, (size,), "uint8", (chunk,) if chunk else None)
    units = read_units(specs, unit)
    read = [(path, leaf) for one in units for path, rows in one.items() for leaf in rows]
    assert sorted(read) == sorted(
        (path, leaf) for path, spec in specs.items() for leaf in range(leaf_count(spec.nbytes))
    )
    assert sum(read_bytes(one, specs) for one in units) == sum(spec.nbytes for spec in specs.values())
    for one in units:
        leaves = sum(map(len, one.values()))
        assert leaves <= max(unit // LEAF, 1) or len(one) == 1
