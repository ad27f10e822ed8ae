"""The deployments and automations of `infra` are what Prefect takes, and what would be lost is refused before."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("prefect")
pytest.importorskip("yaml")

import yaml
from jsonschema import Draft202012Validator
from prefect.events import DeploymentTriggerTypes
from prefect.events.schemas.automations import AutomationCore
from prefect.flows import load_flow_from_entrypoint
from pydantic import TypeAdapter

from tests.support.infra import INFRA
from wherry.errors import NotFoundError, StorageError, UsageError
from wherry.integrations.prefect import deploy
from wherry.integrations.prefect.automations import read_automations, with_runs
from wherry.integrations.prefect.pools import read_pools

POOLS = {pool.name: pool for pool in read_pools(INFRA / "pools")}
FILES = [INFRA / "prefect.yaml", INFRA / "prefect.devices.yaml"]
DEPLOYMENTS = [(path, entry) for path in FILES for entry in yaml.safe_load(path.read_text())["deployments"]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_prefect_reads_the_file_and_knows_every_field(path):
    models = pytest.importorskip("prefect.cli.deploy._models")
    model = models.PrefectYamlModel.model_validate(yaml.safe_load(path.read_text()))
    assert model.pull == [{"prefect.deployments.steps.set_working_directory": {"directory": "/"}}]
    for entry, stated in zip(model.deployments, yaml.safe_load(path.read_text())["deployments"], strict=True):
        assert set(stated) <= set(models.DeploymentConfig.model_fields)
        assert set(stated.get("concurrency_limit", {})) <= set(models.ConcurrencyLimitSpec.model_fields)
        assert all(isinstance(row, models.RawScheduleConfig) for row in entry.schedules or [])
        assert all(row.timezone for row in entry.schedules or [])
        for trigger in stated.get("triggers", []):
            TypeAdapter(DeploymentTriggerTypes).validate_python(trigger)


@pytest.mark.parametrize(("path", "entry"), DEPLOYMENTS, ids=[entry["name"] for _, entry in DEPLOYMENTS])
def test_deployments_name_flows_and_parameters_that_they_take(path, entry):
    assert entry["work_pool"]["name"] in POOLS
    variables = entry["work_pool"].get("job_variables", {})
    assert set(variables) <= set(POOLS[entry["work_pool"]["name"]].variables)
    Draft202012Validator({"properties": POOLS[entry["work_pool"]["name"]].variables}).validate(variables)
    flow = load_flow_from_entrypoint(entry["entrypoint"])
    spec = TypeAdapter(flow.fn.__annotations__["spec"])
    given = [entry.get("parameters"), *(row.get("parameters") for row in entry.get("schedules", []))]
    given += [row["parameters"] for row in entry.get("triggers", [])]
    for parameters in filter(None, given):
        assert set(parameters) == {"spec"}
        spec.validate_python(parameters["spec"])


def test_a_pool_of_kubernetes_gives_each_deployment_its_role(tmp_path):
    copy = deploy._with_pool(INFRA / "prefect.yaml", POOLS["wherry-kubernetes-cpu"], tmp_path)
    stated = {
        entry["name"]: entry["work_pool"]["job_variables"]
        for entry in yaml.safe_load(copy.read_text())["deployments"]
    }
    assert stated == {
        "nightly-convert": {"role": "registrar"},
        "post-training-export": {"role": "registrar"},
        "promote": {"role": "registrar"},
        "convert": {"role": "registrar"},
        "audit": {"role": "auditor"},
        "work": {"role": "worker"},
    }
    assert {entry["entrypoint"] for _, entry in DEPLOYMENTS} == set(deploy.ROLES)
    roles = [entry["work_pool"]["job_variables"]["role"] for path, entry in DEPLOYMENTS if path == FILES[1]]
    assert roles == ["auditor", "auditor"]
    other = deploy._with_pool(INFRA / "prefect.yaml", POOLS["wherry-docker"], tmp_path)
    assert all(
        not one["work_pool"]["job_variables"] for one in yaml.safe_load(other.read_text())["deployments"]
    )


def test_automations_are_prefects():
    found = {one.name: one for one in read_automations(INFRA / "automations.yaml")}
    zombie = found["wherry zombie runs are crashed"]
    beat = int(POOLS["wherry-process"].variables["env"]["default"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
    assert zombie.trigger.within.total_seconds() >= 3 * beat
    assert zombie.trigger.after == {"prefect.flow-run.Running", "prefect.flow-run.heartbeat"}
    pending = found["wherry pending runs are crashed"]
    assert pending.trigger.after == {"prefect.flow-run.Pending"}
    assert pending.actions[0].state.value == "CRASHED"
    assert zombie.actions[0].state.value == "CRASHED"
    assert found["wherry nightly run is missing"].trigger.within.total_seconds() > 24 * 3600


def test_a_notification_takes_the_place_of_doing_nothing():
    block = "11111111-1111-1111-1111-111111111111"
    found = read_automations(INFRA / "automations.yaml", block)
    crashed = ["change-flow-run-state"]
    assert [[action.type for action in one.actions] for one in found] == [
        crashed, crashed, ["send-notification", "do-nothing"]
    ]  # fmt: skip
    assert str(found[2].actions[0].block_document_id) == block
    assert all(isinstance(one, AutomationCore) for one in found)


def test_the_alarm_of_a_missing_night_starts_one():
    found = read_automations(INFRA / "automations.yaml")
    night = "22222222-2222-2222-2222-222222222222"
    missing = with_runs(found, {"nightly-convert": night})[-1]
    assert [(one.type, str(one.deployment_id)) for one in missing.actions] == [("run-deployment", night)]
    assert with_runs(found, {"promote": night})[-1].actions[0].type == "do-nothing"


def test_a_limit_cannot_stop_the_next_night():
    """The server holds the slots of a limit in memory: that of a run that dies with it is never free again."""
    rows = {row["name"]: row for row in deploy.read_deployments(INFRA / "prefect.yaml")}
    assert not [name for name, row in rows.items() if row.get("schedules") and row.get("concurrency_limit")]


def test_faulty_files_are_named(tmp_path):
    with pytest.raises(NotFoundError):
        deploy.read_deployments(tmp_path / "prefect.yaml")
    (tmp_path / "prefect.yaml").write_text("deployments:\n  - name: a\n    entrypoint: b\n")
    with pytest.raises(UsageError, match="missing key 'work_pool'"):
        deploy.read_deployments(tmp_path / "prefect.yaml")
    with pytest.raises(UsageError, match="no work pool files"):
        read_pools(tmp_path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"PK\5\6\xae", "invalid .*: 'utf-8' codec"),
        (b"- a\n", "expected a table, got a list"),
        (b"a: [", "invalid "),
        (b"[" * 5000, "nested too deeply"),
    ],
)
def test_a_file_of_another_kind_is_an_error_of_use(tmp_path, data, said):
    file = tmp_path / "file.yaml"
    file.write_bytes(data)
    for read in (deploy.read_deployments, read_automations):
        with pytest.raises(UsageError, match=said):
            read(file)


def test_a_pipe_is_no_file_of_deployments(tmp_path):
    os.mkfifo(tmp_path / "prefect.yaml")
    with pytest.raises(StorageError, match="not a regular file"):
        deploy.read_deployments(tmp_path / "prefect.yaml")


def entry(**more):
    return {"name": "convert", "entrypoint": "x", "work_pool": {"name": "wherry-kubernetes-cpu"}, **more}


def test_a_pool_that_is_not_there_and_one_for_all():
    pools = tuple(POOLS.values())
    with pytest.raises(UsageError, match="'elsewhere'"):
        deploy.pools_of([entry(work_pool={"name": "elsewhere"})], pools, None)
    assert deploy.pools_of([entry()], pools, "wherry-docker")["convert"].type == "docker"


def test_preflight_refuses_containers_that_keep_things_to_themselves(monkeypatch, tmp_path):
    pools = {"convert": POOLS["wherry-kubernetes-cpu"]}
    with pytest.raises(UsageError, match="ledger sqlite"):
        deploy.check([entry()], pools)
    monkeypatch.setenv("WHERRY_LEDGER", "postgresql://db/wherry")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    deploy.check([entry()], pools)
    with pytest.raises(UsageError, match="target of convert /out"):
        deploy.check([entry(parameters={"spec": {"target": "/out"}})], pools)
    (tmp_path / "wherry.toml").write_text(
        '[routes.a]\nroot = "gs://runs"\n[[routes.a.targets]]\nformat = "orbax"\nuri = "/out/{run}/{step}"\n'
    )
    monkeypatch.setenv("WHERRY_CONFIG", str(tmp_path / "wherry.toml"))
    with pytest.raises(UsageError, match="target 1 of route a"):
        deploy.check([entry()], pools)
    monkeypatch.setenv("WHERRY_SHARED_PATHS", "/out")
    deploy.check([entry()], pools)


def test_a_slice_must_be_all_chips_of_its_host(monkeypatch):
    monkeypatch.setenv("WHERRY_LEDGER", "postgresql://db/wherry")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    pools = {"convert": POOLS["wherry-kubernetes-tpu"]}
    deploy.check([entry()], pools)
    wrong = entry(work_pool={"name": "x", "job_variables": {"tpu_topology": "2x2", "tpu_chips": 8}})
    with pytest.raises(UsageError, match="2x2 has 4 chips, but tpu_chips is 8"):
        deploy.check([wrong], pools)


def test_the_same_file_is_served_without_a_pool():
    from wherry.flows.serve import deployments

    made = {one.name: one for one in deployments(INFRA / "prefect.yaml")}
    assert set(made) == {entry["name"] for path, entry in DEPLOYMENTS if path == FILES[0]}
    night, export = made["nightly-convert"], made["post-training-export"]
    assert (night.schedules[0].schedule.cron, night.schedules[0].schedule.timezone) == ("30 2 * * *", "UTC")
    assert (night.concurrency_limit, export.concurrency_limit) == (None, 4)
    assert export.triggers[0].expect == {"wherry.checkpoint.committed"}
    assert export.entrypoint == "wherry.flows.export.export"
    assert [row.parameters for row in made["audit"].schedules] == [{}, {"spec": {"level": "digest"}}]


PULL = "pull: [{prefect.deployments.steps.set_working_directory: {directory: /}}]\n"


@pytest.mark.parametrize(
    ("head", "entry", "refused"),
    [
        ("", "entrypoint: a.b", "sets no working directory for its runs"),
        ("pull: null\n", "entrypoint: a.b, pull: null", "sets no working directory for its runs"),
        (PULL, "entrypoint: 'flows/x.py:f'", "is a relative path"),
        (PULL, "entrypoint: '/flows/x.py:f'", None),
        (PULL, "entrypoint: a.b, pull: null", None),
        ("", "entrypoint: a.b, pull: []", None),
        ("build: [{x: {}}]\n", "entrypoint: a.b", None),
    ],
)
def test_a_deployment_does_not_depend_on_the_folder_of_the_command(tmp_path, head, entry, refused):
    file = tmp_path / "prefect.yaml"
    file.write_text(f"{head}deployments:\n  - {{name: a, work_pool: {{name: p}}, {entry}}}\n")
    if refused is None:
        deploy.require_independent(file)
        return
    with pytest.raises(UsageError, match=refused) as caught:
        deploy.require_independent(file)
    assert "relative" in refused or caught.value.cure == f"add to the file: {PULL.strip()}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_our_own_deployments_do_not_either(file):
    deploy.require_independent(file)


def test_what_cannot_be_served_is_named(tmp_path):
    from wherry.flows.serve import deployments

    for more, what in ((", sla: []", "unsupported field sla"), ("", "No module named 'nowhere'")):
        (tmp_path / "prefect.yaml").write_text(
            f"deployments:\n  - {{name: a, entrypoint: nowhere.flow, work_pool: {{name: p}}{more}}}\n"
        )
        with pytest.raises(UsageError, match=what):
            deployments(tmp_path / "prefect.yaml")


@pytest.mark.parametrize(
    ("file", "pool", "made"),
    [("prefect.yaml", None, {"wherry-process", "wherry-units"}),
     ("prefect.yaml", "wherry-kubernetes-cpu", {"wherry-kubernetes-cpu"}),
     ("prefect.devices.yaml", None, {"wherry-kubernetes-gpu", "wherry-kubernetes-tpu"})],
)  # fmt: skip
def test_only_the_pools_that_deployments_use_are_made(file, pool, made):
    pools = tuple(POOLS.values())
    chosen = deploy.pools_of(deploy.read_deployments(INFRA / file), pools, pool)
    assert {one.name for one in deploy.used_pools(pools, chosen)} == made
