"""Model URIs: what they mean, what they never give, and that every verb takes them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import wherry
from tests.support.noting_server import noting_server
from tests.support.registry import converted, flip_a_bit, moved
from wherry.cli import cli
from wherry.config.settings import mlflow_tracking_uri
from wherry.core.algorithms import digest_uri
from wherry.core.services import service
from wherry.errors import MismatchError, NotFoundError, UsageError
from wherry.ledger.record import open_ledger, record_sighting
from wherry.ledger.resolve import is_model_uri
from wherry.lineage.lineage import show
from wherry.storage.sidecar import read_sidecar
from wherry.storage.stores import locate

pytest.importorskip("mlflow")

pytestmark = pytest.mark.usefixtures("own_home")


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
