"""The OCDBT databases that we encode, read back by tensorstore."""

import os

import pytest
from google_crc32c import value as crc32c

from wherry.integrations.containers.ocdbt import write
from wherry.integrations.containers.ocdbt.write import Reference, encode_database

ts = pytest.importorskip("tensorstore")


def put(folder, values, data=b""):
    (folder / "d").mkdir()
    (folder / "d" / ("0" * 32)).write_bytes(data)
    nodes, manifest = encode_database(values, f"d/{'f' * 32}", bytes(range(16)), 1_700_000_000_000_000_000)
    (folder / "d" / ("f" * 32)).write_bytes(nodes)
    (folder / "manifest.ocdbt").write_bytes(manifest)
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()


def test_crc32c_has_the_published_check_value():
    assert crc32c(b"123456789") == 0xE3069283


def test_values_inline_and_in_files_come_back(tmp_path):
    data = os.urandom(5000)
    outside = {f"b/{at}": Reference(f"d/{'0' * 32}", at * 10, 10) for at in range(400)}
    values = {"a/.zarray": b"{}", "ä": b"", "a/0": b"x" * 3000, **outside}
    store = put(tmp_path, values, data)
    assert sorted(store.list().result()) == sorted(key.encode() for key in values)
    for key, value in values.items():
        wanted = data[value.offset : value.offset + value.length] if isinstance(value, Reference) else value
        assert store.read(key).result().value == wanted


@pytest.mark.parametrize("count", [1, 7, 8, 50, 343])
def test_trees_of_any_height(tmp_path, monkeypatch, count):
    monkeypatch.setattr(write, "_MOST_ENTRIES", 7)
    values = {f"layer/{at % 5}/{at}": str(at).encode() for at in range(count)}
    store = put(tmp_path, values)
    assert {key.decode(): store.read(key).result().value for key in store.list().result()} == values


def test_tensorstore_can_go_on_writing(tmp_path):
    store = put(tmp_path, {"a": b"1", "b": b"2"})
    store.write("c", b"3").result()
    store.delete_range(ts.KvStore.KeyRange("a", "b")).result()
    assert [store.read(key).result().value for key in sorted(store.list().result())] == [b"2", b"3"]


def test_what_dump_says_is_what_was_put(tmp_path):
    put(tmp_path, {"a": b"1", "b": Reference(f"d/{'0' * 32}", 3, 4)}, bytes(10))
    base = ts.KvStore.open(f"file://{tmp_path}/").result()
    found = ts.ocdbt.dump(base).result()
    assert found["config"]["max_decoded_node_bytes"] == 100_000_000
    (version,) = found["versions"]
    assert version["root"]["statistics"]["num_keys"] == 2
    assert version["root"]["statistics"]["num_indirect_value_bytes"] == 4
