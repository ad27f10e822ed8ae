"""A registry that was lost is made again from the ledger, and one that is whole is left as it is."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.config.settings import mlflow_registry_uri
from wherry.errors import NotFoundError
from wherry.ledger import deliver
from wherry.ledger.record import check_chain, open_ledger

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
