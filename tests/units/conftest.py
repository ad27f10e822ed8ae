"""A small model, its conversions, and jobs of them on a file system and in a store of objects."""

from __future__ import annotations

import pytest

from tests.support.object_stores import model, small_parts
from wherry.units import work as working


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A Hugging Face folder of 1.2 MB in 12 tensors."""
    return model(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(autouse=True)
def small():
    """Parts of a few KiB, and workers that look often."""
    with small_parts(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(working, "LOOK_SECONDS", 0.05)
        yield


@pytest.fixture(params=["files", "objects"])
def target(request, tmp_path):
    """A target that does not exist."""
    return str(tmp_path / "out") if request.param == "files" else f"memory://bucket{tmp_path}/out"
