"""Retention: what is pruned, what holds a checkpoint, and how it is removed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from importlib import import_module

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from wherry.cli import cli
from wherry.config.schema import Retention
from wherry.errors import CorruptError, StorageError
from wherry.ledger.nodes import digest_at, nodes
from wherry.ledger.record import check_chain, open_ledger
from wherry.ledger.statements import statements
from wherry.nightly import removal
from wherry.nightly.night import run_night
from wherry.nightly.prune import RetentionEntry, prune, superfluous
from wherry.nightly.removal import removing
from wherry.nightly.routes import load_config
from wherry.target.janitor import in_use

CONFIG = """
[routes.r]
root = "runs"
select = "all"
min_age = 0
{fields}

[[routes.r.targets]]
format = "{format}"
uri = "out/{{run}}/{{step}}{suffix}"

[routes.r.retention]
{retention}
"""


@pytest.fixture
def night(tmp_path, monkeypatch):
    """Five steps, converted; the newest two are to be kept."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'none' / 'mlflow.db'}")

    def run(retention="keep_last = 2", format="safetensors", suffix=".safetensors", fields=""):
        for step in range(1, 6):
            place = tmp_path / "runs" / "a" / f"checkpoint-{step}"
            place.mkdir(parents=True)
            save_file({"w": np.full((8, 4), step, np.float32)}, place / "model.safetensors")
        text = CONFIG.format(retention=retention, format=format, suffix=suffix, fields=fields)
        (tmp_path / "wherry.toml").write_text(text)
        loaded = load_config(tmp_path / "wherry.toml")
        assert dict(run_night(loaded, loaded.routes).counts) == {"converted": 5}
        return loaded

    return run


def actions(done):
    return {
        int(one.uri.rpartition("/")[2].split(".")[0].split("-")[0]): one.action for one in done.checkpoints
    }


def reason_of(done, step):
    return next(one.reason for one in done.checkpoints if f"/{step}" in one.uri)


def left(tmp_path):
    return sorted(path.name for path in (tmp_path / "out" / "a").iterdir())


def test_a_dry_run_removes_nothing(night, tmp_path):
    loaded = night()
    before = left(tmp_path)
    done = prune(loaded.routes)
    assert actions(done) == {1: "remove", 2: "remove", 3: "remove", 4: "keep", 5: "keep"}
    assert done.nbytes == 3 * 128
    assert left(tmp_path) == before
    with open_ledger() as ledger:
        assert not list(statements(ledger, kinds={"deletion"}))


def test_removal_leaves_a_tombstone_and_is_not_made_again(night, tmp_path):
    loaded = night()
    with open_ledger() as ledger:
        digest = digest_at(ledger, str(tmp_path / "out" / "a" / "1.safetensors"))
    done = prune(loaded.routes, dry_run=False)
    assert actions(done) == {1: "removed", 2: "removed", 3: "removed", 4: "keep", 5: "keep"}
    assert left(tmp_path) == [
        "4.safetensors",
        "4.safetensors.wherry.json",
        "5.safetensors",
        "5.safetensors.wherry.json",
    ]
    assert len(list((tmp_path / "runs" / "a").iterdir())) == 5, "a source is never removed"
    with open_ledger() as ledger:
        stones = [one.body for one in statements(ledger, kinds={"deletion"})]
        assert check_chain(ledger).altered is None
        assert nodes(ledger, [digest])[digest].places[0].gone
    assert {stone["reason"] for stone in stones} == {"r: no rule of its route keeps it"}
    assert dict(run_night(loaded, loaded.routes).counts) == {"done": 2, "pruned": 3}
    assert actions(prune(loaded.routes, dry_run=False)) == {4: "keep", 5: "keep"}


def test_an_age_counts_from_the_statement_not_from_the_clock_of_the_machine_that_converted(
    night, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr("wherry.converter.job.utc_now", lambda: "2001-01-01T00:00:00.000+00:00")
        loaded = night("keep_days = 30")
    assert set(actions(prune(loaded.routes)).values()) == {"keep"}
    later = datetime.now(UTC) + timedelta(days=31)
    assert set(actions(prune(loaded.routes, now=later)).values()) == {"remove"}


def test_the_only_copy_stays(night, tmp_path):
    loaded = night()
    shutil.rmtree(tmp_path / "runs" / "a" / "checkpoint-1")
    save_file(
        {"w": np.zeros((8, 4), np.float32)}, tmp_path / "runs" / "a" / "checkpoint-2" / "model.safetensors"
    )
    done = prune(loaded.routes, dry_run=False)
    assert actions(done) == {1: "keep", 2: "keep", 3: "removed", 4: "keep", 5: "keep"}
    assert "only copy" in reason_of(done, 1)


def test_another_copy_of_the_weights_is_enough_but_not_one_that_goes_too(night, tmp_path):
    import wherry

    loaded = night()
    for step in (1, 2):
        shutil.rmtree(tmp_path / "runs" / "a" / f"checkpoint-{step}")
    wherry.convert(tmp_path / "out" / "a" / "1.safetensors", tmp_path / "copy.npz", to="npz")
    done = prune(loaded.routes)
    assert (actions(done)[1], actions(done)[2]) == ("remove", "keep")
    (tmp_path / "copy.npz").unlink()
    assert actions(prune(loaded.routes))[1] == "keep"


def test_what_is_read_or_written_or_altered_stays(night, tmp_path):
    loaded = night()
    place = tmp_path / "out" / "a"
    data = bytearray((place / "2.safetensors").read_bytes())
    (place / "2.safetensors").write_bytes(data)
    with in_use(str(place / "1.safetensors")):
        said = prune(loaded.routes, dry_run=True)
        done = prune(loaded.routes, dry_run=False)
    assert actions(said) == {1: "keep", 2: "keep", 3: "remove", 4: "keep", 5: "keep"}
    assert actions(done) == {1: "keep", 2: "keep", 3: "removed", 4: "keep", 5: "keep"}
    assert "running job" in reason_of(done, 1)
    assert "have changed since wherry wrote them" in reason_of(done, 2)


def test_a_step_of_a_run_goes_as_a_whole(night, tmp_path):
    loaded = night(format="orbax", suffix="-orbax")
    stale = tmp_path / "out" / ".wherry-x.00000000"
    stale.mkdir()
    done = prune(loaded.routes, dry_run=False)
    assert left(tmp_path) == ["4-orbax", "5-orbax"]
    assert [area.uri for area in done.staging] == [str(stale)]
    assert not stale.exists(), "no run uses it, however young it is"


def refuse(*_args):
    raise StorageError("the ledger is full")


def test_a_failed_tombstone_puts_everything_back(night, tmp_path, monkeypatch):
    from wherry.ledger import record as ledger

    loaded = night()
    before = left(tmp_path)

    monkeypatch.setattr(ledger, "record_event", refuse)
    done = prune(loaded.routes, dry_run=False)
    assert actions(done)[1] == "failed"
    assert left(tmp_path) == before


def test_a_job_that_begins_meanwhile_wins(night, tmp_path, monkeypatch):
    from wherry.nightly import removal

    loaded = night()
    before = left(tmp_path)
    answers = iter([False, True] * 3)
    monkeypatch.setattr(removal, "is_in_use", lambda _uri: next(answers))
    done = prune(loaded.routes, dry_run=False)
    assert set(actions(done).values()) == {"keep"}
    assert left(tmp_path) == before


def test_an_alias_and_a_foreign_registry_hold(night, tmp_path, monkeypatch):
    from types import SimpleNamespace

    from wherry.ledger.record import record_registration

    prune_module = import_module("wherry.nightly.prune")
    from wherry.store.local_store import locate
    from wherry.store.sidecar import read_sidecar

    loaded = night()
    subjects = [
        read_sidecar(locate(str(tmp_path / "out" / "a" / f"{step}.safetensors"))).checkpoint
        for step in (1, 2, 3)
    ]
    registry = prune_module.without_secrets(prune_module.mlflow_registry_uri())
    with open_ledger() as ledger:
        record_registration(ledger, subjects[0], registry, "m", "1")
        record_registration(ledger, subjects[1], "https://elsewhere", "m", "7")
        record_registration(ledger, subjects[2], registry, "m", "2")
    marked = []
    rows = [
        SimpleNamespace(
            name="m",
            version=version,
            tags={"wherry.checkpoint_digest": subject.checkpoint_digest},
            aliases=aliases,
        )
        for version, subject, aliases in (("1", subjects[0], ("champion",)), ("2", subjects[2], ()))
    ]
    fake = SimpleNamespace(
        registered_versions=lambda *_: iter(rows),
        mark_deleted=lambda name, version, **_: marked.append((name, version)),
        unmark_deleted=lambda name, version, **_: marked.remove((name, version)),
    )
    monkeypatch.setattr(prune_module, "service", lambda _name: fake)
    with monkeypatch.context() as patch:
        patch.setattr("wherry.ledger.record.record_event", refuse)
        assert actions(prune(loaded.routes, dry_run=False))[3] == "failed"
    assert marked == [], "what stays is not marked as deleted"
    done = prune(loaded.routes, dry_run=False)
    assert actions(done) == {1: "keep", 2: "keep", 3: "removed", 4: "keep", 5: "keep"}
    assert "champion" in reason_of(done, 1)
    assert "elsewhere" in reason_of(done, 2)
    assert marked == [("m", "2")]


def test_what_somebody_else_put_there_stays(night, tmp_path):
    loaded = night(format="orbax", suffix="-orbax")
    out = tmp_path / "out" / "a"
    (out / "1-orbax" / "notes").mkdir()
    (out / "1-orbax" / "notes" / "why.txt").write_text("by hand")
    done = prune(loaded.routes, dry_run=False)
    assert actions(done) == {1: "keep", 2: "removed", 3: "removed", 4: "keep", 5: "keep"}
    assert (out / "1-orbax" / "notes" / "why.txt").read_text() == "by hand"


def test_a_note_that_names_more_than_the_step_removes_nothing(night, tmp_path):
    from wherry.ledger.record import record_event

    loaded = night()
    with open_ledger() as ledger:
        bodies = [one.body for one in statements(ledger, kinds={"note"}) if one.body.get("about") == "route"]
        for body in bodies:
            forged = {
                key: value for key, value in body.items() if key not in ("subject", "checkpoint_digest")
            }
            record_event(ledger, "note", None, {**forged, "committed": str(tmp_path / "out")})
    before = left(tmp_path)
    done = prune(loaded.routes, dry_run=False)
    assert set(actions(done).values()) == {"keep"}
    assert "not the step folder" in reason_of(done, 1)
    assert left(tmp_path) == before


def test_what_is_registered_meanwhile_stays(night, tmp_path, monkeypatch):
    from wherry.ledger.record import claim_registration
    from wherry.store.local_store import locate
    from wherry.store.sidecar import read_sidecar

    module, loaded = import_module("wherry.nightly.prune"), night()
    subject = read_sidecar(locate(str(tmp_path / "out" / "a" / "1.safetensors"))).checkpoint
    real = module.removing

    def registering(*arguments):
        with open_ledger() as ledger:
            claim_registration(ledger, subject, "sqlite:///r.db", "m")
        return real(*arguments)

    monkeypatch.setattr(module, "removing", registering)
    done = prune(loaded.routes, dry_run=False)
    assert actions(done) == {1: "keep", 2: "removed", 3: "removed", 4: "keep", 5: "keep"}
    assert "registered meanwhile" in reason_of(done, 1)
    assert (tmp_path / "out" / "a" / "1.safetensors").exists()


def test_object_stores(tmp_path):
    import wherry
    from wherry.nightly.removal import removing
    from wherry.store.local_store import locate

    save_file({"w": np.ones(4, np.float32)}, tmp_path / "a.safetensors")
    for uri, to in (("memory://bucket/x/a.safetensors", "safetensors"), ("memory://bucket/x/dcp", "dcp")):
        wherry.convert(tmp_path / "a.safetensors", uri, to=to, lineage=False)
        with pytest.raises(RuntimeError), removing(uri, uri, to):
            raise RuntimeError
        assert locate(uri).exists()
        with removing(uri, uri, to):
            pass
        assert not locate(uri).exists()
    assert list(locate("memory://bucket/x").walk()) == []


def test_command_line(night, tmp_path):
    night()
    line = ["prune", "r", "--config", str(tmp_path / "wherry.toml")]
    done = CliRunner().invoke(cli, line)
    assert "384 B would be removed; add --yes" in done.output
    assert len(left(tmp_path)) == 10
    done = CliRunner().invoke(cli, [*line, "--yes", "--json"])
    found = json.loads(done.output)
    assert (found["dry_run"], found["bytes"], done.exit_code) == (False, 384, 0)
    assert len(left(tmp_path)) == 4


# Taking a checkpoint away: where something fails it is put back, durably, whatever happened on the way.


@pytest.fixture
def file(tmp_path):
    """A checkpoint of a single file, with its sidecar."""
    path = tmp_path / "m.bin"
    path.write_text("data")
    path.with_name("m.bin.wherry.json").write_text("sidecar")
    return path


def names(file):
    return sorted(os.listdir(file.parent))


def remove_and_fail(file, error):
    with removing(str(file), str(file), "safetensors"):
        assert not file.exists()
        raise error


def test_what_is_put_back_is_durable(file, monkeypatch):
    synced, real = [], removal.sync_folder

    def sync_folder(folder):
        synced.append(names(file))
        real(folder)

    monkeypatch.setattr(removal, "sync_folder", sync_folder)
    with pytest.raises(ValueError, match="for the test"):
        remove_and_fail(file, ValueError("for the test"))
    assert {"m.bin", "m.bin.wherry.json"} <= set(synced[-1])
    assert names(file) == ["m.bin", "m.bin.wherry.json"]


def test_a_name_that_cannot_be_given_back_is_a_storage_error_and_the_others_are(file, monkeypatch):
    real = removal.rename_without_replacing

    def rename(source, target):
        if target.name.endswith(".json") and source.name.startswith(".wherry-"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    monkeypatch.setattr(removal, "rename_without_replacing", rename)
    with pytest.raises(StorageError) as caught:
        remove_and_fail(file, ValueError("for the test"))
    assert caught.value.uri.endswith(".sidecar")
    assert file.read_text() == "data"


def test_a_stop_just_after_a_rename_puts_it_back(file, monkeypatch):
    real, stopped = removal.rename_without_replacing, []

    def rename(source, target):
        real(source, target)
        if not stopped:
            stopped.append(source)
            raise KeyboardInterrupt

    monkeypatch.setattr(removal, "rename_without_replacing", rename)
    with pytest.raises(KeyboardInterrupt), removing(str(file), str(file), "safetensors"):
        pytest.fail("it was stopped before")
    assert stopped == [file]
    assert names(file) == ["m.bin", "m.bin.wherry.json"]


def test_an_error_of_the_storage_has_no_cause_that_is_itself(file):
    error = StorageError("for the test")
    with pytest.raises(StorageError) as caught:
        remove_and_fail(file, error)
    assert caught.value is error
    assert error.__cause__ is None


# Retention: what the rules of a route keep, and what they leave to be removed.


NOW = datetime(2026, 11, 21, tzinfo=UTC)


def kept(rules, *rows):
    made = [
        RetentionEntry(f"/{step}", "a", "orbax", step, (NOW - timedelta(days=age)).isoformat(), score)
        for step, age, score in rows
    ]
    return sorted(
        int(uri[1:]) for uri, reason in superfluous(Retention(**rules), made, NOW).items() if reason
    )


def test_a_time_that_no_ledger_stores_is_damage():
    made = [RetentionEntry("/1", "a", "orbax", 1, "zzz")]
    with pytest.raises(CorruptError, match="the ledger holds invalid times: 'zzz'"):
        superfluous(Retention(keep_days=1), made, NOW)


def test_rules():
    rows = [(1, 40, 3.0), (2, 30, 1.0), (3, 20, 2.0), (4, 10, None), (5, 1, 4.0)]
    assert kept({}, *rows) == [1, 2, 3, 4, 5]
    assert kept({"keep_last": 2}, *rows) == [4, 5]
    assert kept({"keep_days": 25}, *rows) == [3, 4, 5]
    assert kept({"keep_best": 1, "metric": "loss"}, *rows) == [2, 4], "an unknown score might be the best"
    assert kept({"keep_best": 1, "metric": "acc", "highest": True}, *rows) == [4, 5]
    assert kept({"keep_last": 1, "keep_best": 1, "metric": "loss"}, *rows) == [2, 4, 5]
    other = [
        RetentionEntry("/b", "b", "orbax", 0, NOW.isoformat()),
        RetentionEntry("/n", "a", "npz", 0, NOW.isoformat()),
    ]
    assert all(superfluous(Retention(keep_last=1), other, NOW).values()), (
        "runs and formats count on their own"
    )
