"""Real conversions to ask the lineage about, and what must be the same of two answers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import wherry


@pytest.fixture
def safetensors_source(tmp_path):
    path = tmp_path / "run" / "source.safetensors"
    path.parent.mkdir()
    save_file({"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.int32)}, path)
    return path


@pytest.fixture
def chain(safetensors_source, tmp_path):
    """safetensors → orbax → npz, and safetensors → npz: what the names say."""
    first = wherry.convert(
        safetensors_source, tmp_path / "out" / "orbax", to="orbax", options={"compression": "zstd"}
    )
    second = wherry.convert(first.target.uri, tmp_path / "out" / "last.npz", to="npz")
    third = wherry.convert(safetensors_source, tmp_path / "out" / "other.safetensors", to="safetensors")
    return SimpleNamespace(first=first, second=second, third=third)


def run(group, *words):
    done = CliRunner().invoke(group, [str(word) for word in words], catch_exceptions=False)
    return done.exit_code, done.output


def answers(found):
    """What must be the same whatever ledger answers: all but its own numbers and the times of its sightings."""
    data = found.to_json()
    for step in data["steps"]:
        del step["edge"]["statement"]
    for node in data["nodes"].values():
        del node["verified"]
        node["places"] = sorted((place["uri"], place["fingerprint"]) for place in node["places"])
    return data


def kinds(rows):
    return {Path(row.uri).name: [reason.kind for reason in row.reasons] for row in rows}
