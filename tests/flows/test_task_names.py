"""On Prefect's pages each step says of which checkpoint it is, where hundreds of them stand below one night."""

from __future__ import annotations

import inspect
import pkgutil
import string
from importlib import import_module

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("prefect")

from prefect import Task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

import wherry.tasks
from wherry.flows.convert import ConvertSpec, convert_checkpoint


def tasks():
    """Every task, by the name of its function."""
    modules = [
        import_module(f"wherry.tasks.{one.name}") for one in pkgutil.iter_modules(wherry.tasks.__path__)
    ]
    return {
        task.fn.__name__: task for one in modules for task in vars(one).values() if isinstance(task, Task)
    }


def test_every_task_bears_the_name_of_what_it_works_on():
    assert len(tasks()) >= 11
    for task in tasks().values():
        assert isinstance(task.task_run_name, str), task.name
        fields = [
            name.split("[")[0] for _, name, _, _ in string.Formatter().parse(task.task_run_name) if name
        ]
        assert fields, task.name
        assert set(fields) <= set(inspect.signature(task.fn).parameters), task.name


@pytest.mark.server
def test_the_steps_of_a_conversion_on_a_server(server, tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "home"))
    source, target = tmp_path / "one.safetensors", tmp_path / "out"
    save_file({"a": np.arange(12, dtype=np.float32)}, source)
    state = convert_checkpoint(
        ConvertSpec(source=str(source), target=str(target), to="orbax"), return_state=True
    )
    with get_client(sync_client=True) as client:
        chosen = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
        names = {run.name for run in client.read_task_runs(flow_run_filter=chosen)}
    assert {f"detect {source}", f"plan {source}", f"convert {source}", f"lineage {target}"} <= names
