"""What is installed and run is pinned: hashes of packages, digests of images, and manifests without privileges."""

from __future__ import annotations

import json
import re
import tomllib
from importlib import metadata
from itertools import chain

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.infra import INFRA, ROOT
from tests.support.postgres import postgres_server

HASHES = (INFRA / "constraints-hashes.txt").read_text()
PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)", HASHES, re.MULTILINE))
MANIFESTS = [
    document
    for file in sorted((INFRA / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(file.read_text())
]
UNTESTED = frozenset(("async-timeout", "setuptools"))  # installers add them by themselves
PODS = [
    row["spec"]["template"]["spec"]
    for row in MANIFESTS
    if row["kind"] in ("Deployment", "Job", "StatefulSet")
]


def test_every_package_has_the_tested_version_and_a_hash():
    tested = dict(line.split("==") for line in (INFRA / "constraints.txt").read_text().split())
    tested = {canonicalize_name(name): version for name, version in tested.items()}
    assert len(PINNED) > 150
    assert {name: tested.get(name, PINNED[name]) for name in PINNED} == PINNED
    assert set(PINNED) - set(tested) <= UNTESTED
    for block in re.split(r"\n(?=\S)", HASHES.strip()):
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block


def requirements(row, extras):
    """What a requirement needs here: an installed package says it, wherry itself does in pyproject.toml."""
    if canonicalize_name(row.name) == "wherry":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        optional = project["optional-dependencies"]
        return [
            Requirement(one) for one in chain(project["dependencies"], *(optional[name] for name in extras))
        ]
    stated = [Requirement(one) for one in metadata.requires(row.name) or ()]
    return [
        one
        for one in stated
        if not one.marker or any(one.marker.evaluate({"extra": name}) for name in ("", *extras))
    ]


def test_everything_that_an_installation_needs_is_in_it_but_torch():
    """pip installs the file with `--no-deps`: what is missing in it is not installed, and nobody says so."""
    waiting, seen, wrong = [Requirement("wherry[all]")], set(), []
    while waiting:
        row = waiting.pop()
        name, extras = canonicalize_name(row.name), frozenset(row.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name == "torch":  # installed apart, with what it needs
            continue
        if name != "wherry" and (
            name not in PINNED or not row.specifier.contains(PINNED[name], prereleases=True)
        ):
            wrong.append(f"{row} is {PINNED.get(name, 'missing')}")
        waiting += requirements(row, extras)
    assert wrong == []
    assert len(seen) > 150
    assert "torch" not in PINNED


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod["containers"][0]["name"])
def test_pods_have_no_privileges_and_cannot_write_to_their_image(pod):
    outer = pod["securityContext"]
    assert outer["runAsNonRoot"] is True
    assert outer["runAsUser"] > 0
    assert outer["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    for container in pod["containers"]:
        inner = container["securityContext"]
        assert inner["allowPrivilegeEscalation"] is False
        assert inner["readOnlyRootFilesystem"] is True
        assert inner["capabilities"] == {"drop": ["ALL"]}
        assert any(
            mount["mountPath"] == "/tmp" or mount["mountPath"] == "/scratch"
            for mount in container["volumeMounts"]
        )
        assert "limits" in container["resources"]


def test_jobs_of_the_pools_have_no_privileges():
    for file in sorted((INFRA / "pools").glob("wherry-kubernetes-*.json")):
        spec = json.loads(file.read_text())["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_each_role_has_a_secret_of_its_own():
    used = {
        name
        for pod in PODS
        for container in pod["containers"]
        for name in [
            *(row["secretRef"]["name"] for row in container.get("envFrom", []) if "secretRef" in row),
            *(
                row["valueFrom"]["secretKeyRef"]["name"]
                for row in container.get("env", [])
                if "valueFrom" in row
            ),
        ]
    }
    assert used == {"wherry-worker", "wherry-prefect", "wherry-mlflow"}
    for file in sorted((INFRA / "pools").glob("wherry-kubernetes-*.json")):
        pool = json.loads(file.read_text())
        spec = pool["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
        secrets = [row for row in spec["containers"][0]["envFrom"] if "secretRef" in row]
        assert secrets == [{"secretRef": {"name": "wherry-run-{{ role }}", "optional": True}}]
        assert pool["variables"]["role"]["enum"] == ["worker", "registrar", "auditor"]
        assert pool["variables"]["role"]["default"] == "worker"
    units = yaml.safe_load((INFRA / "units" / "kubernetes.yaml").read_text())
    [container] = units["spec"]["template"]["spec"]["containers"]
    assert {"secretRef": {"name": "wherry-run-worker"}} in container["envFrom"]


def test_each_role_of_compose_has_a_password_of_its_own_and_no_other():
    text = (INFRA / "docker" / "compose.yaml").read_text()
    stated = yaml.safe_load(text)
    used = {
        name: {*re.findall(r"\$\{(\w+_DB_PASSWORD)", json.dumps(service))}
        for name, service in stated["services"].items()
    }
    assert {name: words for name, words in used.items() if words} == {
        "postgres": {"ADMIN_DB_PASSWORD"},
        "prefect": {"PREFECT_DB_PASSWORD"},
        "mlflow": {"MLFLOW_DB_PASSWORD"},
        "deploy": {"LEDGER_DB_PASSWORD"},
        "worker": {"LEDGER_DB_PASSWORD"},
    }
    assert set(re.findall(r"\$\{(\w+PASSWORD)(?!:\?set it\})", text)) == set(), "each must be set"


def test_the_databases_of_compose_are_apart():
    """The statements that the PostgreSQL of compose runs at its first start, on a real server."""
    import psycopg

    stated = yaml.safe_load((INFRA / "docker" / "compose.yaml").read_text())
    sql = re.sub(r"\$\{(\w+):\?set it\}", r"\1", stated["configs"]["databases"]["content"])
    with postgres_server() as server:
        with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
            for line in sql.splitlines():
                connection.execute(line)
        roles = ("ledger", "prefect", "mlflow")
        for role in roles:
            for database in (*roles, "postgres"):
                url = f"{server}/{database}".replace("postgres@", f"{role}@")
                if role == database:
                    with psycopg.connect(url) as connection:
                        connection.execute("CREATE SCHEMA own; CREATE TABLE of_public (x int)")
                else:
                    with pytest.raises(psycopg.OperationalError, match="permission denied"):
                        psycopg.connect(url)


# What could hold a secret: a variable or a literal, in the words that start a program.
SECRET = re.compile(
    r"\$[{(]?\w*(PASSWORD|TOKEN|SECRET|KEY|DATABASE|LEDGER)|://[^/\s]*:[^/\s@]*@", re.IGNORECASE
)


def command_lines():
    """Every command line of compose, of the manifests and of the pools: where it is, and its words."""
    compose = yaml.safe_load((INFRA / "docker" / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        for key in ("command", "entrypoint"):
            yield f"compose {name} {key}", service.get(key, [])
        yield f"compose {name} healthcheck", service.get("healthcheck", {}).get("test", [])
    for file in sorted((INFRA / "kubernetes").rglob("*.yaml")) + sorted((INFRA / "units").glob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            yield from words_of(file.name, document)
    for file in sorted((INFRA / "pools").glob("*.json")):
        yield from words_of(file.name, json.loads(file.read_text()))


def words_of(place, value):
    """The command lines in a document, however deep."""
    if isinstance(value, list):
        for one in value:
            yield from words_of(place, one)
    elif isinstance(value, dict):
        for key, one in value.items():
            if key in ("command", "args") and isinstance(one, str | list):
                yield f"{place} {key}", one
            else:
                yield from words_of(place, one)


def test_no_command_line_has_a_secret():
    """Whoever may list processes reads it; it belongs into the environment or a file."""
    lines = [*command_lines()]
    assert len(lines) > 20
    assert [place for place, words in lines if SECRET.search(json.dumps(words))] == []


@pytest.mark.parametrize("line", [
    ["mlflow", "--backend-store-uri=postgresql+psycopg://mlflow:${MLFLOW_DB_PASSWORD:?set it}@postgres:5432/mlflow"],
    ["psql", "postgresql://a:b2@host/db"], ["server", "--token", "$(API_TOKEN)"], ["sh", "-c", "x $WHERRY_KEY"],
])  # fmt: skip
def test_a_secret_in_a_command_line_is_seen(line):
    assert SECRET.search(json.dumps(line))


def test_comments_and_pages_show_no_command_with_a_secret():
    texts = [*INFRA.rglob("*.yaml"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert [file.name for file in texts if "--from-literal" in file.read_text()] == []


def test_actions_are_pinned_by_commit():
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    if not files:
        pytest.skip("a source distribution has no workflows")
    used = [one for file in files for one in re.findall(r"uses:\s*(.+)", file.read_text())]
    assert used
    assert [one for one in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)+", one)] == []


def test_the_image_installs_only_wheels():
    """Building a source distribution runs its code, also of one with a hash."""
    text = (INFRA / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    commands = re.findall(
        r"pip install\b[^&;]*", "\n".join(row for row in text.splitlines() if row[:1] != "#")
    )
    assert len(commands) > 4
    assert [one for one in commands if "--only-binary :all:" not in one] == []
