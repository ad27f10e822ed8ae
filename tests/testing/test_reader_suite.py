"""The suite that plug-ins run against their readers finds a reader that lies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from wherry.core.request import SourceRequest
from wherry.formats.detect import resolve_source
from wherry.formats.format import Absent, Block, ChunkDecoder, Chunked, Computed
from wherry.formats.registry import find_format
from wherry.mover.read import read_region
from wherry.testing.readers import canonical, check_reader


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
    location, detection = resolve_source(SourceRequest(str(tmp_path / "a.safetensors")))
    return find_format("safetensors").open(location, detection)


def test_an_honest_reader_passes(opened):
    check_reader(opened)


def bytes_of(opened):
    return {path: canonical(opened, spec) for path, spec in opened.manifest.tensors.items()}


def test_a_reader_that_gives_other_numbers_than_its_bytes(opened):
    def access(_spec):
        return Computed(lambda _region, _out: None)

    lying = replace(opened, reader=Lying(opened.reader, access=access))
    with pytest.raises(AssertionError, match="a: read_bytes differs"):
        check_reader(lying, bytes_of(opened))


def test_a_reader_that_decodes_chunks_to_other_bytes(opened):
    def access(spec):
        def fill(region, out):
            read_region(opened.reader, spec, region, out)

        def decode(cell):
            yield Block(cell, iter([memoryview(bytes(spec.nbytes))]))

        return Chunked(spec.shape, ChunkDecoder(fill, "zeros", lambda _cell: 0, decode))

    specs = {path: replace(spec, chunks=spec.shape) for path, spec in opened.manifest.tensors.items()}
    manifest = replace(opened.manifest, tensors=specs)
    lying = replace(opened, manifest=manifest, reader=Lying(opened.reader, access=access))
    with pytest.raises(AssertionError, match="a: stream differs"):
        check_reader(lying, bytes_of(opened))


def test_a_reader_that_misses_a_part(opened):
    lack = [Absent(("a",), "0.0", "lost")]
    with pytest.raises(AssertionError, match="missing chunks"):
        check_reader(replace(opened, reader=Lying(opened.reader, absent=lambda: iter(lack))))
