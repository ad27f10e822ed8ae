"""The bound of a row: the least time that this machine needs for it, from the rates that `rates.py` measured.

The device and the cores work at the same time, so the bound is the longer of two times:

- *device*: bytes written, divided by the rate of durable writes. With read-back the same bytes are also read from
  storage: either afterwards, at the rate of reads, or meanwhile, at the rate of writing and reading back; whichever is
  faster. The source is in the page cache and takes no device time, except where the row reads it cold.
- *processor*: the sum of what no implementation can avoid, divided by the number of cores: the source is copied from
  the page cache (unless it is cold), decoded or encoded where the row has a codec, and hashed once with BLAKE3; what is
  read back is hashed too. Codecs and the hash of the source count uncompressed bytes.

Nothing else is counted: neither the start of the interpreter, nor checksums of a container, nor transposition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_HASH, _CACHE = "BLAKE3", "page cache read"


class Rates(NamedTuple):
    """What the machine does in bytes per second.

    Attributes:
        cores: number of cores.
        core: name of an operation → rate of one core while all of them work.
        write, read: rates of the device.
        write_and_read: rate at which bytes are written and read back meanwhile.
    """

    cores: int
    core: Mapping[str, float]
    write: float
    read: float
    write_and_read: float


class Job(NamedTuple):
    """The bytes of a row and what happens to them.

    Attributes:
        source, written: bytes of the input and of the output, as they are stored.
        codecs: operations that the tensors go through.
        cold: whether the source is read from storage.
        read_back: whether the output is read back from storage.
    """

    source: int
    written: int
    codecs: tuple[str, ...] = ()
    cold: bool = False
    read_back: bool = False


class Bound(NamedTuple):
    """The least seconds of the device and of the processor."""

    device: float
    processor: float

    @property
    def seconds(self) -> float:
        """The least time of the row."""
        return max(self.device, self.processor)


def rates_of(measured: Mapping[str, Any]) -> Rates:
    """The rates from what `rates.py` prints."""
    device = {name: rate["best"] for name, rate in measured["device"]["rates"].items()}
    core = {name: rate["per_core"] for name, rate in measured["core"].items()}
    return Rates(measured["cores"], core, device["write"], device["read"], device["write and read back"])


def find_bound(job: Job, rates: Rates) -> Bound:
    """The bound of a row."""
    return Bound(_device(job, rates), _processor(job, rates))


def _device(job: Job, rates: Rates) -> float:
    reading = job.source / rates.read if job.cold else 0.0
    written, read = job.written / rates.write, job.written / rates.read
    if job.read_back:
        return reading + min(written + read, job.written / rates.write_and_read)
    return reading + written


def _processor(job: Job, rates: Rates) -> float:
    tensors = max(job.source, job.written)  # of a row with a codec, the compressed side is the smaller one
    seconds = sum(tensors / rates.core[name] for name in (_HASH, *job.codecs))
    if not job.cold:
        seconds += job.source / rates.core[_CACHE]
    if job.read_back:
        seconds += job.written / rates.core[_HASH]
    return seconds / rates.cores
