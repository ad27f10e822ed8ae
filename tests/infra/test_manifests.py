"""What pods and containers may do and reach: each rule is compared whole, so that one that allows more is an error."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tests.support.infra import INFRA

MANIFESTS = [
    document
    for file in (*sorted((INFRA / "kubernetes").rglob("*.yaml")), INFRA / "units" / "kubernetes.yaml")
    for document in yaml.safe_load_all(file.read_text())
]
POOLS = {
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
    yield from POOLS.items()


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
