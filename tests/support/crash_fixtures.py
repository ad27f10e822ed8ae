"""Fixtures of the tests of faults and of kills, made once a module for each format that a test asks for."""

from __future__ import annotations

import pytest

from tests.support.crash import convert
from wherry.core import dtypes
from wherry.core.digest import LEAF
from wherry.formats.registry import find_format
from wherry.store.local_store import locate
from wherry.testing import samples, writers
from wherry.testing.children import Children


class Made(dict):
    """What a function makes of a format's name, kept."""

    def __init__(self, make):
        super().__init__()
        self._make = make

    def __missing__(self, name):
        return self.setdefault(name, self._make(name))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A checkpoint to convert by format, in that format: it has the names and companions that the format needs.

    Its largest tensor is a little more than a move of `small_steps`, which is a leaf.
    """
    folder = tmp_path_factory.mktemp("source")

    def make(name):
        row = find_format(name)
        plain = [one for one in row.holds.dtypes if not dtypes.opaque(one)]
        element = max(min(map(dtypes.bits, plain)) // 8, 1)
        largest = (9, LEAF // 9 // element + 30_001)
        writers.make(samples.source(row, largest=largest), locate(folder / name))
        return folder / name

    return Made(make)


@pytest.fixture
def source(request, sources):
    """The checkpoint to convert to the format `to` of a test, or to Hugging Face's where a test does not choose."""
    return sources[request.getfixturevalue("to") if "to" in request.fixturenames else "huggingface"]


@pytest.fixture(scope="module")
def key():
    """Children outlive the home of a test, and what one leaves the other takes up: one user, one key."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WHERRY_KEY", "the key of the tests of kills")
        yield


@pytest.fixture(scope="module")
def children(key):
    with Children() as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(sources, tmp_path_factory):
    """Checkpoint digest of a conversion that nothing disturbs, by format."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return Made(lambda to: convert(sources[to], folder / to)["target"]["checkpoint_digest"])
