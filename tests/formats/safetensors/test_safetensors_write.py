"""Writing safetensors: what the reference library reads, any order from several threads, failing disks."""

from __future__ import annotations

import errno
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.support.formats import (
    canonical,
    create,
    opened,
    write_all,
)
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import (
    StorageError,
    UnrepresentableError,
    UsageError,
)
from wherry.mover.read import read_array, read_bytes
from wherry.storage.open_file import MOST_OPEN
from wherry.target.files import FlatFiles

TORCH_DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
]


def manifest_of(specs, **more):
    return Manifest(tensors={spec.path: spec for spec in specs}, **more)


def torch_tensors():
    import torch

    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 255, (7 * 5 * 8,), dtype=torch.uint8, generator=generator)
    tensors = {}
    for name in TORCH_DTYPES:
        dtype = getattr(torch, name)
        tensors[name] = (raw[:35] % 2).to(dtype) if name == "bool" else raw[: 35 * dtype.itemsize].view(dtype)
        tensors[name] = tensors[name].reshape(7, 5).clone()
    return tensors | {"scalar": torch.tensor(3), "none": torch.zeros(0, 4), "ü/n": torch.ones(2, 1, 3)}


def torch_bytes(tensor) -> bytes:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_reads_what_the_library_wrote_and_writes_the_same_bytes(tmp_path):
    from safetensors.torch import save_file

    tensors = torch_tensors()
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    found = opened(tmp_path / "a.safetensors", "safetensors")
    assert found.manifest.custom == {"format": "pt"}
    assert {path[0] for path in found.manifest.tensors} == set(tensors)
    contents = {}
    for name, tensor in tensors.items():
        spec = found.manifest.tensors[name,]
        assert spec.shape == tuple(tensor.shape)
        contents[name,] = canonical(found, (name,))
        assert contents[name,] == torch_bytes(tensor), name
    writer = create(tmp_path / "b", "safetensors", found.manifest)
    write_all(writer, contents)
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_the_library_reads_what_we_wrote(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_file

    tensors = torch_tensors()
    names = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    specs = [TensorSpec((name,), tuple(tensor.shape), names[name]) for name, tensor in tensors.items()]
    manifest = manifest_of(specs, custom={"author": "me", "n": 3, "DCP_VERSION": "1.0", "format": "np"})
    write_all(
        create(tmp_path / "a.safetensors", "safetensors", manifest),
        {(name,): torch_bytes(tensor) for name, tensor in tensors.items()},
    )
    loaded = load_file(tmp_path / "a.safetensors")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch_bytes(loaded[name]) == torch_bytes(tensor)
    with safe_open(tmp_path / "a.safetensors", "np") as file:
        assert file.metadata() == {"author": "me", "format": "pt"}


def test_four_bit_floats_are_packed_low_nibble_first(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    stored = torch.arange(48, dtype=torch.uint8).reshape(2, 24) * 5
    save_file({"w": stored.view(torch.float4_e2m1fn_x2)}, tmp_path / "a.safetensors")
    found = opened(tmp_path / "a.safetensors", "safetensors")
    spec = found.manifest.tensors["w",]
    assert (spec.shape, spec.dtype) == ((2, 48), "float4_e2m1fn")
    whole = read_array(found.reader, spec, spec.whole)
    assert whole.dtype == ml_dtypes.float4_e2m1fn
    codes = np.stack([stored.numpy() & 15, stored.numpy() >> 4], axis=-1).reshape(2, 48)
    assert np.array_equal(whole.view("u1"), codes)
    part = read_array(found.reader, spec, (slice(1, 2), slice(3, 20)))
    assert np.array_equal(part.view("u1"), codes[1:2, 3:20])
    assert read_bytes(found.reader, spec) == whole.tobytes()

    writer = create(tmp_path / "b", "safetensors", found.manifest)
    data = whole.tobytes()
    writer.write(("w",), Span(40, 96), memoryview(data)[40:])
    writer.write(("w",), Span(0, 40), memoryview(data)[:40])
    writer.finish()
    with pytest.raises(UsageError):
        writer.write(("w",), Span(1, 3), memoryview(b"\0\0"))
    with pytest.raises(UnrepresentableError):
        writer.write(("w",), Span(0, 1), memoryview(b"\0"))
    with pytest.raises(UnrepresentableError):
        writer.write(("w",), Span(0, 2), memoryview(b"\x10\0"))
    writer.close()
    assert torch.equal(load_file(tmp_path / "b")["w"].view(torch.uint8), stored)


def test_any_order_from_several_threads_and_twice(tmp_path):
    chooser = random.Random(3)
    contents = {(f"t{at}",): chooser.randbytes(chooser.randrange(1, 5000) * 4) for at in range(40)}
    specs = [TensorSpec(path, (len(data) // 4,), "float32") for path, data in contents.items()]
    writer = create(tmp_path / "out", "safetensors", manifest_of(specs))
    assert writer.grid(("t0",)) is None
    spans = [
        (path, Span(start, min(start + 1000, len(data))))
        for path, data in contents.items()
        for start in range(0, len(data), 1000)
    ] * 2
    chooser.shuffle(spans)
    stop = threading.Event()

    def syncing():
        while not stop.wait(0.002):
            writer.sync()

    thread = threading.Thread(target=syncing)
    thread.start()
    with ThreadPoolExecutor(6) as pool:
        for done in [
            pool.submit(writer.write, p, s, memoryview(contents[p])[s.start : s.stop]) for p, s in spans
        ]:
            done.result()
    stop.set()
    thread.join()
    writer.finish()
    writer.finish()
    writer.close()
    writer.close()
    found = opened(tmp_path / "out", "safetensors")
    assert {path: canonical(found, path) for path in contents} == contents


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec(("a", "b"), (2,), "float32"),
        TensorSpec((), (2,), "float32"),
        TensorSpec(("__metadata__",), (2,), "float32"),
        TensorSpec(("a",), (2,), "complex128"),
        TensorSpec(("a",), (2,), "int4"),
        TensorSpec(("a",), (3,), "float4_e2m1fn"),
    ],
)
def test_what_safetensors_cannot_hold(tmp_path, spec):
    with pytest.raises(UnrepresentableError):
        create(tmp_path / "out", "safetensors", manifest_of([spec]))
    assert list(tmp_path.iterdir()) == []


def test_spans_outside_a_tensor_are_refused(tmp_path):
    specs = [TensorSpec(("a",), (2,), "float32"), TensorSpec(("b",), (2,), "float32")]
    writer = create(tmp_path / "out", "safetensors", manifest_of(specs))
    for where, data in [(Span(4, 12), b"\0" * 8), (Span(0, 4), b"\0" * 8), ((slice(0, 2),), b"\0" * 8)]:
        with pytest.raises(UsageError):
            writer.write(("a",), where, memoryview(data))
    writer.close()


def test_a_full_disk_fails_before_the_first_byte(tmp_path, monkeypatch):
    def full(descriptor, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match="space") as caught:
        create(tmp_path / "out", "safetensors", manifest_of([TensorSpec(("a",), (2,), "float32")]))
    assert caught.value.uri == str(tmp_path / "out")
    assert caught.value.retryable is False


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:3], offset))
    files = FlatFiles(tmp_path, {"a": 20})
    files.write("a", 5, b"0123456789")
    files.sync()
    files.close()
    assert (tmp_path / "a").read_bytes() == b"\0" * 5 + b"0123456789" + b"\0" * 5


def test_few_descriptors_for_many_files(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    names = [f"f{at}" for at in range(200)]
    files = FlatFiles(tmp_path, dict.fromkeys(names, 8))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: files.write(name, 0, b"01234567"), names * 3))
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= MOST_OPEN
    files.finish()
    files.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert {(tmp_path / name).read_bytes() for name in names} == {b"01234567"}


def test_a_failed_sync_never_turns_into_success(tmp_path, monkeypatch):
    files = FlatFiles(tmp_path, {"a": 4})
    files.write("a", 0, b"1234")
    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", lambda _fd: (_ for _ in ()).throw(OSError(errno.EIO, "I/O")))
        with pytest.raises(StorageError):
            files.sync()
    with pytest.raises(StorageError):
        files.sync()
    with pytest.raises(StorageError):
        files.finish()
    files.close()


def test_text_that_is_not_unicode_has_no_place_in_a_header():
    """A pickle or a msgpack file may have such a name; the library refuses a file with one."""
    from wherry.integrations.containers.safetensors.header import build

    spec = TensorSpec(("a",), (1,), "int8")
    for specs, metadata in (([TensorSpec(("\ud800",), (1,), "int8")], {}), ([spec], {"k": "\udfff"})):
        with pytest.raises(UnrepresentableError, match="not valid Unicode") as caught:
            build(specs, metadata)
        str(caught.value).encode()
        assert caught.value.cure
