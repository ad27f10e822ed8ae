"""Hugging Face folders whose weights are flax files, as transformers 4 saved them."""

from __future__ import annotations

import json

import numpy as np
import pytest

import wherry
from tests.support.formats import opened
from wherry.errors import CorruptError, HostileError, IncompleteError
from wherry.integrations.formats.huggingface.weights import find_weights

serialization = pytest.importorskip("flax.serialization", reason="flax is not installed")
traverse = pytest.importorskip("flax.traverse_util", reason="flax is not installed")

TREE = {
    "model": {
        "embed_tokens": {"embedding": np.arange(24, dtype="f4").reshape(6, 4)},
        "layers": {
            str(n): {"kernel": np.full((4, 4), n, "f2"), "bias": np.full(4, n, "f4")} for n in range(3)
        },
    },
    "lm_head": {"kernel": np.ones((4, 6), "f4")},
}
FLAT = traverse.flatten_dict(TREE)
CONFIG = {"model_type": "llama", "transformers_version": "4.46.3", "architectures": ["LlamaForCausalLM"]}


def single(folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "flax_model.msgpack").write_bytes(serialization.to_bytes(TREE))
    return folder


def sharded(folder, count=3):
    """As `flax_shard_checkpoint` of transformers 4.46 cuts: whole leaves, an index of joined names."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    joined = {"/".join(path): array for path, array in FLAT.items()}
    files = [f"flax_model-{n + 1:05d}-of-{count:05d}.msgpack" for n in range(count)]
    where = {name: files[number % count] for number, name in enumerate(joined)}
    for file in files:
        part = {name: array for name, array in joined.items() if where[name] == file}
        (folder / file).write_bytes(serialization.to_bytes(traverse.unflatten_dict(part, sep="/")))
    total = sum(array.nbytes for array in joined.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "flax_model.msgpack.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
    return folder


@pytest.mark.parametrize(("make", "word"), [(single, "single"), (sharded, "sharded")])
def test_the_tree_of_flax(tmp_path, make, word):
    folder = make(tmp_path / "model")
    found = wherry.detect(folder)
    assert (found.format, found.verdict, found.format_version) == (
        "huggingface-flax",
        "ok",
        f"{word} flax_model.msgpack",
    )
    assert (found.family, found.writer) == ("llama", "transformers 4.46.3")
    with wherry.open(folder) as checkpoint:
        assert set(checkpoint.manifest.tensors) == set(FLAT)
        assert [companion.name for companion in checkpoint.manifest.companions] == ["config.json"]
        for path, array in FLAT.items():
            np.testing.assert_array_equal(checkpoint.read(path), array)
        assert {entry.name for entry in checkpoint.reader.members()} == {
            path.name for path in folder.iterdir()
        }


@pytest.mark.parametrize("make", [single, sharded])
def test_to_orbax_and_to_one_file(tmp_path, make):
    folder = make(tmp_path / "model")
    for target, name in (("orbax", "orbax"), ("flax-msgpack", "params.msgpack")):
        wherry.convert(folder, tmp_path / name, to=target, ignore=["companions"], lineage=False)
        with wherry.open(tmp_path / name) as checkpoint:
            assert set(checkpoint.manifest.tensors) == set(FLAT)
            for path, array in FLAT.items():
                np.testing.assert_array_equal(checkpoint.read(path), array)


def test_safetensors_and_bin_come_first(tmp_path):
    names = dict.fromkeys(("flax_model.msgpack", "pytorch_model.bin", "model.safetensors"))
    for wanted in ("safetensors", "bin", "msgpack"):
        found = find_weights(names)
        assert found is not None
        assert found.container == wanted
        del names[found.file]
    assert find_weights(names) is None


def test_the_flax_file_next_to_others_is_not_carried(tmp_path):
    folder = single(tmp_path / "model")
    st = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    st.save_file({"w": np.ones(3, "f4")}, folder / "model.safetensors")
    found = opened(folder, "huggingface")
    assert set(found.manifest.tensors) == {("w",)}
    assert any(one.file == "flax_model.msgpack" for one in found.detection.evidence)


def test_a_shard_that_is_not_there(tmp_path):
    folder = sharded(tmp_path / "model")
    (folder / "flax_model-00002-of-00003.msgpack").unlink()
    with pytest.raises(IncompleteError, match="flax_model-00002-of-00003"):
        wherry.open(folder)


def edit(folder, change):
    place = folder / "flax_model.msgpack.index.json"
    index = json.loads(place.read_text())
    change(index["weight_map"])
    place.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "change",
    [
        lambda names: names.pop("lm_head/kernel"),
        lambda names: names.update({"lm_head/bias": "flax_model-00001-of-00003.msgpack"}),
        lambda names: names.update({"model/layers/0/bias": names["model/embed_tokens/embedding"]}),
    ],
)
def test_an_index_that_contradicts_the_files(tmp_path, change):
    folder = sharded(tmp_path / "model")
    edit(folder, change)
    with pytest.raises(CorruptError):
        wherry.open(folder)


def test_an_index_that_leads_out_of_the_folder(tmp_path):
    folder = sharded(tmp_path / "model")
    edit(folder, lambda names: names.update({"lm_head/kernel": "../flax_model.msgpack"}))
    with pytest.raises(HostileError):
        wherry.open(folder)


def test_a_flax_file_that_was_cut(tmp_path):
    folder = single(tmp_path / "model")
    place = folder / "flax_model.msgpack"
    place.write_bytes(place.read_bytes()[:-20])
    assert wherry.detect(folder).verdict == "corrupt"
