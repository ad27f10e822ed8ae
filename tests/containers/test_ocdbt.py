"""OCDBT: what we encode, read back by tensorstore, and each flipped bit of the metadata, found."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from google_crc32c import value as crc32c

import wherry
from tests.support import orbax as support
from wherry.cli import main
from wherry.errors import CorruptError, HostileError
from wherry.integrations.containers.ocdbt import read as ocdbt_reader
from wherry.integrations.containers.ocdbt import write
from wherry.integrations.containers.ocdbt.read import read_database
from wherry.integrations.containers.ocdbt.write import Reference, encode_database
from wherry.integrations.containers.zarr.listing import list_ocdbt
from wherry.store.local_store import locate

ts = pytest.importorskip("tensorstore")

SMALL = {f"a/{number}": bytes([number]) * number for number in range(12)}
LARGE = {f"b/{number}": bytes([number]) * 200 for number in range(4)}
CONFIGS = {
    "one leaf": {},
    "without compression": {"compression": None},
    "values in files": {"max_inline_value_bytes": 0},
    "a tree": {"max_decoded_node_bytes": 250, "max_inline_value_bytes": 16},
    "numbered manifests": {"manifest_kind": "numbered"},
    "old versions": {"version_tree_arity_log2": 1},
}


def written_by_tensorstore(folder, config):
    """Every value in a commit of its own, so that there are versions and nodes of several generations."""
    spec = {
        "driver": "ocdbt",
        "base": f"file://{folder}/",
        "config": {"max_inline_value_bytes": 100, **config},
    }
    store = ts.KvStore.open(spec).result()
    for key, value in {**SMALL, **LARGE}.items():
        store.write(key, value).result()


def written_by_us(folder, most):
    (folder / "d").mkdir()
    places, data = {}, b""
    for key, value in LARGE.items():
        places[key], data = Reference("d/values", len(data), len(value)), data + value
    (folder / "d" / "values").write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "_MOST_ENTRIES", most)
        nodes, manifest = encode_database({**SMALL, **places}, "d/nodes", bytes(range(16)), 1)
    (folder / "d" / "nodes").write_bytes(nodes)
    (folder / "manifest.ocdbt").write_bytes(manifest)


WRITERS = {
    **{
        name: lambda folder, config=config: written_by_tensorstore(folder, config)
        for name, config in CONFIGS.items()
    },
    "ours": lambda folder: written_by_us(folder, 1000),
    "ours, a tree": lambda folder: written_by_us(folder, 3),
}


def read(folder, nodes=None):
    """Every key and value, read by our reader; the places of the nodes go into `nodes`."""
    seen = [] if nodes is None else nodes
    found = {}
    for key, value in read_database(locate(folder), seen.append):
        found[key.decode()] = _bytes_at(folder, value) if isinstance(value, Reference) else value
    return found


def _bytes_at(folder, place):
    return (folder / place.file).read_bytes()[place.offset : place.offset + place.length]


def metadata_of(folder):
    """Files and the byte ranges in them that hold the manifest that is in force and the nodes of its version."""
    nodes = []
    read(folder, nodes)
    numbered = sorted(path.name for path in folder.glob("manifest.0*"))
    whole = [name for name in ["manifest.ocdbt", *numbered[-1:]] if (folder / name).exists()]
    ranges = [(name, 0, (folder / name).stat().st_size) for name in whole]
    return ranges + sorted({(node.file, node.offset, node.offset + node.length) for node in nodes})


def flipped(folder, name, at):
    """The file with one bit of one byte changed; another bit for each byte."""
    data = bytearray((folder / name).read_bytes())
    data[at] ^= 1 << at % 8
    return bytes(data)


@pytest.mark.parametrize("name", WRITERS)
def test_a_flipped_bit_in_any_byte_of_the_metadata_is_found(tmp_path, name):
    WRITERS[name](tmp_path)
    assert read(tmp_path) == {**SMALL, **LARGE}
    ranges = metadata_of(tmp_path)
    if "tree" in name:
        assert len(ranges) > 4, "an interior node and several leaves are meant"
    for file, start, stop in ranges:
        before = (tmp_path / file).read_bytes()
        for at in range(start, stop):
            (tmp_path / file).write_bytes(flipped(tmp_path, file, at))
            with pytest.raises(CorruptError) as caught:
                list_ocdbt(locate(tmp_path))
            assert caught.value.exit_code == 5, (file, at)
            (tmp_path / file).write_bytes(before)
    assert read(tmp_path) == {**SMALL, **LARGE}


def test_every_bit_of_a_manifest_and_of_a_leaf(tmp_path):
    written_by_us(tmp_path, 1000)
    for file, start, stop in metadata_of(tmp_path):
        before = (tmp_path / file).read_bytes()
        for bit in range(start * 8, stop * 8):
            data = bytearray(before)
            data[bit // 8] ^= 1 << bit % 8
            (tmp_path / file).write_bytes(data)
            with pytest.raises(CorruptError):
                read(tmp_path)
        (tmp_path / file).write_bytes(before)


@pytest.mark.parametrize("name", ["one leaf", "old versions"])
def test_what_the_newest_version_does_not_need_does_not_matter(tmp_path, name):
    """Nodes of older versions, of trees and of the tree of versions, are never read, so nothing hangs on them."""
    WRITERS[name](tmp_path)
    needed = metadata_of(tmp_path)
    places = [one for one in list_ocdbt(locate(tmp_path)).values.values() if one.file is not None]
    kept = {(file, at) for file, start, stop in needed for at in range(start, stop)}
    kept |= {(one.file, at) for one in places for at in range(one.offset, one.offset + one.length)}
    changed = 0
    for path in sorted((tmp_path / "d").iterdir()):
        file, data = f"d/{path.name}", bytearray(path.read_bytes())
        for at in range(len(data)):
            if (file, at) not in kept:
                data[at] ^= 0xFF
                changed += 1
        path.write_bytes(data)
    assert changed > 500
    assert read(tmp_path) == {**SMALL, **LARGE}


@pytest.mark.parametrize("size", [0, 1, 17])
def test_what_was_cut_off_is_found(tmp_path, size):
    written_by_us(tmp_path, 1000)
    manifest = tmp_path / "manifest.ocdbt"
    whole = manifest.read_bytes()
    for stop in (size, len(whole) - size - 1):
        manifest.write_bytes(whole[:stop])
        with pytest.raises(wherry.WherryError) as caught:
            read(tmp_path)
        assert caught.value.exit_code == 5


# Metadata that contradicts itself under right checksums, as a forger writes it.


def sealed_anew(data, change):
    """A node or manifest that was changed, with the checksum of what it is now."""
    changed = bytearray(change(bytearray(data[:-4])))
    return bytes(changed) + struct.pack("<I", crc32c(bytes(changed)))


def with_magic(data):
    data[:4] = struct.pack(">I", 0x0CDB1234)  # that of a node of the tree of versions
    return data


def with_length(data):
    data[4:12] = struct.pack("<Q", len(data) + 5)
    return data


def test_a_right_checksum_does_not_make_it_a_node_or_manifest(tmp_path):
    written_by_us(tmp_path, 1000)
    for file, start, stop in metadata_of(tmp_path):
        before = (tmp_path / file).read_bytes()
        for change in (with_magic, with_length):
            forged = sealed_anew(before[start:stop], change)
            (tmp_path / file).write_bytes(before[:start] + forged + before[stop:])
            with pytest.raises(CorruptError, match=r"invalid OCDBT node in .*: wrong magic number or length"):
                read(tmp_path)
        (tmp_path / file).write_bytes(before)


def forge(folder, monkeypatch, name, change):
    """Write a database of several nodes by an encoder of which one function is changed."""
    real = getattr(write, name)
    monkeypatch.setattr(write, name, lambda *arguments: change(real, *arguments))
    written_by_us(folder, 3)


def test_heights_that_do_not_fall(tmp_path, monkeypatch):
    forge(tmp_path, monkeypatch, "_interior", lambda real, children, height: real(children, height + 1))
    with pytest.raises(CorruptError, match="invalid height of an OCDBT node"):
        read(tmp_path)


def test_a_node_has_no_more_bytes_than_any_real_one(tmp_path, monkeypatch):
    """What lies in a sparse file is not read, whatever the length is that its parent names."""
    written_by_us(tmp_path, 1000)
    nodes = []
    read(tmp_path, nodes)
    assert nodes[0].length > (tmp_path / "manifest.ocdbt").stat().st_size
    monkeypatch.setattr(ocdbt_reader, "_MOST_BYTES", nodes[0].length - 1)
    with pytest.raises(HostileError, match=r"OCDBT node of \d+ bytes exceeds the limit of 104 MiB") as caught:
        read(tmp_path)
    assert caught.value.uri == str(tmp_path / "d" / "nodes")


def test_keys_that_are_not_in_order(tmp_path, monkeypatch):
    forge(tmp_path, monkeypatch, "_keys", lambda real, keys, *rest: real([*keys[1:], keys[0]], *rest))
    with pytest.raises(CorruptError, match="not in ascending order"):
        read(tmp_path)


def test_a_key_below_a_node_that_begins_after_it(tmp_path, monkeypatch):
    """The first key of a child is not below that by which its parent names it."""

    def change(real, children, height):
        first = min(children[-1].key + b"~", b"~")
        return real([*children[:-1], children[-1]._replace(key=first)], height)

    forge(tmp_path, monkeypatch, "_interior", change)
    with pytest.raises(CorruptError, match="not in ascending order"):
        read(tmp_path)


# A checkpoint: what each command says.

ARRAYS = {("w",): np.arange(600, dtype=np.float32), ("b",): np.arange(5, dtype=np.int32)}


@pytest.fixture(params=["wherry", "orbax"])
def checkpoint(request, tmp_path):
    """An Orbax item, written by us or by Orbax, with a sidecar."""
    folder = tmp_path / "item"
    if request.param == "wherry":
        support.write(folder, ARRAYS)
    else:
        ocp = pytest.importorskip("orbax.checkpoint")
        tree = {path[0]: array for path, array in ARRAYS.items()}
        with ocp.PyTreeCheckpointer() as saver:
            saver.save(folder, tree)
    wherry.inspect(folder, digest=True, write=True)
    assert run("verify", folder, "--level", "digest")[0] == 0
    return folder


def run(*words):
    """Exit code and JSON of a command."""
    out = io.StringIO()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(out):
        main([*map(str, words), "--json"])
    return ended.value.code, json.loads(out.getvalue())


@pytest.mark.parametrize(
    "words", [("inspect",), ("verify", "--level", "present"), ("verify", "--level", "digest")], ids=" ".join
)
def test_a_flipped_bit_in_the_metadata_of_a_checkpoint_ends_with_5(checkpoint, words):
    for file, start, stop in metadata_of(checkpoint):
        before = (checkpoint / file).read_bytes()
        for at in {start, start + 5, start + 13, (start + stop) // 2, stop - 5, stop - 1}:
            (checkpoint / file).write_bytes(flipped(checkpoint, file, at))
            code, said = run(words[0], checkpoint, *words[1:])
            assert (code, said.get("verdict", "corrupt")) == (5, "corrupt"), (file, at, said)
            (checkpoint / file).write_bytes(before)


def test_a_flipped_bit_is_found_by_opening(checkpoint):
    for file, start, stop in metadata_of(checkpoint):
        before = (checkpoint / file).read_bytes()
        for at in range(start, stop):
            (checkpoint / file).write_bytes(flipped(checkpoint, file, at))
            with pytest.raises(CorruptError), wherry.open(checkpoint):
                pass
        (checkpoint / file).write_bytes(before)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_flipped_bit_in_a_value_is_found_by_its_digest_alone(tmp_path, compression):
    folder = tmp_path / "item"
    support.write(folder, {("w",): ARRAYS["w",]}, compression=compression)
    wherry.inspect(folder, digest=True, write=True)
    [place] = [one for key, one in list_ocdbt(locate(folder)).values.items() if one.file is not None]
    for at in range(place.offset, place.offset + place.length, 97):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        data = flipped(copy, place.file, at)
        (copy / place.file).write_bytes(data)
        assert run("verify", copy, "--level", "present")[0] == 0
        code, said = run("verify", copy, "--level", "digest")
        assert code == 9 if compression == "none" else code in (5, 9)
        assert not said["ok"] if "ok" in said else said["verdict"] == "corrupt"
        shutil.rmtree(copy)
    assert Path(folder).exists()


# The OCDBT databases that we encode, read back by tensorstore.


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
