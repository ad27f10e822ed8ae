"""Records that an earlier commit wrote are read: code that reads them otherwise needs another schema."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import wherry
from wherry.storage.sidecar import read_sidecar
from wherry.storage.stores import locate

GOLDEN = Path(__file__).parents[1] / "golden" / "records"  # written by 9b7b3f02


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(GOLDEN / "folder", tmp_path / "folder"))


def test_a_sidecar_of_an_earlier_commit_is_read(folder):
    sidecar = read_sidecar(locate(folder))
    assert sidecar is not None
    digest = "blake3:b3ca2fe4b2d1719ca156f63bd99bc829b0405f2b031f4f10dd872571b8707202"
    assert sidecar.checkpoint.checkpoint_digest == digest
    assert (sidecar.algorithm, list(sidecar.leaves)) == ("blake3", [("w",)])
    found = wherry.verify(folder, level="digest")
    assert found.ok, found.failed


def test_damage_under_a_sidecar_of_an_earlier_commit_is_named(folder):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = wherry.verify(folder, level="digest")
    assert (found.verdict, found.failed[0].path, found.failed[0].leaf) == ("altered", "w", 0)
