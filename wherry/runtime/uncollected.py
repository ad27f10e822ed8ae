"""No garbage collection while a large acyclic tree grows: walking it again and again takes a third of the time."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def uncollected() -> Generator[None]:
    """Leave the collector off while the block runs, if it was on."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
