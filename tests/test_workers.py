"""The files of `infra` that bring wherry to workers mean what Prefect and Kubernetes take them for."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("prefect")
pytest.importorskip("yaml")

import prefect.server.api.collections
import yaml
from jsonschema import Draft202012Validator, ValidationError
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.events import DeploymentTriggerTypes
from prefect.events.schemas.automations import AutomationCore
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.templating import apply_values, find_placeholders
from prefect.workers.base import BaseJobConfiguration
from pydantic import TypeAdapter

from tests.infra_support import INFRA
from wherry.errors import NotFoundError, UsageError
from wherry.integrations import prefect_deploy
from wherry.integrations.prefect_automations import read_automations
from wherry.integrations.prefect_pools import Pool, read_pool, read_pools, template

POOLS = {pool.name: pool for pool in read_pools(INFRA / "pools")}
KUBERNETES = [name for name, pool in POOLS.items() if pool.type == "kubernetes"]
FILES = [INFRA / "prefect.yaml", INFRA / "prefect.devices.yaml"]
DEPLOYMENTS = [(path, entry) for path in FILES for entry in yaml.safe_load(path.read_text())["deployments"]]


def bundled(pool_type):
    """The template that the installed Prefect's server publishes where it reaches no network."""
    folder = Path(prefect.server.api.collections.__file__).parent / "collections_data" / "views"
    metadata = json.loads((folder / "aggregate-worker-metadata.json").read_text())
    return next(
        rows[pool_type]["default_base_job_configuration"] for rows in metadata.values() if pool_type in rows
    )


def installed(pool_type):
    """The template of the worker package of this type."""
    modules = {"process": "prefect.workers.process", "docker": "prefect_docker.worker"}
    module = pytest.importorskip(modules.get(pool_type, f"prefect_{pool_type}.worker"))
    return getattr(module, f"{pool_type.capitalize()}Worker").get_default_base_job_template()


@pytest.fixture(params=[bundled, installed])
def publish(request):
    return request.param


def test_the_five_pools_are_there():
    assert set(POOLS) == {"wherry-process", "wherry-docker"} | {
        f"wherry-kubernetes-{kind}" for kind in ("cpu", "gpu", "tpu")
    }


@pytest.mark.parametrize("name", POOLS)
def test_templates_are_prefects_own_with_ours_laid_over(name, publish):
    pool, published = POOLS[name], publish(POOLS[name].type)
    before = json.dumps(published)
    made = template(pool, published)
    assert json.dumps(published) == before
    WorkPoolCreate(name=pool.name, type=pool.type, base_job_template=made)
    properties = made["variables"]["properties"]
    assert set(published["variables"]["properties"]) <= set(properties)
    known = set(published["variables"]["properties"]) | {
        name for name, schema in pool.variables.items() if "title" in schema and "description" in schema
    }
    assert set(properties) == known, "a variable that Prefect does not publish needs title and description"
    used = {found.name for found in find_placeholders(made["job_configuration"])}
    assert used <= set(properties)
    assert set(pool.variables) <= used
    Draft202012Validator.check_schema(made["variables"])
    defaults = {name: schema["default"] for name, schema in properties.items() if "default" in schema}
    Draft202012Validator(made["variables"]).validate(defaults)
    assert properties["env"]["default"]["WHERRY_WORKER"] == pool.type


def job(name, publish, **variables):
    """The Kubernetes job of a pool as a worker fills it in; Prefect's own two slips in the pod's spec left out."""
    made = template(POOLS[name], publish("kubernetes"))
    Draft202012Validator(made["variables"]).validate(variables)
    values = BaseJobConfiguration._get_base_config_defaults(made["variables"]["properties"]) | {
        "command": "prefect flow-run execute", "name": "run", "labels": {"a": "b"}, "annotations": {}, **variables,
    }  # fmt: skip
    manifest = apply_values(made["job_configuration"], values)["job_manifest"]
    pod = manifest["spec"]["template"]["spec"]
    assert (pod.pop("parallelism"), pod.pop("completions")) == (1, 1)
    container = pod["containers"][0]
    container["args"] = container["args"].split()
    container["env"] = [{"name": key, "value": value} for key, value in container["env"].items()]
    return manifest


@pytest.mark.parametrize("name", KUBERNETES)
@pytest.mark.parametrize("variables", [{}, {"spot": "true", "ephemeral_ssd": "true", "scratch_size": "1Ti"}])
def test_jobs_are_valid_kubernetes_jobs(name, publish, variables):
    validator = pytest.importorskip("kubernetes_validate")
    manifest = job(name, publish, **variables)
    validator.validate(manifest, "1.31", strict=True)
    pod = manifest["spec"]["template"]["spec"]
    assert len(pod["containers"]) == 1
    selected = pod.get("nodeSelector", {})
    assert {key for key in selected if "spot" in key or "ssd" in key} == (
        {"cloud.google.com/gke-spot", "cloud.google.com/gke-ephemeral-storage-local-ssd"}
        if variables
        else set()
    )
    assert all(isinstance(value, str) for value in selected.values())
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]} == {"scratch"}


def test_devices_are_asked_for_as_variables(publish):
    tpu = job("wherry-kubernetes-tpu", publish, tpu_type="tpu-v6e-slice", tpu_topology="2x2", tpu_chips=4)
    pod = tpu["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["google.com/tpu"] == 4
    assert pod["containers"][0]["resources"]["limits"]["memory"] == "64Gi"
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice", "cloud.google.com/gke-tpu-topology": "2x2",
    }  # fmt: skip
    gpu = job("wherry-kubernetes-gpu", publish, gpu_count=2)["spec"]["template"]["spec"]
    assert gpu["containers"][0]["resources"]["requests"]["nvidia.com/gpu"] == 2
    assert "nvidia.com/gpu" in {row["key"] for row in gpu["tolerations"]}
    cpu = json.dumps(job("wherry-kubernetes-cpu", publish))
    assert "google.com/tpu" not in cpu
    assert "nvidia.com/gpu" not in cpu


def test_slices_of_several_hosts_are_not_admitted(publish):
    for topology in ("4x4", "2x2x2", "16x16"):
        with pytest.raises(ValidationError):
            job("wherry-kubernetes-tpu", publish, tpu_topology=topology)


@pytest.mark.parametrize("name", KUBERNETES)
def test_the_kubernetes_worker_takes_the_jobs(name):
    worker = pytest.importorskip("prefect_kubernetes.worker")
    made = template(POOLS[name], worker.KubernetesWorker.get_default_base_job_template())
    values = BaseJobConfiguration._get_base_config_defaults(made["variables"]["properties"])
    worker.KubernetesWorkerJobConfiguration(**apply_values(made["job_configuration"], values))


@pytest.mark.parametrize("path", sorted((INFRA / "kubernetes").glob("*.yaml")), ids=lambda path: path.name)
def test_manifests_are_valid(path):
    validator = pytest.importorskip("kubernetes_validate")
    rows = list(yaml.safe_load_all(path.read_text()))
    assert rows
    for row in rows:
        validator.validate(row, "1.31", strict=True)
        assert row["metadata"]["namespace"] == "wherry"


def test_workers_of_the_manifests_serve_pools_that_are_there():
    rows = yaml.safe_load_all((INFRA / "kubernetes" / "worker.yaml").read_text())
    commands = [
        row["spec"]["template"]["spec"]["containers"][0]["command"]
        for row in rows
        if row["kind"] == "Deployment"
    ]
    assert {command[command.index("--pool") + 1] for command in commands} == set(KUBERNETES)


def test_the_compose_file_publishes_on_loopback_only():
    services = yaml.safe_load((INFRA / "docker" / "compose.yaml").read_text())["services"]
    ports = list(chain.from_iterable(service.get("ports", []) for service in services.values()))
    assert len(ports) == 2
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert set(services["worker"]["depends_on"]) <= set(services)
    text = (INFRA / "docker" / "compose.yaml").read_text()
    assert set(re.findall(r"PASSWORD: ([^}]*)|://wherry:([^@]*)@", text)) == {
        ("${WHERRY_DB_PASSWORD:?set it", ""), ("", "${WHERRY_DB_PASSWORD:?set it}"),
    }  # fmt: skip


def test_the_compose_file_is_valid():
    spec = pytest.importorskip("compose_spec")
    text = re.sub(r"\$\{(\w+):[?-]([^}]*)\}", r"\2", (INFRA / "docker" / "compose.yaml").read_text())
    stated = yaml.safe_load(text.replace(":set it@", ":secret@"))
    found = spec.PyCompose.from_yaml(
        yaml.safe_dump(stated)
    )  # its parser knows neither variables nor merge keys
    for check in (found.validate, found.validate_networks, found.validate_volumes, found.validate_configs):
        check()
    assert set(found.service_names()) == set(stated["services"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_prefect_reads_the_file_and_knows_every_field(path):
    models = pytest.importorskip("prefect.cli.deploy._models")
    model = models.PrefectYamlModel.model_validate(yaml.safe_load(path.read_text()))
    assert model.pull == [{"prefect.deployments.steps.set_working_directory": {"directory": "/"}}]
    for entry, stated in zip(model.deployments, yaml.safe_load(path.read_text())["deployments"], strict=True):
        assert set(stated) <= set(models.DeploymentConfig.model_fields)
        assert set(stated["concurrency_limit"]) <= set(models.ConcurrencyLimitSpec.model_fields)
        assert all(isinstance(row, models.RawScheduleConfig) for row in entry.schedules or [])
        assert all(row.timezone for row in entry.schedules or [])
        for trigger in stated.get("triggers", []):
            TypeAdapter(DeploymentTriggerTypes).validate_python(trigger)


@pytest.mark.parametrize(("path", "entry"), DEPLOYMENTS, ids=[entry["name"] for _, entry in DEPLOYMENTS])
def test_deployments_name_flows_and_parameters_that_they_take(path, entry):
    assert entry["work_pool"]["name"] in POOLS
    Draft202012Validator(
        {"properties": template(POOLS[entry["work_pool"]["name"]], bundled(POOLS[entry["work_pool"]["name"]].type))[
            "variables"]["properties"]}
    ).validate(entry["work_pool"].get("job_variables", {}))  # fmt: skip
    flow = load_flow_from_entrypoint(entry["entrypoint"])
    spec = TypeAdapter(flow.fn.__annotations__["spec"])
    given = [entry.get("parameters"), *(row.get("parameters") for row in entry.get("schedules", []))]
    given += [row["parameters"] for row in entry.get("triggers", [])]
    for parameters in filter(None, given):
        assert set(parameters) == {"spec"}
        spec.validate_python(parameters["spec"])


def test_automations_are_prefects():
    found = {one.name: one for one in read_automations(INFRA / "automations.yaml")}
    zombie = found["wherry zombie runs are crashed"]
    beat = int(POOLS["wherry-process"].variables["env"]["default"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
    assert zombie.trigger.within.total_seconds() >= 3 * beat
    assert zombie.actions[0].state.value == "CRASHED"
    assert found["wherry nightly run is missing"].trigger.within.total_seconds() > 24 * 3600


def test_a_notification_takes_the_place_of_doing_nothing():
    block = "11111111-1111-1111-1111-111111111111"
    found = read_automations(INFRA / "automations.yaml", block)
    assert [one.actions[0].type for one in found] == ["change-flow-run-state", "send-notification"]
    assert str(found[1].actions[0].block_document_id) == block
    assert all(isinstance(one, AutomationCore) for one in found)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "not JSON"),
        ("[]", "schema 1"),
        ('{"schema": 2, "name": "a", "type": "process"}', "schema 1"),
        ('{"schema": 1, "name": "a", "type": "ecs"}', "type that is known"),
        ('{"schema": 1, "name": "a", "type": "process", "varaibles": {}}', "varaibles"),
    ],
)
def test_faulty_pools_are_named(tmp_path, text, what):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UsageError, match=what):
        read_pool(tmp_path / "a.json")


def test_faulty_files_are_named(tmp_path):
    with pytest.raises(NotFoundError):
        prefect_deploy.read_deployments(tmp_path / "prefect.yaml")
    (tmp_path / "prefect.yaml").write_text("deployments:\n  - name: a\n    entrypoint: b\n")
    with pytest.raises(UsageError, match="misses 'work_pool'"):
        prefect_deploy.read_deployments(tmp_path / "prefect.yaml")
    with pytest.raises(UsageError, match="no work pools"):
        read_pools(tmp_path)


def entry(**more):
    return {"name": "convert", "entrypoint": "x", "work_pool": {"name": "wherry-kubernetes-cpu"}, **more}


def test_a_pool_that_is_not_there_and_one_for_all():
    pools = tuple(POOLS.values())
    with pytest.raises(UsageError, match="'elsewhere'"):
        prefect_deploy.pools_of([entry(work_pool={"name": "elsewhere"})], pools, None)
    assert prefect_deploy.pools_of([entry()], pools, "wherry-docker")["convert"].type == "docker"


def test_preflight_refuses_containers_that_keep_things_to_themselves(monkeypatch, tmp_path):
    pools = {"convert": POOLS["wherry-kubernetes-cpu"]}
    with pytest.raises(UsageError, match="ledger sqlite"):
        prefect_deploy.check([entry()], pools)
    monkeypatch.setenv("WHERRY_LEDGER", "postgresql://db/wherry")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    prefect_deploy.check([entry()], pools)
    with pytest.raises(UsageError, match="target of convert /out"):
        prefect_deploy.check([entry(parameters={"spec": {"target": "/out"}})], pools)
    (tmp_path / "wherry.toml").write_text(
        '[routes.a]\nroot = "gs://runs"\n[[routes.a.targets]]\nformat = "orbax"\nuri = "/out/{run}/{step}"\n'
    )
    monkeypatch.setenv("WHERRY_CONFIG", str(tmp_path / "wherry.toml"))
    with pytest.raises(UsageError, match="target 1 of route a"):
        prefect_deploy.check([entry()], pools)
    monkeypatch.setenv("WHERRY_SHARED_PATHS", "/out")
    prefect_deploy.check([entry()], pools)


def test_a_slice_must_be_all_chips_of_its_host(monkeypatch):
    monkeypatch.setenv("WHERRY_LEDGER", "postgresql://db/wherry")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    pools = {"convert": POOLS["wherry-kubernetes-tpu"]}
    prefect_deploy.check([entry()], pools)
    wrong = entry(work_pool={"name": "x", "job_variables": {"tpu_topology": "2x2", "tpu_chips": 8}})
    with pytest.raises(UsageError, match="2x2 has 4 chips, not 8"):
        prefect_deploy.check([wrong], pools)


def test_lists_of_named_things_are_merged_by_name():
    published = {
        "job_configuration": {"c": [{"name": "x", "a": 1}], "l": [1]},
        "variables": {"properties": {}},
    }
    over = {"c": [{"name": "x", "b": 2}, {"name": "y"}], "l": [2]}
    made = template(Pool("p", "process", "", job_configuration=over), published)
    assert made["job_configuration"] == {"c": [{"name": "x", "a": 1, "b": 2}, {"name": "y"}], "l": [2]}


def test_the_same_file_is_served_without_a_pool():
    from wherry.flows.serve import deployments

    made = {one.name: one for one in deployments(INFRA / "prefect.yaml")}
    assert set(made) == {entry["name"] for path, entry in DEPLOYMENTS if path == FILES[0]}
    night, export = made["nightly-convert"], made["post-training-export"]
    assert (night.schedules[0].schedule.cron, night.schedules[0].schedule.timezone) == ("30 2 * * *", "UTC")
    assert (night.concurrency_limit, night.concurrency_options.collision_strategy.value) == (1, "CANCEL_NEW")
    assert export.triggers[0].expect == {"wherry.checkpoint.committed"}
    assert export.entrypoint == "wherry.flows.export.export"
    assert [row.parameters for row in made["audit"].schedules] == [{}, {"spec": {"level": "digest"}}]


def test_what_cannot_be_served_is_named(tmp_path):
    from wherry.flows.serve import deployments

    for more, what in ((", sla: []", "sla cannot be served"), ("", "No module named 'nowhere'")):
        (tmp_path / "prefect.yaml").write_text(
            f"deployments:\n  - {{name: a, entrypoint: nowhere.flow, work_pool: {{name: p}}{more}}}\n"
        )
        with pytest.raises(UsageError, match=what):
            deployments(tmp_path / "prefect.yaml")
