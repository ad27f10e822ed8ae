"""What a cure says to install fits how wherry was installed: by pip or uv, from where, and as whose tool."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError

import pytest

from wherry import installation
from wherry.errors import missing_extra

FOLDER = {"url": "file:///src/my%20wherry", "dir_info": {"editable": True}}
WHEEL = {"url": "file:///tmp/wherry-1.whl", "archive_info": {}}
GIT = {"url": "https://host/wherry.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
# What `direct_url.json` states → what an installer installs.
ORIGINS = [
    ({}, "'wherry[hub]'"),
    (FOLDER, "-e '/src/my wherry[hub]'"),
    ({**FOLDER, "dir_info": {}}, "'/src/my wherry[hub]'"),
    (WHEEL, "'/tmp/wherry-1.whl[hub]'"),
    ({"url": "https://host/wherry-1.whl"}, "'wherry[hub] @ https://host/wherry-1.whl'"),
    (GIT, "'wherry[hub] @ git+https://host/wherry.git@abc'"),
]


class Distribution:
    """What importlib.metadata knows of an installed package."""

    def __init__(self, text, requires=()):
        self.text, self.requires = text, requires

    def read_text(self, _name):
        """A file of its metadata."""
        return self.text


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An environment with pip on the PATH, into which wherry was installed from an index."""
    folder = tmp_path / "an env"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "pip").touch(0o755)
    monkeypatch.setattr(sys, "prefix", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "bin" / "python"))
    monkeypatch.setenv("PATH", str(folder / "bin"))
    monkeypatch.setattr(installation, "find_spec", lambda _name: True)
    monkeypatch.setattr(installation, "distribution", lambda _name: Distribution(None))
    return folder


@pytest.mark.parametrize(("origin", "requirement"), ORIGINS)
def test_an_extra_is_installed_from_where_wherry_was(origin, requirement, environment, monkeypatch):
    monkeypatch.setattr(installation, "distribution", lambda _name: Distribution(json.dumps(origin)))
    assert installation.extra_command("hub") == f"pip install {requirement}"
    cure = str(missing_extra("huggingface_hub", "hub", "hf:// storage")).rpartition("cure: ")[2]
    assert cure == f"add the extra hub: `pip install {requirement}`", "the same words in Python"


@pytest.mark.parametrize("text", [None, "", "[]", "no JSON"])
def test_without_an_origin_it_is_the_package_of_an_index(text, environment, monkeypatch):
    monkeypatch.setattr(installation, "distribution", lambda _name: Distribution(text))
    assert installation.extra_command("hub") == "pip install 'wherry[hub]'"


def test_run_from_its_sources_it_is_no_installed_package(environment, monkeypatch):
    def absent(_name):
        raise PackageNotFoundError

    monkeypatch.setattr(installation, "distribution", absent)
    assert installation.extra_command("hub") == "pip install 'wherry[hub]'"


def test_a_pip_of_another_environment_is_not_used(environment, monkeypatch, tmp_path):
    (tmp_path / "pip").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    python = shlex.quote(str(environment / "bin" / "python"))
    assert installation.extra_command("hub") == f"{python} -m pip install 'wherry[hub]'"


def test_an_environment_of_uv_has_no_pip(environment, monkeypatch):
    (environment / "bin" / "uv").touch(0o755)
    monkeypatch.setattr(installation, "find_spec", lambda _name: None)
    python = shlex.quote(str(environment / "bin" / "python"))
    assert installation.extra_command("hub") == f"uv pip install --python {python} 'wherry[hub]'"
    assert installation.package_command("a<2", "b", upgrade=True) == (
        f"uv pip install --python {python} --upgrade 'a<2' b"
    )


def test_a_tool_of_pipx_is_changed_by_pipx(environment, monkeypatch):
    (environment / "pipx_metadata.json").write_text("{}")
    assert installation.extra_command("hub") == "pip install 'wherry[hub]'", (
        "of `pipx run`: no tool has its name"
    )
    tool = environment.rename(environment.parent / "venvs") / environment.name
    tool.mkdir()
    (tool / "pipx_metadata.json").write_text("{}")
    monkeypatch.setattr(sys, "prefix", str(tool))
    assert installation.extra_command("hub") == "pipx runpip 'an env' install 'wherry[hub]'"


def test_a_tool_of_uv_keeps_the_extras_and_packages_that_it_has(environment):
    row = '{ name = "wherry", extras = ["mlflow"] }, { name = "psycopg" }'
    (environment / "uv-receipt.toml").write_text(f"[tool]\nrequirements = [{row}]\n")
    assert installation.extra_command("hub") == "uv tool install 'wherry[hub,mlflow]' --with psycopg"
    assert installation.package_command("fastapi<0.151") == (
        "uv tool install 'wherry[mlflow]' --with psycopg --with 'fastapi<0.151'"
    )


def test_a_receipt_that_cannot_be_read_is_that_of_a_tool_of_uv_no_more(environment):
    (environment / "uv-receipt.toml").write_text("no TOML")
    assert installation.extra_command("hub") == "pip install 'wherry[hub]'"


def test_a_wherry_that_uvx_runs_keeps_the_extras_whose_packages_are_there(environment, monkeypatch):
    requires = ("numpy", "wherry[s3]; extra == 'all'", "mlflow<4,>=3.1; extra == 'mlflow'", 's3fs; extra == "s3"',
                "mlflow; extra == 'demo'", "rich; extra == 'demo'")  # fmt: skip

    def find(name):
        if name not in ("wherry", "mlflow"):
            raise PackageNotFoundError
        return Distribution(None, requires)

    monkeypatch.setattr(installation, "distribution", find)
    monkeypatch.setattr(sys, "prefix", str(environment / "archive-v0" / "x"))
    assert installation.extra_command("hub") == "uvx --from 'wherry[hub,mlflow]' wherry"
    assert installation.package_command("a<2", "b", upgrade=True) == (
        "uvx --upgrade --from 'wherry[mlflow]' --with 'a<2' --with b wherry"
    )


@pytest.fixture
def small_wheel(tmp_path, monkeypatch):
    """A small wheel of the name wherry, whose command prints what this module says of its own installation."""
    wheel = tmp_path / "a wheel" / "wherry-1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(installation.__file__, "installation.py")
        archive.writestr("tiny.py", "def main():\n import installation as i\n print(i.extra_command('hub'))\n"
                         " print(i.package_command('wherry'))\n")  # fmt: skip
        archive.writestr("wherry-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: wherry\nVersion: 1\n"
                         "Provides-Extra: mlflow\nProvides-Extra: hub\nProvides-Extra: s3\n"
                         "Requires-Dist: wherry; extra == 'mlflow'\n"
                         "Requires-Dist: absent>=1; extra == 's3'\n")  # fmt: skip
        archive.writestr(
            "wherry-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("wherry-1.dist-info/entry_points.txt", "[console_scripts]\nwherry = tiny:main\n")
        archive.writestr("wherry-1.dist-info/RECORD", "")
    for name in ("TOOL", "TOOL_BIN", "CACHE"):
        monkeypatch.setenv(f"UV_{name}_DIR", str(tmp_path / name))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_PYTHON", sys.executable)
    return wheel


def printed(command):
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout.splitlines()


with_uv = pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")


@with_uv
def test_uv_itself_accepts_the_command_for_its_tool(small_wheel, tmp_path, monkeypatch):
    """The wheel is installed by uv as a tool; then the printed command adds an extra to it."""
    subprocess.run(["uv", "tool", "install", f"{small_wheel}[mlflow]"], check=True, capture_output=True)
    (receipt,) = (tmp_path / "TOOL").rglob("uv-receipt.toml")
    command, _ = printed([tmp_path / "TOOL_BIN" / "wherry"])
    assert command == f"uv tool install '{small_wheel}[hub,mlflow]'"
    printed(command)
    assert 'extras = ["hub", "mlflow"]' in receipt.read_text()


@with_uv
def test_uvx_itself_accepts_the_commands_for_what_it_runs(small_wheel):
    extra, package = printed(f"uvx --from '{small_wheel}' wherry")
    assert extra == f"uvx --from '{small_wheel}[hub]' wherry", "no package is there that an extra needs"
    assert package == f"uvx --from '{small_wheel}' --with wherry wherry"
    assert printed(extra) == printed(package) == [extra, package]
