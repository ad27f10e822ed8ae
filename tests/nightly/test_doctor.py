"""doctor finds what is broken, says the cure, and imports nothing heavy."""

from __future__ import annotations

import http.server
import json
import sqlite3
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from wherry.core.receipt import CheckpointRef, Receipt
from wherry.installation import extra_command
from wherry.ledger.record import open_ledger, record_conversion
from wherry.nightly import doctor


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    for name in (
        "WHERRY_LEDGER",
        "MLFLOW_TRACKING_URI",
        "MLFLOW_REGISTRY_URI",
        "PREFECT_API_URL",
        "PREFECT_PROFILE",
    ):
        monkeypatch.delenv(name, raising=False)


def findings():
    return {finding.name: finding for finding in doctor.diagnose()}


CODES = {"/ok/health": 200, "/private/health": 401, "/ill/health": 503}


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(CODES[self.path])
        self.end_headers()

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture(scope="module")
def url():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_fresh_machine_has_nothing_broken():
    found = findings()
    assert [row for row in found.values() if row.state == "broken"] == []
    assert (
        found["tensorstore"].state
        == found["home"].state
        == found["ledger"].state
        == found["disk"].state
        == "ok"
    )
    assert "0 statements" in found["ledger"].detail


def test_an_absent_extra_is_missing_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(doctor._EXTRAS, "torch", (("no_such_module.inside", "no-such-package"),))
    found = findings()["extra torch"]
    assert (found.state, found.cure) == ("missing", extra_command("torch"))
    assert "no-such-package" in found.detail


def test_a_broken_chain_is_found():
    node = CheckpointRef("/a", "npz", None, "a" * 64, "b" * 64, "mark")
    with open_ledger() as ledger:
        record_conversion(ledger, Receipt(node, node, "c" * 64))
        file = ledger.uri
    assert findings()["ledger"].state == "ok"
    with sqlite3.connect(file) as connection:
        connection.execute("DROP TRIGGER statement_no_update")
        connection.execute("UPDATE statement SET time = '1999'")
    connection.close()
    found = findings()["ledger"]
    assert found.state == "broken"
    assert "statement 1" in found.detail


def test_a_home_that_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "file" / "home"))
    found = findings()
    assert found["home"].state == found["ledger"].state == found["mlflow store"].state == "broken"
    assert "WHERRY_HOME" in found["home"].cure


def test_a_home_that_others_can_read(tmp_path):
    (tmp_path / "home").mkdir(mode=0o755)
    assert "chmod 700" in findings()["home"].cure


@pytest.mark.parametrize(("path", "state"), [("ok", "ok"), ("private", "ok"), ("ill", "broken")])
def test_servers_are_probed(url, path, state, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", f"{url}/{path}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{url}/{path}/")
    found = findings()
    assert found["prefect api"].state == found["mlflow store"].state == state


def test_a_server_that_is_not_there(monkeypatch):
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "http://user:secret@127.0.0.1:9")
    found = findings()["mlflow registry"]
    assert found.state == "broken"
    assert "does not respond" in found.detail
    assert "secret" not in found.detail


def test_the_prefect_profile_is_read(url, tmp_path):
    (tmp_path / "prefect").mkdir()
    profile = f'active = "local"\n[profiles.local]\nPREFECT_API_URL = "{url}/ok"\n'
    (tmp_path / "prefect" / "profiles.toml").write_text(profile)
    assert findings()["prefect api"].state == "ok"


@pytest.mark.parametrize(("fastapi", "broken"), [("0.150.0", False), ("0.165.1", True)])
def test_the_fastapi_that_breaks_prefect_is_named(fastapi, broken, monkeypatch):
    versions = {"fastapi": fastapi, "prefect": "3.8.8"}
    monkeypatch.setattr(doctor, "version", lambda package: versions.get(package, "1"))
    monkeypatch.setattr(doctor, "requires", lambda _package: ["fastapi<1.0.0,>=0.139.0"])
    assert ("prefect server" in findings()) == broken


def test_nothing_heavy_is_imported():
    script = (
        "import json, sys; from wherry.nightly.doctor import diagnose; diagnose()\n"
        "print(json.dumps(sorted({'prefect', 'mlflow', 'torch', 'jax', 'flax'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == []


def test_every_extra_with_packages_of_its_own_is_looked_for():
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extras = declared["project"]["optional-dependencies"]
    developer = {"all", "bench", "demo", "demo-bucket", "docs", "test"}
    assert set(doctor._EXTRAS) == set(extras) - developer


def sandbox_finding(monkeypatch, version, seccomp):
    monkeypatch.setattr("wherry.core.sandbox.landlock_version", lambda: version)
    monkeypatch.setattr("wherry.core.sandbox.has_seccomp", lambda: seccomp)
    return {one.name: one for one in doctor.diagnose()}["sandbox"]


@pytest.mark.parametrize(
    ("version", "seccomp", "state", "words"),
    [
        (7, True, "ok", ("files are limited (Landlock 7)", "seccomp limits calls and the network")),
        (0, True, "missing", ("files are not limited", "seccomp limits calls and the network")),
        (7, False, "missing", ("files are limited (Landlock 7)", "no seccomp")),
    ],
)
def test_the_sandbox_of_native_checks_is_named(version, seccomp, state, words, monkeypatch):
    found = sandbox_finding(monkeypatch, version, seccomp)
    assert found.state == state
    assert all(word in found.detail for word in words)
    assert (found.cure is None) == (state == "ok")


def test_a_sandbox_that_is_switched_off_is_missing(monkeypatch):
    monkeypatch.setenv("WHERRY_CHILD_SANDBOX", "off")
    found = sandbox_finding(monkeypatch, 7, True)
    assert (found.state, found.cure) == ("missing", "unset WHERRY_CHILD_SANDBOX")
