"""Several targets of which one fails: the others are committed, recorded, signed and named."""

from __future__ import annotations

import json
from importlib import import_module
from types import SimpleNamespace

import pytest

import wherry
from tests.support.command import small
from tests.support.signing import key_pair
from wherry.cli import main
from wherry.converter import job
from wherry.converter.convert import convert_all
from wherry.core.request import TargetRequest, convert_request
from wherry.errors import StorageError
from wherry.formats.registry import find_format
from wherry.lineage.lineage import show
from wherry.storage.stores import locate


@pytest.fixture
def source(tmp_path):
    return small(tmp_path / "source.safetensors")


@pytest.fixture
def full(monkeypatch):
    """A storage that takes no npz file."""
    real = job.complete

    def complete(staged, hashes):
        if staged.job.target.uri.endswith(".npz"):
            raise StorageError("storage failed: No space left on device", uri=staged.job.target.uri)
        return real(staged, hashes)

    monkeypatch.setattr(job, "complete", complete)


def targets(tmp_path):
    places = {"npz": tmp_path / "b.npz", "orbax": tmp_path / "a", "flax-msgpack": tmp_path / "c.msgpack"}
    return [TargetRequest(str(place), to) for to, place in places.items()]


def test_the_others_are_recorded_signed_and_named(source, tmp_path, full, monkeypatch):
    failed = []
    monkeypatch.setattr(
        import_module("wherry.converter.convert"), "report_failure", lambda *words: failed.append(words[2])
    )
    wherry.convert(source, tmp_path / "c.msgpack", to="flax-msgpack", lineage=False)
    key, _public = key_pair(tmp_path)
    with pytest.raises(StorageError, match="No space left") as caught:
        convert_all(convert_request(source, targets(tmp_path), sign=key))
    error = caught.value
    made = [tmp_path / "a", tmp_path / "c.msgpack"]
    assert {number: one.target.uri for number, one in error.committed.items()} == {
        1: str(made[0]), 2: str(made[1]),
    }  # fmt: skip
    assert [show(place).edges[0].statement for place in made] == [1, 2]
    assert [(tmp_path / name).exists() for name in ("a/wherry.sig", "c.msgpack.wherry.sig")] == [True, True]
    assert failed == [str(tmp_path / "b.npz")]
    assert error.__notes__ == [f"these targets are committed: {made[0]}, {made[1]}"]


def test_the_command_says_what_is_committed(source, tmp_path, full, capsys):
    line = [
        "convert",
        str(source),
        "--to",
        "npz",
        str(tmp_path / "b.npz"),
        "--to",
        "orbax",
        str(tmp_path / "a"),
    ]
    with pytest.raises(SystemExit) as ended:
        main([*line, "--json"])
    shown = capsys.readouterr()
    assert ended.value.code == 10
    assert json.loads(shown.out)["error"] == "StorageError"
    assert shown.err.splitlines()[-1] == f"note: these targets are committed: {tmp_path / 'a'}"


def test_what_cannot_be_recorded_either_is_a_note(source, tmp_path, full, monkeypatch):
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path}")
    with pytest.raises(StorageError, match="No space left") as caught:
        convert_all(convert_request(source, targets(tmp_path)[:2]))
    assert f"run `wherry ledger record {tmp_path / 'a'}`" in caught.value.__notes__[1]
    assert caught.value.committed[1].lineage.startswith("not recorded: the ledger")


def test_without_lineage_nothing_is_recorded(source, tmp_path, full):
    with pytest.raises(StorageError) as caught:
        convert_all(convert_request(source, targets(tmp_path)[:2], lineage=False))
    assert caught.value.committed[1].lineage == "left out by request"
    assert show(tmp_path / "a").edges[0].statement is None


def test_a_pass_that_fails_keeps_no_other_from_being_made(tmp_path, monkeypatch):
    row, place = find_format("npz"), locate(str(tmp_path / "a.npz"))
    one, other = (SimpleNamespace(checkpoint=object(), row=row, committed=place) for _ in range(2))
    error = StorageError("gone")

    def carried(jobs):
        if jobs[0] is other:
            raise error
        return ["receipt"] * len(jobs)

    monkeypatch.setattr(job, "_pass", carried)
    assert job.run([other, one, other]) == [error, "receipt", error]
