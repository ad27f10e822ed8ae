"""What people type out of habit: options on either side of the command, and targets whose names say their format."""

from __future__ import annotations

import json

import pytest

from tests.support.command import small, typed
from wherry.storage.stores import locate


@pytest.fixture
def folder(tmp_path):
    small(tmp_path / "a.safetensors")
    return tmp_path


@pytest.mark.parametrize("line", ["--json ls", "ls --json", "--json ledger check"])
def test_json_is_accepted_on_either_side_of_the_command(line, folder, capfd):
    code, printed = typed(line, folder, capfd)
    assert code == 0
    json.loads(printed)


@pytest.mark.parametrize(
    "line", ["-q convert {}", "convert {} -q", "--quiet convert {}", "convert --quiet {}"]
)
def test_quiet_is_accepted_on_either_side_of_the_command(line, folder, capfd):
    code, printed = typed(line.format("HOME/a.safetensors HOME/b.npz --to npz"), folder, capfd)
    assert code == 0, printed


@pytest.mark.parametrize("line", ["-v ls", "ls -v", "ls --verbose"])
def test_verbose_is_accepted_on_either_side_of_the_command(line, folder, capfd):
    code, printed = typed(line, folder, capfd)
    assert (code, "model registry" in printed) == (0, True)


def test_what_follows_two_dashes_is_left_alone(folder, capfd):
    code, printed = typed("detect -- --json", folder, capfd)
    assert (code, "--json" in printed) == (3, True)


_NAMES = {"b.npz": "npz", "b.pt": "torch-zip", "b.pth": "torch-zip", "b.safetensors": "safetensors"}


@pytest.mark.parametrize(("name", "format"), _NAMES.items())
def test_the_format_follows_from_the_name_of_the_target(name, format, folder, capfd):
    for verb in ("plan", "convert"):
        code, printed = typed(f"{verb} HOME/a.safetensors HOME/{name} --json", folder, capfd)
        assert code == 0, printed
    code, printed = typed(f"detect HOME/{name} --json", folder, capfd)
    assert (code, json.loads(printed)["format"]) == (0, format)


def test_a_name_that_says_no_format_needs_one(folder, capfd):
    code, printed = typed("convert HOME/a.safetensors HOME/out", folder, capfd)
    assert (code, "missing option '--to'" in printed, "only names that end in" in printed) == (2, True, True)


def test_the_address_of_a_page_of_the_hub_is_its_model():
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    assert locate("https://huggingface.co/org/some.model-1").uri == locate("hf://org/some.model-1").uri
    assert locate("https://huggingface.co/org/m/tree/v2/").uri == locate("hf://org/m@v2").uri
