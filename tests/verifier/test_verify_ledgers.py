"""`verify` against the ledger, on every database of it: what the ledger recorded decides."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.command import typed
from tests.support.ledger import postgres, url
from tests.support.postgres import new_database

__all__ = ["postgres", "url"]


@pytest.fixture
def recorded(tmp_path, monkeypatch, url):
    """A conversion that the ledger has, and a function that runs `verify` on its target."""
    monkeypatch.setenv("WHERRY_LEDGER", url)
    (tmp_path / "in").mkdir()
    save_file({"w": np.arange(12, dtype=np.float32)}, tmp_path / "in" / "model.safetensors")
    return tmp_path


def test_what_was_recorded_is_compared(recorded, capfd):
    assert typed("convert HOME/in HOME/out --to orbax", recorded, capfd)[0] == 0
    code, printed = typed("verify HOME/out --level digest --json", recorded, capfd)
    assert (code, json.loads(printed)["ledger"]) == (0, "equal")


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_another_checkpoint_with_a_fitting_sidecar_is_altered(recorded, capfd, to):
    """Of another format too: a sidecar can be made anew together with the bytes."""
    assert typed("convert HOME/in HOME/model --to orbax", recorded, capfd)[0] == 0
    shutil.rmtree(recorded / "model")
    save_file({"w": np.ones(12, np.float32)}, recorded / "in" / "model.safetensors")
    (recorded / "other").mkdir()
    assert typed(f"convert HOME/in HOME/other/model --to {to} --no-lineage", recorded, capfd)[0] == 0
    for each in (recorded / "other").iterdir():
        each.rename(recorded / each.name)
    code, printed = typed("verify HOME/model --level digest", recorded, capfd)
    assert code == 9, printed
    assert "not the checkpoint that the ledger recorded here" in printed


def test_every_verb_that_reads_the_ledger_says_the_same_on_both(postgres, tmp_path, capfd, monkeypatch):
    results = {}
    for name, ledger in (
        ("sqlite", f"sqlite:///{tmp_path / 'ledger.db'}"),
        ("postgresql", new_database(postgres, "verbs")),
    ):
        monkeypatch.setenv("WHERRY_LEDGER", ledger)
        folder = tmp_path / name
        (folder / "in").mkdir(parents=True)
        save_file({"w": np.arange(12, dtype=np.float32)}, folder / "in" / "model.safetensors")
        assert typed("convert HOME/in HOME/out --to orbax", folder, capfd)[0] == 0
        lines = (
            "verify HOME/out --level digest --record --json", "ls --json",
            "lineage HOME/out --json", "lineage --stale --json", "audit --json", "du HOME/out --json",
            "ledger check",
        )  # fmt: skip
        results[name] = [(line, *_without_times(typed(line, folder, capfd))) for line in lines]
    for at_sqlite, at_postgres in zip(results["sqlite"], results["postgresql"], strict=True):
        assert at_sqlite == at_postgres


def _without_times(result: tuple[int, str]) -> tuple[int, str]:
    code, printed = result
    plain = re.sub(r"\d{4}-\d\d-\d\d[T ][\d:.]+(Z|\+00:00)?", "TIME", printed)
    plain = re.sub(r"postgresql://[^\s\"]+|HOME/../ledger.db|/\S*ledger.db", "LEDGER", plain)
    plain = re.sub(r'("head": "|head: +)[0-9a-f]+', "HEAD", plain)  # the chain covers the times
    return code, re.sub(r"\d+\.\d+(e-\d+)?", "NUMBER", plain)
