"""What a config counts (layers, experts, entries of the vocabulary) and the files lack ends with 5, what they have
beyond it with 7. Tied copies, buffers, layers of multi-token prediction and padding are no error, and are named."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.systems import carry
from tests.support.tiny_models import CLASSES, MODELS
from wherry.core.request import LayoutRequest
from wherry.errors import IncompleteError, UnrepresentableError

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")
WEIGHTS = "model.safetensors"
CHOICES = {"rope": "half", "query_scale": "folded"}  # which MaxText's checkpoints do not state


@pytest.fixture
def made(tmp_path):
    """A tiny model of a label as transformers saves it: the folder and its tensors."""

    def save(label, **more):
        name, settings = MODELS[label]
        config = getattr(transformers, f"{name}Config")(**{**settings, **more})
        getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config).save_pretrained(
            tmp_path / "hf"
        )
        return tmp_path / "hf", load_file(tmp_path / "hf" / WEIGHTS)

    return save


def put(folder, tensors, **said):
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **said}))


def carried(folder, target, to):
    """Convert with proof; the tensors that are left out."""
    plan = wherry.plan(folder, target, to=to)
    carry(folder, target, to)
    return [row for row in plan.ignored if row.rule != "companions"]


def refused(folder, kind, *words, to="maxtext"):
    with pytest.raises(kind) as caught:
        wherry.plan(folder, folder.parent / "out", to=to)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.cure
    assert caught.value.exit_code == {IncompleteError: 5, UnrepresentableError: 7}[kind]


@pytest.mark.parametrize(
    ("label", "attribute", "word", "to"),
    [
        ("llama", "num_hidden_layers", "model.layers.", "maxtext"),
        ("llama", "num_hidden_layers", "model.layers.", "lingua"),
        ("mixtral", "num_local_experts", "experts.", "maxtext"),
        ("qwen3-moe", "num_local_experts", "mlp.experts.", "maxtext"),
        ("t5", "num_layers", "encoder.block.", "t5x-legacy"),
    ],
)
def test_layers_and_experts_are_as_many_as_the_config_says(label, attribute, word, to, made):
    folder, tensors = made(label)
    count = json.loads((folder / "config.json").read_text())[attribute]
    attributes = "num_experts or num_local_experts" if label == "qwen3-moe" else attribute
    assert wherry.plan(folder, folder.parent / "out", to=to).tensors
    put(folder, tensors, **{attribute: count + 1})
    refused(
        folder, IncompleteError, f"missing index {count}", word, f"config.json ({attributes}) implies", to=to
    )
    put(folder, tensors, **{attribute: count - 1})
    refused(folder, UnrepresentableError, word, f"states {count - 1}", f"have index {count - 1}", to=to)


@pytest.mark.parametrize(
    ("label", "to"), [("llama", "maxtext"), ("llama", "huggingface-flax"), ("t5", "t5x-legacy")]
)
def test_the_rows_of_the_embedding_are_those_of_the_vocabulary(label, to, made):
    folder, tensors = made(label)
    name = "shared.weight" if label == "t5" else "lm_head.weight"
    put(folder, tensors, vocab_size=58)
    refused(folder, UnrepresentableError, name, "2 entries beyond the vocabulary", "states 58", to=to)
    put(folder, tensors, vocab_size=64)
    refused(folder, IncompleteError, name, "missing entries", "states 64", "have 60", to=to)


def test_rows_that_maxtext_pads_are_named_and_left_out(made, tmp_path):
    folder, tensors = made("llama")
    wherry.convert(folder, tmp_path / "maxtext", to="maxtext", lineage=False)
    with wherry.open(tmp_path / "maxtext") as checkpoint:
        tree = {path: checkpoint.read(path) for path in checkpoint.manifest.tensors}
    padded = {}
    for path, array in tree.items():
        node = padded
        for part in path[:-1]:
            node = node.setdefault(part, {})
        rows = next((axis for axis, extent in enumerate(array.shape) if extent == 60), None)
        widths = [(0, 4 if axis == rows else 0) for axis in range(array.ndim)]
        node[path[-1]] = np.pad(array, widths, constant_values=7) if rows is not None else array
    wherry.export(padded, tmp_path / "padded", to="maxtext", step=1).result(60)
    shutil.copytree(tmp_path / "maxtext" / "items" / "assets", tmp_path / "padded" / "items" / "assets")
    plan = wherry.plan(tmp_path / "padded", tmp_path / "back", to="huggingface", options=CHOICES)
    said = [note for note in plan.notes if "padding" in note]
    assert len(said) == 2
    assert (
        "token_embedder/embedding has 64 entries, of which the last 4 are padding beyond the vocab of 60"
        in str(said)
    )
    receipt = wherry.convert(
        tmp_path / "padded", tmp_path / "back", to="huggingface", options=CHOICES, lineage=False
    )
    assert receipt.target.tensors == len(tensors)
    for name, array in load_file(tmp_path / "back" / WEIGHTS).items():
        np.testing.assert_allclose(array, tensors[name], rtol=1e-6, err_msg=name)


def further_layer(tensors, number):
    """A layer of multi-token prediction, as DeepSeek publishes it: a layer with experts, and modules around it."""
    last = f"model.layers.{number - 1}."
    start = f"model.layers.{number}."
    rng = np.random.default_rng(3)
    embedding = tensors["model.embed_tokens.weight"]
    width = embedding.shape[1]
    return {
        **{name.replace(last, start): array + 1 for name, array in tensors.items() if name.startswith(last)},
        f"{start}eh_proj.weight": rng.normal(size=(width, 2 * width)).astype("f4"),
        f"{start}enorm.weight": np.ones(width, "f4"),
        f"{start}hnorm.weight": np.ones(width, "f4"),
        f"{start}shared_head.norm.weight": np.ones(width, "f4"),
        f"{start}shared_head.head.weight": embedding + 1,
        f"{start}embed_tokens.weight": embedding,
    }


def test_layers_that_predict_further_tokens(made, tmp_path):
    folder, tensors = made("deepseek-v3")
    more = further_layer(tensors, 2)
    put(folder, {**tensors, **more}, num_nextn_predict_layers=1)
    left = {row.path[0]: row for row in carried(folder, tmp_path / "maxtext", "maxtext")}
    assert left.keys() == more.keys()
    assert {row.rule for row in left.values()} == {"huggingface: model.layers.2.*"}
    assert all("predicts further tokens" in row.reason for row in left.values())
    again = wherry.convert(folder, tmp_path / "again", to="huggingface", lineage=False)
    assert again.target.weights_digest == again.source.weights_digest
    layout = LayoutRequest(dtype="bfloat16")
    wherry.convert(folder, tmp_path / "half", to="huggingface", layout=layout, lineage=False)
    with wherry.open(tmp_path / "half") as checkpoint:
        specs = {path[0]: spec.dtype for path, spec in checkpoint.manifest.tensors.items()}
        assert specs.keys() == tensors.keys() | more.keys()
        assert {specs[name] for name in tensors} == {"bfloat16"}
        for name, array in more.items():  # a module that no layout knows is carried as it is
            assert checkpoint.read((name,)).tobytes() == array.tobytes()
    put(folder, {**tensors, **{name: one for name, one in more.items() if "eh_proj" not in name}})
    refused(folder, UnrepresentableError, "model.layers.2.embed_tokens.weight")


def test_second_copies_and_buffers_are_named(made, tmp_path):
    folder, tensors = made("t5")
    copies = {f"{one}.embed_tokens.weight": tensors["shared.weight"] for one in ("encoder", "decoder")}
    copies["lm_head.weight"] = tensors["shared.weight"]
    put(folder, {**tensors, **copies}, transformers_version="4.46.3")
    left = carried(folder, tmp_path / "t5x", "t5x-legacy")
    assert {row.path[0] for row in left} == copies.keys()
    assert all("second copy" in row.reason for row in left)
    with wherry.open(tmp_path / "t5x") as checkpoint:
        assert not any("logits_dense" in path for path in checkpoint.manifest.tensors)


def test_a_head_that_transformers_5_saved_is_no_copy(made, tmp_path):
    """transformers 4 loads the embedding in its place, transformers 5 the head, and scales its input too."""
    folder, tensors = made("t5")
    put(folder, {**tensors, "lm_head.weight": tensors["shared.weight"] + 1})
    refused(folder, UnrepresentableError, "scaled_output is True", to="t5x-legacy")
    again = wherry.convert(folder, tmp_path / "again", to="huggingface", lineage=False)
    assert again.target.weights_digest == again.source.weights_digest


def test_frequencies_of_old_files_are_named(made, tmp_path):
    folder, tensors = made("llama")
    names = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(4, "f4") for layer in range(2)}
    put(folder, {**tensors, **names})
    assert {row.path[0] for row in carried(folder, tmp_path / "maxtext", "maxtext")} == names.keys()


@pytest.mark.parametrize("label", ["t5-1.1", "mt5"])
def test_a_head_of_its_own_is_not_scaled_and_the_config_says_so(label, made, tmp_path):
    """transformers 5 writes `tie_word_embeddings` true into the config of a T5 whose head is its own."""
    folder, tensors = made(label)
    head = np.random.default_rng(1).normal(size=(60, 32)).astype("f4")
    put(folder, {**tensors, "lm_head.weight": head})
    carry(folder, tmp_path / "t5x", "t5x-legacy")
    with wherry.open(tmp_path / "t5x") as checkpoint:
        path = ("target", "decoder", "logits_dense", "kernel")
        assert checkpoint.read(path).tobytes() == head.T.tobytes()
    (tmp_path / "t5x" / "config.json").unlink()
    wherry.convert(
        tmp_path / "t5x",
        tmp_path / "back",
        to="huggingface",
        lineage=False,
        layout=LayoutRequest(family="t5"),
    )
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["scale_decoder_outputs"]) == (False, False)


def test_a_config_of_transformers_4_gains_what_5_0_reads(made, tmp_path):
    folder, tensors = made("t5-1.1")
    head = np.random.default_rng(1).normal(size=(60, 32)).astype("f4")
    put(folder, {**tensors, "lm_head.weight": head}, tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    config.pop("scale_decoder_outputs")
    (folder / "config.json").write_text(json.dumps(config))
    carry(folder, tmp_path / "t5x", "t5x-legacy")
    carry(tmp_path / "t5x", tmp_path / "back", "huggingface")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    config.pop("dtype")
    assert back == {**config, "scale_decoder_outputs": False, "torch_dtype": "float32"}


@pytest.mark.parametrize("scaled", [True, False])
def test_a_new_type_does_not_change_whether_the_output_is_scaled(scaled, made, tmp_path):
    """transformers 5 has models that are tied and not scaled."""
    folder, _tensors = made("t5", tie_word_embeddings=scaled)
    layout = LayoutRequest(dtype="bfloat16")
    wherry.convert(folder, tmp_path / "half", to="huggingface", layout=layout, lineage=False)
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["scale_decoder_outputs"]) == (True, scaled)


def test_a_tied_head_is_scaled_and_the_config_says_so(made, tmp_path):
    folder, _tensors = made("t5")
    carry(folder, tmp_path / "t5x", "t5x-legacy")
    (tmp_path / "t5x" / "config.json").unlink()
    wherry.convert(
        tmp_path / "t5x",
        tmp_path / "back",
        to="huggingface",
        lineage=False,
        layout=LayoutRequest(family="t5"),
    )
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["scale_decoder_outputs"]) == (True, True)


def test_a_tied_head_that_is_not_scaled_becomes_a_head_of_its_own(made, tmp_path):
    """T5X divides where the logits come from the embedding, so they come from a copy of it."""
    folder, tensors = made("t5", tie_word_embeddings=False)
    assert "lm_head.weight" not in tensors
    carry(folder, tmp_path / "t5x", "t5x-legacy")
    carry(tmp_path / "t5x", tmp_path / "back", "huggingface")
    back = load_file(tmp_path / "back" / WEIGHTS)
    assert back["lm_head.weight"].tobytes() == tensors["shared.weight"].tobytes()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["scale_decoder_outputs"]) == (False, False)
