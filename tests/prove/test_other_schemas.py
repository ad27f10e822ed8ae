"""Records of other commits and schemas: read, or refused with a cure that works."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

import wherry
from tests.support.command import small, typed
from wherry.store.local_store import locate
from wherry.store.sidecar import read_sidecar


def restated(record, path, schema):
    """The record with another schema in one of its parts; the part is named by its keys."""
    part = record
    for name in path:
        part = part[name]
    part["schema"] = schema
    return record


def bare(record):
    """The record as one without algorithms would be: digits alone, and leaves that no algorithm names."""
    text = json.dumps(record).replace("blake3:", "")
    found = json.loads(text)
    return {**found, "schema": 1, "leaves": found["leaves"]["blake3"]}


@pytest.fixture
def target(tmp_path, capfd):
    small(tmp_path / "source.safetensors")
    assert typed("convert HOME/source.safetensors HOME/target --to dcp --quiet", tmp_path, capfd)[0] == 0
    return tmp_path / "target"


@pytest.mark.parametrize(
    ("what", "change"),
    [
        *(
            ("sidecar", lambda record, schema=schema: restated(record, (), schema))
            for schema in (0, 1, 3, 99)
        ),
        ("sidecar", bare),
        ("manifest", lambda record: restated(record, ("manifest",), 1)),
        ("receipt", lambda record: restated(record, ("receipt",), 1)),
    ],
)
def test_a_sidecar_of_another_schema_is_refused_and_can_be_made_anew(target, tmp_path, capfd, what, change):
    file = target / "wherry.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    code, printed = typed("verify HOME/target --level digest", tmp_path, capfd)
    assert code == 5
    assert f"the {what} has schema " in printed
    assert ", but this wherry requires 2" in printed
    file.unlink()
    assert typed("inspect HOME/target --write", tmp_path, capfd)[0] == 0
    code, printed = typed("verify HOME/target --level digest", tmp_path, capfd)
    assert code == 0, printed


def test_a_ledger_of_another_schema_is_compared_with_nothing(target, tmp_path, capfd, monkeypatch):
    """It is read as a file, too, where its digests could have another form."""
    import sqlite3
    from contextlib import closing

    from wherry.config.settings import digest_choice
    from wherry.store.home import home

    assert "ledger" in digest_choice().reason
    with closing(sqlite3.connect(home() / "ledger.db")) as connection:
        connection.execute("PRAGMA user_version = 3")
    assert "ledger" not in digest_choice().reason
    code, printed = typed("verify HOME/target --level digest", tmp_path, capfd)
    assert (code, "the ledger has schema 3, but this wherry requires 4" in printed) == (10, True)
    code, printed = typed("convert HOME/source.safetensors HOME/second --to dcp --quiet", tmp_path, capfd)
    assert (code, "the ledger has schema 3" in printed) == (12, True)
    (home() / "ledger.db").rename(home() / "moved.db")
    assert typed(shlex.join(["ledger", "rebuild", str(tmp_path), "--no-registry"]), tmp_path, capfd)[0] == 0
    code, printed = typed("verify HOME/target --level digest", tmp_path, capfd)
    assert code == 0, printed


# Records that an earlier commit wrote are read: code that reads them otherwise needs another schema.


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
