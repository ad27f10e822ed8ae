"""A model of sentence-transformers stays one: the modules that run after it travel with their weights."""

from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.generations import old_python
from tests.support.huggingface import ONES
from wherry.errors import HostileError, IncompleteError, UnrepresentableError

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
