"""infra/attacks/swaps.py: a short race finds nothing, and notices what it must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def swaps(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "infra"))
    from attacks import swaps

    return swaps


@pytest.mark.full
def test_a_short_race_finds_nothing(tmp_path):
    results = tmp_path / "counts.json"
    words = [sys.executable, "infra/attacks/swaps.py", "--rounds", "30", "--results", str(results)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    assert found["leaks"] == found["mixes"] == found["outside"] == 0
    ends = found["original"] + found["neighbour"] + found["not taken"] + sum(found["refused"].values())
    assert ends == found["rounds"] == 30


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ({}, "original"),
        ({"model-00002-of-00003.safetensors": "runs/near"}, "mixes"),
        ({"config.json": "runs/near"}, "mixes"),
        ({"model-00003-of-00003.safetensors": "private/run"}, "leaks"),
        ({"notes.txt": "private/run"}, "leaks"),
    ],
)
def test_what_a_target_took_in_is_noticed(swaps, tmp_path, taken, expected):
    swaps.make(tmp_path)
    run = tmp_path / "runs" / "group" / "run"
    for name, source in taken.items():
        (run / name).write_bytes((tmp_path / source / name).read_bytes())
    assert swaps.outcome(run) == expected
    assert swaps.outcome(tmp_path / "runs" / "near") == "neighbour"


def test_names_are_exchanged_in_one_step(swaps, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("elsewhere")
    swaps.exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").is_symlink()
    assert (tmp_path / "b").is_dir()
