"""What is installed and run is pinned: packages by hash, images by digest, manifests without privileges."""

from __future__ import annotations

import json
import os
import re
import tomllib
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.infra import INFRA, ROOT, load
from tests.support.postgres import new_database, postgres_server

HASHES = (INFRA / "constraints-hashes.txt").read_text()
PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)", HASHES, re.MULTILINE))


@pytest.fixture
def checkout(tmp_path):
    """A copy of the files of a release, with its script."""
    import shutil

    for name in ("docker", "kubernetes", "pools", "units"):
        shutil.copytree(INFRA / name, tmp_path / "infra" / name)
    for name in ("pin-images", "images.py", "prefect.yaml", "prefect.devices.yaml", "automations.yaml"):
        shutil.copy(INFRA / name, tmp_path / "infra" / name)
    return tmp_path


def pinned(checkout, monkeypatch, said, code=0, word="wherry:latest=registry.example/wherry:1"):
    """A run of the script with a docker that says this."""
    import subprocess
    import sys

    docker = checkout / "bin" / "docker"
    docker.parent.mkdir(exist_ok=True)
    docker.write_text(f"#!/bin/sh\necho '{said}'\nexit {code}\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(docker.parent), prepend=":")
    command = [sys.executable, str(checkout / "infra" / "pin-images"), word]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_images_are_pinned_by_the_digest_that_docker_says(checkout, monkeypatch):
    digest = f"sha256:{'ab' * 32}"
    done = pinned(checkout, monkeypatch, digest)
    assert done.returncode == 0, done.stderr
    for file in (
        "docker/compose.yaml",
        "kubernetes/worker.yaml",
        "kubernetes/servers.yaml",
        "pools/wherry-kubernetes-cpu.json",
        "units/kubernetes.yaml",
    ):
        text = (checkout / "infra" / file).read_text()
        assert f"registry.example/wherry:1@{digest}" in text
        assert not re.search(r'(image: |"default": ")wherry:latest', text)


@pytest.mark.parametrize(
    ("reference", "file", "line"),
    [
        (
            "python:3.11",
            "docker/Dockerfile",
            "ARG BUILD={}\nARG BASE=python:3.11-slim\nFROM ${{BUILD}} AS build",
        ),
        ("python:3.11-slim", "docker/Dockerfile", "ARG BUILD=python:3.11\nARG BASE={}\n"),
        ("wherry:gpu", "prefect.devices.yaml", "image: {}, gpu_count"),
        ("wherry:tpu", "prefect.devices.yaml", "image: {}, "),
        ("postgres:16", "docker/compose.yaml", "    image: {}\n"),
    ],
)
def test_every_image_that_a_file_starts_from_can_be_pinned(checkout, monkeypatch, reference, file, line):
    digest = f"sha256:{'ab' * 32}"
    done = pinned(checkout, monkeypatch, digest, word=f"{reference}={reference}")
    assert (done.returncode, done.stdout) == (0, f"{file}: pinned\n"), done.stderr
    assert line.format(f"{reference}@{digest}") in (checkout / "infra" / file).read_text()


def test_an_image_that_no_file_refers_to_is_an_error(checkout, monkeypatch):
    before = {file: file.read_bytes() for file in (checkout / "infra").rglob("*") if file.is_file()}
    done = pinned(checkout, monkeypatch, f"sha256:{'ab' * 32}", word="wherry:latst=registry.example/wherry:1")
    assert done.returncode == 1
    assert done.stderr == (
        "no file refers to the image wherry:latst; they refer to postgres:16, python:3.11, python:3.11-slim, "
        "wherry:gpu, wherry:latest, wherry:tpu\n"
    )
    assert {file: file.read_bytes() for file in before} == before


@pytest.mark.parametrize(("said", "code"), [("", 1), ("latest", 0), ("sha256:12", 0)])
def test_no_digest_is_made_up(checkout, monkeypatch, said, code):
    before = {file: file.read_bytes() for file in (checkout / "infra").rglob("*") if file.is_file()}
    assert pinned(checkout, monkeypatch, said, code).returncode != 0
    assert {file: file.read_bytes() for file in before} == before


@pytest.fixture
def images(monkeypatch):
    return load("images", monkeypatch)


PINS = {
    "wherry:latest": f"registry.example/wherry:1@sha256:{'ab' * 32}",
    "postgres:16": f"postgres:16@sha256:{'cd' * 32}",
}


def test_the_manifests_of_a_release_have_digests_only(images):
    files = dict(images.released(INFRA, PINS))
    assert {"docker/compose.yaml", "kubernetes/worker.yaml", "kubernetes/servers.yaml", "units/kubernetes.yaml",
            "pools/wherry-kubernetes-cpu.json", "postgres/roles.sql", "prefect.yaml"} <= set(files)  # fmt: skip
    named = [
        row for text in files.values() for row in re.findall(r"(?:wherry|postgres):\w+@sha256:\w{64}", text)
    ]
    assert len(named) > 8
    for name, text in files.items():
        if name.endswith(".json"):
            assert (
                json.loads(text)["variables"].get("image", {}).get("default", PINS["wherry:latest"])
                == PINS["wherry:latest"]
            )
        elif name.endswith(".yaml"):
            stated = set(re.findall(r"^\s*(?:- )?image: (\S+)$", text, re.MULTILINE))
            assert stated <= set(PINS.values()), name
            list(yaml.safe_load_all(text))


def test_deployments_on_devices_are_in_a_release_that_names_their_images(images):
    devices = {f"wherry:{kind}": f"registry.example/{kind}:1@sha256:{'ef' * 32}" for kind in ("gpu", "tpu")}
    assert images.WITH_OWN_IMAGES not in dict(images.released(INFRA, PINS))
    text = dict(images.released(INFRA, {**PINS, **devices}))[images.WITH_OWN_IMAGES]
    assert set(re.findall(r"image: ([^,}\s]+)", text)) == set(devices.values())
    with pytest.raises(SystemExit, match=r"infra/prefect.devices.yaml: no digest for wherry:tpu"):
        dict(images.released(INFRA, {**PINS, "wherry:gpu": devices["wherry:gpu"]}))


def test_an_image_without_a_digest_ends_the_release(images):
    with pytest.raises(
        SystemExit, match=r"infra/docker/compose.yaml: no digest for postgres:16; .*--images postgres:16="
    ):
        dict(images.released(INFRA, {"wherry:latest": PINS["wherry:latest"]}))
    assert images.unpinned('"image": {\n      "default": "a/b:1"\n    }, image: c@sha256:1\nimage: "d"') == {
        "a/b:1",
        "d",
    }


def test_a_release_refuses_an_image_that_no_file_refers_to(images):
    with pytest.raises(
        SystemExit, match="no file refers to the image wherry:latst; they refer to postgres:16"
    ):
        dict(images.released(INFRA, {**PINS, "wherry:latst": PINS["wherry:latest"]}))


def test_the_archive_has_the_same_bytes_for_the_same_files(images):
    import io
    import tarfile

    files = [("a/b.yaml", "text\n"), ("c.json", "{}")]
    data = images.archive(files, "wherry-1-manifests", 1_700_000_000)
    assert data == images.archive(files, "wherry-1-manifests", 1_700_000_000)
    with tarfile.open(fileobj=io.BytesIO(data)) as packed:
        assert packed.getnames() == ["wherry-1-manifests/a/b.yaml", "wherry-1-manifests/c.json"]
        assert packed.extractfile(packed.getmembers()[0]).read() == b"text\n"


@pytest.mark.parametrize("word", ["wherry:latest", "=x", "a="])
def test_an_image_is_named_with_its_place(images, word):
    with pytest.raises(SystemExit, match="expected REFERENCE=IMAGE"):
        images.digests_of([word])


def test_no_docker_is_an_error_that_names_it(images, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="docker not found"):
        images.digests_of(["postgres:16=postgres:16"])


# ---- The image


def report_of(*packages):
    """What pip's report says that it would install."""
    return {"install": [{"metadata": {"name": name, "version": version}} for name, version in packages]}


@pytest.fixture
def hashed(monkeypatch):
    monkeypatch.syspath_prepend(str(INFRA / "docker"))
    import hashed

    return hashed


def test_packages_of_the_image_are_installed_by_their_hashes(hashed):
    name, version = next(iter(PINNED.items()))
    found = report_of(
        ("wherry", "1"), (name.upper(), version), ("torch", "2.13.0+cpu"), ("nvidia-cublas-cu12", "12.1")
    )
    requirements, apart = hashed.divide(found, HASHES)
    assert requirements.startswith(f"{name}=={version} ")
    assert "--hash=sha256:" in requirements
    assert apart == "torch==2.13.0+cpu\nnvidia-cublas-cu12==12.1\n"


@pytest.mark.parametrize("package", [("unheard-of", "1.0"), (next(iter(PINNED)), "0.0.1")])
def test_a_package_without_a_hash_is_not_installed(hashed, package):
    with pytest.raises(SystemExit, match=f"no hash .*{package[0]}=={package[1]}"):
        hashed.divide(report_of(package), HASHES)


def test_the_dockerfile_installs_nothing_else():
    text = (INFRA / "docker" / "Dockerfile").read_text()
    installs = [
        row
        for row in re.findall(r"pip install ([^&|;]*)", text.replace("\\\n", " "))
        if "docker build" not in row
    ]
    assert len(installs) == 6
    backend, built_with, resolved, locked, apart, ours = installs
    assert "--dry-run" in backend
    assert "--require-hashes --no-deps -r requirements.txt" in built_with
    assert re.findall(r"pip wheel .*--no-build-isolation .*", text), (
        "pip would fetch the build backend by itself"
    )
    assert "--dry-run" in resolved
    assert "--require-hashes --no-deps -r requirements.txt" in locked
    assert apart.split()[-3:] == ["--no-deps", "-r", "apart.txt"]
    assert ours.split()[-2:] == ["--no-deps", '"${wheel}"']


def test_the_first_stage_of_the_dockerfile_has_what_the_wheel_is_built_from(tmp_path):
    import shutil
    import subprocess
    import sys

    stage = (INFRA / "docker" / "Dockerfile").read_text().partition("\nFROM ${BASE}")[0]
    for words in re.findall(r"^COPY ((?!.* /install/$).*)$", stage, re.MULTILINE):
        *sources, target = words.split()
        for name in sources:
            into = tmp_path / target / ("" if (ROOT / name).is_dir() else Path(name).name)
            into.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, into)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", "made", "."], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert [path.suffix for path in (tmp_path / "made").iterdir()] == [".whl"]


@pytest.mark.slow
def test_the_commands_of_the_dockerfile_install_wherry(tmp_path):
    """In an environment of its own, from the package index, without docker."""
    import shutil
    import subprocess
    import sys

    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    for name in ("constraints.txt", "constraints-hashes.txt", "docker/hashed.py"):
        (tmp_path / "install").mkdir(exist_ok=True)
        shutil.copy(INFRA / name, tmp_path / "install")
    text = (INFRA / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    words = dict(re.findall(r'^ARG (EXTRAS|WORKERS|DEVICES)="?([^"\n]*)"?$', text, re.MULTILINE))
    [backend] = re.findall(r"^RUN (cd /install .*)$", text, re.MULTILINE)
    [wheel] = re.findall(r"^RUN (pip wheel .*) \.$", text, re.MULTILINE)
    [line] = re.findall(r"^RUN (wheel=.*?pip check)", text, re.MULTILINE)
    backend, wheel, script = (
        row.replace("/wheels", str(tmp_path / "wheels")).replace("/install", str(tmp_path / "install"))
        for row in (backend, wheel, line)
    )
    variables = {"PATH": f"{tmp_path / 'venv' / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path), **words}
    keep = {
        name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_", "SSL_", "HTTP"))
    }
    for command in (backend, f"{wheel} {ROOT}", script, "wherry --version", "prefect version"):
        done = subprocess.run(
            ["sh", "-ec", command], env={**keep, **variables}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_mlflow_keeps_its_data_with_the_driver_of_the_image(tmp_path):
    pytest.importorskip("mlflow")
    from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore

    with postgres_server() as server:
        url = new_database(server, "mlflow").replace("postgresql://", "postgresql+psycopg://")
        store = SqlAlchemyStore(url)
        store.create_registered_model("model")
        assert [one.name for one in store.search_registered_models()] == ["model"]


# What is installed and run is pinned: hashes of packages, digests of images, and manifests without
# privileges.


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
