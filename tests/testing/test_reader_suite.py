"""The suite that plug-ins run against their readers finds a reader that lies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from wherry.formats.detect import resolve
from wherry.formats.format import Absent
from wherry.formats.registry import find_format
from wherry.testing.readers import check_reader


class Lying:
    """A reader that is another one, up to some answers."""

    def __init__(self, reader, **answers):
        self._reader = reader
        self.__dict__.update(answers)

    def __getattr__(self, name):
        return getattr(self._reader, name)


@pytest.fixture
def opened(tmp_path):
    save_file(
        {"a": np.arange(6, dtype="f4").reshape(2, 3), "b": np.ones(4, "i4")}, tmp_path / "a.safetensors"
    )
    location, detection = resolve(tmp_path / "a.safetensors")
    return find_format("safetensors").open(location, detection)


def test_an_honest_reader_passes(opened):
    check_reader(opened)


def test_a_reader_that_gives_other_numbers_than_its_bytes(opened):
    def read(spec, region):
        found = opened.reader.read(spec, region).copy()
        found[...] = 0
        return found

    with pytest.raises(AssertionError, match=r"a: the reader.s read_bytes differs"):
        check_reader(replace(opened, reader=Lying(opened.reader, read=read)))


def test_a_reader_that_misses_a_part(opened):
    lack = [Absent(("a",), "0.0", "lost")]
    with pytest.raises(AssertionError, match="missing chunks"):
        check_reader(replace(opened, reader=Lying(opened.reader, absent=lambda: iter(lack))))
