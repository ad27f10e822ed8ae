"""The files of `infra/units` are what Kubernetes and Slurm take, and their commands make and commit a job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("yaml")

import yaml

import wherry
from tests.support.infra import INFRA
from tests.support.jobs import made_job, undisturbed
from tests.support.object_stores import leftover_names, model
from tests.support.processes import is_running
from wherry.errors import WherryError
from wherry.storage.stores import locate
from wherry.workers.commit import commit
from wherry.workers.records import TaskKind, claims_among, job_records, records_by_unit

MANIFEST = (INFRA / "units" / "kubernetes.yaml").read_text()
SLURM = INFRA / "units" / "slurm.sh"


def job_spec():
    return yaml.safe_load(MANIFEST)["spec"]


def container():
    (one,) = job_spec()["template"]["spec"]["containers"]
    return one


def test_the_manifest_is_a_valid_job_of_pods_with_numbers():
    validator = pytest.importorskip("kubernetes_validate")
    manifest = yaml.safe_load(MANIFEST)
    validator.validate(manifest, "1.31", strict=True)
    assert manifest["metadata"]["namespace"] == "wherry"
    spec = job_spec()
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # a podFailurePolicy asks for it


def test_its_pods_have_no_privileges():
    pod, one = job_spec()["template"]["spec"], container()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {mount["name"] for mount in one["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert "memory" in one["resources"]["limits"]


def test_what_no_retry_can_cure_ends_the_kubernetes_job():
    """And nothing else: a preempted pod, a storage that fails, or a job that has ended."""
    ignored, fatal = job_spec()["podFailurePolicy"]["rules"]
    assert ignored["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    codes = {one.exit_code for one in classes(WherryError)} - {1, 3, 10, 12, 70, 130}
    assert set(fatal["onExitCodes"]["values"]) == codes
    assert fatal["onExitCodes"]["containerName"] == container()["name"]


def fatal_codes():
    """Exit codes with which a pod ends the whole job."""
    return job_spec()["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]


def classes(one):
    return {one}.union(*map(classes, one.__subclasses__()))


@pytest.fixture
def surroundings(tmp_path):
    """A PATH on which `wherry` is this one."""
    script = tmp_path / "bin" / "wherry"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m wherry.cli "$@"\n')
    script.chmod(0o700)
    return {**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}"}


def kubernetes(target, index):
    assert MANIFEST.count("TARGET_URI|") == 1
    one = yaml.safe_load(MANIFEST.replace("TARGET_URI", target))["spec"]["template"]["spec"]["containers"][0]
    stated = {row["name"]: row["value"] for row in one["env"] if row["name"].startswith("WHERRY")}
    return [*one["command"], *one["args"]], {**stated, "JOB_COMPLETION_INDEX": str(index)}


def slurm(target, index):
    return ["bash", str(SLURM), target], {"SLURM_ARRAY_TASK_ID": str(index), "SLURM_ARRAY_TASK_MIN": "0"}


@pytest.mark.parametrize("system", [kubernetes, slurm])
def test_its_tasks_make_a_job_and_the_first_one_commits(tmp_path, surroundings, system):
    source, target = model(tmp_path / "model"), str(tmp_path / "place" / "out")
    Path(target).parent.mkdir()
    made_job(source, target)
    ended = [started(system, target, index, surroundings) for index in (1, 0)]
    assert [one.wait(timeout=120) for one in ended] == [0, 0]
    assert wherry.verify(target, level="digest").ok
    assert leftover_names(target) == []
    undisturbed(source, tmp_path)
    assert wherry.verify(target, level="digest", against=tmp_path / "undisturbed").ok
    late = started(system, target, 2, surroundings)  # it was started again after the commit
    assert late.wait(timeout=120) == 0


@pytest.mark.slow
def test_torchrun_starts_workers_as_they_are(tmp_path, surroundings):
    """As docs/many-machines.md has it; hosts of JAX run one process each, and need nothing more."""
    pytest.importorskip("torch")
    source, target = model(tmp_path / "model"), str(tmp_path / "place" / "out")
    Path(target).parent.mkdir()
    units = len(made_job(source, target).units)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python",
            "wherry", "work", target]  # fmt: skip
    done = subprocess.run(line, env=surroundings, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(records_by_unit(TaskKind.MAKE, job_records(locate(target)).names())) == units
    [receipt] = commit(target).receipts
    assert receipt.target.checkpoint_digest == undisturbed(source, tmp_path).checkpoint_digest


@pytest.mark.parametrize("system", [kubernetes, slurm])
def test_a_terminated_task_gives_its_unit_back(tmp_path, surroundings, system):
    """The machine is taken away: the signal comes to the shell alone, which is the first process of its container."""
    source, target = model(tmp_path / "model", rows=500, count=40), str(tmp_path / "place" / "out")
    Path(target).parent.mkdir()
    units = len(made_job(source, target, unit=500_000).units)
    records = job_records(locate(target))
    task = started(system, target, 0, surroundings)
    while len(records_by_unit(TaskKind.MAKE, records.names())) < 2:
        assert task.poll() is None
        time.sleep(0.02)
    [worker] = Path(f"/proc/{task.pid}/task/{task.pid}/children").read_text().split() or [task.pid]
    task.terminate()
    assert task.wait(timeout=20) not in {0, *fatal_codes()}
    assert not is_running(int(worker))
    names = records.names()
    assert len(records_by_unit(TaskKind.MAKE, names)) < units
    finished = {f"{TaskKind.MAKE}-{unit:05d}" for unit in records_by_unit(TaskKind.MAKE, names)}
    assert {task for task, _attempt in claims_among(names)} <= finished
    again = started(system, target, 0, surroundings)
    assert again.wait(timeout=120) == 0
    assert wherry.verify(target, level="digest").ok
    assert leftover_names(target) == []


@pytest.mark.parametrize("system", [kubernetes, slurm])
def test_a_task_without_a_job_fails(tmp_path, surroundings, system):
    assert started(system, str(tmp_path / "nothing"), 0, surroundings).wait(timeout=120) == 3


def started(system, target, index, surroundings):
    line, more = system(target, index)
    return subprocess.Popen(
        line, env={**surroundings, **more}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def test_slurm_takes_its_options_from_the_head_of_the_script():
    lines = SLURM.read_text().splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[: last + 1])
    assert "#SBATCH --requeue" in lines
    # To the shell, which passes it on: by default Slurm sends it to steps, and the script starts none.
    assert "#SBATCH --signal=B:TERM@30" in lines
