"""Orbax items whose arrays were stored by tensorstore in any grid and codec, and a child process that converts them."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from tests.support.orbax import write

MIB = 1 << 20
ZSTD3 = {"name": "zstd", "configuration": {"level": 1, "checksum": True}}
BYTES3 = {"name": "bytes", "configuration": {"endian": "little"}}


ZSTD = {"compressor": {"id": "zstd", "level": 1}}
GZIP = {"compressor": {"id": "gzip", "level": 1}}
ZLIB = {"compressor": {"id": "zlib", "level": 1}}
BLOSC = {"compressor": {"id": "blosc", "cname": "lz4", "clevel": 1, "shuffle": 1}}
NONE = {"compressor": None}
GZIP3 = {"name": "gzip", "configuration": {"level": 1}}


def shards(inner, *codecs):
    """A zarr 3 codec chain of shards, as Orbax writes them."""
    chain = [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": list(inner),
                "codecs": [BYTES3, *codecs],
                "index_codecs": [BYTES3, {"name": "crc32c"}],
                "index_location": "end",
            },
        }
    ]
    return {"codecs": chain}


@lru_cache(2)
def values(shape, dtype="bfloat16", seed=0):
    """Numbers that compress a little, as weights do; read-only, for the next test gets the same."""
    made = np.random.default_rng(seed).standard_normal(shape, dtype="f4").astype(np.dtype(dtype))
    made.flags.writeable = False
    return made


def stored(folder: Path, array, chunks, *, version=2, ocdbt=False, **changes: Any) -> Path:
    """An Orbax item with one array `w` of our metadata and whatever bytes tensorstore writes for it.

    Args:
        folder: the item, which is made.
        array: the values.
        chunks: its chunk grid.
        version: of zarr.
        ocdbt: whether values lie in an OCDBT database.
        changes: fields of the metadata that differ from uncompressed ones.
    """
    from wherry.integrations.containers.zarr.layout import build_metadata

    write(folder, {("w",): array.ravel()[:1]}, zarr=str(version), ocdbt=ocdbt)
    fields = build_metadata(array.dtype.name, array.shape, chunks, version=version, compression="none")
    base = {"driver": "file", "path": f"{folder}/"}
    inside = {"driver": "ocdbt", "base": base, "path": "w/"} if ocdbt else {**base, "path": f"{folder}/w/"}
    spec = {"driver": {2: "zarr", 3: "zarr3"}[version], "kvstore": inside, "metadata": fields | changes}
    made = ts.open(
        {**spec, "store_data_equal_to_fill_value": True}, create=True, delete_existing=True
    ).result()
    made.write(array).result()
    return folder


CHILD = """
import json, sys
from wherry.converter.convert import convert
receipt = convert(sys.argv[1], sys.argv[2], to="safetensors", memory=sys.argv[3], lineage=False)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps([int(peak.split()[1]) << 10, receipt.target.weights_digest, receipt.seconds]))
"""


def converted(source, target, memory="32MiB"):
    """Convert in a process of its own: peak resident bytes, weights digest, seconds."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(source), str(target), memory],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
