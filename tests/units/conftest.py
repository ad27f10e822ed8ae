"""A small model, its conversions, and jobs of them on a file system and in a store of objects."""

from __future__ import annotations

import pytest

from tests.support.unit_fixtures import small, source  # noqa: F401  fixtures


@pytest.fixture(params=["files", "objects"])
def target(request, tmp_path):
    """A target that does not exist."""
    return str(tmp_path / "out") if request.param == "files" else f"memory://bucket{tmp_path}/out"
