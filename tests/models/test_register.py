"""Registration: versions, tags, and races."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.waits import waits_reported_at_once
from wherry.core.digest import digest_uri
from wherry.errors import MismatchError, MissingExtraError, NotFoundError, StorageError, UsageError
from wherry.integrations.mlflow import aliases, versions
from wherry.ledger.record import check_chain, open_ledger
from wherry.store.local_store import locate
from wherry.store.sidecar import sidecar_location
from wherry.trace.lineage import show

pytestmark = pytest.mark.usefixtures("own_home")

mlflow = pytest.importorskip("mlflow")


def runs(client):
    found = client.get_experiment_by_name("wherry")
    return client.search_runs([found.experiment_id]) if found else []


def runs_of(client, digest):
    """The runs of a checkpoint; others are in the experiment too, also some without a digest."""
    return [run for run in runs(client) if run.data.tags.get("wherry.checkpoint_digest") == digest]


def test_a_version_points_at_the_bytes_and_carries_the_digests(receipt, client, name, tmp_path):
    done = wherry.register(receipt.target.uri, name, alias="candidate", tags={"team": "speech"})
    assert (done.version, done.created, done.page) == ("1", True, None)
    version = client.get_model_version_by_alias(name, "candidate")
    assert version.source == digest_uri(receipt.target.checkpoint_digest)
    expected = {
        "team": "speech",
        "wherry.checkpoint_digest": receipt.target.checkpoint_digest,
        "wherry.weights_digest": receipt.target.weights_digest,
        "wherry.uri": receipt.target.uri,
        "wherry.plan_digest": receipt.plan_digest,
        "wherry.format": "orbax",
        "wherry.format_version": receipt.target.format_version,
        "wherry.version": wherry.__version__,
        "wherry.source_uri": receipt.source.uri,
        "wherry.source_digest": receipt.source.checkpoint_digest,
        "wherry.fetch": f"wherry fetch {digest_uri(receipt.target.checkpoint_digest)} TARGET",
    }
    assert version.tags["wherry.fetch"] in version.description
    assert expected.items() <= version.tags.items()
    run = client.get_run(version.run_id)
    assert run.info.status == "FINISHED"
    folder = Path(run.info.artifact_uri.removeprefix("file://"))
    kept = json.loads((folder / "receipt.json").read_text())
    assert kept["target"]["checkpoint_digest"] == receipt.target.checkpoint_digest
    assert len(json.loads((folder / "manifest.json").read_text())["tensors"]) == 2
    assert sum(file.stat().st_size for file in folder.iterdir()) < 20_000


def test_registering_again_is_the_same_version(receipt, client, name):
    first = wherry.register(receipt, name)
    with open_ledger() as ledger:
        before = check_chain(ledger).statements
    again = wherry.register(receipt, name, alias="champion")
    assert (first.version, first.created, again.version, again.created) == ("1", True, "1", False)
    assert (
        client.get_model_version_by_alias(name, "champion").version
        == client.get_model_version(name, "1").version
    )
    with open_ledger() as ledger:
        assert check_chain(ledger).statements == before
    [row] = show(receipt.target.uri).nodes[receipt.target.checkpoint_digest].registrations
    assert (row.name, row.version, row.state) == (name, "1", "registered")


def test_the_page_of_a_version_has_no_credentials():
    page = wherry.core.services.service("mlflow").page("https://user:secret@host/base/", "my model", "3")
    assert page == "https://host/base/#/models/my%20model/versions/3"


def logged(client, digest):
    experiment = client.get_experiment_by_name("wherry").experiment_id
    return client.search_logged_models(
        [experiment], filter_string=f"tags.`wherry.checkpoint_digest` = '{digest}'"
    )


def test_the_page_shows_source_and_converted(receipt, client, name, tmp_path):
    wherry.register(receipt, name)
    other = wherry.convert(tmp_path / "source.safetensors", tmp_path / "npz.npz", to="npz")
    wherry.register(other, f"{name}-npz")
    [source] = logged(client, receipt.source.checkpoint_digest)
    assert source.tags["mlflow.model.isExternal"] == "true"
    for model, digest in (
        (name, receipt.target.checkpoint_digest),
        (f"{name}-npz", other.target.checkpoint_digest),
    ):
        version = client.get_model_version(model, "1")
        run = client.get_run(version.run_id)
        assert [row.model_id for row in run.inputs.model_inputs] == [source.model_id]
        [made] = logged(client, digest)
        assert [row.model_id for row in run.outputs.model_outputs] == [made.model_id]
        assert (version.tags["wherry.logged_model"], version.tags["wherry.source_model"]) == (
            made.model_id,
            source.model_id,
        )
        assert made.params["tensors"] == "2"


@pytest.mark.parametrize("alias", ["latest", "v1"])
def test_a_failure_after_creation_leaves_nothing(receipt, client, name, alias):
    before = len(runs(client))
    with pytest.raises(UsageError, match="reserved"):
        wherry.register(receipt, name, alias=alias)
    assert client.search_model_versions(f"name = '{name}'") == []
    assert len(runs(client)) == before
    assert show(receipt.target.uri).nodes[receipt.target.checkpoint_digest].registrations == ()
    assert wherry.register(receipt, name, alias="candidate").created


def test_a_failure_keeps_the_version_of_others(receipt, client, name):
    wherry.register(receipt, name)
    with pytest.raises(UsageError):
        wherry.register(receipt, name, alias="latest")
    assert len(client.search_model_versions(f"name = '{name}'")) == 1


def test_without_a_sidecar_there_is_no_identity(receipt, name, tmp_path):
    with pytest.raises(NotFoundError, match="no digests are recorded for this checkpoint") as failure:
        wherry.register(tmp_path / "source.safetensors", name)
    assert f"wherry inspect --digest --write {tmp_path / 'source.safetensors'}" in (failure.value.cure or "")
    wherry.inspect(tmp_path / "source.safetensors", digest=True, write=True)
    done = wherry.register(tmp_path / "source.safetensors", name)
    assert (done.created, done.checkpoint_digest) == (True, receipt.source.checkpoint_digest)
    with pytest.raises(MismatchError, match="its conversion is not recorded"):
        wherry.promote(f"models:/{name}/1", policy={"max_error": 0})
    Path(sidecar_location(locate(receipt.target.uri)).path).unlink()
    with pytest.raises(NotFoundError):
        wherry.register(receipt, name)


@pytest.mark.parametrize("bad", ["a/b", "it's"])
def test_a_name_that_mlflow_does_not_take(receipt, bad):
    with pytest.raises(UsageError):
        wherry.register(receipt, bad)


def test_reserved_tags_are_refused(receipt, name):
    with pytest.raises(UsageError, match=r"reserved tag name 'wherry\.uri'"):
        wherry.register(receipt, name, tags={"wherry.uri": "/elsewhere"})


def test_a_store_that_cannot_be_opened_is_a_storage_error(receipt, name, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        wherry.register(receipt, name, tracking_uri=f"sqlite:///{tmp_path / 'file' / 'mlflow.db'}")


def test_credentials_in_a_uri_are_refused_and_not_shown(receipt, name):
    with pytest.raises(UsageError, match="credentials") as failure:
        wherry.register(receipt, name, tracking_uri="http://user:secret@127.0.0.1:9")
    assert "secret" not in str(failure.value)


def test_without_mlflow_the_extra_is_named(receipt, name, monkeypatch):
    for module in [one for one in sys.modules if one.startswith("wherry.integrations.mlflow")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError, match="add the extra mlflow"):
        wherry.register(receipt, name)


@pytest.mark.parametrize(("said", "quiet"), [(None, "True"), ("false", "False")])
def test_mlflow_reports_its_use_only_if_the_user_allows_it(said, quiet):
    unset = ("MLFLOW_DISABLE_TELEMETRY", "DO_NOT_TRACK", "CI", "GITHUB_ACTIONS", "PYTEST_CURRENT_TEST")
    env = {name: text for name, text in os.environ.items() if name not in unset}
    ask = "import wherry.integrations.mlflow, mlflow.telemetry.utils as it; print(it.MLFLOW_DISABLE_TELEMETRY.get())"
    line = [sys.executable, "-c", ask]
    env |= {} if said is None else {"MLFLOW_DISABLE_TELEMETRY": said}
    done = subprocess.run(line, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == quiet


def test_the_run_of_a_registration_that_was_killed_is_ended_by_the_next(receipt, client, name):
    """A run of another living process, or of another machine, goes on."""
    from wherry.target.janitor import owner_text

    wherry.register(receipt.target.uri, f"{name}-first")
    experiment = client.get_experiment_by_name("wherry").experiment_id
    living = json.loads(owner_text())
    owners = {"KILLED": {**living, "process_start": 1}, "RUNNING": living}
    owners["RUNNING elsewhere"] = {
        **living,
        "host": "elsewhere",
        "process_start": 1,
        "machine": "x",
        "boot": "x",
    }
    made = {
        status: client.create_run(experiment, tags={"wherry.owner": json.dumps(owner)}).info.run_id
        for status, owner in owners.items()
    }
    wherry.register(receipt.target.uri, name)
    assert {status: client.get_run(run).info.status for status, run in made.items()} == {
        status: status.split()[0] for status in made
    }


# Registering from many sides at once, and what is left where a later step fails.


pytest.importorskip("mlflow")


def test_six_threads_give_one_version(receipt, client, name):
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda _: wherry.register(receipt, name), range(6)))
    [version] = client.search_model_versions(f"name = '{name}'")
    assert {row.version for row in done} == {str(version.version)}
    assert sum(row.created for row in done) == 1
    matching = runs_of(client, receipt.target.checkpoint_digest)
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
    matching = runs_of(client, receipt.target.checkpoint_digest)
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
    assert len(runs_of(client, digest)) == 1
    assert len(logged(client, digest)) == 1


def test_the_loser_of_a_race_deletes_its_own(receipt, client, name, monkeypatch):
    """The first search sees nothing, as it does when two processes register at once."""
    first = wherry.register(receipt, name)
    find, blind = versions.lowest, iter([True])
    monkeypatch.setattr(versions, "lowest", lambda *given: None if next(blind, False) else find(*given))
    second = wherry.register(receipt, name)
    assert (second.version, second.created) == (first.version, False)
    assert len(client.search_model_versions(f"name = '{name}'")) == 1
