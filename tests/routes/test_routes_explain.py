"""What a route does with one stated checkpoint: `latest` and `since` as a night would decide them."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from importlib import import_module

import pytest

from tests.support.routes import checkpoint
from wherry.errors import StorageError, UnsupportedError
from wherry.routes.routes import explain, load_config

CONFIG = """
[routes.r]
root = "runs"
select = "{select}"
min_age = {min_age}

[[routes.r.targets]]
format = "safetensors"
uri = "out/{{run}}/{{name}}.safetensors"
"""


def row_of(folder, place, select="latest", min_age=0):
    (folder / "wherry.toml").write_text(CONFIG.format(select=select, min_age=min_age))
    (row,) = explain(str(place), load_config(folder / "wherry.toml"))
    return row


def test_latest_leaves_a_step_that_a_newer_one_has_overtaken(tmp_path):
    older, newer = checkpoint(tmp_path, "team/a", 9), checkpoint(tmp_path, "team/a", 10)
    checkpoint(tmp_path, "team/b", 99)
    row = row_of(tmp_path, older)
    assert (row.takes, row.reason) == (False, "step 10 of this run is newer and complete")
    row = row_of(tmp_path, newer)
    assert (row.takes, row.reason, row.source) == (True, "select = latest", str(newer))
    assert row_of(tmp_path, tmp_path / "runs" / "team" / "a").source == str(newer)
    assert row_of(tmp_path, older, "all").takes
    assert row_of(tmp_path, older, min_age=900).takes, "nothing says yet that the newer one is complete"
    file = newer / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert row_of(tmp_path, older).takes, "the newer one is damaged"


def test_latest_of_steps_between_run_and_folder(tmp_path):
    older = checkpoint(tmp_path, "a/checkpoints", 1)
    assert row_of(tmp_path, older).takes
    checkpoint(tmp_path, "a/checkpoints", 2)
    row = row_of(tmp_path, older)
    assert (row.takes, row.where.run) == (False, "a")


def test_latest_of_steps_that_are_files(tmp_path):
    from wherry import convert

    for step in (1, 2):
        convert(
            checkpoint(tmp_path / "from", "x", step), tmp_path / "runs" / "a" / f"checkpoint_{step}",
            to="flax-msgpack", lineage=False,
        )  # fmt: skip
    first, second = (row_of(tmp_path, tmp_path / "runs" / "a" / f"checkpoint_{step}") for step in (1, 2))
    assert (first.takes, second.takes) == (False, True)


def test_latest_and_no_step(tmp_path):
    place = checkpoint(tmp_path, "a", 1)
    checkpoint(tmp_path, "a", 2)
    final = place.rename(place.parent / "final")
    assert row_of(tmp_path, final).takes


def test_since_leaves_what_is_older(tmp_path):
    place = checkpoint(tmp_path, "a", 1)
    written = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
    for file in place.iterdir():
        os.utime(file, (written, written))
    row = row_of(tmp_path, place, "since 2026-03-02")
    assert (row.takes, row.reason) == (False, "it was written before 2026-03-02T00:00:00+00:00")
    assert row_of(tmp_path, place, "since 2026-03-01").takes


@pytest.mark.parametrize(
    ("select", "module", "name", "error"),
    [
        ("latest", "wherry.formats.discover", "walk", StorageError("it does not answer", retryable=True)),
        (
            "since 2026-03-02",
            "wherry.storage.location",
            "modified_time",
            UnsupportedError("the storage does not report modification times"),
        ),
    ],
)
def test_what_cannot_be_determined_is_taken(tmp_path, monkeypatch, select, module, name, error):
    def refuse(*_args, **_named):
        raise error

    place = checkpoint(tmp_path, "a", 1)
    monkeypatch.setattr(import_module(module), name, refuse)
    row = row_of(tmp_path, place, select)
    assert row.takes
    assert f"cannot be determined: {error.what}" in row.reason
