"""Measures what this machine does per second, before any row runs: hashes, codecs, copies, and the device.

The bound of each row follows from these numbers (`judge.py`), so this program shares no code with wherry: it calls
libraries that every tool can use. Each operation works in reused memory on numbers like those of the inputs, once in
one thread and once in as many threads as there are cores. A rate is bytes divided by processor time, which other
processes disturb little, and the best of several passes counts. `python -m benchmarks.rates FOLDER SIZE` prints JSON
with bytes per second; codecs count decoded bytes.

Of the device under a folder, durable writes, reads past the page cache, and both at once are measured. Large blocks go
past the page cache, from several threads, into and out of a preallocated file: no other way to use a file is faster.
What was read back in the third measurement had been written in the same pass, as a conversion does that reads back what
it writes. Each number is the best of several passes, since a bound must not be slower than the machine.
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

from benchmarks.files import aligned_buffer, open_direct
from benchmarks.inputs import weights, weights_float32

Act: TypeAlias = "Callable[[int, Lane, int], None]"  # with a file, a thread's memory and an offset

_LANES = (2, 4, 8)  # threads; what a device needs differs
_DISK_PASSES = 2
_DISK_BLOCK, _SMALL_BLOCK = 8 << 20, 1 << 20


class Lane(NamedTuple):
    """The memory of one thread: what it writes and where it reads."""

    out: memoryview
    back: memoryview


class Disk(NamedTuple):
    """A file on the device, and how it is used.

    Attributes:
        path: the file.
        size: its bytes, a multiple of `block`.
        block: bytes of one request.
    """

    path: Path
    size: int
    block: int


def device_rates(folder: Path, size: int) -> dict[str, Any]:
    """Bytes per second of `write`, `read` and `write and read back`, and whether they went past the page cache."""
    block = _DISK_BLOCK if size >= 8 * _DISK_BLOCK else _SMALL_BLOCK
    disk = Disk(folder / "device", -(-size // block) * block, block)
    lanes = [_lane(block) for _number in range(max(_LANES))]
    passes: dict[str, list[float]] = {"write": [], "read": [], "write and read back": []}
    for count in _LANES * _DISK_PASSES:
        for name, run in (("write and read back", _write_and_read), ("write", _write), ("read", _read)):
            passes[name].append(disk.size / run(disk, lanes[:count]))
    direct = _is_direct(disk)
    disk.path.unlink()
    return {
        "bytes": disk.size,
        "direct": direct,
        "rates": {name: {"best": max(rates), "least": min(rates)} for name, rates in passes.items()},
    }


def _lane(block: int) -> Lane:
    out = aligned_buffer(block)
    out[:] = os.urandom(block)
    return Lane(out, aligned_buffer(block))


def _write(disk: Disk, lanes: list[Lane]) -> float:
    """Seconds to write the file durably."""

    def act(file: int, lane: Lane, start: int) -> None:
        _whole(os.pwrite(file, lane.out, start), disk)

    return _time(disk, lanes, act, new=True)


def _read(disk: Disk, lanes: list[Lane]) -> float:
    """Seconds to read it."""

    def act(file: int, lane: Lane, start: int) -> None:
        _whole(os.preadv(file, [lane.back], start), disk)

    return _time(disk, lanes, act, new=False)


def _write_and_read(disk: Disk, lanes: list[Lane]) -> float:
    """Seconds to write it durably and to read every block of it back meanwhile."""

    def act(file: int, lane: Lane, start: int) -> None:
        _whole(os.pwrite(file, lane.out, start), disk)
        _whole(os.preadv(file, [lane.back], start), disk)

    return _time(disk, lanes, act, new=True)


def _time(disk: Disk, lanes: list[Lane], act: Act, *, new: bool) -> float:
    if new:
        disk.path.unlink(missing_ok=True)
    file, direct = open_direct(disk.path, os.O_RDWR | os.O_CREAT)
    try:
        if not direct:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.monotonic()
        if new:
            os.posix_fallocate(file, 0, disk.size)
        with ThreadPoolExecutor(len(lanes)) as pool:
            lists = [range(at * disk.block, disk.size, len(lanes) * disk.block) for at in range(len(lanes))]
            for _done in pool.map(_run_lane, repeat(act), repeat(file), lanes, lists):
                pass
        os.fdatasync(file)
        return time.monotonic() - started
    finally:
        os.close(file)


def _run_lane(act: Act, file: int, lane: Lane, starts: range) -> None:
    for start in starts:
        act(file, lane, start)


def _is_direct(disk: Disk) -> bool:
    file, direct = open_direct(disk.path, os.O_RDWR)
    os.close(file)
    return direct


def _whole(done: int, disk: Disk) -> None:
    if done != disk.block:
        raise OSError(f"{done} of {disk.block} bytes of {disk.path} were written or read")


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
