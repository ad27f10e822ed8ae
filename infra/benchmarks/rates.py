"""Measures what this machine does per second, before any row runs: hashes, codecs, copies, and the device.

The bound of each row follows from these numbers (`bound.py`), so this program shares no code with wherry: it calls
libraries that every tool can use. Each operation works in reused memory on numbers like those of the inputs, once in
one thread and once in as many threads as there are cores. A rate is bytes divided by processor time, which other
processes disturb little, and the best of several passes counts. `python -m benchmarks.rates FOLDER SIZE` prints JSON
with bytes per second; codecs count decoded bytes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import ssl
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import repeat
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import deflate
import zstandard
from blake3 import blake3
from isal import isal_zlib

from benchmarks.device import device_rates
from benchmarks.files import aligned_buffer
from benchmarks.inputs import weights
from benchmarks.inputs_zarr import weights as weights_float32

Work: TypeAlias = "Callable[[], int]"  # does one piece of work, returns its bytes

_PASSES = 5
_SECONDS = 0.1  # of a pass
_BLOCK = 4 << 20
_LEAST = 64 << 10
_FED = 256 << 10  # bytes that a gzip codec takes at once
_LARGE = 16  # blocks: more than a processor's cache holds
_LEVEL = 1  # as tensorstore has it by default
_GZIP = 31  # zlib's window bits for the gzip container


class Samples(NamedTuple):
    """What the operations work on: numbers of both kinds, and a file in the page cache."""

    bfloat16: bytes
    float32: bytes
    file: Path


class Operation(NamedTuple):
    """One operation of the processor.

    Attributes:
        name: as the rows of `cases.py` name it.
        implementation: library and version.
        prepare: the work of one thread.
    """

    name: str
    implementation: str
    prepare: Callable[[Samples], Work]


def _hash(function: Callable[[bytes], object]) -> Callable[[Samples], Work]:
    def prepare(samples: Samples) -> Work:
        block = bytes(bytearray(samples.bfloat16))  # one for each thread

        def run() -> int:
            function(block)
            return len(block)

        return run

    return prepare


def _encode_zstd(kind: str) -> Callable[[Samples], Work]:
    def prepare(samples: Samples) -> Work:
        data, engine = getattr(samples, kind), zstandard.ZstdCompressor(level=_LEVEL)
        into = memoryview(bytearray(2 * len(data)))

        def run() -> int:
            _fill(engine.stream_reader(data, size=len(data)), into)
            return len(data)

        return run

    return prepare


def _decode_zstd(kind: str) -> Callable[[Samples], Work]:
    def prepare(samples: Samples) -> Work:
        data, engine = getattr(samples, kind), zstandard.ZstdDecompressor()
        encoded = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
        into = memoryview(bytearray(len(data)))

        def run() -> int:
            return _fill(engine.stream_reader(encoded), into)

        return run

    return prepare


def _fill(reader: Any, into: memoryview) -> int:
    done = 0
    while done < len(into) and (got := reader.readinto(into[done:])):
        done += got
    return done


def _encode_gzip(library: ModuleType) -> Callable[[Samples], Work]:
    def prepare(samples: Samples) -> Work:
        data = memoryview(samples.float32)

        def run() -> int:
            engine = library.compressobj(_LEVEL, library.DEFLATED, _GZIP)
            for start in range(0, len(data), _FED):
                engine.compress(data[start : start + _FED])
            engine.flush()
            return len(data)

        return run

    return prepare


def _decode_gzip(inflate: Callable[[bytes, int], bytes | bytearray]) -> Callable[[Samples], Work]:
    def prepare(samples: Samples) -> Work:
        engine = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        encoded = engine.compress(samples.float32) + engine.flush()
        return lambda: len(inflate(encoded, len(samples.float32)))

    return prepare


def _inflate(encoded: bytes, nbytes: int) -> bytes:
    return zlib.decompress(encoded, _GZIP, nbytes)


def _copy(samples: Samples) -> Work:
    """Copy between two areas of memory that no cache holds; ctypes lets other threads run meanwhile."""
    nbytes = _LARGE * len(samples.bfloat16)
    target, source = ((ctypes.c_char * nbytes).from_buffer(aligned_buffer(nbytes)) for _area in range(2))

    def run() -> int:
        ctypes.memmove(target, source, nbytes)
        return nbytes

    return run


def _read_cached(samples: Samples) -> Work:
    """Read a file that is in the page cache into reused memory."""
    file, buffer = samples.file.open("rb", buffering=0), aligned_buffer(len(samples.bfloat16))

    def run() -> int:
        file.seek(0)
        done = 0
        while got := file.readinto(buffer):
            done += got
        return done

    return run


_ZSTD = f"zstandard {version('zstandard')}, zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))}"
_ZLIB = f"zlib {zlib.ZLIB_RUNTIME_VERSION}"
_ISAL, _DEFLATE = f"isal {version('isal')}", f"deflate {version('deflate')}"
OPERATIONS = (
    Operation(
        "SHA-256", f"hashlib, {ssl.OPENSSL_VERSION}", _hash(lambda block: hashlib.sha256(block).digest())
    ),
    Operation("BLAKE3", f"blake3 {version('blake3')}", _hash(lambda block: blake3(block).digest())),
    Operation("CRC-32", _ISAL, _hash(isal_zlib.crc32)),
    Operation("zstd decode bfloat16", _ZSTD, _decode_zstd("bfloat16")),
    Operation("zstd encode bfloat16", _ZSTD, _encode_zstd("bfloat16")),
    Operation("zstd decode float32", _ZSTD, _decode_zstd("float32")),
    Operation("zstd encode float32", _ZSTD, _encode_zstd("float32")),
    Operation("gzip decode float32", _DEFLATE, _decode_gzip(deflate.gzip_decompress)),
    Operation("gzip encode float32", _ISAL, _encode_gzip(isal_zlib)),
    Operation("zlib decode float32", _ZLIB, _decode_gzip(_inflate)),
    Operation("zlib encode float32", _ZLIB, _encode_gzip(zlib)),
    Operation("memcpy", "ctypes.memmove", _copy),
    Operation("page cache read", "readinto", _read_cached),
)


def core_rates(folder: Path, size: int) -> dict[str, dict[str, Any]]:
    """Name of an operation → bytes per second of one core, alone and with all cores at work."""
    block = min(_BLOCK, max(size // _LARGE, _LEAST))
    file = folder / "cached"
    file.write_bytes(os.urandom(_LARGE * block))
    samples = Samples(weights(block // 2, 1), weights_float32((block // 4,), 1).tobytes(), file)
    seconds = min(_SECONDS, size * 1e-9)
    cores = len(os.sched_getaffinity(0))
    found = {
        one.name: {
            "implementation": one.implementation,
            "alone": rate(one.prepare, samples, 1, seconds),
            "per_core": rate(one.prepare, samples, cores, seconds),
        }
        for one in OPERATIONS
    }
    file.unlink()
    return found


def rate(prepare: Callable[[Samples], Work], samples: Samples, threads: int, seconds: float) -> float:
    """Bytes per second of one of so many threads that work at once, in the best pass."""
    works = [prepare(samples) for _thread in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        passes = [[*pool.map(_time_pass, works, repeat(seconds))] for _pass in range(_PASSES)]
    return max(sum(done for done, _taken in one) / sum(taken for _done, taken in one) for one in passes)


def _time_pass(work: Work, seconds: float) -> tuple[int, float]:
    """Bytes and processor time of a pass; the time in which another process has the core does not count."""
    started, done = time.thread_time(), 0
    while (taken := time.thread_time() - started) < seconds or not done:
        done += work()
    return done, max(taken, 1e-9)


def main() -> None:
    """Measure, and print the numbers."""
    folder, size = Path(sys.argv[1]), int(sys.argv[2])
    found = {
        "cores": len(os.sched_getaffinity(0)),
        "core": core_rates(folder, size),
        "device": device_rates(folder, size),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
