"""Registration in an embedded MLflow store: by reference, once per checkpoint, undone where it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import wherry
from wherry.core.algorithms import digest_uri
from wherry.errors import MismatchError, MissingExtraError, NotFoundError, StorageError, UsageError
from wherry.ledger.record import check_chain, open_ledger
from wherry.lineage.lineage import show
from wherry.storage.sidecar import sidecar_location
from wherry.storage.stores import locate

mlflow = pytest.importorskip("mlflow")

from wherry.integrations.mlflow import versions  # noqa: E402  needs mlflow

pytestmark = pytest.mark.usefixtures("own_home")


def runs(client):
    found = client.get_experiment_by_name("wherry")
    return client.search_runs([found.experiment_id]) if found else []


def test_a_version_points_at_the_bytes_and_carries_the_digests(receipt, client, name, tmp_path):
    done = wherry.register(receipt.target.uri, name, alias="candidate", tags={"team": "speech"})
    assert (done.version, done.created, done.page) == ("1", True, None)
    version = client.get_model_version_by_alias(name, "candidate")
    assert version.source == Path(receipt.target.uri).as_uri()
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


def test_sources_as_registries_take_them(receipt):
    sidecar = SimpleNamespace(checkpoint=receipt.target)
    by_digest = digest_uri(receipt.target.checkpoint_digest)
    assert versions._source(sidecar, "/models/a", "sqlite:////m.db") == "file:///models/a"
    assert versions._source(sidecar, "/models/a", "http://127.0.0.1:5000") == by_digest
    assert versions._source(sidecar, "memory://models/a", "sqlite:////m.db") == by_digest
    page = wherry.core.services.service("mlflow").page("https://user:secret@host/base/", "my model", "3")
    assert page == "https://host/base/#/models/my%20model/versions/3"


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
