"""MaxText's scan form from the tree alone, and what is missing of a sharded checkpoint in words."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import tensorstore as ts

import wherry
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Sharding, TensorSpec
from wherry.integrations.containers.orbax.tree import tree_json
from wherry.integrations.containers.zarr import kvstore
from wherry.integrations.containers.zarr import metadata as zarr
from wherry.integrations.containers.zarr import reader as shortfall
from wherry.integrations.containers.zarr.layout import build_metadata
from wherry.integrations.containers.zarr.listing import Listing, Value
from wherry.integrations.containers.zarr.reader import StoredArray
from wherry.integrations.formats import maxtext
from wherry.storage.stores import locate


def look(*shapes):
    specs = {
        tuple(path.split("/")): TensorSpec(tuple(path.split("/")), extents, "float32")
        for path, extents in shapes
    }
    return maxtext.look(specs, maxtext.WRAPPED)


D = "params/params/decoder"


@pytest.mark.parametrize(
    ("paths", "scanned", "aliases"),
    [
        ([f"{D}/layers/mlp/wo/kernel"], True, ()),
        ([f"{D}/layers/layers_0/mlp/wo/kernel"], True, ()),
        ([f"{D}/scanned_blocks/local_layers/w", f"{D}/layers_remainder/layers_0/w"], True, ()),
        ([f"{D}/pipeline_module/layers/mlp/wo/kernel"], True, ()),
        ([f"{D}/layers_0/mlp/wo/kernel", f"{D}/moe_layers_1/gate/kernel"], False, ()),
        ([f"{D}/layers/0/mlp/wo/kernel"], False, ("layers/0",)),
        ([f"{D}/dense_layer_0/mlp/wo/kernel"], False, ("dense_layer_0",)),
        ([f"{D}/layers/mlp/wo/kernel", f"{D}/layers_0/mlp/wo/kernel"], None, ()),
        ([f"{D}/decoder_norm/scale"], None, ()),
    ],
)
def test_scan_form(paths, scanned, aliases):
    seen = look(*((path, (4, 2, 3)) for path in paths))
    assert (seen.scanned, seen.aliases) == (scanned, aliases)


@pytest.mark.parametrize(
    ("shapes", "axis", "layers"),
    [
        ([(8, 3, 2, 4), (8, 3)], 1, 3),
        ([(3, 8, 4), (3, 5)], 0, 3),
        ([(3, 3, 8), (3, 3)], 1, 3),
        ([(8, 3), (5, 4)], None, None),
    ],
)
def test_scan_axis(shapes, axis, layers):
    seen = look(*((f"{D}/layers/part{number}/kernel", extents) for number, extents in enumerate(shapes)))
    assert seen.groups == {f"{D}/layers": (axis, layers)}


class Stored:
    """What `hosts` asks of a reader."""

    def __init__(self, arrays, keys):

        self.location = locate("/nowhere")
        self.arrays = arrays
        self.listing = Listing(self.location, {key: Value(4, None) for key in keys})


def stored(name, extents, chunks):

    metadata = build_metadata("float32", extents, chunks, version=2, compression="none")
    return StoredArray(name, zarr.parse(json.dumps(metadata).encode(), 2, name))


@pytest.mark.parametrize(
    ("present", "words"), [(2, "1 of 4 hosts"), (4, "1 of 2 hosts"), (6, "3 of 4 hosts")]
)
def test_shares_of_several_devices_each(present, words):
    sharding = Sharding(mesh=(("data", 4), ("model", 2)), spec=(("data", "model"), None))
    arrays = {(name,): stored(name, (8_000_000_000, 8), (1_000_000_000, 8)) for name in ("a", "b")}
    keys = [f"{name}/{index}.0" for name in ("a", "b") for index in range(present)]
    said = shortfall.shortfall(Stored(arrays, keys), dict.fromkeys(arrays, sharding))
    assert said.startswith(words)
    assert f"{present * 64} of 512 GB present" in said


def test_a_replicated_array_is_one_devices_work():
    sharding = Sharding(mesh=(("data", 2),), spec=(None,))
    arrays = {("a",): stored("a", (8,), (8,)), ("b",): stored("b", (8,), (8,))}
    said = shortfall.shortfall(Stored(arrays, ["a/0"]), dict.fromkeys(arrays, sharding))
    assert "hosts" not in said
    assert "32 of 64 bytes present, 1 of 2 chunks" in said


def two_processes(folder):
    """An item that two processes wrote and Orbax merged, made with tensorstore: each wrote one of the arrays."""

    item = folder / "0" / "items"
    paths = [("params", "params", "decoder", "layers", part, "kernel") for part in ("wi", "wo")]
    using, top = kvstore.context(), kvstore.store_spec(locate(item), ocdbt=True, writable=True)
    item.mkdir(parents=True)
    for process, path in enumerate(paths):
        own = locate(item / f"ocdbt.process_{process}")
        (item / own.name).mkdir()
        spec = kvstore.store_spec(own, ocdbt=True, writable=True)
        metadata = build_metadata("float32", (64, 3, 64), (64, 3, 64), version=2, compression="none")
        data = ts.open(
            kvstore.array_spec(spec, ".".join(path), 2, metadata), create=True, context=using
        ).result()
        data.write(np.full((64, 3, 64), process + 1, "f4")).result()
        source, target = (kvstore.open_store(one, using, str(item)) for one in (spec, top))
        source.experimental_copy_range_to(target).result()
    manifest = Manifest(tensors={path: TensorSpec(path, (64, 3, 64), "float32") for path in paths})
    (item / "_METADATA").write_text(json.dumps(tree_json(manifest, zarr3=False, ocdbt=True, custom={})))
    return item


def test_the_share_of_a_lost_process_is_said_in_words(tmp_path):
    item = two_processes(tmp_path)
    found = wherry.detect(tmp_path / "0")
    assert (found.format, found.verdict) == ("maxtext", "ok")
    shutil.rmtree(item / "ocdbt.process_1")
    reason = wherry.detect(tmp_path / "0").reason
    assert reason.startswith("1 of 2 hosts, 49.15 of 98.30 kB present, 1 of 2 chunks, 1 of 2 arrays")
