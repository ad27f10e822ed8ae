"""Container images: pinned by the digest that docker says, and made of packages with the tested hashes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

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
    for command in (
        backend,
        f"{wheel} {ROOT}",
        script,
        "wherry --version",
        "prefect version",
    ):
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
