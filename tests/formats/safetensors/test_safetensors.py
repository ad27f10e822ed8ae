"""safetensors files: every rule of the header, regions, headers altered at random, and writing."""

from __future__ import annotations

import errno
import json
import os
import random
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.formats import assert_ends_well, canonical, create, mutated, opened, place, write_all
from tests.support.processes import open_descriptors
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import (
    CorruptError,
    HostileError,
    IncompleteError,
    StorageError,
    UnrepresentableError,
    UnsupportedError,
    UsageError,
    WherryError,
)
from wherry.formats.format import Glimpse
from wherry.formats.registry import find_format
from wherry.integrations.containers.safetensors import header as safetensors
from wherry.mover.read import read_array, read_bytes
from wherry.store.local_store import locate
from wherry.store.open_file import MOST_OPEN
from wherry.target.files import FlatFiles


def file_of(tmp_path, header, data=b"", name="a.safetensors"):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / name
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def test_an_empty_file_is_not_claimed(corpus):
    assert find_format("safetensors").detect(Glimpse(locate(place("none-empty-file")))) is None


def test_six_bit_floats_are_opaque(tmp_path):
    data = bytes(range(9))
    path = file_of(tmp_path, {"w": entry("F6_E2M3", [3, 4], 0, 9)}, data)
    found = opened(path, "safetensors")
    spec = found.manifest.tensors["w",]
    assert spec.dtype == "float6_e2m3fn"
    assert read_bytes(found.reader, spec) == data
    write_all(create(tmp_path / "b", "safetensors", found.manifest), {("w",): data})
    assert (tmp_path / "b").read_bytes().endswith(data)


@pytest.mark.parametrize("shape", [(6, 5, 4), (300, 300, 7), (4, 1, 3, 2), (7,)])
def test_every_region(tmp_path, shape):
    array = np.arange(np.prod(shape), dtype="<i4").reshape(shape)
    header = {"w": entry("I32", list(shape), 0, array.nbytes)}
    found = opened(file_of(tmp_path, header, array.tobytes()), "safetensors")
    spec = found.manifest.tensors["w",]
    chooser = random.Random(1)
    for _ in range(40):
        bounds = [sorted(chooser.choices(range(extent + 1), k=2)) for extent in shape]
        region = tuple(slice(*pair) for pair in bounds)
        part = read_array(found.reader, spec, region)
        assert part.flags.c_contiguous
        assert np.array_equal(part, array[region])


def test_a_region_is_read_without_the_rest(tmp_path, monkeypatch):
    array = np.zeros((1000, 1000), "<f4")
    found = opened(
        file_of(tmp_path, {"w": entry("F32", [1000, 1000], 0, array.nbytes)}, array.tobytes()), "st"
    )
    read = []
    real = os.preadv

    def counting(descriptor, buffers, offset):
        read.append(sum(len(buffer) for buffer in buffers))
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counting)
    read_array(found.reader, found.manifest.tensors["w",], (slice(500, 502), slice(0, 10)))
    assert sum(read) <= 8000


GOOD = {"a": entry("F32", [2], 0, 8), "b": entry("U8", [4], 8, 12)}
BROKEN = {
    "hole": ({"a": entry("F32", [2], 0, 8), "b": entry("U8", [4], 9, 13)}, 13, CorruptError),
    "overlap": ({"a": entry("F32", [2], 0, 8), "b": entry("U8", [4], 7, 11)}, 11, CorruptError),
    "hole at the start": ({"a": entry("F32", [2], 4, 12)}, 12, CorruptError),
    "bytes at the end": (GOOD, 13, CorruptError),
    "cut": (GOOD, 11, CorruptError),
    "too short for its shape": ({"a": entry("F32", [3], 0, 8)}, 8, CorruptError),
    "negative extent": ({"a": entry("F32", [-1, -2], 0, 8)}, 8, CorruptError),
    "product wraps": ({"a": entry("U8", [2**33, 2**31], 0, 0)}, 0, CorruptError),
    "huge next to zero": ({"a": entry("U8", [2**62, 2**62, 0], 0, 0)}, 0, CorruptError),
    "bool extent": ({"a": entry("F32", [True, 2], 0, 8)}, 8, CorruptError),
    "float extent": ({"a": entry("F32", [2.0], 0, 8)}, 8, CorruptError),
    "stop before start": ({"a": entry("F32", [2], 8, 0)}, 8, CorruptError),
    "three offsets": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}, 8, CorruptError),
    "half a byte": ({"a": entry("F4", [3], 0, 1)}, 1, CorruptError),
    "unknown field": ({"a": {**entry("F32", [2], 0, 8), "x": 1}}, 8, CorruptError),
    "missing field": ({"a": {"dtype": "F32", "shape": [2]}}, 8, CorruptError),
    "not an object": ({"a": 3}, 0, CorruptError),
    "unknown dtype": ({"a": entry("F128", [1], 0, 16)}, 16, UnsupportedError),
    "65 dimensions": ({"a": entry("U8", [1] * 65, 0, 1)}, 1, UnsupportedError),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, 0, CorruptError),
    "twice in an entry": (
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        1,
        CorruptError,
    ),
    "twice": (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', 0, CorruptError),
    "infinity": (b'{"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,0]}}', 0, CorruptError),
    "deep": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, HostileError),
    "digits": (b'{"a":' + b"1" * 100_000 + b"}", 0, CorruptError),
    "not UTF-8": (b'{"\xff":1}', 0, CorruptError),
    "a lone surrogate": (b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', 0, CorruptError),
    "a lone surrogate in a key of the metadata": (b'{"__metadata__":{"\\ud800":"a"}}', 0, CorruptError),
    "a lone surrogate in the metadata": (b'{"__metadata__":{"a":"\\udfff"}}', 0, CorruptError),
    "text after it": (b"{} x", 0, CorruptError),
    "a space before it": (b" {}", 0, CorruptError),
    "a list": (b"[]", 0, CorruptError),
}


@pytest.mark.parametrize("what", BROKEN)
def test_every_rule_of_the_header(tmp_path, what):
    header, size, error = BROKEN[what]
    with pytest.raises(error) as caught:
        opened(file_of(tmp_path, header, b"\0" * size), "safetensors")
    str(caught.value).encode()


def test_the_damaged_tensor_is_named(tmp_path):
    with pytest.raises(CorruptError) as caught:
        opened(file_of(tmp_path, GOOD, b"\0" * 11), "safetensors")
    assert caught.value.path == "b"


def test_what_the_rules_allow(tmp_path):
    header = (
        json.dumps({**GOOD, "none": entry("F32", [0, 3], 8, 8), "__metadata__": {"k": "v"}}).encode() + b"   "
    )
    found = opened(file_of(tmp_path, header, b"\0" * 12), "safetensors")
    assert {path[0] for path in found.manifest.tensors} == {"a", "b", "none"}
    assert opened(file_of(tmp_path, {}, name="empty.safetensors"), "safetensors").manifest.tensors == {}


def test_detection_goes_by_content_and_then_by_name(tmp_path):
    row = find_format("st")

    def seen(path):
        return row.detect(Glimpse(locate(path)))

    assert seen(file_of(tmp_path, GOOD, b"\0" * 12, name="weights")) is not None
    assert seen(file_of(tmp_path, b"[]", name="weights")) is None
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 50)
    assert "not a safetensors header" in seen(tmp_path / "x.safetensors").evidence[0].seen
    with pytest.raises(CorruptError, match="limit"):
        opened(tmp_path / "x.safetensors", "safetensors")
    (tmp_path / "y.safetensors").write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    with pytest.raises(IncompleteError, match="git-lfs"):
        opened(tmp_path / "y.safetensors", "safetensors")
    (tmp_path / "z.safetensors").write_bytes(b"12")
    with pytest.raises(CorruptError):
        opened(tmp_path / "z.safetensors", "safetensors")


def test_a_hundred_thousand_tensors_open_quickly(tmp_path):
    header = {
        f"model.layers.{at}.weight": entry("F32", [2, 2], 16 * at, 16 * at + 16) for at in range(100_000)
    }
    path = locate(file_of(tmp_path, header, b"\0" * 1_600_000))
    began = time.process_time()
    assert len(safetensors.parse(path).slots) == 100_000
    assert time.process_time() - began < 3


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_headers_never_crash(data, tmp_path):
    path = file_of(tmp_path, {**GOOD, "__metadata__": {"k": "v"}}, b"\0" * 12)
    byte = st.integers(0, 255) | st.sampled_from(b'{}[]",:0123456789-.eU8F4')
    path.write_bytes(mutated(data, path.read_bytes(), byte))
    assert_ends_well(path, "safetensors")


NUMBERS = (
    st.integers(-1, 20)
    | st.integers(0, 2**70)
    | st.booleans()
    | st.floats()
    | st.none()
    | st.text(max_size=2)
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F4", "U8", "BOOL", "F6_E2M3", "X"]) | NUMBERS,
        "shape": st.lists(NUMBERS, max_size=4) | NUMBERS,
        "data_offsets": st.lists(NUMBERS, max_size=3) | NUMBERS,
    },
)


@given(header=st.dictionaries(st.text(max_size=3), ENTRIES | NUMBERS, max_size=4), size=st.integers(0, 40))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_made_up_headers_agree_with_the_library(header, size, tmp_path):
    """What we accept, the library accepts; what it accepts we do, unless it is a field or dtype of its future."""
    from safetensors import SafetensorError, safe_open

    path = file_of(tmp_path, json.dumps(header).encode(), b"\0" * size)
    try:
        accepted = {path[0] for path in opened(path, "safetensors").manifest.tensors}
    except WherryError:
        accepted = None
    try:
        with safe_open(path, "np") as file:
            by_library = set(file.keys())
    except (SafetensorError, ValueError, OSError):
        by_library = None
    assert accepted == by_library


# Writing safetensors: what the reference library reads, any order from several threads, failing disks.


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
    before = open_descriptors()
    names = [f"f{at}" for at in range(200)]
    files = FlatFiles(tmp_path, dict.fromkeys(names, 8))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: files.write(name, 0, b"01234567"), names * 3))
    assert len(open_descriptors()) - len(before) <= MOST_OPEN
    files.finish()
    files.close()
    assert open_descriptors() == before
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
