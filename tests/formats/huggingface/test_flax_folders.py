"""Hugging Face Flax folders: the trees of the Flax classes become folders of PyTorch's and back, or are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

import wherry
from tests.support.flax_classes import MODELS, OUT_OF, OWN_HEAD, saved, torch_outputs
from wherry.core.request import LayoutRequest
from wherry.errors import IncompleteError, UnrepresentableError

serialization = pytest.importorskip("flax.serialization", reason="flax is not installed")
traverse = pytest.importorskip("flax.traverse_util", reason="flax is not installed")
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
TIED_FLAX = {"gemma", "gpt2", "gpt2-bare", "t5"}  # whose classes share the embedding with the head


def as_flax(name, array):
    """The key path and the array that the Flax classes have for a tensor of PyTorch's, by the rules of their modules:
    Dense is [in, out], Conv1D [out, in], norms with a bias have a scale, those without a weight."""
    *module, leaf = name.split(".")
    last = module[-1]
    norm = last in ("LayerNorm", "ln_1", "ln_2", "ln_f")
    if last in ("wte", "wpe", "shared", "embed_tokens", "relative_attention_bias") or last.endswith(
        "_embeddings"
    ):
        return (*module, "embedding"), array
    if leaf == "weight" and norm:
        return (*module, "scale"), array
    if leaf == "weight" and array.ndim == 2:
        return (*module, "kernel"), array.T
    return (*module, leaf), array


def made(label, tmp_path, **more):
    """A folder as the Flax class saves it, made of the tensors of the PyTorch class; and the source."""
    from safetensors.numpy import load_file

    source = saved(label, tmp_path / "source", **more)
    tensors = load_file(source / "model.safetensors")
    if label == "llama-tied":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    flat = dict(as_flax(name, array) for name, array in tensors.items())
    flat = {path: np.ascontiguousarray(array) for path, array in flat.items()}
    folder = tmp_path / "flax"
    folder.mkdir()
    tree = traverse.unflatten_dict(flat)
    (folder / "flax_model.msgpack").write_bytes(serialization.msgpack_serialize(tree))
    (folder / "config.json").write_text((source / "config.json").read_text())
    (folder / "vocab.txt").write_text("a\n")
    return folder, source, flat


@pytest.mark.parametrize("label", OUT_OF)
def test_a_folder_of_a_flax_class_computes_the_same_in_pytorch(label, tmp_path):
    folder, source, flat = made(label, tmp_path)
    name = MODELS[label][0]
    found = wherry.detect(folder)
    assert (found.format, found.verdict) == ("huggingface-flax", "ok")
    assert f"Hugging Face Flax ({name}): weights in one file" in found.evidence[0].seen
    receipt = wherry.convert(folder, tmp_path / "torch", to="huggingface", lineage=False)
    assert receipt.lossless
    assert receipt.target.tensors == len(flat) - (label == "llama-tied")  # whose copies are equal
    wanted, computed = torch_outputs(source), torch_outputs(tmp_path / "torch")
    for one, values in wanted.items():
        np.testing.assert_array_equal(computed[one], values)
    assert (tmp_path / "torch" / "vocab.txt").read_text() == "a\n"
    assert wherry.verify(tmp_path / "torch", level="roundtrip", against=folder).ok


@pytest.mark.parametrize("label", OUT_OF)
def test_what_is_written_is_the_tree_of_the_flax_class(label, tmp_path):
    _folder, source, flat = made(label, tmp_path)
    wherry.convert(source, tmp_path / "out", to="huggingface-flax", lineage=False)
    tree = serialization.msgpack_restore((tmp_path / "out" / "flax_model.msgpack").read_bytes())
    written = traverse.flatten_dict(tree)
    assert written.keys() == flat.keys()
    for path, array in flat.items():
        np.testing.assert_array_equal(written[path], array, err_msg=str(path))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [MODELS[label][0]]
    if not label.startswith(("bert", "t5-encoder")):
        assert config["tie_word_embeddings"] is (label in TIED_FLAX)
    if label in OWN_HEAD:
        assert config["scale_decoder_outputs"] is False


def test_a_tied_head_that_is_not_scaled_is_written_out(tmp_path):
    source = saved("t5-tied-unscaled", tmp_path / "source")
    wherry.convert(source, tmp_path / "out", to="huggingface-flax", lineage=False)
    tree = serialization.msgpack_restore((tmp_path / "out" / "flax_model.msgpack").read_bytes())
    np.testing.assert_array_equal(tree["lm_head"]["kernel"], tree["shared"]["embedding"].T)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_without_a_window_it_is_as_long_as_the_positions(tmp_path):
    source = saved("mistral-no-window", tmp_path / "source")
    wherry.convert(source, tmp_path / "out", to="huggingface-flax", lineage=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["sliding_window"] == 64
    wherry.convert(tmp_path / "out", tmp_path / "back", to="huggingface", lineage=False)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["sliding_window"] is None


def test_shards_and_their_index(tmp_path):
    folder, _source, flat = made("bert-masked", tmp_path)
    wherry.convert(
        folder, tmp_path / "shards", to="hf-flax", options={"max_shard_size": "10KB"}, lineage=False
    )
    index = json.loads((tmp_path / "shards" / "flax_model.msgpack.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "shards").glob("flax_model-*.msgpack"))
    assert len(files) > 2
    assert index["weight_map"].keys() == {"/".join(path) for path in flat}
    assert sorted(set(index["weight_map"].values())) == files
    seen = {}
    for file in files:
        tree = serialization.msgpack_restore((tmp_path / "shards" / file).read_bytes())
        seen |= traverse.flatten_dict(tree)
    assert seen.keys() == flat.keys()
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in flat.values())
    found = wherry.detect(tmp_path / "shards")
    assert found.format_version == "sharded flax_model.msgpack"
    back = wherry.convert(tmp_path / "shards", tmp_path / "back", to="hf-flax", lineage=False)
    assert back.target.weights_digest == back.source.weights_digest


def change(folder, **said):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))


@pytest.mark.parametrize(
    ("label", "said", "word"),
    [
        (
            "llama",
            {"rope_theta": 5e5, "rope_parameters": None},
            "rope_theta is 500000.0 .* always uses 10000.0",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            "linear.* always uses .*default",
        ),
        ("llama", {"hidden_act": "tanh"}, "no activation tanh"),
        ("mistral", {"sliding_window": 16}, "a window of 16 within 64 positions"),
        (
            "gemma",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is True .* always uses False",
        ),
        ("gemma", {"hidden_act": "silu"}, "ignores hidden_act"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "layer_idx is True .* always uses False"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is False .* always uses True"),
        ("gpt2", {"activation_function": "tanh"}, "no activation tanh"),
        (
            "t5-1.1",
            {"feed_forward_proj": "gated-gelu_python", "dense_act_fn": "gelu_python"},
            "no gelu_python",
        ),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("bert", {"hidden_act": "mish"}, "no activation mish"),
    ],
)
def test_what_the_flax_class_ignores_is_refused_in_both_directions(label, said, word, tmp_path):
    folder, source, _flat = made(label, tmp_path)
    for there, to in ((source, "huggingface-flax"), (folder, "huggingface")):
        change(there, **said)
        with pytest.raises(UnrepresentableError, match=word):
            wherry.plan(there, tmp_path / "out", to=to)


def test_a_config_that_states_another_model_can_be_corrected(tmp_path):
    folder, source, _flat = made("llama", tmp_path)
    change(folder, rope_theta=5e5, rope_parameters=None)
    with pytest.raises(
        UnrepresentableError, match="states another model than huggingface-flax computes"
    ) as caught:
        wherry.plan(folder, tmp_path / "out", to="huggingface")
    assert "--set rope_theta=10000.0" in caught.value.cure
    wherry.convert(
        folder, tmp_path / "out", to="huggingface", options={"rope_theta": "10000.0"}, lineage=False
    )
    for one, values in torch_outputs(source).items():
        np.testing.assert_array_equal(torch_outputs(tmp_path / "out")[one], values)


def test_heads_that_do_not_divide_the_width(tmp_path):
    source = saved("llama", tmp_path / "source", head_dim=16)
    with pytest.raises(UnrepresentableError, match="heads divide the width"):
        wherry.plan(source, tmp_path / "out", to="huggingface-flax")


def test_umt5_has_no_flax_class(tmp_path):
    import transformers

    from tests.support.tiny_models import T5

    config = transformers.UMT5Config(**T5, feed_forward_proj="gated-gelu")
    transformers.UMT5ForConditionalGeneration(config).save_pretrained(tmp_path / "source")
    with pytest.raises(UnrepresentableError, match="no layout for parameter decoder_layer_relpos"):
        wherry.plan(tmp_path / "source", tmp_path / "out", to="huggingface-flax")


def test_a_llama_without_its_head_is_incomplete(tmp_path):
    folder, _source, flat = made("llama", tmp_path)
    del flat[("lm_head", "kernel")]
    tree = traverse.unflatten_dict(flat)
    (folder / "flax_model.msgpack").write_bytes(serialization.msgpack_serialize(tree))
    change(folder, tie_word_embeddings=True)
    with pytest.raises(IncompleteError, match="missing parameter head: lm_head/kernel"):
        wherry.plan(folder, tmp_path / "out", to="huggingface")


@pytest.mark.parametrize("options", [{}, {"join": "."}])
@pytest.mark.parametrize("to", ["huggingface", "maxtext", "t5x-orbax"])
def test_another_class_is_refused_without_a_false_cure(to, options, tmp_path):
    folder = tmp_path / "vit"
    folder.mkdir()
    tree = {"vit": {"embeddings": {"projection": {"kernel": np.ones((2, 2, 3, 4), "f4")}}}}
    (folder / "flax_model.msgpack").write_bytes(serialization.msgpack_serialize(tree))
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnrepresentableError, match=r"vit \(ViTForImageClassification\)") as caught:
        wherry.plan(folder, tmp_path / "out", to=to, options=options)
    assert "join" not in caught.value.cure
    assert "--to orbax" in caught.value.cure
    assert wherry.plan(folder, tmp_path / "out", to="orbax").tensors == 1


def test_a_class_of_bert_that_no_layout_has(tmp_path):
    folder, _source, _flat = made("bert-masked", tmp_path)
    change(folder, architectures=["BertLMHeadModel"])
    with pytest.raises(UnrepresentableError, match="BertLMHeadModel"):
        wherry.plan(folder, tmp_path / "out", to="huggingface")


@pytest.mark.parametrize(
    ("label", "architecture", "kind", "word"),
    [
        ("bert", "BertForMaskedLM", IncompleteError, "cls/predictions"),
        ("bert-masked", "BertForPreTraining", IncompleteError, "seq_relationship"),
        ("bert-next", "BertForSequenceClassification", IncompleteError, "classifier"),
    ],
)
def test_a_head_that_the_class_implies(label, architecture, kind, word, tmp_path):
    folder, _source, _flat = made(label, tmp_path)
    change(folder, architectures=[architecture])
    with pytest.raises(kind, match=word):
        wherry.plan(folder, tmp_path / "out", to="huggingface")


def test_the_class_of_bert_is_that_which_has_all_its_tensors(tmp_path):
    """Published checkpoints of BERT have the heads of pretraining, and a config that names BertForMaskedLM."""
    folder, source, _flat = made("bert-pretraining", tmp_path)
    for there, to in ((folder, "huggingface"), (source, "huggingface-flax")):
        change(there, architectures=["BertForMaskedLM"])
        wherry.convert(there, tmp_path / f"{to}-out", to=to, lineage=False)
        config = json.loads((tmp_path / f"{to}-out" / "config.json").read_text())
        assert config["architectures"] == ["BertForPreTraining"]


def test_old_names_and_buffers_of_bert_and_gpt2(tmp_path):
    from safetensors.numpy import load_file, save_file

    source = saved("bert-masked", tmp_path / "bert")
    tensors = load_file(source / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): array
        for name, array in tensors.items()
    }
    old["bert.embeddings.position_ids"] = np.arange(64)[None]
    old["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"]
    save_file(old, source / "model.safetensors", metadata={"format": "pt"})
    receipt = wherry.convert(source, tmp_path / "out", to="huggingface-flax", lineage=False)
    assert receipt.target.tensors == len(tensors)
    change(source, tie_word_embeddings=False)
    with pytest.raises(UnrepresentableError, match="the decoder is not tied"):
        wherry.plan(source, tmp_path / "again", to="huggingface-flax")
    source = saved("gpt2", tmp_path / "gpt2")
    tensors = {
        name.removeprefix("transformer."): one
        for name, one in load_file(source / "model.safetensors").items()
    }
    buffers = {
        "h.0.attn.bias": np.tril(np.ones((1, 1, 32, 32), "u1")),
        "h.0.attn.masked_bias": np.array(-1e4, "f4"),
    }
    save_file({**tensors, **buffers}, source / "model.safetensors", metadata={"format": "pt"})
    plan = wherry.plan(source, tmp_path / "gpt2-out", to="huggingface-flax")
    assert {path[0] for path in plan.manifest.tensors} == {"wte", "wpe", "h", "ln_f"}


def test_one_file_and_an_orbax_tree_of_a_flax_class_need_its_config(tmp_path):
    folder, source, _flat = made("gpt2", tmp_path)
    layout = LayoutRequest(config=str(folder / "config.json"))
    wherry.convert(
        folder / "flax_model.msgpack", tmp_path / "one", to="huggingface", layout=layout, lineage=False
    )
    wherry.convert(folder, tmp_path / "tree", to="orbax", lineage=False)
    wherry.convert(tmp_path / "tree", tmp_path / "two", to="huggingface", lineage=False)
    for there in ("one", "two"):
        for name, values in torch_outputs(source).items():
            np.testing.assert_array_equal(torch_outputs(tmp_path / there)[name], values)
    again = wherry.convert(tmp_path / "tree", tmp_path / "three", to="huggingface-flax", lineage=False)
    assert again.target.weights_digest == again.source.weights_digest


def test_a_flax_tree_of_another_form_is_no_folder_of_a_flax_class(tmp_path):
    tree = {"params": {"dense": {"kernel": np.ones((2, 3), "f4")}}}
    with pytest.raises(UnrepresentableError, match="Flax class of transformers"):
        wherry.export(tree, tmp_path / "out", to="huggingface-flax").result(60)
    own = {"resnet": tree["params"], "head": {"bias": np.ones(3, "f4")}}
    with_statistics = {"params": own, "batch_stats": {"resnet": {"norm": {"mean": np.ones(3, "f4")}}}}
    for place, one in enumerate((own, with_statistics)):
        receipt = wherry.export(one, tmp_path / str(place), to="huggingface-flax").result(60)
        assert receipt.target.tensors == len(traverse.flatten_dict(one))
