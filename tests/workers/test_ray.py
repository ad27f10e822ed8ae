"""Ray: a cluster that somebody else has started, whose nodes come and go; and one of this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.jobs import receipts
from tests.support.object_stores import leftover_names
from tests.support.worker_pools import committed_as_by_one, job_of, request_of, same_tensors
from wherry.errors import StorageError, UsageError
from wherry.workers import convert_on
from wherry.workers import work as working
from wherry.workers.coordinator import Workplace
from wherry.workers.work import carry_with_pool

ray = pytest.importorskip("ray", reason="ray is not installed")

from wherry.integrations.engines import ray_actors  # noqa: E402  it imports ray

pytestmark = pytest.mark.slow
# Ray reads it once in a process, and this one has a cluster of its own in other tests.
OPEN = {"RAY_AUTH_MODE": "disabled", "WHERRY_KEY": "a key that all machines share" * 2}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def node(folder, *words):
    """Start a node of a cluster; the process that stands for it."""
    command = [Path(sys.executable).with_name("ray"), "start", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=1",
               "--object-store-memory=80000000", "--disable-usage-stats", *words]  # fmt: skip
    with (folder / "node.log").open("ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **OPEN}
        )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A head with one worker's room; its address, and a function that adds a node, and returns its process."""
    tmp_path = tmp_path_factory.mktemp("cluster")
    port, client = free_port(), free_port()
    started = [node(tmp_path, "--head", f"--port={port}", f"--ray-client-server-port={client}",
                    "--include-dashboard=false", f"--temp-dir=/tmp/r{os.getpid()}")]  # fmt: skip
    asking = [sys.executable, "-c", f"import ray; ray.init('ray://127.0.0.1:{client}')"]
    for _look in range(20):  # its port is open before it can be used
        if (
            subprocess.run(asking, check=False, capture_output=True, env={**os.environ, **OPEN}).returncode
            == 0
        ):
            break
        assert started[0].poll() is None, (tmp_path / "node.log").read_text()

    def add():
        started.append(node(tmp_path, f"--address=127.0.0.1:{port}"))
        return started[-1]

    yield f"127.0.0.1:{client}", add
    for one in reversed(started):
        one.terminate()
    for one in started:
        one.wait(30)
    shutil.rmtree(f"/tmp/r{os.getpid()}", ignore_errors=True)


@pytest.fixture(autouse=True)
def same_key(monkeypatch):
    monkeypatch.setenv("WHERRY_KEY", OPEN["WHERRY_KEY"])


@pytest.fixture
def target(tmp_path):
    return str(tmp_path / "out")


def test_a_process_that_uses_ray_is_left_alone(source, target):
    with ray_actors._own_cluster(1):
        with pytest.raises(UsageError, match="uses Ray already"):
            convert_on(request_of(source, target), "ray:1", unit_bytes=110_000)
        assert ray.is_initialized()


def test_a_cluster_that_runs_is_used_and_no_actor_stays(source, target, tmp_path, cluster):
    address, _add = cluster
    [receipt] = convert_on(request_of(source, target), f"ray://{address}", unit_bytes=110_000).receipts
    assert same_tensors(receipt, source, tmp_path)
    assert [one for one in leftover_names(target) if not one.startswith("undisturbed")] == []
    with ray.init(f"ray://{address}", log_to_driver=False):
        for _look in range(100):
            if ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"]:
                break
            time.sleep(0.1)
        else:
            pytest.fail("an actor holds a core")


def test_each_node_has_a_worker_and_one_that_dies_changes_nothing(source, target, tmp_path, cluster):
    address, add = cluster
    made, second, lost = job_of(source, target, "25KB", 25_600), add(), []
    with ray_actors.pool(Workplace(address)) as pool:
        for _look in range(1200):
            if len(pool.present()) == 2:
                break
            time.sleep(0.1)
        for worker in pool.present():  # units of a few KiB are made before a process has started
            pool.submit(worker, "begin", working.close, "", "").result(120)
        for _receipt in carry_with_pool(made, pool):
            makers = {row["worker"] for row in receipts(target).values()}
            if len(makers) == 2 and not lost:
                second.kill()
                lost.append(second)
    assert lost, "both nodes make units"
    assert committed_as_by_one(made, source, tmp_path)


def test_an_address_where_nothing_answers_is_named(source, target, monkeypatch):
    monkeypatch.setenv("RAY_CLIENT_RECONNECT_GRACE_PERIOD", "0")
    with pytest.raises(StorageError, match="does not answer") as caught:
        convert_on(request_of(source, target), f"ray://127.0.0.1:{free_port()}", unit_bytes=110_000)
    assert caught.value.retryable
    assert leftover_names(target)  # the job, which the same command takes up
