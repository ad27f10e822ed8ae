"""What the tests of units and of carriers share: a small model, and parts of a few KiB."""

from __future__ import annotations

import pytest

from tests.support.object_stores import model, small_parts
from wherry.workers import work as working


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
