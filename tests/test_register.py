"""Registration in an embedded MLflow store: by reference, once per checkpoint, undone where it fails."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.errors import MissingExtraError, NotFoundError, StorageError, UsageError
from wherry.home import mlflow_tracking_uri
from wherry.ledger import check_chain, open_ledger
from wherry.lineage import show
from wherry.sidecar import sidecar_location
from wherry.store import locate

mlflow = pytest.importorskip("mlflow")


@pytest.fixture(scope="module", autouse=True)
def own_home(tmp_path_factory):
    """One store for the module: a new one takes seconds to make its tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHERRY_HOME", str(tmp_path_factory.mktemp("home")))
        for name in ("WHERRY_LEDGER", "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture
def receipt(tmp_path):
    tensors = {"a": np.random.default_rng().normal(size=(3, 4)), "b": np.ones(5, np.int32)}
    save_file(tensors, tmp_path / "source.safetensors")
    return wherry.convert(tmp_path / "source.safetensors", tmp_path / "orbax", to="orbax")


@pytest.fixture
def client(own_home):
    return mlflow.MlflowClient(tracking_uri=mlflow_tracking_uri(), registry_uri=mlflow_tracking_uri())


@pytest.fixture
def name(request):
    return request.node.name.replace("[", "-").replace("]", "")


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
    }
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


def test_six_threads_give_one_version(receipt, client, name):
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda _: wherry.register(receipt, name), range(6)))
    [version] = client.search_model_versions(f"name = '{name}'")
    assert {row.version for row in done} == {str(version.version)}
    assert sum(row.created for row in done) == 1
    mine = [
        run
        for run in runs(client)
        if run.data.tags["wherry.checkpoint_digest"] == receipt.target.checkpoint_digest
    ]
    assert [run.info.run_id for run in mine] == [version.run_id]


def test_the_loser_of_a_race_deletes_its_own(receipt, client, name, monkeypatch):
    """The first search sees nothing, as it does when two processes register at once."""
    service = wherry.registry.service("mlflow")
    first = wherry.register(receipt, name)
    find, blind = service._find, iter([True])
    monkeypatch.setattr(service, "_find", lambda *given: None if next(blind, False) else find(*given))
    second = wherry.register(receipt, name)
    assert (second.version, second.created) == (first.version, False)
    assert len(client.search_model_versions(f"name = '{name}'")) == 1


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
    with pytest.raises(NotFoundError, match="no digests") as failure:
        wherry.register(tmp_path / "source.safetensors", name)
    assert "wherry inspect --digest --write" in (failure.value.cure or "")
    Path(sidecar_location(locate(receipt.target.uri)).path).unlink()
    with pytest.raises(NotFoundError):
        wherry.register(receipt, name)


@pytest.mark.parametrize("bad", ["a/b", "it's"])
def test_a_name_that_mlflow_does_not_take(receipt, bad):
    with pytest.raises(UsageError):
        wherry.register(receipt, bad)


def test_reserved_tags_are_refused(receipt, name):
    with pytest.raises(UsageError, match="set by wherry"):
        wherry.register(receipt, name, tags={"wherry.uri": "/elsewhere"})


def test_a_store_that_cannot_be_opened_is_a_storage_error(receipt, name, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        wherry.register(receipt, name, tracking_uri=f"sqlite:///{tmp_path / 'file' / 'mlflow.db'}")


def test_sources_as_registries_take_them(receipt):
    service = wherry.registry.service("mlflow")
    sidecar = SimpleNamespace(checkpoint=receipt.target)
    by_digest = f"wherry://sha256/{receipt.target.checkpoint_digest}"
    assert service._source(sidecar, "/models/a", "sqlite:////m.db") == "file:///models/a"
    assert service._source(sidecar, "/models/a", "http://127.0.0.1:5000") == by_digest
    assert service._source(sidecar, "memory://models/a", "sqlite:////m.db") == by_digest
    page = service._page("https://user:secret@host/base/", "my model", "3")
    assert page == "https://host/base/#/models/my%20model/versions/3"


@pytest.fixture
def server(tmp_path):
    """A real MLflow server on a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = [
        "--backend-store-uri",
        f"sqlite:///{tmp_path / 'm.db'}",
        "--artifacts-destination",
        str(tmp_path / "kept"),
    ]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    process = subprocess.Popen([*command, *store], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        await_health(f"{url}/health", process)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def await_health(url, process):
    for _ in range(240):
        assert process.poll() is None, "the MLflow server ended"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail("the MLflow server did not come up in two minutes")


@pytest.mark.server
def test_through_a_server(receipt, name, server, capfd):
    with ThreadPoolExecutor(6) as pool:
        done = list(
            pool.map(lambda _: wherry.register(receipt, name, alias="c", tracking_uri=server), range(6))
        )
    assert sum(row.created for row in done) == 1
    [shown] = {(row.version, row.page) for row in done}
    assert shown[1] == f"{server}/#/models/{name}/versions/{shown[0]}"
    client = mlflow.MlflowClient(server, server)
    [version] = client.search_model_versions(f"name = '{name}'")
    assert version.source == f"wherry://sha256/{receipt.target.checkpoint_digest}"
    assert version.tags["wherry.uri"] == receipt.target.uri
    assert {file.path for file in client.list_artifacts(version.run_id)} == {"manifest.json", "receipt.json"}
    assert capfd.readouterr().out == ""


def test_credentials_in_a_uri_are_refused_and_not_shown(receipt, name):
    with pytest.raises(UsageError, match="credentials") as failure:
        wherry.register(receipt, name, tracking_uri="http://user:secret@127.0.0.1:9")
    assert "secret" not in str(failure.value)


def test_without_mlflow_the_extra_is_named(receipt, name, monkeypatch):
    monkeypatch.delitem(sys.modules, "wherry.integrations.mlflow", raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError, match=r"wherry\[mlflow\]"):
        wherry.register(receipt, name)
