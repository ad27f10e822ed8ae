"""Registering from many sides at once, and what is left where a later step fails."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.waits import waits_reported_at_once
from wherry.errors import StorageError
from wherry.ledger.record import check_chain, open_ledger
from wherry.lineage.lineage import show

pytest.importorskip("mlflow")
from wherry.integrations.mlflow import aliases, versions

pytestmark = pytest.mark.usefixtures("own_home")


def runs(client):
    found = client.get_experiment_by_name("wherry")
    return client.search_runs([found.experiment_id]) if found else []


def logged(client, digest):
    experiment = client.get_experiment_by_name("wherry").experiment_id
    return client.search_logged_models(
        [experiment], filter_string=f"tags.`wherry.checkpoint_digest` = '{digest}'"
    )


def test_six_threads_give_one_version(receipt, client, name):
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda _: wherry.register(receipt, name), range(6)))
    [version] = client.search_model_versions(f"name = '{name}'")
    assert {row.version for row in done} == {str(version.version)}
    assert sum(row.created for row in done) == 1
    matching = [
        run
        for run in runs(client)
        if run.data.tags["wherry.checkpoint_digest"] == receipt.target.checkpoint_digest
    ]
    assert [run.info.run_id for run in matching] == [version.run_id]


ENTER = """
import json, sys, wherry
done = wherry.register(sys.argv[1], sys.argv[2], alias="candidate")
print(json.dumps([done.version, done.created]))
"""


def test_six_processes_give_one_version(receipt, client, name):
    command = [sys.executable, "-c", ENTER, receipt.target.uri, name]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    done = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    [version] = client.search_model_versions(f"name = '{name}'")
    assert {number for number, _created in done} == {str(version.version)}
    assert sum(created for _number, created in done) == 1
    assert {str(number) for number in client.get_registered_model(name).aliases.values()} == {
        str(version.version)
    }
    matching = [
        run
        for run in runs(client)
        if run.data.tags["wherry.checkpoint_digest"] == receipt.target.checkpoint_digest
    ]
    assert len(matching) == 1
    assert {model.model_id for model in logged(client, receipt.target.checkpoint_digest)} == {
        version.tags["wherry.logged_model"]
    }
    with open_ledger() as ledger:
        assert check_chain(ledger).altered is None


def broken(*_given):
    raise StorageError("the ledger is gone", retryable=True)


def test_a_ledger_that_fails_takes_everything_back(receipt, client, name, tmp_path, monkeypatch):
    save_file({"a": np.zeros(3)}, tmp_path / "other.safetensors")
    other = wherry.convert(tmp_path / "other.safetensors", tmp_path / "other", to="orbax")
    wherry.register(other, name, alias="candidate")
    before = len(runs(client))
    monkeypatch.setattr("wherry.ledger.record.record_registration", broken)
    with pytest.raises(StorageError, match="ledger is gone"):
        wherry.register(receipt, name, alias="candidate", tags={"team": "speech"})
    assert {alias: str(v) for alias, v in client.get_registered_model(name).aliases.items()} == {
        "candidate": "1"
    }
    assert [str(row.version) for row in client.search_model_versions(f"name = '{name}'")] == ["1"]
    assert len(runs(client)) == before
    assert logged(client, receipt.target.checkpoint_digest) == []
    with pytest.raises(StorageError):
        wherry.register(other, name, tags={"team": "speech"})
    assert "team" not in client.get_model_version(name, "1").tags
    assert show(receipt.target.uri).nodes[receipt.target.checkpoint_digest].registrations == ()


def test_a_version_that_others_adopted_stays(receipt, client, name, monkeypatch):
    """Two callers at once: the caller that created the version fails after the other caller has got it."""
    import wherry.ledger.record

    record = wherry.ledger.record.record_registration

    def adopted_then_broken(*given):
        monkeypatch.setattr("wherry.ledger.record.record_registration", record)
        assert not wherry.register(receipt, name).created
        raise StorageError("the ledger is gone", retryable=True)

    monkeypatch.setattr("wherry.ledger.record.record_registration", adopted_then_broken)
    with pytest.raises(StorageError):
        wherry.register(receipt, name)
    [version] = client.search_model_versions(f"name = '{name}'")
    assert client.get_run(version.run_id).info.lifecycle_stage == "active"
    assert versions.WITHDRAWN_TAG not in version.tags


def test_who_meets_a_withdrawal_waits_for_its_end(receipt, client, name):
    wherry.register(receipt, name)
    client.set_model_version_tag(name, "1", versions.WITHDRAWN_TAG, "somebody")
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(wherry.register, receipt, name)
        with pytest.raises(TimeoutError):
            second.result(timeout=1)
        client.delete_model_version(name, "1")
        done = second.result(timeout=60)
    assert (done.version, done.created) == ("2", True)


def test_a_version_that_is_deleted_while_it_is_read_is_not_adopted(receipt, client, name, monkeypatch):
    """Stores of MLflow read a version and its tags one after the other."""
    wherry.register(receipt, name)
    client.set_model_version_tag(name, "1", versions.WITHDRAWN_TAG, "somebody")
    real = type(client).get_model_version

    def torn(self, *given):
        found = real(self, *given)
        if versions.WITHDRAWN_TAG in found.tags:
            self.delete_model_version(name, "1")
            found.tags.clear()
        return found

    monkeypatch.setattr(type(client), "get_model_version", torn)
    done = wherry.register(receipt, name)
    assert (done.version, done.created) == ("2", True)


def test_a_withdrawal_of_a_dead_process_is_ended(receipt, client, name, monkeypatch):
    monkeypatch.setattr(versions, "_WITHDRAWAL_SECONDS", 0.2)
    wherry.register(receipt, name)
    client.set_model_version_tag(name, "1", versions.WITHDRAWN_TAG, "somebody")
    with waits_reported_at_once(monkeypatch) as lines:
        assert wherry.register(receipt, name).version == "1"
    assert f"models:/{name}/1: waiting for another attempt that may withdraw this version" in lines
    assert versions.WITHDRAWN_TAG not in client.get_model_version(name, "1").tags


ABANDONED = """
import os, sys, wherry
from wherry.integrations.mlflow import versions
calls = []
def blind(*given):
    calls.append(1)
    return None if len(calls) == 1 else os._exit(9)
versions.lowest = blind
wherry.register(sys.argv[1], sys.argv[2])
"""


def test_what_a_kill_leaves_is_removed_by_the_next(receipt, client, name, monkeypatch):
    """Killed between the creation of a version and the second search, while an older version exists."""
    monkeypatch.setattr(aliases, "_SETTLE_SECONDS", 0.1)
    wherry.register(receipt, name)
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", ABANDONED, receipt.target.uri, name], check=False)
        assert killed.returncode == 9

    def there():
        return sorted(str(row.version) for row in client.search_model_versions(f"name = '{name}'"))

    assert there() == ["1", "2", "3"]
    assert wherry.register(receipt, name).version == "1"
    assert there() == ["1", "2", "3"], "who created them may be alive"
    monkeypatch.setattr(versions, "_STALE_SECONDS", -1.0)
    client.set_registered_model_alias(name, "pinned", "2")
    assert wherry.register(receipt, name).version == "1"
    assert there() == ["1", "2"], "an alias protects"
    client.delete_registered_model_alias(name, "pinned")
    assert wherry.register(receipt, name).version == "1"
    assert there() == ["1"]
    digest = receipt.target.checkpoint_digest
    assert len([run for run in runs(client) if run.data.tags["wherry.checkpoint_digest"] == digest]) == 1
    assert len(logged(client, digest)) == 1


def test_the_loser_of_a_race_deletes_its_own(receipt, client, name, monkeypatch):
    """The first search sees nothing, as it does when two processes register at once."""
    first = wherry.register(receipt, name)
    find, blind = versions.lowest, iter([True])
    monkeypatch.setattr(versions, "lowest", lambda *given: None if next(blind, False) else find(*given))
    second = wherry.register(receipt, name)
    assert (second.version, second.created) == (first.version, False)
    assert len(client.search_model_versions(f"name = '{name}'")) == 1
