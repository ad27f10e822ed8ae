"""Limits of stores, which all flows share, and what a run may keep of its steps; on a (temporary) Prefect server."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager, nullcontext
from importlib import import_module

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("prefect")

from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_RESULTS_LOCAL_STORAGE_PATH, temporary_settings

from tests.support.flow import occupied, watched
from tests.support.waits import waits_reported_at_once
from wherry.flows.convert import ConvertSpec, convert_checkpoint
from wherry.tasks.steps import detect

module = import_module("wherry.flows.convert")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.safetensors"
    save_file({"a": np.arange(12, dtype=np.float32)}, path)
    return path


@pytest.fixture
def limited(tmp_path, monkeypatch):
    """One conversion at a time on local files."""
    (tmp_path / "wherry.toml").write_text("[concurrency]\nfile = 1\ns3-far = 2\n")
    monkeypatch.setenv("WHERRY_CONFIG", str(tmp_path / "wherry.toml"))


@pytest.mark.server
def test_a_conversion_occupies_the_limits_of_its_stores(server, source, tmp_path, limited, monkeypatch):
    held = watched(monkeypatch)
    further = [{"target": str(tmp_path / "b"), "to": "orbax"}]
    spec = ConvertSpec(source=str(source), target=str(tmp_path / "a.npz"), to="npz", further=further)
    state = convert_checkpoint(spec, return_state=True)
    assert state.is_completed(), state.message
    assert (held, occupied()) == ([(1, 1)], (0, 1))


def test_a_run_says_which_limit_it_waits_for(limited, tmp_path, monkeypatch):
    @contextmanager
    def full(names, **_how):
        deadline = time.monotonic() + 60
        while not lines and time.monotonic() < deadline:
            time.sleep(0.01)
        yield names

    monkeypatch.setattr(module.FlowRunContext, "get", object)
    monkeypatch.setattr(module, "answering_server", lambda: None)  # on a busy machine it is waited for, too
    monkeypatch.setattr(module, "_make_limits", lambda _limits: None)
    monkeypatch.setattr(module, "_free_slots_if_alone", lambda _limits: None)
    monkeypatch.setattr(module, "concurrency", full)
    with waits_reported_at_once(monkeypatch) as lines, module._turn([str(tmp_path / "a")]):
        held = len(lines)
        time.sleep(0.1)
    assert lines == ["wherry-io-file: waiting for a free slot of the concurrency limit"]
    assert held == 1, "the slot is waited for, and then held"


@pytest.mark.server
@pytest.mark.parametrize("alone", [True, False])
def test_slots_that_a_server_has_forgotten_are_free_again(
    server, source, tmp_path, limited, monkeypatch, alone
):
    """A server keeps the leases of slots in memory: those of its last life stay taken."""
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 60.0 if alone else 1.0)
    if not alone:
        monkeypatch.setattr(module, "_free_slots_if_alone", lambda _limits: None)
    module._make_limits({"wherry-io-file": 1})
    with get_client(sync_client=True) as client:
        client.increment_concurrency_slots(["wherry-io-file"], 1, "concurrency")
    assert occupied() == (1, 1)
    spec = ConvertSpec(source=str(source), target=str(tmp_path / "a.npz"), to="npz")
    state = convert_checkpoint(spec, return_state=True)
    assert state.is_completed(), state.message
    assert occupied() == (0, 1)


@pytest.mark.server
def test_the_slot_of_a_conversion_that_runs_is_not_free(server):
    @task(name="convert", task_run_name="convert x")
    def convert():
        with get_client(sync_client=True) as client:
            while not client.read_task_runs(
                flow_run_filter=module._AT_WORK, task_run_filter=module._CONVERTING
            ):
                time.sleep(0.1)  # the server records a task somewhat later
        module._free_lost_slots(["wherry-io-file"])
        return occupied()

    @flow
    def at_work():
        return convert()

    module._make_limits({"wherry-io-file": 3})
    with get_client(sync_client=True) as client:
        client.increment_concurrency_slots(["wherry-io-file"], 2, "concurrency")
    assert at_work() == (1, 3)
    with get_client(sync_client=True) as client:
        client.release_concurrency_slots(["wherry-io-file"], 1, 1.0)
    assert occupied() == (0, 3)


def test_another_run_may_make_a_limit_at_the_same_moment(monkeypatch):
    made = []

    class Client:
        def upsert_global_concurrency_limit_by_name(self, name, limit):
            made.append((name, limit))
            if len(made) == 1:
                raise ObjectAlreadyExists(OSError("409"))

    monkeypatch.setattr(module, "get_client", lambda **_: nullcontext(Client()))
    module._make_limits({"wherry-io-file": 3})
    assert made == [("wherry-io-file", 3)] * 2


def test_outside_of_a_run_no_server_is_contacted(source, tmp_path, limited, monkeypatch):
    def never(*_, **__):
        raise AssertionError("there is no server")

    for name in ("get_client", "concurrency"):
        monkeypatch.setattr(module, name, never)
    for name in ("detect", "plan", "convert", "lineage"):
        monkeypatch.setattr(module, name, getattr(module, name).fn)
    monkeypatch.setattr(module, "asset_events", lambda _receipt: None)
    monkeypatch.setattr(import_module("wherry.tasks.steps"), "progress_artifact", lambda *_: None)
    spec = ConvertSpec(source=str(source), target=str(tmp_path / "o"), to="orbax", level="none")
    assert module.chain(spec.conversion)["receipt"]["target"]["uri"] == str(tmp_path / "o")


@pytest.mark.server
def test_each_step_looks_again_and_nothing_is_kept_as_a_pickle(server, source, tmp_path):
    @flow(name="twice", result_serializer="json")
    def twice():
        before = detect(str(source))["verdict"]
        source.write_bytes(source.read_bytes()[:-4])
        return [before, detect(str(source))["verdict"]]

    results = tmp_path / "results"
    with temporary_settings({PREFECT_RESULTS_LOCAL_STORAGE_PATH: results}):
        before, after = twice()
    assert (before, after != "ok") == ("ok", True)
    kept = [json.loads(path.read_text()) for path in results.rglob("*") if path.is_file()]
    assert kept == [[before, after]], "the flow's own result, as JSON, and none of its steps"
