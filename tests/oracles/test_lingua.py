"""Lingua and Meta compute from what wherry wrote what transformers computes from the source, and the other way."""

from __future__ import annotations

import json

import numpy as np
import pytest

import wherry
from tests.support.corpus import CORPUS, needs
from tests.support.oracles import files, huggingface, judge, lingua
from tests.support.oracles.cases import LINGUA_INTO, LLAMA_OUT_OF, META_INTO
from tests.support.oracles.huggingface import MODELS, TOKENS, apart
from tests.support.oracles.leaves import Invented, Leaves
from wherry.core.request import LayoutRequest

pytest.importorskip("transformers")

ARGS = {
    "dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "vocab_size": 60, "multiple_of": 32,
    "ffn_dim_multiplier": None, "norm_eps": 1e-5, "rope_theta": 10000.0, "max_seqlen": 64, "weight_tying": False,
    "sliding_window": None,
}  # fmt: skip
RUN = {
    "model": ARGS,
    "distributed": {"model_dtype": "fp32"},
    "data": {"tokenizer": {"name": "bytes", "path": None}},
}
META = {name: ARGS[name] for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of")} | {
    "norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
ROOTS = {"lingua": "model.", "lingua-consolidated": "model/"}


def test_the_oracle_computes_what_lingua_computed():
    case, golden = "lingua-fsdp2-w2", "hf-llama-from-lingua-fp32"
    needs(case, golden)
    folder = CORPUS / case / "checkpoint" / "checkpoints" / "0000000004"
    args = json.loads((folder / "params.json").read_text())["model"]
    leaves = Leaves(files.below(files.arrays("lingua", folder), "model."))
    ids = json.loads((CORPUS / golden / "inputs.json").read_text())["input_ids"]
    wanted = np.load(CORPUS / golden / "logits.npy")
    assert apart(lingua.logits(leaves, args, np.array(ids)), wanted) < judge.ALLOWED


@pytest.mark.parametrize("to", list(ROOTS))
@pytest.mark.parametrize("label", LINGUA_INTO)
def test_lingua_computes_what_transformers_computed(label, to, tmp_path):
    wherry.convert(judge.source(label), tmp_path / "out", to=to, lineage=False)
    args = json.loads((tmp_path / "out" / "params.json").read_text())["model"]
    leaves = Leaves(files.below(files.arrays(to, tmp_path / "out"), ROOTS[to]))
    found = lingua.logits(leaves, args, TOKENS)
    leaves.require_all_taken()
    judge.require_equal(found, judge.wanted(label))


@pytest.mark.parametrize("to", list(ROOTS))
@pytest.mark.parametrize("label", LLAMA_OUT_OF)
def test_transformers_computes_what_lingua_computed(label, to, tmp_path):
    invented = Invented()
    expected = lingua.logits(invented, ARGS, TOKENS)
    source = tmp_path / "lingua"
    if to == "lingua":
        files.save_dcp(source, {f"model.{name}": array for name, array in invented.arrays.items()})
    else:
        source.mkdir()
        files.save_torch(source / "consolidated.pth", invented.arrays, "model")
    (source / "params.json").write_text(json.dumps(RUN))
    layout = LayoutRequest(family=family_of(label))
    wherry.convert(source, tmp_path / "out", to="huggingface", layout=layout, lineage=False)
    judge.require_equal(huggingface.logits(tmp_path / "out"), expected)


def family_of(label):
    """What a user names: nothing for a Llama, to which the families of the same tensors yield."""
    return None if label == "llama" else MODELS[label].family


@pytest.mark.parametrize("label", META_INTO)
def test_meta_computes_what_transformers_computed(label, tmp_path):
    wherry.convert(
        judge.source(label), tmp_path / "consolidated.00.pth", to="torch-zip",
        layout=LayoutRequest(family=MODELS[label].family), lineage=False,
    )  # fmt: skip
    leaves = Leaves(files.arrays("torch-zip", tmp_path / "consolidated.00.pth"))
    args = {
        **META,
        "multiple_of": 16,
        "ffn_dim_multiplier": 0.28,
        "norm_eps": 1e-5 if label == "phi3" else 1e-6,
    }
    args |= {"rope_theta": 5e5, "use_scaled_rope": True} if label == "llama-3.1" else {}
    found = lingua.logits(leaves, args, TOKENS)
    leaves.require_all_taken()
    judge.require_equal(found, judge.wanted(label))


@pytest.mark.parametrize("label", LLAMA_OUT_OF)
def test_transformers_computes_what_meta_computed(label, tmp_path):
    invented = Invented()
    scaled = {"use_scaled_rope": True, "rope_theta": 5e5}
    args = {**META, **({} if label == "phi3" else scaled)}  # a Phi-3 here has positions that are not scaled
    expected = lingua.logits(invented, args, TOKENS)
    file = files.save_torch(tmp_path / "consolidated.00.pth", invented.arrays)
    (tmp_path / "params.json").write_text(json.dumps(args))
    layout = LayoutRequest(family=MODELS[label].family, config=str(tmp_path / "params.json"))
    wherry.convert(file, tmp_path / "out", to="huggingface", layout=layout, lineage=False)
    judge.require_equal(huggingface.logits(tmp_path / "out"), expected)
