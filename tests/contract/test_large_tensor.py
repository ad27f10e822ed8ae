"""One tensor of 4 GB through each container under the default budget: bit-equal, in the same memory as a small one.

Slow: each case writes and reads back 4 GB, in a process of its own whose peak is measured.
"""

from __future__ import annotations

import json
import shutil

import pytest

import wherry
from tests.support.forms import options_for
from tests.support.large import NAMES, WRITTEN, make_source, measured

SHAPE = (2048, 1024, 1024)  # bfloat16, 4 GiB
BASE = 130 << 20  # an interpreter with numpy, SQLAlchemy and, where chunks are encoded, codecs
BUDGET = 128 << 20
HELD = [name for name, row in WRITTEN.items() if "bfloat16" in row.holds.dtypes]
CONVERT = """
import wherry
source, target, to, options = sys.argv[1:]
result = wherry.convert(source, target, to=to, options=json.loads(options), lineage=False).verification["ok"]
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """One tensor whose blocks all differ, named so that every format takes it."""
    (name,) = NAMES[:1] or ["w"]
    folder = make_source(tmp_path_factory.mktemp("large") / "model", {name: SHAPE}, "bfloat16")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def place(tmp_path):
    """Where the target goes; nothing of 4 GB is kept."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("to", HELD)
def test_one_tensor_of_4_gb(source, place, to):
    checked, peak = measured(CONVERT, source, place / to, to, json.dumps(options_for(to)))
    assert checked
    assert peak < BASE + BUDGET, f"{peak / 1e6:.0f} MB"
    with wherry.open(place / to) as written:
        (spec,) = written.manifest.tensors.values()
        assert (spec.shape, spec.dtype) == (SHAPE, "bfloat16")
        probe = written.read(spec.path, (slice(1234, 1235), slice(7, 9), slice(0, 1024)))
    with wherry.open(source) as original:
        (spec,) = original.manifest.tensors.values()
        wanted = original.read(spec.path, (slice(1234, 1235), slice(7, 9), slice(0, 1024)))
    assert probe.tobytes() == wanted.tobytes()
