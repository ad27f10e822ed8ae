"""What tests of flows ask of Prefect's global limits."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def occupied(name: str = "wherry-io-file") -> tuple[int, int]:
    """Slots of a limit that are taken now, and how many there are."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        limit = client.read_global_concurrency_limit_by_name(name)
        return limit.active_slots, limit.limit


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """A list that gets what is occupied when a conversion begins, of each that a flow carries out from now on."""
    seen: list[tuple[int, int]] = []
    module = import_module("wherry.flows.convert")
    convert = module.convert

    def noting(*args: Any, **how: Any) -> Any:
        seen.append(occupied())
        return convert(*args, **how)

    monkeypatch.setattr(module, "convert", noting)
    return seen
