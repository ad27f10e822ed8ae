"""Pickles of nested numpy arrays: the corpus, every protocol and element type, byte orders, JAX's arrays, damage."""

from __future__ import annotations

import collections
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wherry
from tests.support.formats import assert_ends_well, canonical, mutated, opened
from wherry.errors import CorruptError, HostileError, NotACheckpointError, UnsupportedError
from wherry.formats.format import Glimpse
from wherry.formats.registry import find_format
from wherry.store.local_store import locate
from wherry.store.remote_store import remote_store
from wherry.testing import readers

PROTOCOLS = [0, 1, 2, 3, 4, 5]
TYPES = [
    *("?", "i1", "u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"),
    *(">i2", ">u4", ">i8", ">f2", ">f4", ">f8", ">c8"),
]


def save(tmp_path, value, protocol=4, name="params.pkl"):
    path = tmp_path / name
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def bytes_of(array) -> bytes:
    array = np.asarray(array)
    return (
        array.astype(array.dtype.newbyteorder("<")).tobytes() if array.dtype.kind != "V" else array.tobytes()
    )


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_type_order_and_size(tmp_path, protocol):
    random = np.random.default_rng(1)
    value = {}
    for code in TYPES:
        raw = random.integers(0, 2 if code == "?" else 256, (5 * 7 * np.dtype(code).itemsize,), dtype="u1")
        value[code] = raw.view(code).reshape(5, 7)
    for name in ("bfloat16", "float8_e4m3fn", "int4", "float8_e5m2"):
        raw = random.integers(0, 8, (12 * np.dtype(getattr(ml_dtypes, name)).itemsize,), dtype="u1")
        value[name] = raw.view(getattr(ml_dtypes, name)).reshape(3, 4)
    value |= {
        "large": random.random((90, 110)),
        "turned": np.asfortranarray(random.random((70, 60)).astype("f4")),
    }
    value |= {"cube": np.asfortranarray(random.random((3, 4, 5)).astype(">f4")), "scalar": np.float32(3.25)}
    value |= {
        "zero": np.zeros((0, 3), "i2"),
        "none": np.array(7.5),
        "step": np.int64(9),
        "yes": np.bool_(True),
    }
    value["deep"] = {"list": [np.arange(3), (np.ones(2), {"x": 1.5})]}
    path = save(tmp_path, value, protocol)
    found = opened(path, "numpy-pickle")
    flat = {("deep", "list", "0"): value["deep"]["list"][0], ("deep", "list", "1", "0"): np.ones(2)}
    flat |= {(name,): array for name, array in value.items() if name != "deep"}
    assert set(found.manifest.tensors) == set(flat)
    for key, array in flat.items():
        spec = found.manifest.tensors[key]
        assert (spec.shape, spec.dtype) == (array.shape, array.dtype.name), key
        assert canonical(found, key) == bytes_of(array), key
    assert found.manifest.values["deep", "list", "1", "1", "x"] == 1.5
    assert found.manifest.step == 9
    assert found.detection.format_version == f"pickle protocol {protocol}"
    raw = found.reader.access(found.manifest.tensors["large",]).extents
    assert (raw is None) == (protocol == 2)
    readers.check_reader(found, regions=2)


def test_text_protocols(tmp_path):
    for protocol in (0, 1):
        path = save(tmp_path, {"w": np.arange(6.0), "n": [1, -2, True, 1.5, "é\n", None]}, protocol)
        with wherry.open(path) as found:
            assert found.detection.format == "numpy-pickle"
            assert found.read("w").tolist() == [0, 1, 2, 3, 4, 5]
            assert [found.manifest.values["n", str(i)] for i in range(5)] == [1, -2, True, 1.5, "é\n"]


def test_python_2_wrote_bytes_as_its_text(tmp_path):
    data = pickle.dumps({"w": np.arange(300.0)}, 2)
    state = np.arange(300.0).tobytes()
    text = state.decode("latin-1").encode()
    start = data.index(b"X" + len(text).to_bytes(4, "little"))
    end = data.index(b"R", start + 5 + len(text)) + 1
    tail = data[data.index(b"c_codecs\nencode") : start]
    assert tail, "another pickler"
    old = data[:start] + b"T" + len(state).to_bytes(4, "little") + state + data[end:]
    # `_codecs.encode` was fetched from the memo before the text: drop it below the string.
    fetch = old.rindex(b"h", 0, start)
    old = old[:fetch] + old[fetch + 2 :]
    path = tmp_path / "old.pkl"
    path.write_bytes(old)
    with wherry.open(path) as found:
        assert found.read("w").tolist() == np.arange(300.0).tolist()
        assert found.reader.access(found.manifest.tensors["w",]).extents is not None


def test_spelt_bytes_are_read_by_pages(tmp_path):
    random = np.random.default_rng(2)
    array = random.integers(0, 256, 5_000_003, dtype="u1")
    path = save(tmp_path, {"w": array, "x": 1}, 2)
    with wherry.open(path) as found:
        assert np.array_equal(found.read("w"), array)
        for start, stop in (
            (0, 1),
            (1 << 20, (1 << 20) + 5),
            (3_333_333, 4_444_444),
            (5_000_000, 5_000_003),
            (7, 7),
        ):
            assert np.array_equal(found.read("w", (slice(start, stop),)), array[start:stop])


def test_jax_arrays(tmp_path):
    jnp = pytest.importorskip("jax.numpy")
    path = save(tmp_path, {"a": jnp.arange(5), "b": jnp.ones((2, 3), jnp.bfloat16)})
    with wherry.open(path) as found:
        assert found.read("a").tolist() == [0, 1, 2, 3, 4]
        assert found.manifest.tensors["b",].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"a": 1, "b": "text"}, NotACheckpointError),
        ({"a": np.array(["text"])}, UnsupportedError),
        ({"a": np.array([None, 1], dtype=object)}, UnsupportedError),
        ({"a": np.zeros(2, [("x", "f4")])}, UnsupportedError),
        ({"a": np.zeros(2, "M8[s]")}, UnsupportedError),
        ({"a": np.ma.zeros(2)}, UnsupportedError),
        ({"a": np.ones(2), "b": collections.UserDict()}, HostileError),
        ({"a": np.ones(2), "b": np.load}, UnsupportedError),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, value, error):
    path = save(tmp_path, value)
    with pytest.raises(error):
        wherry.open(path)


def test_a_pickle_of_something_else_is_not_claimed(tmp_path):
    row = find_format("numpy-pickle")
    for number, value in enumerate(({"a": 1}, [1, 2], "text", {"x": collections.OrderedDict(a=1)})):
        for protocol in PROTOCOLS:
            assert row.detect(Glimpse(locate(save(tmp_path, value, protocol, f"{number}.pkl")))) is None
    for text in ("Nothing here.", "{}", "(a) is b.", "import numpy\n.", "cats are nice.\n", "d.", "i"):
        (tmp_path / "notes.txt").write_text(text)
        assert row.detect(Glimpse(locate(tmp_path / "notes.txt"))) is None, text


def test_sizes_must_agree(tmp_path):
    path = save(tmp_path, {"a": np.arange(1000.0)})
    data = path.read_bytes()
    path.write_bytes(data.replace(b"M\xe8\x03\x85", b"M\xe9\x03\x85", 1))
    with pytest.raises(CorruptError, match="size mismatch of a numpy array"):
        wherry.open(path)
    path.write_bytes(data[:-4000])
    with pytest.raises(CorruptError):
        wherry.open(path)
    path.write_bytes(data + b"more")
    with pytest.raises(CorruptError, match="after the pickle"):
        wherry.open(path)


def test_shared_arrays_say_so_and_convert(tmp_path):
    array = np.arange(4000.0).reshape(50, 80)
    path = save(tmp_path, {"a": array, "b": array, "t": array.T, "step": np.int64(4)})
    with wherry.open(path) as found:
        assert found.manifest.tensors["b",].tags == {"shares": "a"}
    wherry.convert(path, tmp_path / "out.safetensors", to="safetensors", lineage=False)
    with wherry.open(tmp_path / "out.safetensors") as found:
        assert np.array_equal(found.read("t"), array.T)
        assert np.array_equal(found.read("b"), array)


def test_a_remote_pickle(tmp_path):
    store = remote_store("memory")
    store.put(
        "/pickles/params.pkl",
        pickle.dumps({"a": np.arange(400_000.0), "b": np.asfortranarray(np.ones((9, 99)))}),
    )
    with wherry.open("memory://pickles/params.pkl") as found:
        assert found.read("a")[-1] == 399_999
        assert found.read("b").sum() == 891


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_pickles_never_crash(data, tmp_path):
    value = {"a": np.arange(6.0).reshape(2, 3).T, "b": [np.ones(300), 3, {"c": np.int32(3)}]}
    path = tmp_path / "a.pkl"
    path.write_bytes(mutated(data, pickle.dumps(value, data.draw(st.sampled_from([2, 3, 4, 5])))))
    assert_ends_well(path, "numpy-pickle")
