"""A registry that was lost is made again from the ledger, and one that is whole is left as it is."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.config.settings import mlflow_registry_uri
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


def test_what_another_registry_was_told_is_left_alone(tmp_path):
    wherry.register(made(tmp_path, 4), "other", registry_uri=f"sqlite:///{tmp_path}/other.db")
    assert deliver.deliver("mlflow", again=True)[0].events == 0
    assert not client().search_registered_models("name = 'other'")
