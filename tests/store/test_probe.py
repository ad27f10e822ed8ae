"""A server that does not answer is reported within seconds, before its client retries in silence."""

from __future__ import annotations

import re
import socket
import sqlite3
import ssl
import threading
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from urllib.error import URLError

import pytest
from click import Command
from click.testing import CliRunner

import wherry
from tests.support.command import small
from wherry.cli import main
from wherry.errors import StorageError, UsageError
from wherry.integrations.mlflow_probe import require_answer
from wherry.integrations.prefect.server import answering_server
from wherry.ledger.record import open_ledger
from wherry.store import probe, waits
from wherry.store.waits import RetryPolicy


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    monkeypatch.setattr(probe, "ANSWER_SECONDS", 0.3)
    monkeypatch.setenv("WHERRY_STORAGE_TIMEOUT", "0.1s")


@pytest.fixture
def closed_port():
    """A port that refuses connections."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


@pytest.fixture
def silent_port():
    """A port that takes connections and never answers."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=64)) as server:
        yield server.getsockname()[1]


@contextmanager
def server(status: int):
    """A server that answers everything with one status; yields its URL and the paths that were requested."""
    paths: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            pass

    running = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}", paths
    finally:
        running.shutdown()
        running.server_close()


@pytest.mark.parametrize("status", [200, 302, 401, 404, 500, 503])
def test_any_answer_of_a_server_will_do(status):
    with server(status) as (url, paths):
        require_answer(url, f"{url}")
    assert paths == ["/health"], "one request for each URI"


@pytest.mark.parametrize("scheme", ["http://", "https://", "postgresql+psycopg://user:secret@", "mysql://"])
def test_a_port_that_refuses_is_an_error_with_a_cure(scheme, closed_port):
    with pytest.raises(StorageError, match="Connection refused") as caught:
        require_answer(f"{scheme}127.0.0.1:{closed_port}/mlflow")
    assert (caught.value.retryable, "MLFLOW_TRACKING_URI" in caught.value.cure) == (True, True)
    assert "secret" not in str(caught.value)


def test_a_server_that_is_silent_is_an_error(silent_port):
    with pytest.raises(StorageError, match=r"no response within 0\.3 s"):
        require_answer(f"http://127.0.0.1:{silent_port}")


def test_both_stores_are_probed(closed_port):
    with server(200) as (url, _), pytest.raises(StorageError, match=str(closed_port)):
        require_answer(url, f"http://127.0.0.1:{closed_port}")


@pytest.mark.parametrize(
    "uri",
    ["sqlite:///mlflow.db", "mlruns", "databricks", "file:///tmp/mlruns", "http://[::1", "postgresql:///db"],
)
def test_what_has_no_server_is_not_probed(uri, monkeypatch):
    monkeypatch.setattr(socket, "create_connection", lambda *_: pytest.fail("it connected"))
    require_answer(uri)


@pytest.mark.parametrize("verb", ["resolve", "register", "promote"])
def test_verbs_report_a_silent_server(verb, tmp_path, silent_port):
    stores = {"tracking_uri": f"http://127.0.0.1:{silent_port}", "registry_uri": None}
    wherry.convert(small(tmp_path / "a.safetensors"), tmp_path / "b.safetensors", to="safetensors")
    calls = {
        "resolve": lambda: wherry.resolve("models:/m/1", **stores),
        "register": lambda: wherry.register(tmp_path / "b.safetensors", "m", **stores),
        "promote": lambda: wherry.promote(tmp_path / "b.safetensors", model="m", **stores),
    }
    with pytest.raises(StorageError, match="MLflow does not answer: no response"):
        calls[verb]()


@pytest.mark.parametrize("port", ["closed_port", "silent_port"])
def test_a_prefect_server_that_does_not_answer_is_an_error(port, request):
    settings = pytest.importorskip("prefect.settings", reason="prefect is not installed")
    from wherry.integrations.prefect.server import required_server

    api = f"http://127.0.0.1:{request.getfixturevalue(port)}/api"
    with settings.temporary_settings({settings.PREFECT_API_URL: api}), pytest.raises(StorageError) as caught:
        required_server()
    assert (caught.value.uri, "prefect server start" in caught.value.cure) == (api, True)
    assert "Prefect does not answer: " in caught.value.what


def test_a_prefect_server_that_answers_will_do_and_none_is_an_error_only_where_it_is_needed():
    settings = pytest.importorskip("prefect.settings", reason="prefect is not installed")
    from wherry.integrations.prefect.server import answering_server, required_server

    with server(404) as (url, _), settings.temporary_settings({settings.PREFECT_API_URL: f"{url}/api"}):
        assert required_server() == f"{url}/api"
    with settings.temporary_settings(restore_defaults={settings.PREFECT_API_URL}):
        assert answering_server() is None
        with pytest.raises(UsageError, match="no Prefect server configured"):
            required_server()


# ---- commands, with a server that is down and with one that hangs


@pytest.fixture(params=["closed_port", "silent_port"])
def dead(request, tmp_path, monkeypatch):
    """The URL of a server that does not answer; the working directory has one checkpoint and its route."""
    url = f"http://127.0.0.1:{request.getfixturevalue(request.param)}"
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    monkeypatch.chdir(tmp_path)
    small(tmp_path / "runs" / "a.safetensors")
    (tmp_path / "wherry.toml").write_text(
        '[routes.all]\nroot = "runs"\nmin_age = "0s"\nmodel = "m"\n'
        'targets = [{ format = "orbax", uri = "out/{run}/{name}" }]\n'
    )
    return url


@pytest.mark.parametrize(
    ("words", "code"), [("nightly --go", 12), ("audit --registered", 0), ("audit out", 0)]
)
def test_commands_say_at_once_that_mlflow_does_not_answer(words, code, dead, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", dead)
    if words.startswith("audit"):
        wherry.convert("runs/a.safetensors", "out", to="orbax")
    done = CliRunner().invoke(Command("run", callback=lambda: main(words.split())), [])
    text = done.output + "".join(capfd.readouterr())
    assert "MLflow does not answer: " in text, text
    assert dead in text
    assert "start the server, or check MLFLOW_TRACKING_URI" in text
    assert done.exit_code == code, text


def test_emit_says_at_once_that_prefect_does_not_answer(dead, monkeypatch):
    monkeypatch.setattr(import_module("wherry.cli.deploy"), "_EMIT_SECONDS", 0.3)
    monkeypatch.setenv("PREFECT_API_URL", f"{dead}/api")
    done = CliRunner().invoke(Command("run", callback=lambda: main(["emit", "runs/a.safetensors"])), [])
    assert "Prefect does not answer: " in done.output
    assert f"({dead}/api)" in done.output
    assert (done.exit_code, "PREFECT_API_URL" in done.output) == (10, True)


@pytest.mark.parametrize("waited_for", ["a ledger", "MLflow", "Prefect"])
def test_what_is_away_is_waited_for_by_one_rule_with_one_line(waited_for, monkeypatch, caplog, tmp_path):
    """It answers from the 6th attempt on, once the line is logged; only the time that a store may take is a limit."""
    settings, attempts = pytest.importorskip("prefect.settings"), []
    monkeypatch.setenv("WHERRY_STORAGE_TIMEOUT", "30s")
    monkeypatch.setattr(RetryPolicy, "pause_after", lambda *_: 0.001 if len(attempts) < 6 else 0.5)
    monkeypatch.setattr(waits, "_watch", waits._Watch())
    monkeypatch.setattr(waits, "NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(waits, "_LOOK_SECONDS", 0.001)

    def silence(*_):
        attempts.append(1)
        is_logged = any(" has not answered for " in record.getMessage() for record in caplog.records)
        return "Connection refused" if len(attempts) < 6 or not is_logged else None

    if waited_for == "a ledger":
        url = f"sqlite:///{tmp_path / 'ledger.db'}"
        with open_ledger(url) as ledger:
            real = ledger.backend.begin

            def begin(driver, kind):
                if silence():
                    raise sqlite3.OperationalError("Connection refused")
                return real(driver, kind)

            monkeypatch.setattr(ledger.backend, "away", str)
            monkeypatch.setattr(ledger.backend, "begin", begin)
            with ledger.read():
                pass
    else:
        monkeypatch.setattr(probe, "_silence", silence)
        url = "http://127.0.0.1:9/api"
        if waited_for == "MLflow":
            require_answer(url)
        else:
            with settings.temporary_settings({settings.PREFECT_API_URL: url}):
                assert answering_server() == url
    assert len(attempts) >= 6
    lines = {record.getMessage() for record in caplog.records if "has not answered" in record.getMessage()}
    assert all(re.fullmatch(r"\S+ has not answered for \d+ s(; attempt \d+ of 60)?", line) for line in lines)
    assert any("of 60" in line for line in lines)


def test_a_server_whose_certificate_only_its_client_knows_has_answered(monkeypatch):
    def fail(*_request):
        raise URLError(ssl.SSLCertVerificationError(1, "unable to get local issuer certificate"))

    monkeypatch.setattr("wherry.store.addresses.open_checked", fail)
    assert probe.silence_of("https://prefect.example/api", "https://prefect.example/api") is None
