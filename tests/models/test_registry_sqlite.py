"""A version is looked up in MLflow's SQLite file as MLflow's client finds it; whatever is not plain is the client's."""

from __future__ import annotations

import functools
import hashlib
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

import wherry
from wherry.config.settings import mlflow_registry_uri, mlflow_tracking_uri
from wherry.core.services import service
from wherry.errors import NotFoundError, WherryError
from wherry.integrations.mlflow_sqlite import _REVISIONS, look_up
from wherry.integrations.mlflow_version import RegisteredVersion
from wherry.ledger.resolve import DIGEST_TAG
from wherry.storage.home import sqlite_file, sqlite_to_read

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
