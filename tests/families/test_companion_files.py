"""What goes along with the tensors, end to end: files carried, gaps named, snippets that run, the way back whole."""

from __future__ import annotations

import json

import pytest

import wherry
from tests.support.families import PLAIN_LLAMA, made
from wherry.core.request import LayoutRequest
from wherry.errors import MismatchError, NotFoundError, UnrepresentableError
from wherry.families import load_family
from wherry.families.companions import config_system, matches

np = pytest.importorskip("numpy")
safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")

# tokenizer.model as SentencePiece writes it begins with field 1 of a protocol buffer, tiktoken's with base64.
SENTENCEPIECE, TIKTOKEN = b"\n\x0e\n\x05<unk>", b"IQ== 0\nIg== 1\n"


def llama():
    return made(load_family("llama"), "huggingface", {})


@pytest.fixture
def folder(tmp_path):
    """A Llama of Hugging Face with a tokenizer and the other files that come with models."""
    source = tmp_path / "hf"
    source.mkdir()
    safetensors.save_file(
        {path[0]: array for path, array in llama().tensors.items()}, source / "model.safetensors"
    )
    (source / "config.json").write_text(json.dumps(PLAIN_LLAMA))
    (source / "tokenizer.model").write_bytes(SENTENCEPIECE)
    (source / "tokenizer_config.json").write_text("{}")
    (source / "generation_config.json").write_text("{}")
    (source / "LICENSE").write_text("as you like")
    (source / "training_args.bin").write_bytes(b"whatever")
    return source


def plan(source, tmp_path, to, **layout):
    options = layout.pop("options", None)
    return wherry.plan(source, tmp_path / "out", to=to, options=options, layout=LayoutRequest(**layout))


def companions(resolved) -> set[str]:
    return {companion.name for companion in resolved.manifest.companions}


def test_files_are_carried_and_what_stays_behind_is_not(folder, tmp_path):
    resolved = plan(folder, tmp_path, "maxtext")
    assert companions(resolved) == {
        "maxtext_config.yml", "config.json", "tokenizer.model", "tokenizer_config.json", "generation_config.json",
        "LICENSE",
    }  # fmt: skip
    assert not any("tokenizer" in note for note in resolved.notes)


def test_no_tokenizer_is_a_warning(folder, tmp_path):
    (folder / "tokenizer.model").unlink()
    assert any(
        "no tokenizer" in note and "--assets" in note for note in plan(folder, tmp_path, "maxtext").notes
    )


@pytest.mark.parametrize(("data", "kind"), [(SENTENCEPIECE, "sp"), (TIKTOKEN, "tiktoken")])
def test_the_config_of_lingua_names_the_tokenizer(folder, tmp_path, data, kind):
    (folder / "tokenizer.model").write_bytes(data)
    wherry.convert(folder, tmp_path / "out", to="lingua", lineage=False)
    params = json.loads((tmp_path / "out" / "params.json").read_text())
    assert params["data"]["tokenizer"] == {"name": kind, "path": "tokenizer.model"}
    assert params["distributed"]["model_dtype"] == "fp32"
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == data


def test_assets_replace_what_the_source_has(folder, tmp_path):
    assets = tmp_path / "assets"
    (assets / "chat_templates").mkdir(parents=True)
    (assets / "tokenizer.model").write_bytes(TIKTOKEN)
    (assets / "chat_template.jinja").write_text("{{ messages }}")
    (assets / "model.safetensors").write_bytes(b"not wanted")
    wherry.convert(
        folder, tmp_path / "out", to="maxtext", lineage=False, layout=LayoutRequest(assets=str(assets))
    )
    found = tmp_path / "out" / "items" / "assets"
    assert (found / "tokenizer.model").read_bytes() == TIKTOKEN
    assert (found / "chat_template.jinja").read_text() == "{{ messages }}"
    assert not (found / "model.safetensors").exists()
    with pytest.raises(NotFoundError, match="no tokenizer"):
        plan(folder, tmp_path, "maxtext", assets=str(tmp_path / "nowhere"))


def test_the_way_back_finds_what_the_target_could_not_say(folder, tmp_path):
    config = {**PLAIN_LLAMA, "bos_token_id": 7, "attention_dropout": 0.25}
    (folder / "config.json").write_text(json.dumps(config))
    for to in ("maxtext", "penzai", "lingua"):
        wherry.convert(folder, tmp_path / to, to=to, lineage=False)
        back = tmp_path / f"{to}-back"
        receipt = wherry.convert(tmp_path / to, back, to="huggingface", lineage=False)
        found = json.loads((back / "config.json").read_text())
        assert {**config, "torch_dtype": "float32"}.items() <= found.items()
        assert (back / "tokenizer.model").read_bytes() == SENTENCEPIECE
        assert (back / "LICENSE").exists()
        assert receipt.lossless == (to != "maxtext")  # its query holds 1/sqrt(8)


def test_a_config_of_another_model_next_to_the_source_is_refused(folder, tmp_path):
    wherry.convert(folder, tmp_path / "there", to="maxtext", lineage=False)
    config = tmp_path / "there" / "items" / "assets" / "config.json"
    config.write_text(json.dumps({**PLAIN_LLAMA, "num_hidden_layers": 4}))
    with pytest.raises(MismatchError, match=r"config\.json .*layer is 4"):
        plan(tmp_path / "there", tmp_path, "huggingface")
    assert not (tmp_path / "out").exists()


def test_a_config_is_of_the_system_whose_sizes_it_states():
    systems = load_family("llama").systems
    assert config_system(PLAIN_LLAMA, systems.values()) is systems["huggingface"]
    assert (
        config_system({"model": {"dim": 8, "n_layers": 2, "n_heads": 2}}, systems.values())
        is systems["lingua"]
    )
    assert config_system({"base_emb_dim": 8}, systems.values()) is systems["maxtext"]
    assert config_system({"unrelated": 1}, systems.values()) is None


def test_a_config_of_the_target_is_taken_from_the_user(folder, tmp_path):
    wherry.convert(folder, tmp_path / "there", to="maxtext", lineage=False)
    (tmp_path / "there" / "items" / "assets" / "config.json").unlink()
    stated = tmp_path / "stated.json"
    stated.write_text(json.dumps({**PLAIN_LLAMA, "bos_token_id": 11}))
    layout = LayoutRequest(config=str(stated))
    wherry.convert(tmp_path / "there", tmp_path / "out", to="huggingface", lineage=False, layout=layout)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["bos_token_id"] == 11


def test_snippets_name_what_loads(folder, tmp_path):
    hf, maxtext, lingua = (
        plan(folder, tmp_path, to, dtype="float32").snippet for to in ("hf", "maxtext", "lingua")
    )
    assert "LlamaForCausalLM.from_pretrained" in hf
    assert "load_parameters_path=" in maxtext
    assert "base_emb_dim=12" in maxtext
    assert "scan_layers=true" in maxtext
    assert 'mlp_activations=\'["silu", "linear"]\'' in maxtext
    assert "init_ckpt_path" in lingua


def test_the_snippet_for_transformers_runs(folder, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    receipt = wherry.convert(folder, tmp_path / "lingua", to="lingua", lineage=False)
    assert receipt.lossless
    resolved = plan(tmp_path / "lingua", tmp_path, "huggingface")
    wherry.convert(tmp_path / "lingua", tmp_path / "out", to="huggingface", lineage=False)
    names: dict[str, object] = {}
    exec(resolved.snippet.replace("DST", str(tmp_path / "out")), names)  # as a user pastes it
    weights = names["model"].state_dict()
    for path, array in llama().tensors.items():
        assert np.array_equal(weights[path[0]].numpy(), array)


def test_patterns_do_not_reach_into_folders():
    assert matches("tokenizer.model", ["*.model"])
    assert not matches("original/tokenizer.model", ["*.model"])
    assert not matches("tokenizerXmodel", ["tokenizer.model"])


def test_the_gin_of_a_run_is_read_before_any_data(tmp_path):
    tensors = made(
        load_family("t5"),
        "huggingface",
        {"relpos": "shared"},
        without=("encoder_up", "decoder_up", "encoder_layer_relpos", "decoder_layer_relpos"),
    ).tensors
    (tmp_path / "hf").mkdir()
    safetensors.save_file(
        {path[0]: array for path, array in tensors.items()}, tmp_path / "hf" / "model.safetensors"
    )
    t5x = tmp_path / "run" / "checkpoint_5"
    config = {"model_type": "t5", "num_heads": 3, "d_kv": 4, "num_layers": 2, "num_decoder_layers": 3,
              "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}  # fmt: skip
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    wherry.convert(tmp_path / "hf", t5x, to="t5x-legacy", lineage=False)
    for name in ("architecture.gin", "config.json"):
        (t5x / name).unlink(missing_ok=True)
    gin = tmp_path / "run" / "config.gin"
    gin.write_text("network.T5Config:\n  emb_dim = 12\n  num_heads = 3\n")
    assert wherry.plan(t5x, tmp_path / "out", to="huggingface").tensors == len(tensors)
    gin.write_text("network.T5Config.emb_dim = 13\nnetwork.T5Config.num_heads = 3\n")
    with pytest.raises(MismatchError, match=r"embed.*13"):
        wherry.plan(t5x, tmp_path / "out", to="huggingface")
    gin.write_text("network.T5Config.emb_dim = 12\nnetwork.T5Config.num_gadgets = 3\n")
    with pytest.raises(UnrepresentableError, match="num_gadgets"):
        wherry.plan(t5x, tmp_path / "out", to="huggingface")
