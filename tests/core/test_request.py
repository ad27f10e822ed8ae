"""One request: an option is declared once, and is then known to commands, forms, routes, exports and receipts.

An option is added to a copy of the product, by one line; what it takes to add one is counted, and README says it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from wherry.converter.command import DECIDING, UNPLANNED
from wherry.core.request import (
    PLAIN,
    ConvertRequest,
    LayoutRequest,
    RewriteRequest,
    SourceRequest,
    TargetRequest,
    convert_request,
    options_of,
)
from wherry.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
PLACE = "    sign: str | None = option("
ADDED = '    pace: int | None = option(None, "Maximum number at a time.", metavar="N", decides=True)\n'
ASK = """
import json, sys
import click, wherry
from wherry.cli import cli
from wherry.config.schema import Route
from wherry.converter.command import command, DECIDING
from wherry.live.request import export_request
from wherry.store.sidecar import read_sidecar
from wherry.store.local_store import locate
source, target = sys.argv[1:3]
cli.main(["convert", source, target, "--to", "npz", "--set", "join=.", "--pace", "3", "--json"], standalone_mode=False)
receipt = read_sidecar(locate(target)).receipt
door = wherry.convert(source, target + "2.npz", to="npz", options={"join": "."}, pace=4, lineage=False)
found = {
    "stated": receipt.requested, "command": command(receipt), "door": door.requested, "decides": "pace" in DECIDING,
    "route": Route.model_json_schema()["properties"]["pace"]["description"],
    "export": export_request(uri="t", to="npz", snapshot="host", pace=5).convert.pace,
}
try:
    from wherry.flows.convert_spec import ConvertSpec
except ImportError:
    pass
else:
    spec = ConvertSpec(source=source, target=target, to="npz", pace=6)
    found["form"] = ConvertSpec.model_json_schema()["properties"]["advanced"]["properties"]["pace"]["description"]
    found["request"] = spec.request.pace
print()
print(json.dumps(found))
"""


@pytest.fixture
def source(tmp_path):
    save_file({"a.b": np.arange(6, dtype=np.float32)}, tmp_path / "s.safetensors")
    return tmp_path / "s.safetensors"


@pytest.fixture
def copy(tmp_path):
    """The product with one more option of `convert`."""
    home = tmp_path / "product"
    for room in ("wherry", "integrations", "tasks", "flows"):
        shutil.copytree(ROOT / room, home / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return home


def changed(home):
    """The files of the product that are not as in the checkout."""
    files = [
        path for room in ("wherry", "integrations", "tasks", "flows") for path in (home / room).rglob("*.py")
    ]
    return {
        str(path.relative_to(home))
        for path in files
        if path.read_bytes() != (ROOT / path.relative_to(home)).read_bytes()
    }


def test_an_option_is_added_by_one_line(copy, source, tmp_path):
    file = copy / "wherry" / "core" / "request.py"
    text = file.read_text()
    assert text.count(PLACE) == 1
    file.write_text(text.replace(PLACE, ADDED + PLACE))
    assert changed(copy) == {"wherry/core/request.py"}, "the code that obeys it and its test make three files"
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    help_ = [sys.executable, "-c", "from wherry.cli import main; main(['convert', '--help'])"]
    shown = subprocess.run(help_, check=True, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert "--pace N" in shown.stdout
    words = [sys.executable, "-c", ASK, str(source), str(tmp_path / "t.npz")]
    done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["stated"] == {"to": "npz", "pace": 3, "options": {"join": "."}}
    assert found["door"]["pace"] == 4
    assert found["command"].endswith("--set join=. --pace 3")
    assert found["decides"]
    assert found["export"] == 5
    assert found["route"] == "Maximum number at a time."
    assert found.get("form", found["route"]) == found["route"]
    assert found.get("request", 6) == 6


def test_its_json_form_is_the_request():
    request = convert_request(
        "s",
        [TargetRequest("a", "orbax", {"x": 1}), TargetRequest("b", "npz", layout=LayoutRequest(dtype="float32"))],
        family="llama", rename=("a -> b",), allow_opaque=("p.B", "p.A"), ignore=("values",), meta={"k": "v"},
        format="dcp", memory=None, sign=Path("key.pem"),
    )  # fmt: skip
    assert ConvertRequest.from_json(json.loads(json.dumps(request.to_json()))) == request
    assert request.source == SourceRequest("s", "dcp", allow_opaque=("p.A", "p.B"))
    assert request.memory == "128MiB", "None stands for the default"
    first, second = request.targets
    assert first.layout == LayoutRequest(family="llama"), (
        "what holds for all holds where nothing else is stated"
    )
    assert second.layout == LayoutRequest(dtype="float32")
    assert first.settings == {"x": 1, "rename": "a -> b"}


@pytest.mark.parametrize("name", ["pkg", "pkg.*", "*"])
def test_opaque_classes_are_named_exactly(name):
    with pytest.raises(UsageError, match="invalid class name in allow_opaque"):
        SourceRequest("s", allow_opaque=(name,))


def test_no_two_options_have_one_name_and_what_decides_is_stated():
    every = list(options_of(SourceRequest, TargetRequest, ConvertRequest))
    assert len({one.name for one in every}) == len({one.flag for one in every}) == len(every)
    assert all(one.stated for one in every if one.decides)
    assert {one.name for one in options_of(RewriteRequest)} < {one.name for one in every}
    assert DECIDING == (
        "options", "only", "ignore", "family", "dtype", "allow_overflow", "family_file", "config", "assets"
    )  # fmt: skip
    assert DECIDING[6:] == UNPLANNED
    assert not PLAIN.explicit
