"""What we write is loaded bit-equal by libraries of 2024 too: Orbax 0.6.4 and 0.5.9, flax 0.8, torch 2.3.

Slow: the environments of these libraries are made once, with pip; where it cannot make one, its tests are skipped
with what pip said.
"""

from __future__ import annotations

import hashlib
import random

import pytest

import wherry
from tests.support.formats import create, write_all
from tests.support.generations import loaded
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.formats.registry import find_format
from wherry.store.local_store import locate
from wherry.testing import samples, writers
from wherry.testing.samples import random_bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4000)]  # pip may take long

STEP = 7
ROWS = (
    ("embed.weight", (1300, 517), "float32"), ("layer_0.kernel", (33, 65), "bfloat16"),
    ("layer_0.scale", (33,), "float16"), ("layer_0.mask", (5, 3), "bool"), ("layer_1.kernel", (33, 65), "bfloat16"),
    ("layer_1.quantised", (7, 9), "int8"), ("layer_1.count", (), "int32"), ("table", (3, 700_001), "uint8"),
)  # fmt: skip
ORBAX_CASES = [
    ("orbax", {}, ""), ("orbax", {"compression": "zstd"}, ""), ("orbax", {"ocdbt": "false"}, ""),
    ("orbax", {"ocdbt": "false", "compression": "zstd", "chunks": "1"}, ""), ("orbax", {"chunks": "1"}, ""),
    ("maxtext", {"zarr": "2"}, "items"), ("maxtext", {"zarr": "2", "ocdbt": "false"}, "items"),
    ("penzai", {}, ""), ("t5x-orbax", {}, "state"), ("t5x-orbax", {"ocdbt": "false"}, "state"),
]  # fmt: skip


@pytest.fixture(scope="module")
def contents():
    """Key path in one part → (spec, bytes)."""
    generator = random.Random(0)
    specs = [TensorSpec((name,), shape, dtype) for name, shape, dtype in ROWS]
    return {spec.path: (spec, random_bytes(spec, generator)) for spec in specs}


@pytest.fixture(scope="module")
def flat(contents, tmp_path_factory):
    """A checkpoint with one-part key paths."""
    path = tmp_path_factory.mktemp("flat") / "model.safetensors"
    manifest = Manifest({key: spec for key, (spec, _data) in contents.items()}, kind="params")
    write_all(create(path, "safetensors", manifest), {key: data for key, (_spec, data) in contents.items()})
    return path


@pytest.fixture(scope="module")
def nested(contents, tmp_path_factory):
    """The same below `params`, as a tree, with a step next to it."""
    path = tmp_path_factory.mktemp("nested") / "model.pt"
    specs = [TensorSpec(branch(key), spec.shape, spec.dtype) for key, (spec, _data) in contents.items()]
    manifest = Manifest(
        {spec.path: spec for spec in specs}, values={("step",): STEP}, kind="params", step=STEP
    )
    write_all(
        create(path, "torch-zip", manifest), {branch(key): data for key, (_spec, data) in contents.items()}
    )
    return path


def branch(key):
    return ("params", *key[0].split("."))


def wanted(contents, name=lambda key: key):
    """What an old library must find."""
    return {
        name(key): (spec.dtype, spec.shape, hashlib.sha256(data).hexdigest())
        for key, (spec, data) in contents.items()
    }


def arrays(found):
    return {path: node for path, node in found.items() if isinstance(node, tuple) and path[-1] != "step"}


def assert_step(found):
    node = found["step",]
    assert node == STEP or node[2] == hashlib.sha256(STEP.to_bytes(node_size(node), "little")).hexdigest()


def node_size(node):
    return {"int32": 4, "int64": 8}[node[0]]


@pytest.mark.parametrize(("to", "options", "inside"), ORBAX_CASES, ids=str)
def test_orbax_0_6_4(contents, nested, tmp_path, to, options, inside):
    wherry.convert(nested, tmp_path / "out", to=to, options=options, lineage=False)
    found = loaded("orbax", "pytree", tmp_path / "out" / inside)
    assert arrays(found) == wanted(contents, branch)
    assert_step(found)


def test_paxml_1_2_by_its_orbax_0_5_9(contents, nested, tmp_path):
    wherry.convert(nested, tmp_path / "out", to="paxml", options={"version": "1.2"}, lineage=False)
    found = loaded("pax", "pytree", tmp_path / "out" / "state")
    assert arrays(found) == wanted(contents, branch)
    assert_step(found)


def test_paxml_1_1_by_its_names(contents, flat, tmp_path):
    """PaxML names the arrays that it asks for, and opens each with tensorstore."""
    rules = {"rename": "{name*} -> mdl_vars/params/{name*}"}
    wherry.convert(flat, tmp_path / "out", to="paxml", options=rules, lineage=False)
    found = loaded("pax", "names", tmp_path / "out" / "state")
    assert arrays(found) == wanted(contents, lambda key: (f"mdl_vars.params.{key[0]}",))


def test_flax_0_8(contents, nested, tmp_path):
    wherry.convert(nested, tmp_path / "out", to="flax-msgpack", lineage=False)
    found = loaded("orbax", "msgpack", tmp_path / "out")
    assert arrays(found) == wanted(contents, branch)
    assert_step(found)


def test_torch_2_3_loads_dcp(contents, flat, tmp_path):
    wherry.convert(flat, tmp_path / "out", to="dcp", options={"for_torch": "2.3"}, lineage=False)
    assert loaded("torch", "dcp", tmp_path / "out") == wanted(contents)


def test_torch_2_3_loads_files(contents, nested, tmp_path):
    wherry.convert(nested, tmp_path / "out.pt", to="torch-zip", lineage=False)
    found = loaded("torch", "file", tmp_path / "out.pt")
    assert arrays(found) == wanted(contents, branch)
    assert_step(found)


@pytest.mark.parametrize("to", ["lingua", "lingua-consolidated"])
def test_torch_2_3_loads_lingua(tmp_path, to):
    """Lingua calls `dcp.load` on a step folder and `torch.load` on what it consolidated."""
    sample = samples.source(find_format(to))
    writers.make(sample, locate(tmp_path / "source"))
    options = {"for_torch": "2.3"} if to == "lingua" else {}
    wherry.convert(tmp_path / "source", tmp_path / "out", to=to, options=options, lineage=False)
    inside = ("dcp", "") if to == "lingua" else ("file", "consolidated.pth")
    found = loaded("torch", inside[0], tmp_path / "out" / inside[1])
    specs = sample.manifest.tensors
    sums = wanted({path: (specs[path], data) for path, data in sample.contents.items()})
    assert {path: found[path] for path in sums} == sums
