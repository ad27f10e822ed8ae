"""What a script learns from the exit code: each verdict of `detect` and `verify` has its own."""

from __future__ import annotations

import pickle

import pytest

import wherry
from tests.support.attack import Payload
from tests.support.command import command, small


@pytest.fixture
def converted(tmp_path):
    """A checkpoint whose digests are recorded."""
    wherry.convert(small(tmp_path / "a.safetensors"), tmp_path / "b.safetensors", to="safetensors")
    return tmp_path / "b.safetensors"


def test_verify_tells_intact_altered_and_cut(converted):
    assert command("verify", converted, "--level", "digest").returncode == 0
    data = converted.read_bytes()
    converted.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert command("verify", converted, "--level", "digest").returncode == 9
    converted.write_bytes(data[:-1])
    assert command("verify", converted).returncode == 5


def test_detect_tells_sound_cut_hostile_and_strange(tmp_path):
    sound, cut = small(tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
    cut.write_bytes(sound.read_bytes()[:-1])
    hostile, strange = tmp_path / "c.pkl", tmp_path / "d.txt"
    hostile.write_bytes(pickle.dumps(Payload(tmp_path / "marker"), protocol=2))
    strange.write_text("no checkpoint\n")
    codes = {path.name: command("detect", path).returncode for path in (sound, cut, hostile, strange)}
    assert codes == {"a.safetensors": 0, "b.safetensors": 5, "c.pkl": 6, "d.txt": 4}
    assert not (tmp_path / "marker").exists()
