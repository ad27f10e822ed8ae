"""Export from real processes: 8 devices with donation, torchrun with 2 ranks, 2 JAX processes, and the exit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

import wherry
from tests.support.export_programs import EIGHT_DEVICES, EXIT, JAX_RANKS, TORCH_RANKS

LIMIT = 240


def program(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(text)
    return str(path)


def run(command, **more):
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT, **more)


def torchrun(script, *arguments):
    pytest.importorskip("torch")
    return run([
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script,
        *map(str, arguments),
    ], env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip


@pytest.fixture
def out(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def test_a_training_loop_on_eight_devices_that_donates_its_state(tmp_path, out):
    pytest.importorskip("flax")
    pytest.importorskip("optax")
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = run([sys.executable, program(tmp_path, EIGHT_DEVICES), str(out)], env=env)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row[0] for row in rows] == [2, 3]
    assert rows[0][1] == rows[1][1] == 14
    assert "8 devices" in rows[0][2]
    assert sorted(os.listdir(out)) == ["disk", "host"]


def test_two_ranks_of_torchrun_give_their_shards(tmp_path, out):
    """Both kinds of snapshot, a state that all ranks hold whole, one of each rank's own, and ranks without space."""
    done = torchrun(program(tmp_path, TORCH_RANKS), out)
    assert done.returncode == 0, done.stderr
    names = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))
    files = [f"{name}.safetensors" for name in ("replicated", "stage0", "stage1")]
    assert names == sorted(["disk", "host", *files, *(f"{file}.wherry.json" for file in files)])
    assert wherry.verify(out / "disk", level="digest").ok


def test_two_jax_processes_give_their_shards(tmp_path, out):
    pytest.importorskip("jax")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = program(tmp_path, JAX_RANKS)
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    other = subprocess.Popen(
        [sys.executable, script, "1", port, str(out)], env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        done = run([sys.executable, script, "0", port, str(out)], env=env)
        _, said = other.communicate(timeout=LIMIT)
    finally:
        other.kill()
    assert done.returncode == 0, done.stderr
    assert other.returncode == 0, said
    assert json.loads(done.stdout.splitlines()[-1]) == ["jax"]


def test_a_process_that_ends_waits_for_its_export(tmp_path, out):
    done = run([sys.executable, program(tmp_path, EXIT), str(out / "w.safetensors"), "100"])
    assert done.returncode == 0, done.stderr
    assert "waiting for the export" in done.stderr
    assert wherry.verify(out / "w.safetensors", level="digest").ok


def test_but_not_longer_than_its_exit_wait(tmp_path, out):
    done = run([sys.executable, program(tmp_path, EXIT), str(out / "w.safetensors"), "0"])
    assert done.returncode == 0, done.stderr
    assert "timed out after 0 s; nothing was committed" in done.stderr
    assert not (out / "w.safetensors").exists()
