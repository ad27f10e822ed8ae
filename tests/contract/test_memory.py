"""2 GB of each container are digested within 400 MB of resident memory, compressed ones and single huge chunks too.

Slow: each case is written, by our writer or by the library that its files come from, and digested in a process of
its own. Nothing is kept.
"""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

import wherry
from tests.support.forms import options_for
from tests.support.large import NAMES, WRITTEN, make_source, measured

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LIMIT = 400 << 20
LAYERS = [*NAMES, *(f"layer.{number}" for number in range(8 - len(NAMES)))]
SHAPES = {**dict.fromkeys(LAYERS, (16, 1024, 4096)), "table": (512, 1024, 1024)}
CODECS = [
    (name, {"compression": codec})
    for name, row in WRITTEN.items() if "compression" in row.options
    for codec in row.options["compression"].choices if codec != "none"
]  # fmt: skip
CASES = [
    *((name, {}) for name in WRITTEN), *CODECS,
    ("orbax", {"zarr": "3", "compression": "zstd"}),
    ("orbax", {"chunks": "whole", "compression": "zstd"}), ("t5x-legacy", {"chunks": "whole", "compression": "gzip"}),
]  # fmt: skip
DIGEST = """
import wherry
found = wherry.inspect(sys.argv[1], digest=True)
result = {spec.name: found.manifest.digests[path] for path, spec in found.manifest.tensors.items()}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = make_source(tmp_path_factory.mktemp("gigabytes") / "model", SHAPES, "float16")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def digests(source):
    """Tensor digests, sorted: names differ between systems."""
    with wherry.open(source) as checkpoint:
        assert checkpoint.manifest.nbytes == 2 << 30
    return check(source, None)


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    shutil.rmtree(tmp_path)


def check(path, wanted):
    """Digest in a child; the peak, and the digests."""
    result, peak = measured(DIGEST, path)
    found = sorted(result.values())
    assert wanted is None or found == wanted
    assert peak < LIMIT, f"{peak / 1e6:.0f} MB"
    return found


@pytest.mark.parametrize(("to", "options"), CASES, ids=str)
def test_written_by_us(source, digests, folder, to, options):
    wherry.convert(
        source, folder / "out", to=to, options={**options_for(to), **options}, lineage=False, verify="none"
    )
    check(folder / "out", digests)


def arrays(source: Path) -> dict[str, np.ndarray]:
    """The tensors, mapped and not read."""
    file = source / "model.safetensors"
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    del header["__metadata__"]
    return {
        name: np.memmap(file, "f2", "r", 8 + length + row["data_offsets"][0], tuple(row["shape"]))
        for name, row in header.items()
    }


def save_npz(tensors, path):
    """As `np.savez_compressed` does, with less effort for the codec."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in tensors.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array)


def save_pickle(tensors, path, protocol):
    with path.open("wb") as file:
        pickle.dump({name: np.asarray(array) for name, array in tensors.items()}, file, protocol)


def save_equinox(tensors, path):
    with path.open("wb") as file:
        for array in tensors.values():
            np.save(file, array)


def save_gguf(tensors, path):
    def text(word):
        return struct.pack("<Q", len(word)) + word.encode()

    at, rows = 0, b""
    for name, array in tensors.items():
        shape = array.shape[::-1]
        rows += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 1, at)
        at += array.nbytes
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 0) + rows
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % 32))
        for array in tensors.values():
            array.tofile(file)


def save_torch(tensors, path, *, zipped):
    torch = pytest.importorskip("torch")
    state = {name: torch.from_numpy(array) for name, array in tensors.items()}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)


def save_dcp(tensors, path):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    extension = pytest.importorskip("torch.distributed.checkpoint._extension")
    writer = dcp.FileSystemWriter(str(path), _extensions=[extension.ZStandard()])
    state = {name: torch.from_numpy(array) for name, array in tensors.items()}
    dcp.save(state, storage_writer=writer, no_dist=True)


FOREIGN = {
    "compressed.npz": save_npz,
    "protocol4.pkl": lambda tensors, path: save_pickle(tensors, path, 4),
    "protocol2.pkl": lambda tensors, path: save_pickle(tensors, path, 2),
    "model.eqx": save_equinox,
    "model.gguf": save_gguf,
    "legacy.pt": lambda tensors, path: save_torch(tensors, path, zipped=False),
    "zip.pt": lambda tensors, path: save_torch(tensors, path, zipped=True),
    "dcp-zstd": save_dcp,
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", FOREIGN)
def test_written_by_others(source, digests, folder, name):
    FOREIGN[name](arrays(source), folder / name)
    check(folder / name, digests)
