"""What a run says that it waits for: at once, and each wait once."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wherry.store import waits

if TYPE_CHECKING:
    import pytest


@contextmanager
def waits_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> Generator[list[str]]:
    """What is waited for while the block runs, without the seconds; slow answers of stores depend on load."""
    lines: list[str] = []
    monkeypatch.setattr(waits, "_watch", waits._Watch())  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(waits, "NOTICE_SECONDS", 0.05)
    monkeypatch.setattr(waits, "_LOOK_SECONDS", 0.01)

    def keep(line: str) -> None:
        waited, _, seconds = line.rpartition(", ")
        if seconds.endswith(" so far"):
            lines.append(waited)

    with waits.reporting_waits_to(keep):
        yield lines
