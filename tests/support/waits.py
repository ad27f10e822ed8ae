"""What a run says that it waits for: at once, and each wait once."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from wherry.remote import waits

if TYPE_CHECKING:
    from collections.abc import Generator

    import pytest


@contextmanager
def told_at_once(monkeypatch: pytest.MonkeyPatch) -> Generator[list[str]]:
    """The lines that are told while the block runs, without the seconds."""
    lines: list[str] = []
    monkeypatch.setattr(waits, "_watch", waits._Watch())  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(waits, "NOTICE_SECONDS", 0.05)
    monkeypatch.setattr(waits, "_LOOK_SECONDS", 0.01)
    with waits.told_to(lambda line: lines.append(line.rpartition(", ")[0])):
        yield lines
