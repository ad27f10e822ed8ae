"""Taking stock: a checkpoint that wherry did not write gets an identity, and none of its files is touched."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

import wherry
from tests.support.registry import flip_a_bit, model_folder
from wherry.cli import cli
from wherry.errors import NotFoundError, TargetExistsError
from wherry.storage.sidecar import read_sidecar
from wherry.storage.stores import locate


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_foreign_checkpoint_can_be_verified_and_fetched_afterwards(tmp_path):
    folder = model_folder(tmp_path / "foreign")
    before = contents(folder)
    with pytest.raises(NotFoundError, match="no digests are recorded"):
        wherry.fetch(folder, tmp_path / "copy")
    seen = wherry.inspect(folder, write=True).manifest
    sidecar = read_sidecar(locate(folder))
    assert sidecar.receipt is None
    assert sidecar.manifest.digests == seen.digests
    assert {one.name: bool(one.sha256) for one in seen.companions} == {
        "config.json": True,
        "tokenizer.json": True,
    }
    assert {name: data for name, data in contents(folder).items() if name != "wherry.json"} == before
    assert wherry.detect(folder).verdict == "ok"
    assert wherry.verify(folder, level="digest").ok
    copy = wherry.fetch(folder, tmp_path / "copy")
    assert copy.checkpoint_digest == sidecar.checkpoint.checkpoint_digest
    made = wherry.convert(folder, tmp_path / "o", to="orbax")
    assert made.source.checkpoint_digest == sidecar.checkpoint.checkpoint_digest


def test_it_is_the_node_that_a_conversion_names(tmp_path):
    folder = model_folder(tmp_path / "foreign")
    made = wherry.convert(folder, tmp_path / "o", to="orbax")
    wherry.inspect(folder, write=True)
    assert read_sidecar(locate(folder)).checkpoint.checkpoint_digest == made.source.checkpoint_digest


def test_a_record_is_never_replaced(tmp_path):
    folder = model_folder(tmp_path / "foreign")
    line = ["inspect", str(folder), "--digest", "--write", "--json"]
    done = CliRunner().invoke(cli, line)
    assert all(row["digest"] for row in json.loads(done.stdout)["tensors"])
    record = (folder / "wherry.json").read_bytes()
    assert CliRunner().invoke(cli, line).exit_code == 0
    flip_a_bit(folder)
    with pytest.raises(TargetExistsError, match="another checkpoint"):
        wherry.inspect(folder, write=True)
    assert (folder / "wherry.json").read_bytes() == record


def test_the_record_of_a_single_file_is_next_to_it(tmp_path):
    file = model_folder(tmp_path / "foreign") / "model.safetensors"
    file = file.rename(tmp_path / "one.safetensors")
    wherry.inspect(file, write=True)
    assert (tmp_path / "one.safetensors.wherry.json").exists()
    flip_a_bit(tmp_path)
    assert wherry.verify(file, level="digest").verdict == "altered"
