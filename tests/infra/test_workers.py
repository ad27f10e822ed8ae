"""The files of `infra` that bring wherry to workers mean what Prefect, Kubernetes and Slurm take them for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from unittest.mock import MagicMock
from uuid import uuid4

import prefect.server.api.collections
import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.objects import FlowRun
from prefect.utilities.templating import apply_values, find_placeholders
from prefect.workers.base import BaseJobConfiguration

import wherry
from tests.support.infra import INFRA
from tests.support.jobs import made_job, undisturbed
from tests.support.object_stores import leftover_names, model
from tests.support.processes import is_running
from wherry.errors import UsageError, WherryError
from wherry.integrations.prefect.pools import WorkPool, read_pool, read_pools, template
from wherry.store.local_store import locate
from wherry.workers.commit import commit
from wherry.workers.records import TaskKind, claims_among, job_records, records_by_unit

pytest.importorskip("prefect")
pytest.importorskip("yaml")


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


# What pods and containers may do and reach: each rule is compared whole, so that one that allows more is
# an error.


MANIFESTS = [
    document
    for file in (*sorted((INFRA / "kubernetes").rglob("*.yaml")), INFRA / "units" / "kubernetes.yaml")
    for document in yaml.safe_load_all(file.read_text())
]
POOLS_OF_MANIFESTS = {
    file.stem: json.loads(file.read_text())["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    for file in sorted((INFRA / "pools").glob("wherry-kubernetes-*.json"))
}
COMPOSE = yaml.safe_load((INFRA / "docker" / "compose.yaml").read_text())["services"]
SERVERS = ("prefect", "mlflow")
WORKERS = ("wherry-worker-cpu", "wherry-worker-gpu", "wherry-worker-tpu")
ANYWHERE, SELF = "anywhere", "pods of the namespace"
METADATA = ("169.254.169.254/32", "169.254.169.252/32")


def of_kind(kind):
    return {row["metadata"]["name"]: row for row in MANIFESTS if row["kind"] == kind}


def place(peer):
    """One peer of a rule as text."""
    if peer == {"podSelector": {}}:
        return SELF
    if set(peer) == {"ipBlock"} and set(peer["ipBlock"]) == {"cidr"}:
        return peer["ipBlock"]["cidr"]
    assert set(peer) == {"podSelector"}, peer
    return selected(peer["podSelector"])


def selected(selector):
    assert set(selector) == {"matchExpressions"}, selector
    [row] = selector["matchExpressions"]
    assert row["key"] == "app.kubernetes.io/name"
    return row["operator"], *row["values"]


def openings(rules, side):
    """Every pair of place and port that rules open; `anywhere` and `any port` where a rule does not say."""
    return {
        (place(peer) if peer is not None else ANYWHERE, port.get("port", "any port"))
        for rule in rules
        for peer in rule.get(side) or [None]
        for port in rule.get("ports") or [{}]
    }


def test_network_policies_open_these_and_nothing_else():
    policies = {name: row["spec"] for name, row in of_kind("NetworkPolicy").items()}
    servers = ("In", *SERVERS)
    found = {
        name: (
            selected(spec["podSelector"]),
            set(spec["policyTypes"]),
            openings(spec.get("ingress", []), "from"),
            openings(spec.get("egress", []), "to"),
        )
        for name, spec in policies.items()
    }
    assert found == {
        "wherry-servers": (servers, {"Ingress"}, {(SELF, "any port")}, set()),
        "wherry-workers": (
            ("NotIn", *SERVERS),
            {"Ingress", "Egress"},
            set(),
            {
                *((servers, port) for port in (4200, 5000)),
                *((ANYWHERE, port) for port in (53, 443, 6443, 5432)),
            },
        ),
        "wherry-metadata": (
            ("NotIn", *SERVERS, *WORKERS),
            {"Egress"},
            set(),
            {(place, port) for place in METADATA for port in (80, 988)},
        ),
    }


def test_ports_are_single_ones_of_tcp_and_names_are_also_resolved_by_udp():
    specs = [row["spec"] for row in of_kind("NetworkPolicy").values()]
    rules = [rule for spec in specs for side in ("ingress", "egress") for rule in spec.get(side, [])]
    stated = [port for rule in rules for port in rule.get("ports", [])]
    assert all(set(port) == {"protocol", "port"} for port in stated), "no range"
    assert {port["protocol"] for port in stated} == {"TCP", "UDP"}
    assert [port["port"] for port in stated if port["protocol"] == "UDP"] == [53]


def test_the_metadata_server_is_opened_only_by_a_file_of_its_own():
    """`kubectl apply -f infra/kubernetes` does not descend into folders."""
    for file in (INFRA / "kubernetes").glob("*.yaml"):
        assert "169.254" not in file.read_text(), file.name
    assert "169.254" in (INFRA / "kubernetes" / "gke" / "metadata.yaml").read_text()


def test_the_role_of_a_worker_is_this():
    roles = {name: row["rules"] for name, row in of_kind("Role").items()}
    reads, writes = ["get", "list", "watch"], ["create", "update", "patch", "delete"]
    assert roles == {
        "wherry-worker": [
            {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": [*reads, *writes]},
            {"apiGroups": [""], "resources": ["pods", "pods/log", "pods/status"], "verbs": reads},
            {"apiGroups": ["", "events.k8s.io"], "resources": ["events"], "verbs": reads},
        ]
    }
    assert not {row["kind"] for row in MANIFESTS} & {"ClusterRole", "ClusterRoleBinding"}
    bound = {
        name: (row["roleRef"]["kind"], row["roleRef"]["name"], [one["name"] for one in row["subjects"]])
        for name, row in of_kind("RoleBinding").items()
    }
    assert bound == {"wherry-worker": ("Role", "wherry-worker", ["wherry-worker"])}


def pods():
    for row in MANIFESTS:
        if row["kind"] in ("Deployment", "Job", "StatefulSet", "DaemonSet", "Pod"):
            yield row["metadata"]["name"], row["spec"]["template"]["spec"]
    yield from POOLS_OF_MANIFESTS.items()


@pytest.mark.parametrize(
    ("name", "pod"), [*pods()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_only_workers_have_a_token_of_the_cluster(name, pod):
    if name in WORKERS:
        assert pod["serviceAccountName"] == "wherry-worker"
        assert "automountServiceAccountToken" not in pod
    else:
        assert pod["automountServiceAccountToken"] is False
        assert pod.get("serviceAccountName", "") in ("", "wherry-flow")


@pytest.mark.parametrize(
    ("name", "pod"), [*pods()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_no_pod_reaches_its_node(name, pod):
    assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(pod), name
    assert "hostPath" not in json.dumps(pod)
    for container in (*pod["containers"], *pod.get("initContainers", [])):
        assert set(container["securityContext"]) == {
            "allowPrivilegeEscalation", "readOnlyRootFilesystem", "capabilities",
        }  # fmt: skip


def test_service_accounts_are_these():
    found = {
        name: row.get("automountServiceAccountToken", True) for name, row in of_kind("ServiceAccount").items()
    }
    assert found == {"wherry-worker": True, "wherry-flow": False}


@pytest.mark.parametrize("name", sorted(COMPOSE))
def test_a_service_of_compose_has_only_the_rights_that_it_needs(name):
    service = COMPOSE[name]
    assert not {"privileged", "pid", "ipc", "devices", "group_add", "userns_mode"} & set(service)
    assert service.get("network_mode", "none") == "none"
    assert "docker.sock" not in json.dumps(service)
    assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", []))
    assert (service.get("user"), service.get("cap_add")) == (
        ("0:0", ["CHOWN"]) if name == "volumes" else (None, None)
    )
    if name != "postgres":
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["image"] == "wherry:latest"


def test_the_image_ends_as_a_user_by_number():
    """`runAsNonRoot` refuses an image whose user has only a name."""
    stage = re.split(r"^FROM ", (INFRA / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)[-1]
    [user] = re.findall(r"^USER (.*)$", stage, re.MULTILINE)
    assert re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", user)
    assert f"useradd --uid {user} " in stage
    assert "USER" not in stage.partition(f"USER {user}")[2]


# The files of `infra/units` are what Kubernetes and Slurm take, and their commands make and commit a job.


pytest.importorskip("yaml")


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
