"""infra/release and the workflow: what a release consists of, and what every push runs."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def release():
    loader = SourceFileLoader("release", str(ROOT / "infra" / "release"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("release", loader))
    loader.exec_module(module)
    return module


def test_the_bill_of_materials_has_every_locked_package_with_its_hashes(release):
    locked = (ROOT / "infra" / "constraints-hashes.txt").read_text()
    bill = release.bill_of_materials("1.2.3", locked)
    assert (bill["bomFormat"], bill["metadata"]["component"]["version"]) == ("CycloneDX", "1.2.3")
    names = re.findall(r"^([\w.-]+)==", locked, re.MULTILINE)
    assert [one["name"] for one in bill["components"]] == [name.lower() for name in names]
    hashes = [row["value"] for one in bill["components"] for row in one["properties"]]
    assert hashes == re.findall(r"--hash=sha256:(\w+)", locked)
    assert all(one["properties"] for one in bill["components"])
    (edges,) = bill["dependencies"]
    assert edges["dependsOn"] == [one["bom-ref"] for one in bill["components"]]


def test_sums_are_those_that_sha256sum_checks(release, tmp_path):
    (tmp_path / "a.whl").write_bytes(b"a")
    (tmp_path / "b.json").write_bytes(b"b")
    (tmp_path / "SHA256SUMS").write_text(release.sums(tmp_path))
    subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=tmp_path, check=True, capture_output=True
    )
    (tmp_path / "b.json").write_bytes(b"c")
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path, check=False, capture_output=True)
    assert done.returncode


@pytest.mark.slow
def test_a_release_is_built_checked_and_the_same_twice(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("the tests do not run in a git checkout")
    for name in ("one", "two"):
        subprocess.run([ROOT / "infra" / "release", tmp_path / name], check=True, capture_output=True)
    made = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "one").iterdir()}
    assert {re.sub(r"\d[\d.]*\d", "N", name) for name in made} == {
        "wherry-N-py3-none-any.whl", "wherry-N.tar.gz", "wherry-N.cdx.json", "SHA256SUMS",
    }  # fmt: skip
    again = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "two").iterdir()
    }
    assert again == made
    (wheel,) = (tmp_path / "one").glob("*.whl")
    assert "wherry/packaged/prefect.yaml" in zipfile.ZipFile(wheel).namelist()
    (bill,) = (tmp_path / "one").glob("*.cdx.json")
    assert json.loads(bill.read_text())["metadata"]["component"]["name"] == "wherry"
    refused = subprocess.run(
        [ROOT / "infra" / "release", tmp_path / "one"], check=False, capture_output=True, text=True
    )
    assert (refused.returncode, "is not empty" in refused.stderr) == (1, True)


def test_the_workflow_runs_the_commands_of_this_house():
    data = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    triggers = data[True]  # YAML 1.1 reads `on` as a boolean, and GitHub does not
    assert {"push", "pull_request", "schedule"} <= set(triggers)
    assert data["permissions"] == {"contents": "read"}
    commands = [
        step["run"].split() for job in data["jobs"].values() for step in job["steps"] if "run" in step
    ]
    assert ["infra/test"] in commands
    for program, *words in commands:
        assert (ROOT / program).stat().st_mode & 0o111, f"{program} can be run"
        shown = subprocess.run(
            [sys.executable, ROOT / program, "--help"], check=True, capture_output=True, text=True
        ).stdout
        assert all(word in shown for word in words if word.startswith("--"))
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert data["jobs"]["test"]["strategy"]["matrix"]["python"] == classifiers
