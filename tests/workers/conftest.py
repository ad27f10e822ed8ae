"""A small model, its conversions, jobs of them on a file system and in a store, and coordinators that look often."""

from __future__ import annotations

import pytest

from tests.support.large_files import saved
from tests.support.unit_fixtures import small, source  # noqa: F401  fixtures
from wherry.workers import coordinator, engines


@pytest.fixture(params=["files", "objects"])
def target(request, tmp_path):
    """A target that does not exist."""
    return str(tmp_path / "out") if request.param == "files" else f"memory://bucket{tmp_path}/out"


@pytest.fixture(scope="session")
def large_model(tmp_path_factory):
    """A safetensors file of 20 MB, and its arrays."""
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    return path, saved(path)


@pytest.fixture
def model(large_model):
    """The file of the large model."""
    return large_model[0]


@pytest.fixture
def arrays(large_model):
    """The arrays of the large model."""
    return large_model[1]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Coordinators look often."""
    monkeypatch.setattr(engines, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(coordinator, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(coordinator, "AGAIN_SECONDS", 0.05)
