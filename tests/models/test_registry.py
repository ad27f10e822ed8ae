"""The registry: its files, REST, and how it is rebuilt."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import sqlite3
import subprocess
import sys
import threading
from base64 import b64encode
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.config.settings import mlflow_registry_uri, mlflow_tracking_uri
from wherry.core.services import service
from wherry.errors import NotFoundError, StorageError, WherryError
from wherry.integrations.mlflow_rest import look_up as look_up_of_rest
from wherry.integrations.mlflow_sqlite import _REVISIONS, look_up
from wherry.integrations.mlflow_version import RegisteredVersion
from wherry.ledger import deliver
from wherry.ledger.record import check_chain, open_ledger
from wherry.ledger.resolve import DIGEST_TAG
from wherry.store.home import sqlite_file, sqlite_to_read

DIGEST = f"sha256:{'ab' * 32}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A registry with the versions, aliases, stages and tags that a model can have."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path_factory.mktemp('registry') / 'a registry.db'}"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    for name in ("a model", "other", "empty", "Ünï%@x"):
        client.create_registered_model(name)
    for number in range(1, 5):
        client.create_model_version(
            "a model", f"/runs/{number}", tags={"number": str(number), "wherry.uri": "u"}
        )
        client.create_model_version(
            "other", f"/other/{number}", tags={DIGEST_TAG: DIGEST, "note": "x\ny'\"é"}
        )
    client.create_model_version("Ünï%@x", "/x")
    for alias, number in (("champion", "3"), ("b", "3"), ("Candidate", "1"), ("gone", "2")):
        client.set_registered_model_alias("a model", alias, number)
    client.set_registered_model_alias("other", "champion", "4")
    client.transition_model_version_stage("a model", "1", "Archived")
    client.set_model_version_tag("a model", "3", "number", "three")
    client.delete_model_version_tag("a model", "3", "wherry.uri")
    client.delete_model_version("a model", "2")
    return uri


CASES = [
    *(("a model", {"version": number}) for number in ("1", "2", "3", "03", "4", "5", "0")),
    *(
        ("a model", {"alias": alias})
        for alias in ("champion", "b", "candidate", "Candidate", "gone", "latest")
    ),
    ("other", {"alias": "champion"}),
    ("other", {"version": "1"}),
    ("OTHER", {"version": "1"}),
    ("empty", {"version": "1"}),
    ("empty", {"alias": "champion"}),
    ("missing", {"version": "1"}),
    ("missing", {"alias": "champion"}),
    ("Ünï%@x", {"version": "1"}),
    ("a m_del", {"version": "1"}),
    *((name, {}) for name in ("a model", "other", "empty", "missing", "Ünï%@x")),
]


def answer(look, name, **arguments):
    """A version as it was found, or the error, as it is printed."""
    try:
        return look(name, **arguments)
    except WherryError as error:
        return type(error), error.to_json()


@pytest.mark.parametrize(("name", "which"), CASES, ids=str)
def test_the_file_gives_what_the_client_gives(shared, name, which):
    expected = answer(service("mlflow").look_up, name, tracking_uri=shared, registry_uri=shared, **which)
    assert answer(look_up, name, registry_uri=shared, **which) == expected


def test_the_cases_are_both_found_and_refused(shared):
    found = [answer(look_up, name, registry_uri=shared, **which) for name, which in CASES]
    assert sum(isinstance(one, RegisteredVersion) for one in found) == 13
    assert sum(one[0] is NotFoundError for one in found) == len(CASES) - 13
    assert found[CASES.index(("other", {"version": "1"}))].tags[DIGEST_TAG] == DIGEST
    assert found[CASES.index(("a model", {"version": "3"}))] == (
        "a model", "3", {"number": "three"}, ("b", "champion")
    )  # fmt: skip


def test_the_schema_of_the_installed_mlflow_is_known(shared):
    with closing(sqlite3.connect(sqlite_file(shared))) as connection:
        [(revision,)] = connection.execute("SELECT version_num FROM alembic_version")
    assert revision in _REVISIONS


def test_the_file_does_not_change(shared):
    file = sqlite_file(shared)
    before = hashlib.sha256(file.read_bytes()).digest(), sorted(file.parent.iterdir())
    assert look_up("a model", registry_uri=shared, alias="champion")
    assert (hashlib.sha256(file.read_bytes()).digest(), sorted(file.parent.iterdir())) == before


@pytest.fixture
def copy(shared, tmp_path):
    """A copy of the registry, for changes."""
    (tmp_path / "copy.db").write_bytes(sqlite_file(shared).read_bytes())
    return f"sqlite:///{tmp_path / 'copy.db'}"


OTHERS = {
    "an unknown revision": "UPDATE alembic_version SET version_num = 'ffffffffffff'",
    "no revision": "DELETE FROM alembic_version",
    "a model in a workspace": "INSERT INTO registered_models (workspace, name) VALUES ('team', 'foreign')",
    "a tag without a value": "INSERT INTO model_version_tags (workspace, name, version, key, value) "
    "VALUES ('default', 'a model', 1, 'empty', NULL)",
    "a version that is no number": "UPDATE registered_model_aliases SET version = 'one'",
    "no table": "ALTER TABLE registered_model_aliases RENAME TO renamed",
}


@pytest.mark.parametrize("change", OTHERS)
def test_the_client_knows_other_files(copy, change):
    assert look_up("a model", registry_uri=copy, version="1")
    with closing(sqlite3.connect(sqlite_file(copy))) as connection:
        connection.execute(OTHERS[change])
        connection.commit()
    assert look_up("a model", registry_uri=copy, version="1") is None


def test_the_client_knows_other_stores_and_settings(shared, tmp_path, monkeypatch):
    missing = tmp_path / "missing.db"
    (tmp_path / "text.db").write_text("no database")
    stores = f"sqlite:///{missing}", f"sqlite:///{tmp_path / 'text.db'}", f"{shared}?timeout=1", "http://host"
    assert [look_up("a model", registry_uri=uri, version="1") for uri in (*stores, f"{tmp_path}")] == [
        None
    ] * 5
    assert not missing.exists()
    monkeypatch.setenv("MLFLOW_ENABLE_WORKSPACES", "true")
    assert look_up("a model", registry_uri=shared, version="1") is None


@pytest.mark.parametrize(("name", "version"), [("a model", "9" * 40), ("a:b", "1")])
def test_the_client_refuses_what_cannot_be(shared, name, version):
    assert look_up(name, registry_uri=shared, version=version) is None


def test_a_writer_in_the_way_is_left_to_the_client(copy, monkeypatch):
    impatient = functools.partial(sqlite_to_read, timeout=0.1)
    monkeypatch.setattr("wherry.integrations.mlflow_sqlite.sqlite_to_read", impatient)
    with closing(sqlite3.connect(sqlite_file(copy), isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        assert look_up("a model", registry_uri=copy, version="1") is None
    assert look_up("a model", registry_uri=copy, version="1")


def test_a_model_uri_is_resolved_without_the_client(candidate, name):
    """In a process of its own, as MLflow is imported here."""
    assert mlflow_registry_uri() == mlflow_tracking_uri()
    script = (
        "import sys, wherry; found = wherry.resolve(sys.argv[1]); "
        "print(found.uri, found.version, found.alias); sys.exit('mlflow' in sys.modules)"
    )
    command = [sys.executable, "-c", script, f"models:/{name}@candidate"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout.split(), done.returncode) == ([candidate.target.uri, "1", "candidate"], 0), (
        done.stderr
    )
    assert wherry.resolve(f"models:/{name}@candidate").tags["team"] == "speech"


# A registry that was lost is made again from the ledger, and one that is whole is left as it is.


mlflow = pytest.importorskip("mlflow")


def made(folder, value):
    source = folder / f"{value}.safetensors"
    save_file({"w": np.full((3, 4), value, np.float32)}, source)
    return wherry.convert(source, folder / f"orbax-{value}", to="orbax")


def client():
    uri = mlflow_registry_uri()
    return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


def test_versions_and_aliases_come_back(tmp_path, caplog):
    receipts = [made(tmp_path, value) for value in (1, 2, 3)]
    for receipt in receipts:
        wherry.register(receipt, "m")
    for version in (1, 2):
        wherry.promote(f"models:/m/{version}")
    assert deliver.deliver("mlflow", again=True)[0].events == 0, "nothing is missing"

    client().delete_registered_model("m")
    shutil.rmtree(receipts[2].target.uri)
    done = deliver.deliver("mlflow", again=True)[0]
    assert done.failed is None
    assert done.events == 3, "two versions and the alias"
    assert "was not restored" in caplog.text
    assert wherry.resolve("models:/m@champion").checkpoint_digest == receipts[1].target.checkpoint_digest
    assert wherry.resolve("models:/m@previous").checkpoint_digest == receipts[0].target.checkpoint_digest
    tags = client().get_model_version_by_alias("m", "champion").tags
    assert tags["wherry.source_uri"] == receipts[1].source.uri
    assert deliver.deliver("mlflow", again=True)[0].events == 0
    with open_ledger() as ledger:
        assert check_chain(ledger).altered is None


def test_a_version_in_another_registry_is_left_alone(tmp_path):
    wherry.register(made(tmp_path, 4), "other", registry_uri=f"sqlite:///{tmp_path}/other.db")
    assert deliver.deliver("mlflow", again=True)[0].events == 0
    assert not client().search_registered_models("name = 'other'")


def test_what_was_registered_before_a_server_was_configured_is_found_and_delivered(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    receipts = [made(tmp_path, value) for value in (5, 6)]
    for receipt in receipts:
        wherry.register(receipt, "early")
    wherry.promote("models:/early/1")
    with open_ledger() as ledger:
        chain = check_chain(ledger).statements
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'server.db'}")
    wherry.register(made(tmp_path, 7), "late")
    for form in ("models:/early", "models:/early/1", "models:/early@champion"):
        with pytest.raises(
            NotFoundError, match="2 versions are only in the registry in this home"
        ) as failure:
            wherry.resolve(form)
        assert "`wherry ledger deliver mlflow`" in failure.value.cure
        assert "server.db" in str(failure.value.uri)
    done = deliver.deliver("mlflow")[0]
    assert (done.events, done.failed, done.statements > chain) == (3, None, True), (
        "two versions and the alias"
    )
    assert wherry.resolve("models:/early@champion").checkpoint_digest == receipts[0].target.checkpoint_digest
    assert wherry.resolve("models:/early").checkpoint_digest == receipts[1].target.checkpoint_digest
    with pytest.raises(NotFoundError) as failure:
        wherry.resolve("models:/nobody")
    assert "deliver" not in failure.value.cure


def test_an_alias_of_the_server_is_not_moved_by_the_registry_in_the_home(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    old, new = made(tmp_path, 8), made(tmp_path, 9)
    wherry.register(old, "both")
    wherry.promote("models:/both/1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'server.db'}")
    wherry.register(new, "both", alias="champion")
    deliver.deliver("mlflow", again=True)
    assert wherry.resolve("models:/both@champion").checkpoint_digest == new.target.checkpoint_digest


# A version is looked up on a server without MLflow's client; whatever is not plain is left to the client.


SETTINGS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
MODEL = {"name": "a model", "aliases": [{"alias": "champion", "version": "2"}, {"alias": "b", "version": 2}]}
VERSION = {"name": "a model", "version": "2", "tags": [{"key": "k", "value": "v"}]}


class _Registry(BaseHTTPRequestHandler):
    """Answers with `status` and what the server's `answers` holds for the last parts of a path."""

    def do_GET(self):
        parts = urlsplit(self.path)
        if parts.path == "/health":  # see `mlflow_probe`
            self.send_response(200)
            self.end_headers()
            return
        self.server.seen.append((parts.path, parse_qs(parts.query), self.headers.get("Authorization")))
        self.send_response(self.server.status)
        if self.server.status == 302:
            self.send_header("Location", "http://127.0.0.1:1/")
        self.end_headers()
        self.wfile.write(self.server.answers[parts.path.removeprefix("/api/2.0/mlflow/")])

    def log_message(self, *_arguments):
        """Nothing is printed."""


@pytest.fixture
def server(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), _Registry) as http:
        http.status, http.seen = 200, []
        http.answers = {
            "registered-models/get": json.dumps({"registered_model": MODEL}).encode(),
            "model-versions/get": json.dumps({"model_version": VERSION}).encode(),
        }
        http.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield http
        http.shutdown()
        thread.join()


@pytest.mark.parametrize("which", [{"alias": "champion"}, {"version": "2"}], ids=str)
def test_an_alias_and_a_version(server, which):
    found = look_up_of_rest("a model", registry_uri=server.url, **which)
    assert found == ("a model", "2", {"k": "v"}, ("b", "champion"))
    assert [fields for _path, fields, _header in server.seen] == [
        {"name": ["a model"]},
        {"name": ["a model"], "version": ["2"]},
    ]


def test_the_newest_version(server):
    server.answers["model-versions/search"] = json.dumps({"model_versions": [VERSION]}).encode()
    assert look_up_of_rest("a model", registry_uri=server.url) == (
        "a model",
        "2",
        {"k": "v"},
        ("b", "champion"),
    )
    assert server.seen[1][1] == {
        "filter": ["name='a model'"],
        "max_results": ["1"],
        "order_by": ["version_number DESC"],
    }


def test_the_client_handles_a_name_that_the_filter_cannot_express(server):
    assert look_up_of_rest("a 'model'", registry_uri=server.url) is None


def test_credentials_of_the_environment(server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    assert look_up_of_rest("m", registry_uri=server.url, version="2")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "p")
    assert look_up_of_rest("m", registry_uri=server.url, version="2")
    headers = [header for _path, _fields, header in server.seen]
    assert headers == ["Bearer secret"] * 2 + [f"Basic {b64encode(b'me:p').decode()}"] * 2


@pytest.mark.parametrize("status", [302, 401, 404, 429, 503])
def test_the_client_handles_errors(server, status):
    server.status = status
    assert look_up_of_rest("m", registry_uri=server.url, version="2") is None


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"<html>", b'{"registered_model": 3}', b'{"registered_model": {}}']
)
def test_the_client_handles_unknown_answers(server, body):
    server.answers["registered-models/get"] = body
    assert look_up_of_rest("m", registry_uri=server.url, alias="champion") is None


def test_the_client_names_the_aliases_that_exist(server):
    assert look_up_of_rest("m", registry_uri=server.url, alias="other") is None


def test_the_client_knows_other_stores_and_settings_rest(server, monkeypatch):
    assert look_up_of_rest("m", registry_uri="sqlite:///x.db", version="1") is None
    assert (
        look_up_of_rest("m", registry_uri=server.url.replace("//", "//user:password@"), version="2") is None
    )
    monkeypatch.setenv("MLFLOW_TRACKING_AWS_SIGV4", "true")
    assert look_up_of_rest("m", registry_uri=server.url, version="2") is None
    assert server.seen == []


def test_no_server_answers(monkeypatch):
    monkeypatch.setenv("WHERRY_STORAGE_TIMEOUT", "0.1s")
    with pytest.raises(StorageError, match="MLflow does not answer"):
        look_up_of_rest("m", registry_uri="http://127.0.0.1:1", version="2")
