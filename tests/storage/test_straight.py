"""Reading past the page cache gives the same bytes as reading through it, wherever memory and file lie."""

from __future__ import annotations

import errno
import mmap
import os
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import wherry
from wherry.mover import read as reading
from wherry.storage import direct as straight
from wherry.storage.direct import BLOCK, readinto

SIZE = 5 * (64 << 10) + 777
CONTENT = random.Random(0).randbytes(SIZE)
if not straight.DIRECT:
    pytest.skip("this system has no O_DIRECT", allow_module_level=True)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "f").write_bytes(CONTENT)
    with (tmp_path / "f").open("rb") as opened:
        os.fsync(opened.fileno())
    return str(tmp_path / "f")


@given(st.integers(0, SIZE + 10), st.integers(0, SIZE + 2 * BLOCK), st.integers(0, BLOCK))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_part_at_any_place(file, offset, length, slack):
    """Memory that lies as the file does (no slack), or does not."""
    memory = memoryview(mmap.mmap(-1, SIZE + 4 * BLOCK))
    first = (offset + slack) % BLOCK
    buffer = memory[first : first + length]
    there = len(CONTENT[offset : offset + length])
    assert readinto(file, offset, buffer) == there
    assert buffer[:there] == CONTENT[offset : offset + length]
    assert not any(memory[:first])
    assert not any(memory[first + length :])


def test_whole_blocks_go_straight(file, monkeypatch):
    flags, real = [], os.open
    monkeypatch.setattr(os, "open", lambda path, how, *rest: (flags.append(how), real(path, how, *rest))[1])
    memory = memoryview(mmap.mmap(-1, SIZE + BLOCK))
    assert readinto(file, 100, memory[100:SIZE]) == SIZE - 100
    assert any(how & os.O_DIRECT for how in flags)
    flags.clear()
    assert readinto(file, 100, memory[101 : 101 + SIZE]) == SIZE - 100
    assert not any(how & os.O_DIRECT for how in flags)


@pytest.mark.parametrize("where", ["open", "read"])
def test_a_file_system_without_it_is_read_through_the_cache(file, monkeypatch, where):
    real_open, real_read, direct = os.open, os.preadv, set()

    def opened(path, how, *rest):
        if how & os.O_DIRECT and where == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = real_open(path, how, *rest)
        (direct.add if how & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def read(descriptor, buffers, offset):
        if descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "preadv", read)
    memory = memoryview(mmap.mmap(-1, SIZE + BLOCK))
    assert readinto(file, 0, memory[:SIZE]) == SIZE
    assert memory[:SIZE] == CONTENT


def test_an_error_of_the_storage_is_one(file, monkeypatch):
    def read(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(OSError, match="Input/output"):
        readinto(file, 0, memoryview(mmap.mmap(-1, SIZE)))


def test_the_read_back_of_a_conversion_goes_straight(tmp_path, monkeypatch):
    source = tmp_path / "a.safetensors"
    save_file({"w": np.arange(1 << 18, dtype=np.float32)}, source)
    read, real = [], reading.readinto
    monkeypatch.setattr(
        reading, "readinto", lambda path, *rest, **more: (read.append(path), real(path, *rest, **more))[1]
    )
    wherry.convert(source, tmp_path / "none", to="dcp", verify="none")
    assert read == []
    wherry.convert(source, tmp_path / "out", to="dcp")
    assert read
    assert all(str(tmp_path / ".wherry-out") in path for path in read)
