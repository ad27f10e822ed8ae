"""safetensors files: the corpus, every rule of the header, regions, and headers altered at random."""

from __future__ import annotations

import json
import os
import random
import struct
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.formats import (
    assert_as_expected,
    assert_ends_well,
    cases,
    create,
    expected,
    mutated,
    opened,
    place,
    write_all,
)
from wherry.errors import (
    CorruptError,
    HostileError,
    IncompleteError,
    UnsupportedError,
    WherryError,
)
from wherry.formats.format import Glimpse
from wherry.formats.registry import find_format
from wherry.integrations.containers.safetensors import header as safetensors
from wherry.mover.read import read_array, read_bytes
from wherry.storage.stores import locate


def file_of(tmp_path, header, data=b"", name="a.safetensors"):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / name
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("case", cases("safetensors"))
def test_corpus(case):
    found, row = opened(place(case), "safetensors"), expected(case)
    assert_as_expected(found, row)
    assert (found.detection.format_version, found.manifest.kind) == (row["layout_version"], row["kind"])
    assert list(found.reader.absent()) == []


@pytest.mark.parametrize("case", cases("safetensors", verdicts=("corrupt",)))
def test_corpus_defects(case):
    with pytest.raises(CorruptError):
        opened(place(case), "safetensors")


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
