"""What the durability tests share: watched runs, the moments of a run, and an operating system that forgets a sync."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.ledger import watched_queries
from wherry.formats.registry import find_format
from wherry.store.local_store import locate
from wherry.testing import faults, samples, writers
from wherry.testing.durability import Disk

SHAPE = (3, 100_003)  # whole blocks, which go past the page cache, and a part of one


def is_journal(path) -> bool:
    return "journal" in path.name


def at_journal_or_commit(call, path) -> bool:
    return call == "commit" or is_journal(path)


@contextmanager
def watched(root, *targets, keeps=None):
    """A watched folder; a statement of the ledger reports success, as the end of the block does."""
    root.mkdir(exist_ok=True)
    with Disk(root, targets, keeps) as disk, faults.small_steps():

        def executed(statement, _values):
            if statement.startswith("INSERT INTO statement"):
                disk.reported("a statement of the ledger")

        with watched_queries(executed):
            yield disk


def make_source(name, folder):
    """A small checkpoint of a format, as `samples.source` has it."""
    writers.make(samples.source(find_format(name), largest=SHAPE), locate(folder))
    return folder


@contextmanager
def forgetting(chosen):
    """An operating system that does not sync what `chosen(path)` is true of, and says that it did.

    Yields:
        The paths whose syncs were forgotten.
    """
    forgotten = []

    def forgetful(function):
        def sync(file):
            path = Path(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}").readlink()
            if chosen(path):
                forgotten.append(path)
            else:
                function(file)

        return sync

    with ExitStack() as stack:
        for name in ("fsync", "fdatasync"):
            stack.enter_context(faults.replace_value(f"os:{name}", forgetful(getattr(os, name))))
        yield forgotten
