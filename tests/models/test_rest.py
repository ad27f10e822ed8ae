"""A version is looked up on a server without MLflow's client; whatever is not plain is left to the client."""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from wherry.errors import StorageError
from wherry.integrations.mlflow_rest import look_up

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
    found = look_up("a model", registry_uri=server.url, **which)
    assert found == ("a model", "2", {"k": "v"}, ("b", "champion"))
    assert [fields for _path, fields, _header in server.seen] == [
        {"name": ["a model"]},
        {"name": ["a model"], "version": ["2"]},
    ]


def test_the_newest_version(server):
    server.answers["model-versions/search"] = json.dumps({"model_versions": [VERSION]}).encode()
    assert look_up("a model", registry_uri=server.url) == ("a model", "2", {"k": "v"}, ("b", "champion"))
    assert server.seen[1][1] == {
        "filter": ["name='a model'"],
        "max_results": ["1"],
        "order_by": ["version_number DESC"],
    }


def test_the_client_handles_a_name_that_the_filter_cannot_express(server):
    assert look_up("a 'model'", registry_uri=server.url) is None


def test_credentials_of_the_environment(server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    assert look_up("m", registry_uri=server.url, version="2")
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "p")
    assert look_up("m", registry_uri=server.url, version="2")
    headers = [header for _path, _fields, header in server.seen]
    assert headers == ["Bearer secret"] * 2 + [f"Basic {b64encode(b'me:p').decode()}"] * 2


@pytest.mark.parametrize("status", [302, 401, 404, 429, 503])
def test_the_client_handles_errors(server, status):
    server.status = status
    assert look_up("m", registry_uri=server.url, version="2") is None


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"<html>", b'{"registered_model": 3}', b'{"registered_model": {}}']
)
def test_the_client_handles_unknown_answers(server, body):
    server.answers["registered-models/get"] = body
    assert look_up("m", registry_uri=server.url, alias="champion") is None


def test_the_client_names_the_aliases_that_exist(server):
    assert look_up("m", registry_uri=server.url, alias="other") is None


def test_the_client_knows_other_stores_and_settings(server, monkeypatch):
    assert look_up("m", registry_uri="sqlite:///x.db", version="1") is None
    assert look_up("m", registry_uri=server.url.replace("//", "//user:password@"), version="2") is None
    monkeypatch.setenv("MLFLOW_TRACKING_AWS_SIGV4", "true")
    assert look_up("m", registry_uri=server.url, version="2") is None
    assert server.seen == []


def test_no_server_answers(monkeypatch):
    monkeypatch.setenv("WHERRY_STORAGE_TIMEOUT", "0.1s")
    with pytest.raises(StorageError, match="MLflow does not answer"):
        look_up("m", registry_uri="http://127.0.0.1:1", version="2")
