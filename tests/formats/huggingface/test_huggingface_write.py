"""Writing Hugging Face folders: what transformers loads, how tensors are spread over files."""

from __future__ import annotations

import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.formats import canonical, copy, create, opened, place
from wherry.core.manifest import Companion, Manifest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import UsageError
from wherry.formats.registry import checked_options, find_format
from wherry.integrations.formats.huggingface.weights import natural_key

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


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
