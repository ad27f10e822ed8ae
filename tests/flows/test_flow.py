"""The convert flow against a real (temporary) Prefect server: the chain, its artifacts, and how it fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from wherry.errors import CorruptError, NotRecordedError, StorageError

pytest.importorskip("prefect")
pytest.importorskip("mlflow")

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

from wherry.core.progress import Progress
from wherry.flows.convert import ConvertSpec, convert_checkpoint, summary
from wherry.ledger.record import check_chain, open_ledger
from wherry.nightly import ending
from wherry.tasks import common
from wherry.tasks.common import retryable

pytestmark = [pytest.mark.server]


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "home"))
    for name in ("WHERRY_LEDGER", "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.safetensors"
    save_file({"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.int32)}, path)
    return path


def artifacts(flow_run_id):
    with get_client(sync_client=True) as client:
        chosen = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
        return {row.key: row for row in client.read_artifacts(artifact_filter=chosen)}


def test_an_engine_is_chosen_in_the_form_and_progress_is_by_units(server, source, tmp_path):
    spec = ConvertSpec(
        source=str(source), target=str(tmp_path / "out"), to="dcp", options={"shard_size": "1B"},
        on="processes:1", unit="1B",
    )  # fmt: skip
    state = convert_checkpoint(spec, return_state=True)
    receipt = state.result()["receipt"]
    assert receipt["resumed_bytes"] == receipt["bytes_written"] > 0  # the units were made by other processes
    [bar] = [
        row for key, row in artifacts(state.state_details.flow_run_id).items() if key == "wherry-convert"
    ]
    assert float(bar.data) == 100.0
    assert re.search(r": 2 of 2 units, \S+ \S+ of .*, \d workers?, 0 failed attempts$", bar.description)
    with pytest.raises(ValueError, match="String should match pattern"):
        ConvertSpec(source="a", target="b", to="hf", on="horses")


def test_the_whole_chain_and_again(server, source, tmp_path):
    spec = ConvertSpec(
        source=str(source), target=str(tmp_path / "orbax"), to="orbax", level="digest", model="m", alias="c"
    )
    state = convert_checkpoint(spec, return_state=True)
    assert state.is_completed(), state.message
    done = json.loads(json.dumps(state.result()))
    assert done["detection"]["format"] == "safetensors"
    assert done["plan"]["digest"] == done["receipt"]["plan_digest"]
    assert done["verification"]["verdict"] == "ok"
    assert done["verification"]["lineage"] == "recorded"
    assert (done["registration"]["version"], done["registration"]["created"]) == ("1", True)
    assert len(done["lineage"]["nodes"]) == 2

    found = artifacts(state.state_details.flow_run_id)
    table = {row["what"]: row["value"] for row in json.loads(found["wherry-conversion"].data)}
    assert table["model version"].startswith("m 1 in sqlite:")
    assert table["target"] == str(tmp_path / "orbax")
    assert {found[f"wherry-{verb}"].data for verb in ("convert", "verify")} == {100.0}

    again = convert_checkpoint(spec)
    assert again["receipt"]["already"]
    assert (again["registration"]["version"], again["registration"]["created"]) == ("1", False)
    with open_ledger() as ledger:
        assert check_chain(ledger).altered is None
    assert len(again["lineage"]["edges"]) == 1


def test_failure_ends_failed_with_text_and_cure(server, source, tmp_path, monkeypatch):
    notices = []
    monkeypatch.setattr(ending, "send", lambda _, notice, page: notices.append((notice, page)))
    data = source.read_bytes()
    source.write_bytes(data[:-4])
    state = convert_checkpoint(
        ConvertSpec(source=str(source), target=str(tmp_path / "o"), to="orbax"), return_state=True
    )
    assert state.is_failed()
    error = state.result(raise_on_failure=False)
    assert isinstance(error, CorruptError), error
    assert error.what in state.message
    row = artifacts(state.state_details.flow_run_id)["wherry-failure"]
    table = {line["what"]: line["value"] for line in json.loads(row.data)}
    assert table["what"] == error.what
    assert table["exit_code"] == "5"
    [(notice, page)] = notices
    assert error.what in notice.first_error
    assert (notice.cure, notice.counts) == (error.cure, {"failed": 1})
    assert str(state.state_details.flow_run_id) in page
    assert not (tmp_path / "o").exists()


def test_what_is_committed_and_not_recorded_ends_failed_with_the_cure_and_is_shown(
    server, source, tmp_path, monkeypatch
):
    from wherry.flows import convert as module
    from wherry.tasks.steps import lineage

    monkeypatch.setattr(module, "lineage", lineage.with_options(retries=0))
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path}")
    target = tmp_path / "orbax"
    spec = ConvertSpec(source=str(source), target=str(target), to="orbax", level="none")
    state = convert_checkpoint(spec, return_state=True)
    assert state.is_failed()
    error = state.result(raise_on_failure=False)
    assert isinstance(error, NotRecordedError), error
    assert error.cure.endswith(f"run `wherry ledger record {target}`")
    assert error.cure in state.message
    found = artifacts(state.state_details.flow_run_id)
    shown = {row["what"]: row["value"] for row in json.loads(found["wherry-conversion"].data)}
    assert (shown["target"], shown["lineage"]) == (str(target), "not recorded")
    failed = {row["what"]: row["value"] for row in json.loads(found["wherry-failure"].data)}
    assert failed["exit_code"] == "12"
    monkeypatch.delenv("WHERRY_LEDGER")
    again = convert_checkpoint(spec)
    assert (again["receipt"]["already"], len(again["lineage"]["edges"])) == (True, 1)


def test_what_is_not_registered_ends_failed_with_the_cure(server, source, tmp_path, monkeypatch):
    from wherry.flows import convert as module
    from wherry.tasks import steps as task

    def gone(*_, **__):
        raise StorageError("MLflow cannot be reached", cure="start it")

    monkeypatch.setattr(task, "enter", gone)
    monkeypatch.setattr(module, "register", task.register.with_options(retries=0))
    spec = ConvertSpec(source=str(source), target=str(tmp_path / "o"), to="orbax", model="m", level="none")
    state = convert_checkpoint(spec, return_state=True)
    error = state.result(raise_on_failure=False)
    assert isinstance(error, NotRecordedError), error
    assert error.what == "done, but not registered: MLflow cannot be reached"
    assert error.cure.startswith(f"start it; then run `wherry register {tmp_path / 'o'} --model m")
    assert len(error.result["lineage"]["edges"]) == 1, "the ledger has it nevertheless"


def test_unknown_fields_and_levels_are_refused():
    good = {"source": "/a", "target": "/b", "to": "orbax"}
    assert ConvertSpec(**good).memory == "128MiB"
    for bad in ({"sauce": "/a"}, {"level": "thorough"}, {"if_exists": "overwrite"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ConvertSpec(**good, **bad)


def test_only_retryable_errors_are_retried():
    def retried(error):
        return retryable(None, None, SimpleNamespace(data=error))

    assert retried(StorageError("the connection broke", retryable=True))
    assert not retried(StorageError("the disk is full"))
    assert not retried(CorruptError("a header contradicts the file"))
    assert not retried(ValueError("not ours"))


def test_a_failed_verification_fails_the_task(source, tmp_path, monkeypatch):
    import wherry
    from wherry.errors import MismatchError
    from wherry.tasks import steps as module
    from wherry.trace.lineage import show

    monkeypatch.setattr(module, "progress_artifact", lambda *_: None)
    receipt = wherry.convert(
        source, tmp_path / "copy.safetensors", to="safetensors", options={"metadata_format": "np"}
    )
    data = bytearray((tmp_path / "copy.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "copy.safetensors").write_bytes(data)
    with pytest.raises(MismatchError, match="verification failed") as failure:
        module.verify.fn(receipt.target.uri, level="digest")
    assert failure.value.path
    command = f"wherry convert {source} {receipt.target.uri} --to safetensors --set metadata_format=np"
    assert "and convert again: mv " in failure.value.cure
    assert failure.value.cure.endswith(f" && {command}")
    node = show(receipt.target.checkpoint_digest).nodes[receipt.target.checkpoint_digest]
    assert node.verified.verdict == "altered"


def test_discover_lists_detections(source, tmp_path):
    from wherry.tasks.steps import discover

    found = discover.fn(str(tmp_path))
    assert [(row["uri"], row["format"]) for row in found] == [(str(source), "safetensors")]


def test_lineage_task_fails_where_the_ledger_cannot_be_written(source, tmp_path, monkeypatch):
    import wherry
    from wherry.tasks.steps import lineage

    receipt = wherry.convert(source, tmp_path / "orbax", to="orbax", lineage=False).to_json()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path / 'file' / 'ledger.db'}")
    with pytest.raises(NotRecordedError, match="not recorded") as failure:
        lineage.fn(receipt)
    assert failure.value.retryable
    monkeypatch.delenv("WHERRY_LEDGER")
    assert len(lineage.fn(receipt)["edges"]) == 1


def test_progress_is_throttled_and_its_failure_is_logged_once(monkeypatch, caplog):
    sent = []
    monkeypatch.setattr(common, "create_progress_artifact", lambda *_, **__: "id")
    monkeypatch.setattr(common, "update_progress_artifact", lambda _id, percent, **_: sent.append(percent))
    report = common.progress_artifact("convert", "/a")
    for done in range(101):
        report(Progress("convert", done, 100, 1.0, None, "a"))
    assert sent == [100.0]

    def refuse(*_, **__):
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(common, "update_progress_artifact", refuse)
    report = common.progress_artifact("convert", "/a")
    for _ in range(3):
        report(Progress("convert", 100, 100, 1.0, None, "a"))
    assert caplog.text.count("progress is no longer reported") == 1


def test_summary_states_rate_and_size():
    reference = {"uri": "/x", "format": "npz", "format_version": None, "checkpoint_digest": "d", "tensors": 1}
    receipt = {
        "source": reference,
        "target": {**reference, "parameters": 1000},
        "seconds": 2.0,
        "bytes_written": 4 << 20,
        "lossless": True,
        "already": False,
        "plan_digest": "p",
    }
    done = {
        "receipt": receipt,
        "verification": None,
        "registration": None,
        "lineage": {"nodes": [1], "edges": []},
    }
    rows = {row["what"]: row["value"] for row in summary(done)}
    assert re.fullmatch(r"2\.1 MB/s", rows["rate"])
    assert "1,000" in rows["tensors"]


def test_tasks_need_no_framework():
    script = "import sys, wherry.flows.convert; print(sorted({'torch', 'jax', 'mlflow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
