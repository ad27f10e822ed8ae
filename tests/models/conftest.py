"""Fixtures of the tests of a model registry: a model's name, a client, and what is registered."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.registry import converted
from wherry.config.settings import mlflow_tracking_uri


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The name of a model that no other test of the module has."""
    return re.sub(r"\W+", "-", request.node.name)


@pytest.fixture
def client(own_home):
    """A client of the registry that wherry finds by itself."""
    import mlflow

    return mlflow.MlflowClient(tracking_uri=mlflow_tracking_uri(), registry_uri=mlflow_tracking_uri())


@pytest.fixture
def receipt(tmp_path: Path) -> wherry.Receipt:
    """A converted checkpoint with contents of its own."""
    tensors = {"a": np.random.default_rng().normal(size=(3, 4)), "b": np.ones(5, np.int32)}
    save_file(tensors, tmp_path / "source.safetensors")
    return wherry.convert(tmp_path / "source.safetensors", tmp_path / "orbax", to="orbax")


@pytest.fixture
def candidate(tmp_path: Path, name: str) -> wherry.Receipt:
    """A registered candidate."""
    receipt = converted(tmp_path / "one")
    wherry.register(receipt, name, alias="candidate", tags={"team": "speech"})
    return receipt
