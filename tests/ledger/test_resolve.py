"""What names a checkpoint: model URIs, beginnings of digests, and places."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from click import Command
from click.testing import CliRunner
from safetensors.numpy import save_file

import wherry
from tests.support.command import small
from tests.support.noting_server import noting_server
from tests.support.registry import converted, flip_a_bit, moved
from tests.support.signing import key_pair
from wherry.cli import cli, main
from wherry.config.roots import root_of
from wherry.config.settings import mlflow_tracking_uri
from wherry.core.digest import digest_uri
from wherry.core.request import SourceRequest
from wherry.core.services import service
from wherry.core.units import short
from wherry.errors import HostileError, MismatchError, NotFoundError, UsageError
from wherry.ledger.record import open_ledger, record_sighting
from wherry.ledger.resolve import checkpoint_uri, is_model_uri
from wherry.prove.audit import audit
from wherry.prove.verify import comparison, verify, verify_and_record
from wherry.store.addresses import ELSEWHERE
from wherry.store.local_store import locate
from wherry.store.sidecar import read_sidecar
from wherry.trace.lineage import show
from wherry.trace.stale import stale

pytestmark = pytest.mark.usefixtures("own_home")

pytest.importorskip("mlflow")


@pytest.fixture
def stores():
    return {"tracking_uri": mlflow_tracking_uri(), "registry_uri": mlflow_tracking_uri()}


@pytest.fixture
def name(request):
    return re.sub(r"\W+", "-", request.node.name)


@pytest.fixture
def receipt(tmp_path, name):
    receipt = converted(tmp_path)
    wherry.register(receipt, name, alias="champion", tags={"team": "speech"})
    return receipt


def forms(receipt, name):
    return [
        f"models:/{name}@champion",
        f"models:/{name}/1",
        f"models:/{name}",
        f"models:/{name}/latest",
        digest_uri(receipt.target.checkpoint_digest),
    ]


def test_every_form_gives_the_place(receipt, name):
    for form in forms(receipt, name):
        found = wherry.resolve(form)
        assert found.uri == receipt.target.uri
        assert found.checkpoint_digest == receipt.target.checkpoint_digest
        assert found.weights_digest == receipt.target.weights_digest
    by_alias = wherry.resolve(f"models:/{name}@champion")
    assert (by_alias.name, by_alias.version, by_alias.alias) == (name, "1", "champion")
    assert by_alias.tags["team"] == "speech"


def test_a_name_alone_is_its_newest_version(receipt, name, tmp_path):
    newer = wherry.convert(receipt.source.uri, tmp_path / "newer.npz", to="npz")
    wherry.register(newer, name)
    assert [wherry.resolve(f"models:/{name}{end}").version for end in ("", "/latest", "@champion")] == [
        "2",
        "2",
        "1",
    ]


def test_every_verb_takes_them(receipt, name, tmp_path):
    for form in forms(receipt, name):
        assert wherry.detect(form).uri == receipt.target.uri
        assert len(wherry.inspect(form).manifest.tensors) == 2
        assert wherry.verify(form, level="digest").ok
        with wherry.open(form) as checkpoint:
            assert checkpoint.read("b").tolist() == [1] * 5
    form = f"models:/{name}@champion"
    assert wherry.verify(receipt.source.uri, level="present", against=form).ok
    made = wherry.convert(form, tmp_path / "orbax", to="orbax")
    assert made.source.uri == receipt.target.uri
    assert made.source.checkpoint_digest == receipt.target.checkpoint_digest
    assert show(form).root == receipt.target.checkpoint_digest
    assert wherry.register(form, f"{name}-again").checkpoint_digest == receipt.target.checkpoint_digest
    for words in (["detect", form], ["inspect", form], ["verify", form], ["lineage", "show", form]):
        done = CliRunner().invoke(cli, [*words, "--json"])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)


@pytest.mark.parametrize("write", ["models:/m@c", "wherry://sha256/" + "0" * 64])
def test_they_are_no_place_to_write(receipt, tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="is a model URI; expected a path"):
        wherry.convert(receipt.source.uri, write, to="orbax")
    assert not (tmp_path / "models:").exists()


@pytest.mark.parametrize(
    ("uri", "error"),
    [
        ("models:/nobody@champion", NotFoundError),
        ("models:/NAME@nothing", NotFoundError),
        ("models:/NAME/99", NotFoundError),
        ("models:/NAME/newest", UsageError),
        ("models:/NAME@", UsageError),
        ("models:/nobody", NotFoundError),
        ("wherry://sha256/abc", UsageError),
        ("wherry://sha256/" + "0" * 64, NotFoundError),
    ],
)
def test_what_means_nothing_is_an_error(own_home, tmp_path, uri, error):
    if not hasattr(test_what_means_nothing_is_an_error, "registered"):
        wherry.register(converted(tmp_path), "known")
        test_what_means_nothing_is_an_error.registered = True
    text = uri.replace("NAME", "known")
    assert is_model_uri(text)
    with pytest.raises(error) as failure:
        wherry.resolve(text)
    assert failure.value.cure
    with pytest.raises(error):
        wherry.detect(text)


def test_bytes_that_were_moved_are_found_through_the_ledger(receipt, name, tmp_path):
    place = moved(Path(receipt.target.uri), tmp_path / "archive")
    with pytest.raises(NotFoundError, match="not found at any known location"):
        wherry.resolve(f"models:/{name}@champion")
    seen = read_sidecar(locate(place)).checkpoint
    with open_ledger() as ledger:
        record_sighting(
            ledger, type(seen)(**{**{f: getattr(seen, f) for f in seen.__slots__}, "uri": str(place)})
        )
    for form in forms(receipt, name):
        assert wherry.resolve(form).uri == str(place)


def test_another_checkpoint_at_the_place_is_never_given(receipt, name, tmp_path):
    moved(Path(receipt.target.uri), tmp_path / "gone")
    other = converted(tmp_path / "other")
    moved(Path(other.target.uri), Path(receipt.target.uri))
    with pytest.raises(MismatchError, match="is not the registered"):
        wherry.resolve(f"models:/{name}@champion")


def test_damage_is_a_verdict_of_the_verbs_not_of_the_name(receipt, name):
    flip_a_bit(Path(receipt.target.uri))
    assert wherry.resolve(f"models:/{name}@champion").uri == receipt.target.uri
    outcome = wherry.verify(f"models:/{name}@champion", level="digest")
    assert outcome.verdict == "altered"


def test_a_tag_that_leads_to_this_machine_is_passed_over_without_a_request(receipt, name, stores):
    """Who may write tags of a registry must not choose what a worker asks."""
    import mlflow as upstream

    client = upstream.MlflowClient(**stores)
    with noting_server() as (port, paths):
        for host in ("127.0.0.1", "localhost", "0x7f.1"):
            client.set_model_version_tag(name, "1", "wherry.uri", f"http://{host}:{port}/admin")
            assert (
                wherry.resolve(f"models:/{name}@champion").uri == receipt.target.uri
            )  # a place of the ledger
    assert paths == []


def test_a_digest_is_found_by_the_registry_alone(receipt, name, monkeypatch, tmp_path):
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path / 'empty.db'}")
    found = wherry.resolve(digest_uri(receipt.target.checkpoint_digest))
    assert found.uri == receipt.target.uri


def test_what_was_deleted_says_so_and_an_alias_protects(receipt, name, stores):
    mlflow = service("mlflow")
    with pytest.raises(UsageError, match="has the alias champion"):
        mlflow.mark_deleted(name, "1", by="prune", reason="keep_last", **stores)
    with pytest.raises(UsageError, match="has the alias champion"):
        mlflow.unregister(name, "1", **stores)
    rows = [row for row in mlflow.registered_versions(**stores) if row.name == name]
    assert [(row.version, row.aliases) for row in rows] == [("1", ("champion",))]
    assert rows[0].tags["wherry.checkpoint_digest"] == receipt.target.checkpoint_digest
    import mlflow as upstream

    upstream.MlflowClient(**stores).delete_registered_model_alias(name, "champion")
    mlflow.mark_deleted(name, "1", by="prune", reason="keep_last", **stores)
    with pytest.raises(NotFoundError, match=r"the checkpoint was deleted: .* by prune: keep_last"):
        wherry.resolve(f"models:/{name}/1")
    mlflow.unregister(name, "1", **stores)
    assert [row for row in mlflow.registered_versions(**stores) if row.name == name] == []


def test_what_was_deleted_and_is_registered_again_is_found_again(tmp_path, name, stores):
    made = converted(tmp_path)
    wherry.register(made, name)
    service("mlflow").mark_deleted(name, "1", by="prune", reason="keep_last", **stores)
    back = moved(Path(made.target.uri), tmp_path / "restored")
    assert wherry.register(back, name).version == "1"
    assert wherry.resolve(f"models:/{name}/1").uri == str(back)


def test_a_version_without_its_place_is_no_crash(receipt, name, stores):
    import mlflow

    client = mlflow.MlflowClient(**stores)
    client.delete_model_version_tag(name, "1", "wherry.uri")
    assert wherry.resolve(f"models:/{name}@champion").uri == receipt.target.uri, "the ledger knows it"


def test_a_live_state_is_restored_through_a_model_uri(receipt, name, tmp_path):
    import numpy as np
    from safetensors.numpy import load_file

    wanted = load_file(next(Path(receipt.target.uri).glob("*.safetensors")))
    template = {key: np.zeros_like(value) for key, value in wanted.items()}
    for uri in (f"models:/{name}@champion", f"models:/{name}/1"):
        found = wherry.restore(uri, into=template)
        assert found.missing == found.unexpected == ()
        assert all(np.array_equal(found.state[key], value) for key, value in wanted.items())
    moved(Path(receipt.target.uri), tmp_path / "away")
    with pytest.raises(NotFoundError, match="not found at any known location"):
        wherry.restore(f"models:/{name}@champion", into=template)


def test_the_beginning_of_a_digest_names_a_checkpoint_for_every_verb(receipt):
    whole = receipt.target.checkpoint_digest
    for text in (whole.rpartition(":")[2][:12], whole[:20], whole):
        with wherry.open(text) as checkpoint:
            assert checkpoint.uri == receipt.target.uri
        assert wherry.verify(text).uri == receipt.target.uri


def test_a_digest_names_a_source_without_a_sidecar_as_long_as_it_is_the_same(tmp_path):
    receipt = converted(tmp_path, to="dcp")
    source = Path(receipt.source.uri)
    text = receipt.source.checkpoint_digest[:20]
    assert wherry.detect(text).uri == str(source)
    (source / "config.json").write_text(json.dumps({"model_type": "other"}))
    with pytest.raises(NotFoundError, match="not found at any known location"):
        wherry.detect(text)


def test_a_digest_does_not_name_what_replaced_its_checkpoint(tmp_path):
    receipt, other = converted(tmp_path, to="dcp"), converted(tmp_path / "other", to="dcp")
    moved(Path(receipt.target.uri), tmp_path / "away")
    moved(Path(other.target.uri), Path(receipt.target.uri))
    with pytest.raises(NotFoundError, match="not found at any known location"):
        wherry.open(receipt.target.checkpoint_digest)


def test_a_file_comes_before_a_digest_of_its_name_and_an_unknown_digest_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(converted(tmp_path).target.uri) / "model.safetensors", "0123abcd")
    assert wherry.detect("0123abcd").uri == str(tmp_path / "0123abcd")
    with pytest.raises(NotFoundError, match="no checkpoint with this digest in the ledger"):
        wherry.detect("sha256:0123abcdef")
    with pytest.raises(NotFoundError, match="file or folder not found"):
        wherry.detect("0123abcdef")


def test_the_cure_for_an_unknown_name_or_version_is_what_exists(receipt, name, stores):
    for service_name in ("mlflow-sqlite", "mlflow"):
        one = {"registry_uri": stores["registry_uri"]} if service_name == "mlflow-sqlite" else stores
        with pytest.raises(NotFoundError) as caught:
            service(service_name).look_up(f"{name}x", **one)
        assert f"did you mean {name}" in caught.value.cure
        with pytest.raises(NotFoundError) as caught:
            service(service_name).look_up(name, version="7", **one)
        assert caught.value.cure == "choose one of: 1"


# The beginning of a digest names a checkpoint in every command, as README says.


pytest.importorskip("mlflow")

# What is typed → a part of what it prints. DIGEST is the beginning of a digest, PLACE where the checkpoint is, SHORT
# how its digest is shown.
VERBS = {
    "detect DIGEST": "PLACE",
    "inspect DIGEST": "PLACE",
    "verify DIGEST": "ok",
    "resolve DIGEST": "PLACE",
    "ls DIGEST": "DIGITS",
    "du DIGEST": "1",
    "audit DIGEST": "1 of them ok",
    "emit DIGEST --json": "PLACE",
    "lineage show DIGEST": "SHORT",
    "lineage why DIGEST": "SHORT",
    "plan DIGEST new.npz --to npz": "npz",
    "convert DIGEST new.npz --to npz": "npz",
    "split DIGEST new --to dcp": "new",
    "merge DIGEST*0.5 DIGEST*0.5 new.safetensors --to safetensors": "new",
    "fetch DIGEST new": "new",
    "diff DIGEST DIGEST": "",
    "sign DIGEST --key key.pem": "",
    "register DIGEST --model by-digest": "by-digest",
    "promote DIGEST --model by-digest": "by-digest",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    return tmp_path


def typed(line):
    """Exit code of a command, and what it printed."""
    done = CliRunner().invoke(Command("run", callback=lambda: main(line.split())), [])
    return done.exit_code, done.output


@pytest.mark.parametrize("line", VERBS)
def test_the_beginning_of_a_digest_names_a_checkpoint(line, here, monkeypatch):
    save_file({"a": np.arange(12, dtype=np.float32)}, "one.safetensors")
    receipt = wherry.convert("one.safetensors", "made", to="orbax")
    monkeypatch.setattr("wherry.core.emit.post", lambda *_given, **_how: None)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    if line.startswith("sign"):
        key_pair(here)
    digest = receipt.target.checkpoint_digest.partition(":")[2][:12]
    code, text = typed(line.replace("DIGEST", digest))
    wanted = VERBS[line].replace("PLACE", receipt.target.uri)
    shown = short(receipt.target.checkpoint_digest)
    wanted = wanted.replace("SHORT", shown).replace("DIGITS", shown.partition(":")[2])
    assert (code, wanted in text.replace("\n", "")) == (0, True), text


def test_a_digest_that_nobody_knows_is_a_name_like_any_other(here):
    small(here / "one.safetensors")
    assert [typed(f"{verb} 0123456789ab")[0] for verb in ("resolve", "audit", "detect")] == [3, 3, 3]
    wherry.convert("one.safetensors", "0123456789ab", to="safetensors", lineage=False)
    assert typed("detect 0123456789ab")[0] == 0


# A place that only the registry, the ledger or a parameter states is opened below a root of the routes,
# or refused.


CONFIG = """
[routes.r]
root = "{root}/runs"

[[routes.r.targets]]
format = "torch-zip"
uri = "{root}/out/{{run}}.pt"
"""


@pytest.fixture
def receipt_of_places(tmp_path):
    return converted(tmp_path / "elsewhere")


@pytest.fixture
def routed(tmp_path, monkeypatch, receipt_of_places):
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


def test_a_place_in_the_ledger_that_no_route_has_is_not_opened(receipt_of_places, routed, opened):
    for form in (
        digest_uri(receipt_of_places.target.checkpoint_digest),
        receipt_of_places.target.checkpoint_digest,
    ):
        for verb in (checkpoint_uri, wherry.open, wherry.detect):
            with pytest.raises(HostileError, match="no route reads or writes") as caught:
                verb(form)
        assert wherry.verify(form).verdict == "malicious"
    assert not [path for path in opened if path.startswith(receipt_of_places.target.uri)]
    folder = Path(receipt_of_places.target.uri).parent
    assert f'links = ["{folder}"]' in (caught.value.cure or "")


def test_the_cure_lets_the_place_be_opened(receipt_of_places, routed, tmp_path, monkeypatch):
    folder = Path(receipt_of_places.target.uri).parent
    file = tmp_path / "wherry.toml"
    file.write_text(f'links = ["{folder}"]\n{file.read_text()}')
    assert (
        wherry.resolve(digest_uri(receipt_of_places.target.checkpoint_digest)).uri
        == receipt_of_places.target.uri
    )


def test_a_place_below_a_target_is_opened_and_must_not_become_a_link_out_of_it(
    tmp_path, receipt_of_places, routed
):
    inside = tmp_path / "out" / "model"
    inside.parent.mkdir()
    wherry.fetch(receipt_of_places.target.uri, inside)
    shutil.rmtree(receipt_of_places.target.uri)
    form = digest_uri(receipt_of_places.target.checkpoint_digest)
    assert wherry.resolve(form).uri == str(inside)
    wherry.open(form).close()
    inside.rename(tmp_path / "elsewhere" / "moved")
    inside.symlink_to(tmp_path / "elsewhere" / "moved")
    with pytest.raises(HostileError, match=r"symbolic link points outside|no route reads or writes"):
        wherry.resolve(form)


def test_an_audit_reads_no_place_that_no_route_has(receipt_of_places, routed, opened):
    report = audit("all", record=False)
    assert "outside-routes" in {finding.kind for finding in report.findings}
    assert not [path for path in opened if path.startswith(receipt_of_places.target.uri)]
    named = audit([str(Path(receipt_of_places.target.uri).parent)], record=False)
    assert "outside-routes" not in {finding.kind for finding in named.findings}, "the user names this root"


def test_stale_reads_no_source_that_no_route_has(receipt_of_places, routed, opened, caplog):
    assert stale() == []
    assert "not judged: their sources" in caplog.text
    assert not [path for path in opened if path.startswith(receipt_of_places.source.uri)]


@pytest.mark.parametrize("stated", ["a place elsewhere", "a server of this machine"])
def test_logits_open_no_source_that_a_sidecar_names_elsewhere(
    receipt_of_places, routed, opened, stated, monkeypatch
):
    """Whoever may write a checkpoint writes its receipt too."""
    monkeypatch.setattr("wherry.prove.native._require", lambda *_: None)
    source = (
        receipt_of_places.source.uri if stated == "a place elsewhere" else "http://127.0.0.1:9/m.safetensors"
    )
    sidecar = Path(receipt_of_places.target.uri) / "wherry.json"
    document = json.loads(sidecar.read_text())
    document["receipt"]["source"]["uri"] = source
    sidecar.write_text(json.dumps(document))
    with noting_server() as (port, seen):
        sidecar.write_text(sidecar.read_text().replace("127.0.0.1:9", f"127.0.0.1:{port}"))
        assert wherry.verify(receipt_of_places.target.uri, level="logits").verdict == "malicious"
        assert seen == []
    assert not [path for path in opened if path.startswith(receipt_of_places.source.uri)]


def test_the_source_of_a_comparison_does_not_leave_its_root(receipt_of_places, tmp_path):
    root = tmp_path / "sources"
    root.mkdir()
    (root / "run").symlink_to(receipt_of_places.source.uri)
    source = SourceRequest(receipt_of_places.target.uri)
    for level in ("digest", "roundtrip"):
        assert verify(source, level=level, against=root / "run").ok, "a person may name a link"
        found = verify(source, level=level, against=SourceRequest(str(root / "run"), below=str(root)))
        assert found.verdict == "malicious"
    how = comparison("roundtrip", str(root / "run"), str(root), None)
    with pytest.raises(MismatchError, match="link points outside"):
        verify_and_record(receipt_of_places.target.uri, **how)


def test_dots_do_not_lead_out_of_a_root(routed, tmp_path):
    assert root_of(tmp_path / "runs" / "a") == f"{tmp_path}/runs"
    assert root_of(tmp_path / "out" / "a") == f"{tmp_path}/out/"
    for text in (f"{tmp_path}/runs/../elsewhere", f"{tmp_path}/runsx", f"{tmp_path}", "http://127.0.0.1/a"):
        with pytest.raises(HostileError, match="no route reads or writes"):
            root_of(text)


def test_without_routes_there_are_no_roots(receipt_of_places, opened):
    wherry.open(receipt_of_places.target.uri).close()
    assert [path for path in opened if path.startswith(receipt_of_places.target.uri)], (
        "and the fixture sees it"
    )
    assert root_of("/anywhere") is None
    assert (
        wherry.resolve(digest_uri(receipt_of_places.target.checkpoint_digest)).uri
        == receipt_of_places.target.uri
    )


def test_a_tag_of_the_registry_sends_no_request(receipt_of_places, routed, request, tmp_path, monkeypatch):
    """Whoever writes tags names a server of the network in which wherry runs."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setattr(
        "wherry.store.addresses.kind_of_host", lambda _host: ELSEWHERE
    )  # only the roots refuse it
    name = re.sub(r"\W+", "-", request.node.name)
    wherry.register(receipt_of_places.target.uri, name, alias="candidate")
    client = mlflow.MlflowClient(mlflow_tracking_uri(), mlflow_tracking_uri())
    shutil.rmtree(receipt_of_places.target.uri)
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
