"""A place that only the registry, the ledger or a parameter states is opened below a root of the routes, or refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import wherry
from tests.support.noting_server import noting_server
from tests.support.registry import converted
from wherry.auditor.audit import audit
from wherry.cli import cli
from wherry.config.roots import root_of
from wherry.config.settings import mlflow_tracking_uri
from wherry.core.algorithms import digest_uri
from wherry.core.request import SourceRequest
from wherry.errors import HostileError, MismatchError
from wherry.ledger.resolve import checkpoint_uri
from wherry.lineage.stale import stale
from wherry.remote.addresses import ELSEWHERE
from wherry.verifier.verify import comparison, verify, verify_and_record

CONFIG = """
[routes.r]
root = "{root}/runs"

[[routes.r.targets]]
format = "torch-zip"
uri = "{root}/out/{{run}}.pt"
"""

pytestmark = pytest.mark.usefixtures("own_home")


@pytest.fixture
def receipt(tmp_path):
    return converted(tmp_path / "elsewhere")


@pytest.fixture
def routed(tmp_path, monkeypatch, receipt):
    """From now on there are routes, and none of them reads or writes where the checkpoint is."""
    (tmp_path / "wherry.toml").write_text(CONFIG.format(root=tmp_path))
    monkeypatch.setenv("WHERRY_CONFIG", str(tmp_path / "wherry.toml"))
    (tmp_path / "runs").mkdir()


@pytest.fixture
def opened(monkeypatch):
    """The paths that are given to `os.open`."""
    import os

    found, real = [], os.open

    def noting(path, flags, *rest, **named):
        found.append(os.fspath(path) if not isinstance(path, int) else "")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", noting)
    return found


def test_a_place_in_the_ledger_that_no_route_has_is_not_opened(receipt, routed, opened):
    for form in (digest_uri(receipt.target.checkpoint_digest), receipt.target.checkpoint_digest):
        for verb in (checkpoint_uri, wherry.open, wherry.detect):
            with pytest.raises(HostileError, match="no route reads or writes") as caught:
                verb(form)
        assert wherry.verify(form).verdict == "malicious"
    assert not [path for path in opened if path.startswith(receipt.target.uri)]
    folder = Path(receipt.target.uri).parent
    assert f'links = ["{folder}"]' in (caught.value.cure or "")


def test_the_cure_lets_the_place_be_opened(receipt, routed, tmp_path, monkeypatch):
    folder = Path(receipt.target.uri).parent
    file = tmp_path / "wherry.toml"
    file.write_text(f'links = ["{folder}"]\n{file.read_text()}')
    assert wherry.resolve(digest_uri(receipt.target.checkpoint_digest)).uri == receipt.target.uri


def test_a_place_below_a_target_is_opened_and_must_not_become_a_link_out_of_it(tmp_path, receipt, routed):
    inside = tmp_path / "out" / "model"
    inside.parent.mkdir()
    wherry.fetch(receipt.target.uri, inside)
    shutil.rmtree(receipt.target.uri)
    form = digest_uri(receipt.target.checkpoint_digest)
    assert wherry.resolve(form).uri == str(inside)
    wherry.open(form).close()
    inside.rename(tmp_path / "elsewhere" / "moved")
    inside.symlink_to(tmp_path / "elsewhere" / "moved")
    with pytest.raises(HostileError, match=r"symbolic link points outside|no route reads or writes"):
        wherry.resolve(form)


def test_an_audit_reads_no_place_that_no_route_has(receipt, routed, opened):
    report = audit("all", record=False)
    assert "outside-routes" in {finding.kind for finding in report.findings}
    assert not [path for path in opened if path.startswith(receipt.target.uri)]
    named = audit([str(Path(receipt.target.uri).parent)], record=False)
    assert "outside-routes" not in {finding.kind for finding in named.findings}, "the user names this root"


def test_stale_reads_no_source_that_no_route_has(receipt, routed, opened, caplog):
    assert stale() == []
    assert "not judged: their sources" in caplog.text
    assert not [path for path in opened if path.startswith(receipt.source.uri)]


@pytest.mark.parametrize("stated", ["a place elsewhere", "a server of this machine"])
def test_logits_open_no_source_that_a_sidecar_names_elsewhere(receipt, routed, opened, stated, monkeypatch):
    """Whoever may write a checkpoint writes its receipt too."""
    monkeypatch.setattr("wherry.verifier.native._require", lambda *_: None)
    source = receipt.source.uri if stated == "a place elsewhere" else "http://127.0.0.1:9/m.safetensors"
    sidecar = Path(receipt.target.uri) / "wherry.json"
    document = json.loads(sidecar.read_text())
    document["receipt"]["source"]["uri"] = source
    sidecar.write_text(json.dumps(document))
    with noting_server() as (port, seen):
        sidecar.write_text(sidecar.read_text().replace("127.0.0.1:9", f"127.0.0.1:{port}"))
        assert wherry.verify(receipt.target.uri, level="logits").verdict == "malicious"
        assert seen == []
    assert not [path for path in opened if path.startswith(receipt.source.uri)]


def test_the_source_of_a_comparison_does_not_leave_its_root(receipt, tmp_path):
    root = tmp_path / "sources"
    root.mkdir()
    (root / "run").symlink_to(receipt.source.uri)
    source = SourceRequest(receipt.target.uri)
    for level in ("digest", "roundtrip"):
        assert verify(source, level=level, against=root / "run").ok, "a person may name a link"
        found = verify(source, level=level, against=SourceRequest(str(root / "run"), below=str(root)))
        assert found.verdict == "malicious"
    how = comparison("roundtrip", str(root / "run"), str(root), None)
    with pytest.raises(MismatchError, match="link points outside"):
        verify_and_record(receipt.target.uri, **how)


def test_dots_do_not_lead_out_of_a_root(routed, tmp_path):
    assert root_of(tmp_path / "runs" / "a") == f"{tmp_path}/runs"
    assert root_of(tmp_path / "out" / "a") == f"{tmp_path}/out/"
    for text in (f"{tmp_path}/runs/../elsewhere", f"{tmp_path}/runsx", f"{tmp_path}", "http://127.0.0.1/a"):
        with pytest.raises(HostileError, match="no route reads or writes"):
            root_of(text)


def test_without_routes_there_are_no_roots(receipt, opened):
    wherry.open(receipt.target.uri).close()
    assert [path for path in opened if path.startswith(receipt.target.uri)], "and the fixture sees it"
    assert root_of("/anywhere") is None
    assert wherry.resolve(digest_uri(receipt.target.checkpoint_digest)).uri == receipt.target.uri


def test_a_tag_of_the_registry_sends_no_request(receipt, routed, request, tmp_path, monkeypatch):
    """Whoever writes tags names a server of the network in which wherry runs."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setattr(
        "wherry.remote.addresses.kind_of_host", lambda _host: ELSEWHERE
    )  # only the roots refuse it
    name = re.sub(r"\W+", "-", request.node.name)
    wherry.register(receipt.target.uri, name, alias="candidate")
    client = mlflow.MlflowClient(mlflow_tracking_uri(), mlflow_tracking_uri())
    shutil.rmtree(receipt.target.uri)
    with noting_server() as (port, requests):
        client.set_model_version_tag(name, "1", "wherry.uri", f"http://127.0.0.1:{port}/a/b")
        for words in (
            ["resolve", f"models:/{name}@candidate"],
            ["verify", f"models:/{name}/1"],
            ["fetch", f"models:/{name}/1", str(tmp_path / "copy")],
            ["promote", f"models:/{name}/1"],
            ["convert", f"models:/{name}/1", str(tmp_path / "a.npz"), "--to", "npz"],
        ):
            done = CliRunner().invoke(cli, words)
            refused = isinstance(done.exception, HostileError) or done.exit_code == HostileError.exit_code
            assert refused, (words, done.output, done.exception)
    assert requests == []
    assert not (tmp_path / "copy").exists()
