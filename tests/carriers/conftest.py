"""A small model, as the tests of units have it, and carriers that look often."""

from __future__ import annotations

import pytest

from tests.support.unit_fixtures import small, source  # noqa: F401  fixtures
from wherry.carriers import coordinator, processes, unit_queue


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(coordinator, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(unit_queue, "AGAIN_SECONDS", 0.05)
