"""Threads that wait for memory, each begun when the one before it has requested some: that fixes their order."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest

from wherry.core.threads import Turns


@pytest.fixture
def asking(monkeypatch):
    """A function that starts a thread, and returns it once it has requested memory."""
    events, real = {}, Turns.turn

    @contextmanager
    def turn(turns):
        with real(turns) as has_turn:
            if (requested := events.get(threading.current_thread())) is not None:
                requested.set()
            yield has_turn

    def start(act, *args):
        thread = threading.Thread(target=act, args=args, daemon=True)
        events[thread] = threading.Event()
        thread.start()
        assert events[thread].wait(120), "it has not requested memory"
        return thread

    monkeypatch.setattr(Turns, "turn", turn)
    return start
