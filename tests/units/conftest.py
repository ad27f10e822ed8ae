"""A small model, its conversions, and jobs of them on a file system and in a store of objects."""

from __future__ import annotations

import pytest

from tests.support.large_files import saved
from tests.support.unit_fixtures import small, source  # noqa: F401  fixtures


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
