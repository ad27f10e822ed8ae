"""An output records a move only once its bytes are durable and every leaf that it touches has its digest."""

from __future__ import annotations

import hashlib

import pytest

from wherry.core.algorithms import SHA256
from wherry.core.digest import LEAF
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import StorageError
from wherry.mover.checksums import LeafTable
from wherry.mover.move import Move
from wherry.mover.output import Output
from wherry.target.journal import open_journal

HEADER = {"plan": "p"}
SPEC = TensorSpec(("w",), (LEAF + LEAF // 2,), "uint8")
CUT = LEAF // 4  # inside the first leaf


class Storage:
    """A writer that keeps nothing but the order of calls."""

    def __init__(self):
        self.calls = []
        self.error = None

    def place(self, path, where):
        return 0

    def write(self, path, where, data):
        self.calls.append("write")

    def is_durable_by_sync(self):
        return True

    def sync(self):
        if self.error is not None:
            raise self.error
        self.calls.append("sync")


@pytest.fixture
def storage():
    return Storage()


@pytest.fixture
def journal(tmp_path):
    opened = open_journal(tmp_path / "journal", HEADER)
    yield opened
    opened.close()


def deliver(output, leaves, start, stop):
    move = Move(SPEC.path, Span(start, stop), None)
    leaves.hasher(SPEC.path).update(start, memoryview(bytes(stop - start)))
    output.deliver(move, memoryview(bytes(stop - start)))
    output.delivered([move], leaves)


def recorded(tmp_path):
    again = open_journal(tmp_path / "journal", HEADER)
    again.close()
    return {row.span: dict(row.leaves) for row in again.done}


def test_a_move_waits_for_the_digests_of_all_its_leaves(tmp_path, storage, journal):
    output, leaves = Output(storage, {SPEC.path: SPEC}, journal), LeafTable({SPEC.path: SPEC}, (SHA256,))
    deliver(output, leaves, 0, CUT)
    output.settle(leaves)
    assert recorded(tmp_path) == {}, "the first leaf is not hashed to its end"
    deliver(output, leaves, LEAF, SPEC.nbytes)
    output.settle(leaves)
    last = hashlib.sha256(bytes(LEAF // 2)).digest()
    assert recorded(tmp_path) == {(LEAF, SPEC.nbytes): {1: last}}
    deliver(output, leaves, CUT, LEAF)
    output.settle(leaves)
    first = hashlib.sha256(bytes(LEAF)).digest()
    assert recorded(tmp_path) == {
        (0, CUT): {0: first}, (CUT, LEAF): {0: first}, (LEAF, SPEC.nbytes): {1: last}
    }  # fmt: skip


def test_what_could_not_be_synced_is_never_recorded(tmp_path, storage, journal):
    output, leaves = Output(storage, {SPEC.path: SPEC}, journal), LeafTable({SPEC.path: SPEC}, (SHA256,))
    deliver(output, leaves, 0, LEAF)
    storage.error = StorageError("the disk failed", retryable=True)
    output.settle(leaves)
    assert output.error is storage.error
    storage.error = None
    output.settle(leaves)
    assert recorded(tmp_path) == {}, "a later sync says nothing of what an earlier one lost"
    assert not output.wants(Move(SPEC.path, Span(LEAF, SPEC.nbytes), None))
