"""Nothing waits in silence: what sleeps or waits stands in a `waiting` block, or says here why it need not."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.house import MODULES, label

# Method names that stop a thread until something happens.
STOPS = ("sleep", "wait", "wait_for")
# File and function → why nobody is left without a word.
ALLOWED = {
    # in parallel with the work: threads that run again and again
    ("wherry/remote/waits.py", "_has_waits_after_pause"): "it is what tells",
    ("wherry/target/lease.py", "_beat"): "renews a lease, in a thread of its own",
    ("wherry/target/lease.py", "_release_later"): "releases a lease, in a thread of its own",
    ("wherry/workers/records.py", "beat"): "renews a claim, in a thread of its own",
    # work goes on meanwhile, and its progress is shown
    ("wherry/workers/coordinator.py", "_collect_results"): "units are made meanwhile",
    ("wherry/workers/engines.py", "_carry_with_processes"): "units are made meanwhile",
    ("wherry/workers/engines.py", "_call"): "a unit is read meanwhile",
    ("wherry/mover/pool.py", "reserved"): "other ranges are moved meanwhile",
    ("wherry/mover/decode.py", "complete"): "ranges are written meanwhile",
    ("wherry/target/parts.py", "_reserve"): "parts are sent meanwhile",
    ("wherry/target/parts.py", "drain"): "parts are sent meanwhile",
    ("wherry/target/parts.py", "loaded"): "another part is completed and sent meanwhile",
    ("wherry/live/restore.py", "room"): "other tensors are read meanwhile",
    ("flows/nightly.py", "result"): "the task is shown by Prefect, with its progress",
    # the caller tells
    ("wherry/store/remote_store.py", "in_thread"): "a call of a store, which retries and probes watch",
    ("wherry/ledger/database.py", "_begin_wal"): "called where a connection is waited for",
    (
        "wherry/live/shares.py",
        "_until",
    ): "each caller is in a block, or looks for signs of life once a second",
    ("wherry/live/store.py", "save"): "Export.wait tells",
    ("wherry/live/store.py", "wait"): "Export.wait tells",
    ("wherry/live/handle.py", "result"): "Export.wait tells",
    ("wherry/core/forks.py", "without_forks"): "two seconds at most, until a fork is done",
    ("wherry/core/background.py", "_wait"): "it logs what it waits for before the process exits",
    ("wherry/store/azure.py", "_await_copy"): "the copy is waited for in a block",
    ("integrations/mlflow/aliases.py", "_take"): "the lock is waited for in a block",
    ("integrations/mlflow/aliases.py", "_take_mark"): "the lock is waited for in a block",
    # it says itself what it waits for
    ("wherry/target/lease_watch.py", "judge_all"): "warns with the time that it takes at most",
    ("wherry/runtime/child.py", "run"): "a check works, whose limit is stated",
    ("wherry/runtime/child.py", "wait"): "a check works, whose limit is stated",
    # two seconds at most
    ("wherry/core/forks.py", "_before_fork"): "transactions of other threads are waited for",
    ("wherry/target/lease.py", "_lock"): "held for a moment",
    ("wherry/runtime/child.py", "result"): "the time that a process gets to end",
    ("wherry/workers/work.py", "_note_failure"): "one pause",
    ("integrations/mlflow/client.py", "colliding"): "pauses of parts of a second, a few times",
}


def stopping(tree: ast.AST, function: str = "", watched: bool = False) -> Iterator[tuple[str, bool]]:
    """Function and whether it stands in a `waiting` block, of each call that stops a thread."""
    for node in ast.iter_child_nodes(tree):
        inside, announced = function, watched
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside, announced = node.name, False
        if isinstance(node, ast.With | ast.AsyncWith):
            announced = watched or any(_name(item.context_expr) == "waiting" for item in node.items)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STOPS:
            yield inside, announced
        yield from stopping(node, inside, announced)


def _name(node: ast.expr) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _unwatched() -> set[tuple[str, str]]:
    return {
        (label(path), function)
        for path in MODULES
        if not label(path).startswith("wherry/testing/")
        for function, announced in stopping(ast.parse(path.read_text()))
        if not announced
    }


def test_nothing_waits_in_silence():
    assert _unwatched() - set(ALLOWED) == set(), "put it into `with waiting(where, what=...)`"


def test_nothing_is_allowed_that_does_not_wait():
    assert set(ALLOWED) - _unwatched() == set()


def test_a_sleep_outside_of_a_block_is_seen():
    source = """
def silent():
    with waiting("a"):
        def later():
            done.wait()
    time.sleep(1)
def announced():
    with opened(), waiting("a"):
        while True:
            time.sleep(1)
"""
    assert list(stopping(ast.parse(source))) == [("later", False), ("silent", False), ("announced", True)]
