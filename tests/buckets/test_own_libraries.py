"""What wherry uploaded is opened by the systems' own libraries there, and what tensorstore reads for wherry too."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from wherry.converter.convert import convert
from wherry.prove.verify import verify

DRIVERS = {"gs": "gcs", "s3": "s3"}
VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)
TENSORSTORE = """
import tensorstore, numpy
base = {"driver": DRIVER, "bucket": BUCKET, "path": "made/"}
if DRIVER == "s3":
    base |= {"endpoint": URL, "aws_region": "us-east-1"}
packed = {"driver": "ocdbt", "base": base, "path": "a.w/"}
spec = {"driver": "zarr", "kvstore": packed if OCDBT else base | {"path": "made/a.w/"}}
found = numpy.asarray(tensorstore.open(spec).result(timeout=30).read().result(timeout=30))
"""
ORBAX = """
import numpy, orbax.checkpoint
found = numpy.asarray(orbax.checkpoint.PyTreeCheckpointer().restore(URI)["a.w"])
"""
TORCH = """
import torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
state = {"a.w": torch.zeros(3, 4)}
dcp.load(state, storage_reader=FsspecReader(URI), no_dist=True)
found = state["a.w"].numpy()
"""


def read_there(bucket, program, **more):
    """What a program in a process of its own reads at `made`."""
    facts = {
        "DRIVER": DRIVERS[bucket.protocol], "BUCKET": bucket.name, "URL": bucket.proxy.url, "URI": f"{bucket.uri}/made",
        **more,
    }  # fmt: skip
    head = "\n".join(f"{name} = {value!r}" for name, value in facts.items())
    env = {**os.environ, "TENSORSTORE_GCS_HTTP_URL": bucket.proxy.url, "JAX_PLATFORMS": "cpu"}
    text = f"{head}\n{program}\nimport json\nprint(json.dumps(found.tolist()))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def made(bucket, tmp_path):
    """Makes a checkpoint of a format in the bucket."""
    save_file({"a.w": VALUES}, tmp_path / "model.safetensors")

    def make(to, **options):
        uri = f"{bucket.uri}/made"
        convert(tmp_path / "model.safetensors", uri, to=to, options=options, lineage=False)

    return make


@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)  # tensorstore does not read az://
@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("ocdbt", [True, False], ids=["database", "objects"])
def test_tensorstore_reads_orbax_from_there(bucket, made, ocdbt, compression):
    made("orbax", ocdbt=ocdbt, compression=compression)
    assert read_there(bucket, TENSORSTORE, OCDBT=ocdbt) == VALUES.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["gs"], indirect=True)  # Orbax takes no s3:// path
@pytest.mark.parametrize("ocdbt", [True, False], ids=["database", "objects"])
def test_orbax_restores_from_there(bucket, made, ocdbt):
    made("orbax", ocdbt=ocdbt, compression="zstd")
    assert read_there(bucket, ORBAX) == VALUES.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)
def test_torch_loads_from_there(bucket, made):
    made("dcp")
    assert read_there(bucket, TORCH) == VALUES.tolist()


@pytest.mark.parametrize("bucket", ["gs", "s3"], indirect=True)  # tensorstore does not read az://
def test_what_tensorstore_reads_for_wherry_comes_from_the_same_endpoint(bucket, tmp_path, monkeypatch):
    """Small values inside a node of OCDBT, and codecs that only tensorstore decodes, are read by its own drivers."""
    import tensorstore

    folder = tmp_path / "made"
    base = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "path": "w/"}
    codec = {"compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}}
    spec = {
        "driver": "zarr",
        "kvstore": base,
        "metadata": {"shape": [3, 4], "chunks": [3, 4], "dtype": "<f4", **codec},
    }
    tensorstore.open(spec, create=True).result().write(VALUES).result()
    tree = {
        "tree_metadata": {
            "('w',)": {
                "key_metadata": [{"key": "w", "key_type": 2}],
                "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
            }
        },
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
    }
    (folder / "_METADATA").write_text(json.dumps(tree))
    (folder / "_CHECKPOINT_METADATA").write_text(
        json.dumps({"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2, "custom_metadata": {}})
    )
    (folder / "commit_success.txt").write_text("done")
    bucket.upload(folder, "made")
    assert verify(f"{bucket.uri}/made", level="roundtrip", against=folder).ok
