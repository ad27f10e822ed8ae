"""One flipped bit in the data of a format: the container reports it if it can, and else a digest changes.

A format whose container has a checksum over its data ends with `corrupt`, whether it is verified or converted, and a
conversion leaves nothing. A format without one is read to the last byte, so that its digests differ.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import wherry
from tests.support import ocdbt, rank_files, tf_bundle, universal, zero
from tests.support.audit import flip
from tests.support.corpus import expected, home, needs
from tests.support.made import MAKERS
from tests.support.ranks import two_ranks
from tests.support.variants import CASES, words
from wherry.errors import CorruptError
from wherry.formats.registry import find_format, formats
from wherry.testing import samples, writers

# Containers with a checksum over the data of every tensor: a CRC of each member of a zip archive.
ARCHIVES = {
    "dcp", "lingua", "lingua-consolidated", "megatron", "megatron-ranks", "npz", "torch-zip", "torchtitan",
}  # fmt: skip
# Without one; a codec may have its own: gzip's CRC-32, and zstd's checksum, which zarr 3 asks for.
PLAIN = {
    "flax-msgpack", "huggingface", "huggingface-flax", "maxtext", "orbax", "paxml", "penzai", "safetensors",
    "t5x-legacy", "t5x-orbax", "vllm-sharded",
}  # fmt: skip
# Formats that are only read: those in READ have a checksum over their data, and a case below. The others have none:
# `verify` reads every byte of them, and finds another one where the ledger or a sidecar has the digests.
READ = {"deepspeed-universal", "fsdp", "meta-consolidated", "tf-bundle"}
UNCHECKED = {
    "dcp-safetensors",
    "deepspeed",
    "equinox",
    "flax-gda",
    "gguf",
    "numpy-pickle",
    "ocdbt",
    "paxml-flax",
    "torch-legacy",
    "torchscript",
}
SHAPE = (512, 640)


def test_every_format_is_here():
    named = ARCHIVES | PLAIN | READ | UNCHECKED
    assert set(formats()) == named, "say whether the new format has a checksum over its data"


def has_checksum(name, options):
    codec = options.get("compression")
    zarr3 = name == "maxtext" or options.get("zarr") == "3"
    return name in ARCHIVES or codec == "gzip" or (codec == "zstd" and zarr3)


def made(tmp_path, name, options):
    """A checkpoint by the format's own writer, without a record, and the file that holds its largest tensor."""
    row = find_format(name)
    sample = samples.source(row, largest=SHAPE, options=options)
    place = writers.staging_place(tmp_path)
    writers.make(sample, place)
    out = tmp_path / "out"
    shutil.move(place.path, out)
    with wherry.open(out, format=name) as checkpoint:
        largest = max(checkpoint.manifest.tensors.values(), key=lambda spec: spec.nbytes)
        extents = checkpoint.reader.access(largest).extents
    if extents:
        return out, [(extents[0].location.path, extents[0].offset + extents[0].length // 2)]
    files = [out] if out.is_file() else [path for path in out.rglob("*") if path.is_file()]
    file = max(files, key=lambda path: path.stat().st_size)
    return out, [(file, file.stat().st_size // 2)]


def require_found(out, name, tmp_path, to="orbax"):
    found = wherry.verify(out, level="digest", format=name)
    assert (found.verdict, found.exit_code) == ("corrupt", 5)
    with pytest.raises(CorruptError):
        wherry.convert(out, tmp_path / "target", to=to, format=name)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[f"{name}-{words(options)}" for name, options in CASES]
)
def test_a_flipped_bit_of_the_data(tmp_path, name, options):
    out, [(file, at)] = made(tmp_path, name, options)
    intact = wherry.verify(out, level="digest", format=name)
    assert intact.verdict == "read"
    flip(Path(file), at)
    if has_checksum(name, options):
        require_found(out, name, tmp_path, to="torch-zip")
        return
    found = wherry.verify(out, level="digest", format=name)
    if found.verdict == "read":
        assert found.to_json()["digests"] != intact.to_json()["digests"], "not every byte was read"
    else:
        assert found.verdict == "corrupt"  # a codec noticed by itself


VALUES = np.random.default_rng(7).normal(size=SHAPE).astype("f4")


def tensor_bundle(folder):
    tf_bundle.write(folder, {"w": VALUES})
    return folder / "ckpt.data-00000-of-00001"


def deflated(folder):
    folder.mkdir()
    np.savez_compressed(folder / "m.npz", w=VALUES)
    return folder / "m.npz"


def fortran(folder):
    folder.mkdir()
    np.savez(folder / "m.npz", w=np.asfortranarray(VALUES))
    return folder / "m.npz"


def shared_storage(folder):
    """Tensors that share one storage, as the parts of a fused projection do; the archive has one CRC for all of it."""
    import torch

    folder.mkdir()
    whole = torch.from_numpy(VALUES)
    torch.save({"q": whole[:200], "k": whole[200:400], "all": whole}, folder / "m.pt")
    return folder / "m.pt"


def hidden_storage(folder):
    """A tensor that is a small part of a storage, the rest of which no tensor names."""
    import torch

    folder.mkdir()
    torch.save({"w": torch.from_numpy(VALUES)[100:400]}, folder / "m.pt")
    return folder / "m.pt"


def transposed(folder):
    import torch

    folder.mkdir()
    torch.save({"w": torch.from_numpy(VALUES).T}, folder / "m.pt")
    return folder / "m.pt"


def meta(folder):
    import torch

    folder.mkdir()
    torch.save({"tok_embeddings.weight": torch.from_numpy(VALUES)}, folder / "consolidated.00.pth")
    (folder / "params.json").write_text(
        json.dumps({"dim": 640, "n_layers": 1, "n_heads": 4, "vocab_size": 512})
    )
    return folder / "consolidated.00.pth"


def deepspeed_universal(folder):
    step = universal.save(folder, whole={"w": VALUES}, trained=False) / universal.STEP
    return step / "zero" / "w" / "fp32.pt"


def fsdp(folder):
    """The first of two ranks has a half of the tensor."""
    saved = rank_files.save_all(folder, {"2": rank_files.Save([2], {"w": [[*SHAPE], "float32", ["S0"]]})})
    return saved["2"][0] / "model_world_size_2_rank_0.pt"


def zarr3(folder, codecs, chunks=SHAPE):
    """An Orbax item without a database, of one array with other codecs than wherry writes."""
    import tensorstore

    inner = {"name": "bytes", "configuration": {"endian": "little"}}
    metadata = {"data_type": "float32", "shape": SHAPE, "codecs": codecs(inner)}
    metadata["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": chunks}}
    wherry.convert(
        _one_tensor(folder), folder, to="orbax", options={"ocdbt": "false", "zarr": "3"}, lineage=False
    )
    (folder / "wherry.json").unlink()
    shutil.rmtree(folder / "w")
    store = {"driver": "zarr3", "kvstore": f"file://{folder}/w/", "metadata": metadata}
    tensorstore.open(store, create=True).result()[...] = VALUES
    return max(
        (path for path in (folder / "w").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )


def _one_tensor(folder):
    from safetensors.numpy import save_file

    file = folder.with_name("one.safetensors")
    save_file({"w": VALUES}, file)
    return file


def crc32c_codec(folder):
    return zarr3(folder, lambda inner: [inner, {"name": "crc32c"}])


def crc32c_in_shards(folder):
    def codecs(inner):
        parts = {"chunk_shape": [64, 640], "codecs": [inner, {"name": "crc32c"}]}
        parts["index_codecs"] = [inner, {"name": "crc32c"}]
        return [{"name": "sharding_indexed", "configuration": parts}]

    return zarr3(folder, codecs)


def small_tensors_of_a_bundle(folder):
    """Small enough to be carried in one batch."""
    tf_bundle.write(folder, {f"w{number}": VALUES[number] for number in range(9)})
    return folder / "ckpt.data-00000-of-00001"


def small_shared_storage(folder):
    """The archive is small too, so most of it is the storage."""
    import torch

    folder.mkdir()
    whole = torch.from_numpy(VALUES[:16])
    torch.save({"q": whole[:8], "k": whole[8:]}, folder / "m.pt")
    return folder / "m.pt"


BUNDLES = (tensor_bundle, small_tensors_of_a_bundle)
FURTHER = (
    *BUNDLES, deflated, fortran, shared_storage, small_shared_storage, hidden_storage, transposed, meta, fsdp,
    deepspeed_universal, crc32c_codec, crc32c_in_shards,
)  # fmt: skip


@pytest.mark.parametrize("make", FURTHER, ids=lambda make: make.__name__)
def test_a_flipped_bit_where_another_software_recorded_a_checksum(tmp_path, make):
    file = make(tmp_path / "in")
    if make in (*BUNDLES, meta, crc32c_codec, crc32c_in_shards):
        source = tmp_path / "in"
    else:
        above = {fsdp: file.parent, deepspeed_universal: file.parents[2]}
        source = above.get(make, file)
    assert wherry.verify(source, level="digest").verdict == "read"
    flip(file, file.stat().st_size // 2)
    require_found(source, None, tmp_path)


def pieces_of_ranks(folder):
    script = """
        from torch.distributed.checkpoint import HuggingFaceStorageWriter
        state = {"w": distribute_tensor(torch.arange(54, dtype=torch.float32).reshape(9, 6), mesh, [Shard(0)])}
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(f"{folder}/out", save_distributed=True))
    """
    folder.mkdir()
    two_ranks(script, folder)
    return folder / "out"


def of_corpus(case):
    def copied(folder):
        needs(case)
        shutil.copytree(home(case), folder)
        return folder / expected(case)["uri"]

    return copied


def of_makers(name):
    return lambda folder: MAKERS[name][0](folder)[0]


CODEC = {
    "flax-gda"
}  # its chunks are compressed by zstd, which may notice a flipped bit although it has no checksum here
# What makes a checkpoint of each format without a checksum that can be read.
MAKE_UNCHECKED = {
    "dcp-safetensors": pieces_of_ranks,
    "deepspeed": lambda folder: zero.save(folder, 1, 1),
    "equinox": of_corpus("equinox-expaloma"),
    "flax-gda": of_corpus("flax-gda"),
    "gguf": of_corpus("gguf-tiny-f16"),
    "numpy-pickle": of_makers("numpy-pickle"),
    "ocdbt": lambda folder: ocdbt.write(folder, {"model/w": VALUES}),
    "paxml-flax": of_makers("paxml-flax"),
    "torch-legacy": of_makers("torch-legacy"),
}


def test_every_format_without_a_checksum_that_is_read_is_flipped():
    assert set(MAKE_UNCHECKED) == {name for name in UNCHECKED if find_format(name).readable}


@pytest.mark.parametrize("name", MAKE_UNCHECKED)
def test_a_flipped_bit_where_nothing_recorded_a_checksum(tmp_path, name):
    """`verify` reads the bit, but only a record tells that it is another one."""
    out = MAKE_UNCHECKED[name](tmp_path / "in")
    assert wherry.detect(out).format == name
    intact = wherry.verify(out, level="digest", record=True)
    assert (intact.verdict, intact.lineage) == ("read", "recorded")
    with wherry.open(out) as checkpoint:
        largest = max(checkpoint.manifest.tensors.values(), key=lambda spec: spec.nbytes)
        extents = checkpoint.reader.access(largest).extents
        stored = extents[-1] if extents else None
    if stored:
        flip(Path(stored.location.path), stored.offset + stored.length // 2)
    else:
        flip(chunk_of(largest.path[-1], tmp_path), -10)
    found = wherry.verify(out, level="digest")
    if found.verdict == "corrupt":
        assert name in CODEC, "a codec noticed by itself"
        return
    assert found.verdict == "altered"
    before, after = intact.full_read.digests, found.full_read.digests
    assert {path for path, digest in after.items() if digest != before[path]} == {largest.path}


def chunk_of(name, folder):
    """A file of an array in a folder of its own."""
    return max(
        path for path in folder.rglob("*") if path.parent.name == name and not path.name.startswith(".")
    )
