"""GGUF files that wherry writes: the `gguf` package reads what it names and lays out itself, and transformers computes
from them what the model computes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import wherry
from tests.support.generations import old_python
from tests.support.gguf import model_parts, save_gguf
from tests.support.libraries import loaded
from tests.support.oracles import huggingface, judge
from tests.support.oracles.cases import GGUF_LOADED, GGUF_WRITTEN, GGUF_WRITTEN_FOR_TRANSFORMERS
from tests.support.oracles.huggingface import TOKENS
from wherry.core.request import LayoutRequest
from wherry.errors import UnrepresentableError, UsageError

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
BY_TRANSFORMERS = """
import sys
sys.path.append(sys.argv[1])
import numpy as np, torch, transformers
model, report = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[2], gguf_file="model.gguf", attn_implementation="eager", dtype=torch.float32, output_loading_info=True)
assert not report["missing_keys"], report
with torch.no_grad():
    np.save(sys.argv[3], model.double().eval()(torch.tensor(np.load(sys.argv[4]))).logits.numpy())
"""
WITHOUT = {"tokenizer": "none"}


def written(source, target, **options):
    return wherry.convert(source, target, to="gguf", options={**WITHOUT, **options}, lineage=False)


@pytest.mark.parametrize("label", GGUF_WRITTEN)
def test_the_tensors_are_those_of_llama_cpp_s_converter(label, tmp_path):
    """Names, order of rows and the tensor of rotary positions, by an independent writer of the same file."""
    metadata, tensors = model_parts(judge.source(label))
    wanted = loaded("gguf", save_gguf(tmp_path / "wanted.gguf", metadata, tensors))
    written(judge.source(label), tmp_path / "model.gguf")
    held = loaded("gguf", tmp_path / "model.gguf")
    factors = ("rope_freqs.weight",)
    if factors in wanted:
        apart = [np.frombuffer(one.pop(factors)[2], "f4") for one in (held, wanted)]
        np.testing.assert_allclose(*apart, rtol=1e-6)
    assert held == wanted
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    apart = {
        key
        for key, value in metadata.items()
        if key in fields and fields[key].contents() != pytest.approx(value)
    }
    assert apart == set()
    assert metadata.keys() - fields.keys() == {"general.name"}


def test_a_bucket_that_proves_by_checksums_gets_the_same_record(tmp_path):
    receipts = [
        wherry.convert(judge.source("llama"), f"memory://gguf{tmp_path}/{verify}.gguf", to="gguf", options=WITHOUT,
                       verify=verify, lineage=False)
        for verify in ("digest", "store")
    ]  # fmt: skip
    assert len({one.target.checkpoint_digest for one in receipts}) == 1
    assert wherry.verify(receipts[1].target.uri, level="digest").ok


@pytest.mark.parametrize("label", GGUF_WRITTEN)
def test_the_model_comes_back(label, tmp_path):
    receipt = written(judge.source(label), tmp_path / "model.gguf")
    assert receipt.lossless is not label.startswith("gemma")  # whose norms are one more, rounded to float32
    assert wherry.verify(tmp_path / "model.gguf", level="digest").ok
    assert wherry.verify(tmp_path / "model.gguf", level="roundtrip", against=str(judge.source(label))).ok
    wherry.convert(tmp_path / "model.gguf", tmp_path / "out", to="huggingface", lineage=False)
    judge.require_equal(huggingface.logits(tmp_path / "out"), judge.wanted(label))


@pytest.mark.parametrize("label", GGUF_LOADED)
def test_transformers_own_loader_finds_the_model_s_tensors_and_config(label, tmp_path):
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    written(judge.source(label), tmp_path / "model.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(judge.source(label))
    found = load_gguf_checkpoint(str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=model)
    wanted = {name: value for name, value in model.state_dict().items() if "e_score" not in name}
    if model.config.tie_word_embeddings:
        del wanted["lm_head.weight"]
    assert found["tensors"].keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(
            found["tensors"][name].numpy(), value.numpy(), rtol=1e-6, atol=1e-7, err_msg=name
        )
    stated = {
        key: value
        for key, value in found["config"].items()
        if hasattr(model.config, key) and key not in ("_model_name_or_path", "architectures")
    }
    assert len(stated) > 8
    apart = {
        key: value for key, value in stated.items() if getattr(model.config, key) != pytest.approx(value)
    }
    assert apart == {}


@pytest.mark.slow
@pytest.mark.parametrize("label", GGUF_WRITTEN_FOR_TRANSFORMERS)
def test_transformers_computes_from_the_file_what_the_model_computes(label, tmp_path):
    """It needs accelerate, which is in an environment of its own; the metadata alone state the model."""
    (tmp_path / "in").mkdir()
    written(judge.source(label), tmp_path / "in" / "model.gguf")
    np.save(tmp_path / "tokens.npy", TOKENS)
    packages = next((old_python("gguf").parents[1] / "lib").glob("python*/site-packages"))
    words = (packages, tmp_path / "in", tmp_path / "logits.npy", tmp_path / "tokens.npy")
    run = subprocess.run(
        [sys.executable, "-c", BY_TRANSFORMERS, *map(str, words)],
        capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    judge.require_equal(np.load(tmp_path / "logits.npy"), judge.wanted(label))


@pytest.mark.parametrize("label", GGUF_WRITTEN)
def test_names_are_those_of_the_package(label, tmp_path):
    """Each tensor is one that the architecture has, and what the package calls the model's own tensors is there."""
    written(judge.source(label), tmp_path / "model.gguf")
    found = gguf.GGUFReader(tmp_path / "model.gguf")
    name = found.fields["general.architecture"].contents()
    (kind,) = [one for one, text in gguf.MODEL_ARCH_NAMES.items() if text == name]
    known = {gguf.TENSOR_NAMES[one] for one in gguf.MODEL_TENSORS[kind]}
    held = {one.name for one in found.tensors}
    assert {re.sub(r"^blk\.\d+", "blk.{bid}", one.rpartition(".")[0]) for one in held} <= known
    with wherry.open(judge.source(label)) as model:
        paths = [path[0] for path in model]
    names = gguf.get_tensor_name_map(kind, 16)
    wanted = {names.get_name(one.removesuffix(".weight").removesuffix(".bias")) for one in paths} - {
        None,
        "output",
    }
    assert len(wanted) > 10
    assert {one.rpartition(".")[0] for one in held} >= wanted


@pytest.fixture(scope="module")
def brain(tmp_path_factory):
    """A Llama in bfloat16 whose rows are whole blocks."""
    import torch

    folder = tmp_path_factory.mktemp("brain") / "hf"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


TYPES = {
    "source": ("BF16", 32), "f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7),
    "q4_0": ("Q4_0", 2), "q4_1": ("Q4_1", 3), "q5_0": ("Q5_0", 8), "q5_1": ("Q5_1", 9), "mxfp4": ("MXFP4", 38),
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
def test_matrices_get_the_type_that_is_stated_and_vectors_float32(kind, brain, tmp_path):
    receipt = written(brain, tmp_path / "model.gguf", type=kind)
    written(brain, tmp_path / "plain.gguf", type="f32")
    found, plain = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("model", "plain"))
    name, number = TYPES[kind]
    assert found.fields["general.file_type"].contents() == number
    for one, wide in zip(found.tensors, plain.tensors, strict=True):
        assert one.tensor_type.name == (name if len(one.shape) > 1 else "F32")
        values = np.ascontiguousarray(wide.data)
        assert np.array_equal(one.data, gguf.quantize(values, one.tensor_type)), one.name
    lossy = kind not in ("source", "f32", "bf16")
    assert receipt.lossless is not lossy
    assert bool(receipt.losses) is lossy
    proof = wherry.verify(tmp_path / "model.gguf", level="roundtrip", against=str(brain))
    assert proof.ok
    assert (proof.measured is not None and 0 < proof.measured.share <= 1) is lossy
    wherry.convert(tmp_path / "model.gguf", tmp_path / "again", to="huggingface", lineage=False)


def test_a_file_of_llama_cpp_gets_another_type(brain, tmp_path):
    written(brain, tmp_path / "model.gguf")
    written(tmp_path / "model.gguf", tmp_path / "small.gguf", type="q4_0")
    proof = wherry.verify(tmp_path / "small.gguf", level="roundtrip", against=str(tmp_path / "model.gguf"))
    assert proof.ok
    assert proof.measured is not None
    assert proof.measured.error > 0
    written(brain, tmp_path / "straight.gguf", type="q4_0")
    assert (tmp_path / "small.gguf").read_bytes() == (tmp_path / "straight.gguf").read_bytes()


def test_a_plan_states_what_blocks_lose(brain, tmp_path):
    options = {**WITHOUT, "type": "q8_0"}
    plan = wherry.plan(brain, tmp_path / "model.gguf", to="gguf", options=options)
    assert len(plan.lossy) == sum(len(spec.shape) > 1 for spec in plan.manifest.tensors.values())
    assert {bound.block for bound in plan.lossy.values()} == {0.5 / 127 + 2**-11}
    assert [one.name for one in plan.manifest.companions] == ["config.json"]


def test_another_target_of_the_same_blocks_is_no_roundtrip(brain, tmp_path):
    """The proof computes the blocks again: a value that was changed, and recorded, is found."""
    written(brain, tmp_path / "model.gguf", type="q8_0")
    changed = judge.source("llama")
    proof = wherry.verify(tmp_path / "model.gguf", level="roundtrip", against=str(brain))
    assert proof.ok
    with pytest.raises(UnrepresentableError):
        wherry.verify(tmp_path / "model.gguf", level="roundtrip", against=str(changed))


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path):
    with pytest.raises(UnrepresentableError, match="no whole blocks of 32") as refused:
        written(judge.source("llama"), tmp_path / "model.gguf", type="q8_0")
    assert refused.value.cure
    assert not list(tmp_path.iterdir())


def test_blocks_are_not_quantised_again(brain, tmp_path):
    written(brain, tmp_path / "model.gguf", type="q8_0")
    with pytest.raises(UsageError, match="quantised already, as Q8_0"):
        written(tmp_path / "model.gguf", tmp_path / "again.gguf", type="f16")
    written(tmp_path / "model.gguf", tmp_path / "again.gguf", type="f16", dequantize="float32")
    assert wherry.verify(tmp_path / "again.gguf", level="roundtrip", against=str(tmp_path / "model.gguf")).ok
    written(tmp_path / "model.gguf", tmp_path / "same.gguf")
    assert (tmp_path / "same.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


@pytest.mark.parametrize("label", ["olmo2", "granite", "smollm3", "gpt2", "deepseek-v3.2"])
def test_a_model_without_rules_is_refused(label, tmp_path):
    with pytest.raises(
        UnrepresentableError, match=r"no rule writes the metadata|no layout|cannot|no indexer"
    ):
        written(judge.source(label), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_act": "gelu"}, "activation"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 2.0,
                              "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}, "rope_scaling"),
        ({"rms_norm_eps": 1.23456789123e-05}, "norm_eps"),
    ],
)  # fmt: skip
def test_what_the_metadata_cannot_state_is_refused_by_name(change, word, tmp_path):
    config = json.loads((judge.source("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(UnrepresentableError, match=word):
        wherry.convert(
            judge.source("llama"), tmp_path / "model.gguf", to="gguf", options=WITHOUT, lineage=False,
            layout=LayoutRequest(config=str(tmp_path / "config.json")),
        )  # fmt: skip


def test_a_target_without_a_tokenizer_is_refused_unless_that_is_stated(tmp_path):
    with pytest.raises(UnrepresentableError, match=r"missing tokenizer\.json") as refused:
        wherry.convert(judge.source("llama"), tmp_path / "model.gguf", to="gguf", lineage=False)
    assert "tokenizer" in str(refused.value.cure)
