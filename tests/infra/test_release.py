"""infra/release and the workflow: what a release consists of, and what every push runs."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import re
import subprocess
import sys
import tomllib
import zipfile
from datetime import date
from email.parser import BytesParser
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

import wherry
from tests.support.infra import load
from tests.support.readme import CONTRIBUTING, code, commands, section

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


STATED = '"""The version."""\n\n__version__ = "0.2.0"\n'


@pytest.mark.parametrize(
    ("tags", "version"),
    [
        (["v0.2.0"], "0.2.0"),
        (["stable", "v0.2.0"], "0.2.0"),
        ([], "0.2.0.dev20261123213000"),
        (["vintage", "v1", "1.2.0", "v1.2.0-2"], "0.2.0.dev20261123213000"),
    ],
)
def test_the_version_is_that_of_the_tag(tags, version, monkeypatch):
    module = load("provenance", monkeypatch)
    assert module.version_of(tags, STATED, 1795469400) == version
    assert Version(version).public == version
    assert module.stamp_version(STATED, version).splitlines()[2] == f'__version__ = "{version}"'


def test_a_commit_has_one_version(monkeypatch):
    module = load("provenance", monkeypatch)
    with pytest.raises(ValueError, match=r"several versions: 1\.2\.0, 1\.3\.0"):
        module.version_of(["v1.3.0", "v1.2.0"], STATED, 0)
    with pytest.raises(ValueError, match="states no version"):
        module.version_of([], "", 0)
    with pytest.raises(ValueError, match=r"the tag is v1\.2\.0, but wherry/version\.py states 0\.2\.0"):
        module.version_of(["v1.2.0"], STATED, 0)
    begun = STATED.replace("0.2.0", "0.3.0.dev0")
    assert module.version_of([], begun, 0) == "0.3.0.dev19700101000000"
    stated = (ROOT / "wherry" / "version.py").read_text()
    assert module.version_of([], stated, 0) == f"{wherry.__version__.removesuffix('.dev0')}.dev19700101000000"
    assert module.version_of([f"v{wherry.__version__}"], stated, 0) == wherry.__version__


def test_the_commands_that_make_a_release_are_shown_for_the_stated_version(release):
    tag, build = commands(code(section("Release", CONTRIBUTING), "sh")[0])
    assert tag[:2] == ["git", "tag"]
    assert release.version_of(tag[2:], (ROOT / "wherry" / "version.py").read_text(), 0) == tag[2][1:]
    assert build[0] == "infra/release"
    shown = subprocess.run([ROOT / build[0], "--help"], check=True, capture_output=True, text=True).stdout
    assert all(word in shown for word in build[1:] if word.startswith("--"))
    dated = rf"^## {re.escape(tag[2][1:])} \((\d{{4}}-\d\d-\d\d)\)$"
    [day] = re.findall(dated, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert date.fromisoformat(day)


def test_the_metadata_link_to_the_repository_that_is_built(monkeypatch):
    module = load("provenance", monkeypatch)
    runner = {"GITHUB_SERVER_URL": "https://git.example", "GITHUB_REPOSITORY": "o/wherry"}
    stated = (ROOT / "pyproject.toml").read_text()
    built = tomllib.loads(module.state_urls(stated, module.address_in(runner)))
    assert built["project"].pop("urls") == {"Repository": "https://git.example/o/wherry"}
    assert built == tomllib.loads(stated)
    assert not module.address_in({})


def test_a_provenance_names_what_was_built_of_what_by_whom(tmp_path, monkeypatch):
    module = load("provenance", monkeypatch)
    (tmp_path / "a.whl").write_bytes(b"a")
    statement = module.provenance([tmp_path / "a.whl"], "1.2.0", "c" * 40, {"hatchling": "1.27"}, {})
    assert statement["subject"] == [{"name": "a.whl", "digest": {"sha256": hashlib.sha256(b"a").hexdigest()}}]
    made = statement["predicate"]["buildDefinition"]
    assert made["resolvedDependencies"] == [
        {"name": "source", "digest": {"gitCommit": "c" * 40}}, {"uri": "pkg:pypi/hatchling@1.27"},
    ]  # fmt: skip
    assert statement["predicate"]["runDetails"] == {"builder": {"id": "urn:wherry:builder:local"}}
    runner = {
        "GITHUB_SERVER_URL": "https://git.example", "GITHUB_REPOSITORY": "o/wherry", "GITHUB_REF": "refs/tags/v1",
        "GITHUB_RUN_ID": "7", "GITHUB_WORKFLOW_REF": "o/wherry/.github/workflows/test.yml@refs/tags/v1",
    }  # fmt: skip
    there = module.provenance([tmp_path / "a.whl"], "1.2.0", "c" * 40, {}, runner)["predicate"]
    (source,) = there["buildDefinition"]["resolvedDependencies"]
    assert source["uri"] == "git+https://git.example/o/wherry@refs/tags/v1"
    assert there["runDetails"]["builder"]["id"] == runner["GITHUB_WORKFLOW_REF"]
    assert there["runDetails"]["metadata"]["invocationId"] == "https://git.example/o/wherry/actions/runs/7"


@pytest.mark.slow
def test_a_release_is_built_checked_and_the_same_twice(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("the tests do not run in a git checkout")
    for name in ("one", "two"):
        command = [ROOT / "infra" / "release", tmp_path / name, "--url", "https://git.example/o/wherry"]
        subprocess.run(command, check=True, capture_output=True)
    made = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "one").iterdir()}
    assert {re.sub(r"(?<=wherry-)\d[\d.]*(?:\.dev\d+)?\d", "N", name) for name in made} == {
        f"wherry-N-py3-none-manylinux_2_17_{platform.machine()}.whl",
        "wherry-N.tar.gz", "wherry-N.cdx.json", "wherry-N.intoto.json", "SHA256SUMS",
    }  # fmt: skip
    again = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "two").iterdir()
    }
    assert again == made
    (wheel,) = (tmp_path / "one").glob("*.whl")
    held = zipfile.ZipFile(wheel)
    names = held.namelist()
    assert "wherry/packaged/prefect.yaml" in names
    assert any(re.fullmatch(r"wherry/kernels/kernels-\w+\.so", name) for name in names)
    [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
    assert "Repository, https://git.example/o/wherry" in BytesParser().parsebytes(
        held.read(metadata)
    ).get_all("Project-URL")
    (bill,) = (tmp_path / "one").glob("*.cdx.json")
    assert json.loads(bill.read_text())["metadata"]["component"]["name"] == "wherry"
    (statement,) = (tmp_path / "one").glob("*.intoto.json")
    subjects = json.loads(statement.read_text())["subject"]
    assert {one["name"]: one["digest"]["sha256"] for one in subjects} == {
        name: digest for name, digest in made.items() if name not in (statement.name, "SHA256SUMS")
    }
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
