"""The files of `infra` that bring wherry to workers mean what Prefect and Kubernetes take them for."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from unittest.mock import MagicMock
from uuid import uuid4

import pytest

pytest.importorskip("prefect")
pytest.importorskip("yaml")

import prefect.server.api.collections
import yaml
from jsonschema import Draft202012Validator, ValidationError
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.utilities.templating import apply_values, find_placeholders
from prefect.workers.base import BaseJobConfiguration

from tests.support.infra import INFRA
from wherry.errors import UsageError
from wherry.integrations.prefect.pools import WorkPool, read_pool, read_pools, template

POOLS = {pool.name: pool for pool in read_pools(INFRA / "pools")}
KUBERNETES = [name for name, pool in POOLS.items() if pool.type == "kubernetes"]


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


def test_the_pools_are_there():
    assert set(POOLS) == {"wherry-process", "wherry-units", "wherry-docker"} | {
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


def test_containers_of_the_docker_pool_have_the_rights_of_those_of_compose(publish):
    worker = pytest.importorskip("prefect_docker.worker")
    made = template(POOLS["wherry-docker"], publish("docker"))
    values = BaseJobConfiguration._get_base_config_defaults(made["variables"]["properties"])
    filled = worker.DockerWorkerJobConfiguration(**apply_values(made["job_configuration"], values))
    filled.prepare_for_flow_run(FlowRun(flow_id=uuid4()))
    settings = worker.DockerWorker(work_pool_name="a")._build_container_settings(MagicMock(), filled)
    compose = yaml.safe_load((INFRA / "docker" / "compose.yaml").read_text())["x-wherry"]
    for right in ("read_only", "cap_drop", "security_opt"):
        assert settings[right] == compose[right]
    assert {f"{place}:{how}" for place, how in settings["tmpfs"].items()} <= set(compose["tmpfs"])
    assert settings["privileged"] is False
    assert settings["environment"]["PREFECT_HOME"].startswith("/tmp/")


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
    assert mounts == {volume["name"] for volume in pod["volumes"]} == {"scratch", "config"}


@pytest.mark.parametrize("name", KUBERNETES)
def test_runs_find_the_configuration_where_the_manifests_say(name, publish):
    rows = yaml.safe_load_all((INFRA / "kubernetes" / "worker.yaml").read_text())
    (settings,) = [row for row in rows if row["kind"] == "ConfigMap"]
    file = Path(settings["data"]["WHERRY_CONFIG"])
    pod = job(name, publish)["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert {"configMapRef": {"name": settings["metadata"]["name"], "optional": True}} in container["envFrom"]
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == str(file.parent)]
    (volume,) = [one for one in pod["volumes"] if one["name"] == mount["name"]]
    assert volume["configMap"]["optional"], (
        "the pod starts without it, and the run itself says what is missing"
    )
    text = (INFRA / "kubernetes" / "worker.yaml").read_text()
    assert f"create configmap {volume['configMap']['name']} --from-file={file.name}=" in text


@pytest.mark.parametrize("name", KUBERNETES)
def test_a_run_has_the_secret_of_its_role_and_no_other(name, publish):
    for variables, role in (
        ({}, "worker"),
        ({"role": "auditor"}, "auditor"),
        ({"role": "registrar"}, "registrar"),
    ):
        container = job(name, publish, **variables)["spec"]["template"]["spec"]["containers"][0]
        secrets = [row["secretRef"]["name"] for row in container["envFrom"] if "secretRef" in row]
        assert secrets == [f"wherry-run-{role}"]
    with pytest.raises(ValidationError):
        job(name, publish, role="owner")


def test_devices_are_requested_by_variables(publish):
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


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "invalid JSON"),
        ("[]", "schema 1"),
        ('{"schema": 2, "name": "a", "type": "process"}', "schema 1"),
        ('{"schema": 1, "name": "a", "type": "ecs"}', "unknown type"),
        ('{"schema": 1, "name": "a", "type": "process", "varaibles": {}}', "varaibles"),
    ],
)
def test_faulty_pools_are_named(tmp_path, text, what):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UsageError, match=what):
        read_pool(tmp_path / "a.json")


def test_lists_of_named_things_are_merged_by_name():
    published = {
        "job_configuration": {"c": [{"name": "x", "a": 1}], "l": [1]},
        "variables": {"properties": {}},
    }
    over = {"c": [{"name": "x", "b": 2}, {"name": "y"}], "l": [2]}
    made = template(WorkPool("p", "process", "", job_configuration=over), published)
    assert made["job_configuration"] == {"c": [{"name": "x", "a": 1, "b": 2}, {"name": "y"}], "l": [2]}
