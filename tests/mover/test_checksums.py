"""The checksum that a container records for a range is compared once, when every byte of the range was read."""

from __future__ import annotations

import zlib

import pytest

from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import CorruptError
from wherry.formats.contents import Extent, RangeChecksum
from wherry.mover.checksums import ContainerChecksums
from wherry.storage.stores import locate

DATA = bytes(range(100))
SPEC = TensorSpec(("w",), (100,), "uint8")


@pytest.fixture
def place(tmp_path):
    (tmp_path / "file").write_bytes(DATA)
    return locate(tmp_path / "file")


def read(checksums, place, *spans, crc=None):
    """Add spans of a tensor whose bytes are in a range with a checksum."""
    recorded = RangeChecksum(0, len(DATA), zlib.crc32(DATA) if crc is None else crc)
    for span in spans:
        extent = Extent(place, 0, len(DATA), within=recorded)
        checksums.update((extent,), span, memoryview(DATA)[span.start : span.stop], SPEC)


def test_a_range_that_tensors_share_is_not_touched_while_it_is_compared(place, monkeypatch):
    checksums, real, compared = ContainerChecksums(), ContainerChecksums._compare, []

    def compare(self, watched):
        compared.append(watched)
        read(self, place, Span(20, 60))  # another thread, for another tensor
        assert watched.crc.left == 0
        assert watched.crc.known(0, len(DATA))[0][:2] == (0, 50)
        real(self, watched)

    monkeypatch.setattr(ContainerChecksums, "_compare", compare)
    read(checksums, place, Span(0, 50), Span(50, 100))
    read(checksums, place, Span(0, 50))
    checksums.finish()
    assert len(compared) == 1


def test_a_range_that_differs_differs_whenever_the_pass_is_finished(place):
    checksums = ContainerChecksums()
    read(checksums, place, Span(0, 50), crc=7)
    for _time in range(2):
        with pytest.raises(CorruptError, match="checksum mismatch"):
            checksums.finish()
