"""One tensor of 4 GB through each container under the default budget: bit-equal, in the same memory as a small one.

Slow: each case writes and reads back 4 GB, in a process of its own whose peak is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import wherry
from wherry.registry import formats

GB = 4 << 30
SHAPE = (2048, 1024, 1024)  # bfloat16
BASE = 130 << 20  # an interpreter with numpy, SQLAlchemy and, where chunks are encoded, codecs
BUDGET = 128 << 20
HELD = [
    name
    for name, row in formats().items()
    if row.create is not None and "bfloat16" in row.holds.dtypes and not row.holds.needs
]
CHILD = """
import json, resource, sys
import wherry
source, target, to = sys.argv[1:]
receipt = wherry.convert(source, target, to=to, lineage=False)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"weights": receipt.target.weights_digest, "checked": receipt.verification["ok"], "peak": peak}))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A safetensors file whose blocks all differ."""
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    header = {"w": {"dtype": "BF16", "shape": SHAPE, "data_offsets": [0, GB]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    block = bytearray(np.random.default_rng(0).bytes(8 << 20))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number in range(GB // len(block)):
            block[:8] = number.to_bytes(8, "little")
            file.write(block)
    yield path
    path.unlink()


@pytest.fixture
def place(tmp_path):
    """Where the target goes; nothing of 4 GB is kept."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("to", HELD)
def test_one_tensor_of_4_gb(source, place, to):
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(source), str(place / to), to],
        capture_output=True, text=True, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["checked"]
    assert found["peak"] < BASE + BUDGET, f"{found['peak'] / 1e6:.0f} MB"
    with wherry.open(place / to) as written:
        (spec,) = written.manifest.tensors.values()
        assert (spec.shape, spec.dtype) == (SHAPE, "bfloat16")
        probe = written.read(spec.path, (slice(1234, 1235), slice(7, 9), slice(0, 1024)))
    with wherry.open(source) as original:
        (spec,) = original.manifest.tensors.values()
        wanted = original.read(spec.path, (slice(1234, 1235), slice(7, 9), slice(0, 1024)))
    assert probe.tobytes() == wanted.tobytes()
