"""infra/device-check: the libraries hold on the device what wherry recorded, and a difference is seen."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

import wherry

SCRIPT = Path(__file__).parents[2] / "infra" / "device-check"


@pytest.fixture(scope="module")
def script():
    spec = spec_from_loader("device_check", SourceFileLoader("device_check", str(SCRIPT)))
    module = module_from_spec(spec)
    sys.modules["device_check"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["device_check"]


@pytest.mark.full
def test_every_result_is_restored_as_recorded(tmp_path):
    words = ["--here", "--size", "2", "--json", "--scratch", str(tmp_path)]
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["rows"]
    assert [(row["result"], row["equal"], row["tensors"]) for row in rows] == [
        ("orbax", 32, 32),
        ("dcp", 32, 32),
        ("huggingface", 32, 32),
    ]
    assert all(row["load_seconds"] > 0 and row["export_seconds"] > 0 for row in rows)
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_a_value_that_differs_on_the_device_is_seen(script, tmp_path):
    source, target = tmp_path / "source.safetensors", tmp_path / "dcp"
    script.make_source(source, 1 << 20)
    wherry.convert(source, target, to="dcp", family="none", lineage=False)
    held = script.by_torch(target)
    recorded = script.digests_of(target)
    assert dict(script.hashed(held, target)) == recorded
    name = next(iter(held.state))
    held.state[name][0, 0] += 1
    differing = {key for key, digest in script.hashed(held, target) if digest != recorded[key]}
    assert differing == {name}
    row = script.Row("dcp", "torch", "cpu", 1, 1.0, len(recorded) - len(differing), len(recorded), 1.0)
    assert not row.ok
    assert replace(row, equal=len(recorded)).ok
