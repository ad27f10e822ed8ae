"""The registry behind a real MLflow server on this machine: by reference, promoted, fetched, with users."""

from __future__ import annotations

import json
import urllib.request
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor

import pytest

import wherry
from tests.support.registry import converted, flip_a_bit, mlflow_server
from wherry.core.digest import digest_uri
from wherry.core.services import service
from wherry.errors import MismatchError, StorageError

mlflow = pytest.importorskip("mlflow")
pytestmark = [pytest.mark.server, pytest.mark.usefixtures("own_home")]  # as there is one server

ADMIN = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": "a-long-password"}


@pytest.fixture(scope="module")
def server(tmp_path_factory, own_home):
    """A server that asks for users."""
    folder = tmp_path_factory.mktemp("server")
    config = folder / "auth.ini"
    config.write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{folder / 'auth.db'}\n"
        "admin_username = admin\nauthorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
        "auth_cache_ttl_seconds = 600\n"  # hashing the password takes 0.2 s at each request
    )
    secrets = {
        "MLFLOW_AUTH_CONFIG_PATH": str(config),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "for this test alone",
        "MLFLOW_AUTH_ADMIN_PASSWORD": ADMIN["MLFLOW_TRACKING_PASSWORD"],
    }
    for key, value in ADMIN.items():
        own_home.setenv(key, value)
    with mlflow_server(folder, "--app-name", "basic-auth", environment=secrets) as url:
        yield url


@pytest.fixture
def stores(server):
    return {"tracking_uri": server, "registry_uri": server}


@pytest.fixture
def everywhere(server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)


def add_user(server, name, password):
    basic = b64encode(":".join(ADMIN.values()).encode()).decode()
    request = urllib.request.Request(
        f"{server}/api/2.0/mlflow/users/create",
        data=json.dumps({"username": name, "password": password}).encode(),
        headers={"Authorization": f"Basic {basic}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


def test_six_at_once_give_one_version(stores, tmp_path, capfd):
    receipt = converted(tmp_path, to="orbax")
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda _: wherry.register(receipt, "six", alias="c", **stores), range(6)))
    assert sum(row.created for row in done) == 1
    [shown] = {(row.version, row.page) for row in done}
    assert shown[1] == f"{stores['registry_uri']}/#/models/six/versions/{shown[0]}"
    client = mlflow.MlflowClient(**stores)
    [version] = client.search_model_versions("name = 'six'")
    assert version.source == digest_uri(receipt.target.checkpoint_digest)
    assert version.tags["wherry.uri"] == receipt.target.uri
    assert {file.path for file in client.list_artifacts(version.run_id)} == {"manifest.json", "receipt.json"}
    run = client.get_run(version.run_id)
    assert [row.model_id for row in run.inputs.model_inputs] == [version.tags["wherry.source_model"]]
    assert [row.model_id for row in run.outputs.model_outputs] == [version.tags["wherry.logged_model"]]
    assert capfd.readouterr().out == ""


def test_promoted_resolved_fetched_and_rolled_back(stores, tmp_path, everywhere):
    for number in ("1", "2"):
        receipt = converted(tmp_path / number)
        wherry.register(receipt, "story", alias="candidate")
        done = wherry.promote("models:/story@candidate")
        assert done.version == number
        assert done.page == f"{stores['registry_uri']}/#/models/story/versions/{number}"
    found = wherry.resolve("models:/story@champion")
    assert found.uri == receipt.target.uri
    assert wherry.resolve(digest_uri(found.checkpoint_digest)).uri == found.uri
    copy = wherry.fetch("models:/story@champion", tmp_path / "copy")
    assert wherry.verify(copy.uri, level="digest").ok
    assert wherry.rollback("story").version == "1"
    assert wherry.resolve("models:/story@champion").version == "1"
    names = {(row.name, row.version): row.aliases for row in service("mlflow").registered_versions(**stores)}
    assert names["story", "1"] == ("champion",)
    assert names["story", "2"] == ()


def test_an_altered_checkpoint_is_refused(stores, tmp_path):
    receipt = converted(tmp_path)
    wherry.register(receipt, "altered", alias="candidate", **stores)
    flip_a_bit(tmp_path / "target")
    with pytest.raises(MismatchError, match="differs from the registered one"):
        wherry.promote("models:/altered@candidate", **stores)
    assert list(mlflow.MlflowClient(**stores).get_registered_model("altered").aliases) == ["candidate"]


def test_from_an_embedded_registry_to_a_server(server, tmp_path):
    receipt = converted(tmp_path)
    wherry.register(receipt, "carried", alias="candidate", tags={"team": "speech"})
    done = wherry.promote("models:/carried@candidate", to_registry_uri=server)
    client = mlflow.MlflowClient(server, server)
    version = client.get_model_version_by_alias("carried", "champion")
    assert (done.registry, version.tags["team"]) == (server, "speech")
    assert version.source == digest_uri(receipt.target.checkpoint_digest)


def test_an_approver_is_whom_the_server_has_authenticated(server, stores, tmp_path, monkeypatch):
    wherry.register(converted(tmp_path), "approved", alias="candidate", **stores)
    gates = {"approvers": ["alice", "admin"]}
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "another-password")
    assert service("mlflow").identity(server) is None
    monkeypatch.undo()
    add_user(server, "bob", "a-password-of-bob")
    with monkeypatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_USERNAME", "bob")
        patch.setenv("MLFLOW_TRACKING_PASSWORD", "a-password-of-bob")
        assert service("mlflow").identity(server) == "bob"
        with pytest.raises((MismatchError, StorageError), match=r"approvers|PERMISSION_DENIED"):
            wherry.promote("models:/approved@candidate", policy=gates, **stores)
    done = wherry.promote("models:/approved@candidate", policy=gates, **stores)
    assert done.by == "admin"
    assert [gate.found for gate in done.gates if gate.gate == "approvers"] == ["admin"]
    assert (
        mlflow.MlflowClient(**stores).get_model_version("approved", "1").tags["wherry.promoted_by"] == "admin"
    )


def test_a_server_without_users_knows_nobody(server, tmp_path):
    with mlflow_server(tmp_path) as url:
        assert service("mlflow").identity(url) is None
        with pytest.raises(MismatchError, match="no user that the registry's server has authenticated"):
            wherry.promote(
                converted(tmp_path).target.uri,
                model="anybody",
                policy={"approvers": ["admin"]},
                tracking_uri=url,
                registry_uri=url,
            )
