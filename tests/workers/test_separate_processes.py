"""Boxes and regions are read back by real processes that have not written them, and which of them has read what."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.families import LLAMA, SIZES, made
from tests.support.jobs import proofs, receipts
from tests.support.large_files import MB, large_file
from wherry.converter.plan import joint_moves
from wherry.core.request import TargetRequest, convert_request
from wherry.errors import IncompleteError, MismatchError
from wherry.families import load_family
from wherry.store.local_store import locate
from wherry.workers import convert_on
from wherry.workers.commit import commit
from wherry.workers.job import split
from wherry.workers.records import job_records

# What is converted to what: system, options, size of a unit.
REGIONS = ("safetensors", {}, 4 * MB)
ORBAX = ("orbax", {"data_file_size": "20MB", "chunks": "1x16"}, 20 * MB)
MAXTEXT = ("maxtext", {"data_file_size": "40MB"}, 40 * MB)


@pytest.fixture
def target(tmp_path):
    """A target on a file system."""
    return str(tmp_path / "out")


@pytest.fixture(
    params=[REGIONS, ORBAX, pytest.param(MAXTEXT, marks=pytest.mark.slow)], ids=lambda row: row[0]
)
def case(request, model, tmp_path, target):
    """The request of a conversion, and the size of its units."""
    to, options, unit = request.param
    source = {"safetensors": lambda _folder: model, "orbax": wide_tensor, "maxtext": llama}[to](tmp_path)
    return convert_request(str(source), [TargetRequest(target, to, options)], lineage=False), unit


def wide_tensor(folder):
    """A tensor that is stored by columns: a band of chunks is all of it, too large for one move."""
    path = folder / "model.safetensors"
    save_file({"w": np.random.default_rng(0).standard_normal((2048, 9216), "f4")}, path)
    return path


def llama(folder):
    """A Llama whose feed-forward kernels are above 64 MiB once its layers are stacked."""
    embed, ffn, layers = 512, 6144, 6
    sizes = {**SIZES, "embed": embed, "ffn": ffn, "layer": layers, "pair": 8}
    tensors = made(load_family("llama"), "huggingface", {}, sizes=sizes).tensors
    path = folder / "hf"
    path.mkdir()
    save_file(
        {name: array for (name,), array in tensors.items()}, path / "model.safetensors", {"format": "pt"}
    )
    config = {"hidden_size": embed, "intermediate_size": ffn, "num_hidden_layers": layers, "head_dim": 16}
    (path / "config.json").write_text(json.dumps({**LLAMA, **config}))
    return path


def start(target):
    """A worker: a process of its own."""
    line = [sys.executable, "-m", "wherry.cli", "work", target, "--json"]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(worker):
    """What a worker has done, once it has ended."""
    output, errors = worker.communicate(timeout=240)
    assert worker.returncode == 0, errors
    return json.loads(output)


def process(row):
    """The process that has left a record."""
    return int(re.match(r"process (\d+) on", row["worker"])[1])


def makers(target):
    """Number of each unit → who has made it."""
    return {row["unit"]: process(row) for row in receipts(target).values()}


def provers(target):
    """Number of each unit → who has read it back."""
    return {row["unit"]: process(row) for row in proofs(target).values()}


def require_result(receipt, request, tmp_path):
    """The result is that of one process."""
    [to] = request.targets
    one = wherry.convert(request.source.uri, tmp_path / "one", to=to.to, options=to.options, lineage=False)
    assert receipt.target.checkpoint_digest == one.target.checkpoint_digest
    assert receipt.source.checkpoint_digest == one.source.checkpoint_digest
    assert wherry.verify(to.uri, level="digest").ok


def flip(job):
    """Flip a bit in the largest file that was made; its size and its times stay."""
    path = large_file(job.records.folder.path)
    times, data = path.stat(), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_two_processes_read_back_what_a_third_has_made(case, target, tmp_path):
    request, unit = case
    job = split(request, unit)
    assert len(job.units) > 2
    maker = start(target)
    assert ended(maker)["proved"] == []
    workers = [start(target) for _ in range(2)]
    reports = [ended(worker) for worker in workers]
    pids = {worker.pid for worker in workers}
    assert makers(target) == dict.fromkeys(range(len(job.units)), maker.pid)
    assert set(provers(target).values()) <= pids
    assert set(provers(target)) == set(range(len(job.units)))
    assert sum(len(report["proved"]) for report in reports) == len(job.units)
    [receipt] = commit(target).receipts
    moves, plan = joint_moves([job.job.plan]), job.job.plan
    boxes = [path for path, source in plan.pairs.items() if moves.are_boxes(source)]
    shared = boxes or plan.pairs  # a stacked kernel may be neither boxes nor runs
    wanted = sum(plan.manifest.tensors[path].nbytes for path in shared)
    assert wanted > 10 * MB
    assert receipt.verification["bytes_by_workers"] > wanted - MB  # small tensors are left to the commit
    require_result(receipt, request, tmp_path)


def test_two_processes_find_a_bit_that_was_flipped_after_the_receipt(case, target):
    request, unit = case
    job = split(request, unit)
    ended(start(target))
    flip(job)
    for worker in [start(target) for _ in range(2)]:
        ended(worker)
    with pytest.raises((MismatchError, IncompleteError), match=r"differ|other bytes"):
        commit(target)
    assert not Path(target).exists()


@pytest.mark.slow
def test_an_engine_of_processes_shares_out_what_is_read_back(case, target, tmp_path):
    """Whoever has made a unit does not prove it."""
    request, unit = case
    made_by, proved_by = {}, {}

    def observe(progress):
        if progress.stage != "verify" or "job.json" not in job_records(locate(target)).names():
            return
        made_by.update(makers(target))
        proved_by.update(provers(target))

    [receipt] = convert_on(request, "processes:2", unit_bytes=unit, progress=observe).receipts
    processes = {*made_by.values(), *proved_by.values()}
    assert len(processes) == 2
    assert os.getpid() not in processes
    assert proved_by
    assert all(made_by[number] != pid for number, pid in proved_by.items())
    require_result(receipt, request, tmp_path)
