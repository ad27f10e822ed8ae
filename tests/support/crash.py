"""What the tests of faults and of kills share: conversions in small steps, and what may be left of them.

Everything follows from the registry: a new format is tried like the others. The short version tries few moments, and
a third of those for formats that write through another one's container; the slow version nearly all of all formats.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import wherry
from wherry.errors import StorageError
from wherry.formats.registry import find_format, formats
from wherry.store.sidecar import sidecar_name
from wherry.target.clean import clean
from wherry.testing import faults
from wherry.testing.children import Order

WRITTEN = [name for name, row in formats().items() if row.is_written]
FAILING = [place for place in faults.PLACES if place.split(":")[1] not in ("unlink", "rmdir")]
RENAME = "wherry.target.staging:rename_without_replacing"


def own_container(name):
    """Whether no other written format has the container of this one, so that its moments are its own."""
    return not any(base in WRITTEN for base in find_format(name).refines)


def options_of(to):
    """Chunks of 1 MiB where a format has chunks: many in a small checkpoint."""
    return {"chunks": "1"} if "chunks" in find_format(to).options else {}


def convert(source, target, to=None):
    to = to or target.name.split(".")[0]
    with faults.small_steps():
        return wherry.convert(
            source, target, to=to, family="none", options=options_of(to), lineage=False
        ).to_json()


def failure_of(source, target):
    """The storage error that a conversion ends with, or None."""
    try:
        convert(source, target)
    except StorageError as error:
        return error
    return None


def order(source, target, to, **more):
    return Order(str(source), str(target), to, options_of(to), **more)


def complete(target: Path) -> set[str]:
    """What lies in the target's folder when all is done."""
    to = target.name.split(".")[0]
    return {target.name, sidecar_name(target.name)} if find_format(to).single_file else {target.name}


def assert_done(receipt, target, digest):
    """The target is what an undisturbed run makes, and nothing else is left."""
    assert receipt["target"]["checkpoint_digest"] == digest
    left = set(os.listdir(target.parent)) - complete(target)
    if receipt[
        "already"
    ]:  # killed after the commit: only the lease and the rest of the area can be there, and mean nothing
        hexes = "[0-9a-f]{8}"
        left_over = rf"\.wherry-{target.name}\.(lease|{hexes}\.draft|{hexes}-{hexes})"
        assert all(re.fullmatch(left_over, name) for name in left), left
        assert all(row.removed for row in clean(target.parent, min_age=0))
        left = set(os.listdir(target.parent)) - complete(target)
    assert not left


def assert_whole_or_absent(target):
    if target.exists():
        assert wherry.verify(target, level="digest").ok
    for name in os.listdir(target.parent):
        path = target.parent / name
        if path != target:
            assert name.startswith(".wherry-") or name == sidecar_name(target.name), name
            assert wherry.detect(path).verdict != "ok"
    assert [one.uri for one in wherry.discover(target.parent)] in ([], [str(target)])


def assert_left_after(failed, target):
    """After an error: no target, and resumable state where a retry can help, else nothing."""
    assert not target.exists(), "after the commit, a conversion ends with 0 or 12"
    if not failed.retryable:
        assert not target.parent.exists(), os.listdir(target.parent)
    elif target.parent.exists():
        left = os.listdir(target.parent)
        assert all(name.startswith(f".wherry-{target.name}.") for name in left), left
        assert not any(name.endswith(".lease") for name in left), left


def spread(total: int, most: int) -> list[int]:
    """Up to so many call numbers, first and last among them; of one, the middle."""
    if most == 1 or total < 2:
        return [(total + 1) // 2][:total]
    return sorted({1 + round(step * (total - 1) / (most - 1)) for step in range(most)})


def written(few, many):
    """Parametrize a test by `to` and `most`: few moments of each container, and, slow, many of each format."""
    cases = [pytest.param(name, few, id=f"few-{name}") for name in WRITTEN if own_container(name)]
    cases += [pytest.param(name, many, id=f"many-{name}", marks=pytest.mark.slow) for name in WRITTEN]
    return pytest.mark.parametrize(("to", "most"), cases)


each_written = pytest.mark.parametrize("to", WRITTEN)
