"""What goes along with the tensors: configs, files, token ids; what nobody knows is named."""

from __future__ import annotations

import json
import os

import pytest

import wherry
from tests.support.command import typed
from tests.support.corpus import place
from tests.support.families import OWN_SIZES, PLAIN_LLAMA, SIZES, made
from wherry.core.request import LayoutRequest
from wherry.errors import MismatchError, NotFoundError, UnrepresentableError, UsageError
from wherry.families import convert_layout, families, load_family
from wherry.families.companions import config_system, matches
from wherry.families.config_files import parse_config, render_config
from wherry.families.config_written import written_config
from wherry.families.fact_checks import known_names
from wherry.families.facts import tell
from wherry.layout.expr import evaluate


def projected(source, target, config=None, *, tensors=None, **more):
    family = load_family("llama")
    manifest = (tensors or made(family, source, {"tree": "dcp", "rope": "half"})).manifest
    return convert_layout(manifest, family, source, target, config=config, sizes=axes(), **more)


def axes() -> dict[str, int]:
    return {name: SIZES[name] for name in ("group", "qhead", "pair")}


def test_what_is_known_is_written():
    table = {"norm_eps": 1e-6, "rope_theta": 1e6, "max_seqlen": 99}
    written = written_config(projected("lingua", "huggingface", {"model": table}))
    assert written.config == {
        **PLAIN_LLAMA, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 1e6,
        "max_position_embeddings": 99, "torch_dtype": "float32",
    }  # fmt: skip
    assert written.warnings == ()


def test_the_user_must_state_what_no_config_states():
    """All of it at once, and nothing that changes no output; that is written with a warning."""
    with pytest.raises(UsageError, match="no config states") as caught:
        written_config(projected("lingua", "huggingface"))
    for fact in ("norm_eps", "rope_theta", "sliding_window"):
        assert f"--set {fact}=VALUE" in caught.value.for_shell()
    assert "max_position" not in str(caught.value)
    assert "activation" not in str(caught.value)  # Lingua knows no other
    stated = {"norm_eps": 1e-6, "rope_theta": 7.0, "sliding_window": 0}
    written = written_config(projected("lingua", "huggingface", stated=stated))
    assert (written.config["rms_norm_eps"], written.config["rope_theta"]) == (1e-6, 7.0)
    assert len(written.warnings) == 1
    assert "max_position_embeddings = 2048" in written.warnings[0]
    assert "config.json" in written.warnings[0]


def test_what_a_given_config_says_is_kept():
    given = {**PLAIN_LLAMA, "bos_token_id": 128000, "torch_dtype": "float16", "rope_theta": 7.0}
    written = written_config(projected("lingua", "huggingface"), given)
    assert written.config == {**given, "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32"}
    assert written.warnings == ()


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("hidden_size", 16, "embed is 16"),
        ("num_hidden_layers", 4, "layer is 4"),
        ("rope_theta", 7.0, "rope_theta is 7"),
    ],
)
def test_a_given_config_of_another_model_is_refused(attribute, value, said):
    config = {"model": {"rope_theta": 500000.0, "norm_eps": 1e-5}}
    with pytest.raises(MismatchError, match=said):
        written_config(projected("lingua", "huggingface", config), {**PLAIN_LLAMA, attribute: value})


def test_an_unknown_attribute_is_refused():
    with pytest.raises(UnrepresentableError, match="num_gadgets"):
        written_config(projected("lingua", "huggingface"), {**PLAIN_LLAMA, "num_gadgets": 3})


def test_what_a_config_cannot_say_is_refused():
    with pytest.raises(UnrepresentableError, match="meta cannot hold this model: its params"):
        written_config(projected("huggingface", "meta", PLAIN_LLAMA))


def test_ties_are_seen_in_the_tensors():
    tied = made(load_family("llama"), "lingua", {"tree": "dcp"}, without=("head",))
    for target, attribute in (("huggingface", "tie_word_embeddings"), ("maxtext", "logits_via_embedding")):
        found = written_config(projected("lingua", target, {"model": {"dim": 12}}, tensors=tied))
        assert found.config[attribute] is True


def test_llama_31_scales_as_maxtext_does():
    chosen = {"scan_layers": "true", "param_scan_axis": "1", "rope": "interleaved", "query_scale": "folded"}
    source = made(load_family("llama"), "maxtext", chosen)
    there = projected("maxtext", "huggingface", {"rope_type": "llama3.1"}, tensors=source)
    assert there.source.chosen["rope"] == "interleaved"
    assert written_config(there).config["rope_scaling"] == LLAMA3


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"factor": 32.0},
        {"low_freq_factor": 2.0},
        {"high_freq_factor": 5.0},
        {"original_max_position_embeddings": 99},
    ],
)
def test_a_scaling_that_maxtext_has_not_is_refused(change):
    scaled = projected("huggingface", "maxtext", {**PLAIN_LLAMA, "rope_scaling": LLAMA3})
    written = written_config(scaled).config
    assert (written["rope_type"], written["rope_use_scale"]) == ("llama3.1", True)
    other = {**PLAIN_LLAMA, "rope_scaling": {**LLAMA3, **change}}
    with pytest.raises(UnrepresentableError, match=r"rope_scaling is .* but maxtext would use") as caught:
        written_config(projected("huggingface", "maxtext", other))
    assert "--set rope_scaling=llama3.1" in str(caught.value.cure)


# Parameters of the kinds of a family that exclude those which are made here.
_OTHER_KINDS = {
    "deepseek": ("moe_query", "dense_query"),
    "t5": ("encoder_up", "decoder_up", "encoder_layer_relpos", "decoder_layer_relpos"),
    "qwen": ("query_bias", "key_bias", "value_bias", "gate", "up", "down"),
}


# Where sizes depend on one another, or on facts that are not made here.
_SIZES = {
    "llama4": {"cycle": 4, "turn": 2},
    "gemma4-small": OWN_SIZES["gemma4-small"],
    "qwen3-next": {"qkvz": 4136, "channel": 4116, **OWN_SIZES["qwen3-next"]},
    "stablelm": {"embed": SIZES["group"] * SIZES["qhead"] * 2 * SIZES["pair"]},
}


CHOICES = {"feed_forward": "parallel"}  # there are experts in a family that may have them


def every_write():
    for name in families():
        for system in load_family(name).systems.values():
            if system.write.file:
                yield pytest.param(name, system.name, id=f"{name}-{system.name}")


@pytest.mark.parametrize(("name", "target"), list(every_write()))
def test_every_config_is_read_as_what_is_known(name, target):
    """`written_config` checks it; a mistake in a declaration is an error here."""
    family = load_family(name)
    system = family.system(target)
    chosen = {key: form.choices[0] for key, form in system.forms.items()}
    chosen |= {key: CHOICES.get(key, one.usual) for key, one in system.conventions.items()}
    sizes = {
        **SIZES,
        "kv_down": 11,
        "kv_rank": 8,
        "kv_dim": 5 + 6,
        "query_dim": 9,
        "shared_ffn": 10,
        "expert_ffn": 5,
    }
    if target == "meta":
        sizes["embed"] = sizes["group"] * sizes["qhead"] * 2 * sizes["pair"]
    if name == "bert":
        sizes["side"] = sizes["embed"]
    sizes |= _SIZES.get(name, {})
    source = made(family, target, chosen, without=_OTHER_KINDS.get(name, ()), sizes=sizes)
    conventions = {key: chosen[key] for key in system.conventions}
    there = convert_layout(source.manifest, family, target, target, source_options=conventions,
                           sizes={axis: ({**sizes, **family.constants})[axis] for axis in family.axes})  # fmt: skip
    written = written_config(there)
    config_facts = tell(system, written.config)
    known = known_names(there)
    assert config_facts.sizes
    assert {axis: known[axis] for axis in config_facts.sizes if axis in known} == {
        axis: extent for axis, extent in config_facts.sizes.items() if axis in known
    }
    assert parse_config(str(system.write.file), render_config(str(system.write.file), written.config))


@pytest.mark.parametrize("ffn", [*range(1, 60), 1408, 2730, 2731, 5632, 11008, 13824, 14336, 28672, 53248])
def test_any_width_is_said_by_lingua_s_rule(ffn):
    for dim in (8, 64, 2048, 4096, 5120, 16384):
        names = {"ffn": ffn, "embed": dim}
        multiple = evaluate("ffn_multiple(ffn, 8 * embed // 3)", names)
        multiplier = evaluate("ffn_multiplier(ffn, 8 * embed // 3)", names)
        found = {"dim": dim, "multiple_of": multiple, "ffn_dim_multiplier": multiplier}
        rule = "round_up(int((ffn_dim_multiplier or 1) * (8 * dim // 3)), multiple_of)"
        assert evaluate(rule, found) == ffn


def test_yaml_is_read_as_maxtext_writes_it():
    text = b"""# a comment
base_emb_dim: 12
base_num_query_heads: 4   # a remark
base_num_kv_heads: 2
rope_max_timescale: 500_000
mlp_activations: ["silu","linear"]
decoder_block: "llama2"
normalization_layer_epsilon: 1.0e-5
scan_layers: True
run_name:
"""
    assert parse_config("a.yml", text) == {
        "base_emb_dim": 12, "base_num_query_heads": 4, "base_num_kv_heads": 2, "rope_max_timescale": 500000,
        "mlp_activations": ["silu", "linear"], "decoder_block": "llama2", "normalization_layer_epsilon": 1e-5,
        "scan_layers": True, "run_name": None,
    }  # fmt: skip
    with pytest.raises(UsageError, match="line 2") as failure:
        parse_config("a.yml", b"a: 1\n b: 2\n")
    assert str(failure.value).count("line 2") == str(failure.value).count("cure:") == 1
    nested = b"rules: [['norm', 'fsdp'],\n        ['mlp', ['a', 'b']]]\neps: 1e-06\nkeep: None\n"
    found = {"rules": [["norm", "fsdp"], ["mlp", ["a", "b"]]], "eps": 1e-6, "keep": None}
    assert parse_config("a.yml", nested) == found
    assert parse_config("a.yml", render_config("a.yml", found)) == found
    with pytest.raises(UsageError, match="aliases are not supported"):
        parse_config("a.yml", b"a: &x [1]\nb: *x\n")
    with pytest.raises(UsageError, match="expected a table"):
        parse_config("a.yml", b"- 1\n")


def test_yaml_is_a_number_to_others():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    values = {"a": 1e-5, "b": 1.5e-7, "c": 10000, "d": True, "e": None, "f": ["silu", "linear"], "g": "x: y"}
    assert yaml.safe_load(render_config("a.yml", values)) == values
    assert parse_config("a.yml", render_config("a.yml", values)) == values


def test_gin_is_read_as_t5x_writes_it():
    text = b"""from t5x.examples.t5 import network
EMB_DIM = 16
# Parameters for network.T5Config:
# ==============================================================================
network.T5Config.dropout_rate = 0.0
network.T5Config.emb_dim = %EMB_DIM
network.T5Config.mlp_activations = \\
    ('gelu', 'linear')
train/utils.DatasetConfig.batch_size = 128
network.T5Config:
  head_dim = 8
  logits_via_embedding = False
network.Transformer.config = @network.T5Config()
"""
    assert parse_config("config.gin", text) == {
        "dropout_rate": 0.0, "emb_dim": 16, "mlp_activations": ("gelu", "linear"), "head_dim": 8,
        "logits_via_embedding": False,
    }  # fmt: skip
    values = {"emb_dim": 16, "mlp_activations": ["gelu", "linear"], "logits_via_embedding": False}
    written = render_config("a.gin", values)
    assert b"network.T5Config.mlp_activations = ('gelu', 'linear')" in written
    assert parse_config("a.gin", written) == {**values, "mlp_activations": ("gelu", "linear")}


def test_a_conditional_model_keeps_its_table():
    """Gemma 3's config has the text model's attributes one table deeper; the attributes outside this table stay."""
    text = {
        "model_type": "gemma3_text", "vocab_size": 20, "num_hidden_layers": 14, "hidden_size": 12, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 10, "torch_dtype": "bfloat16",
    }  # fmt: skip
    family = load_family("gemma3")
    source = made(family, "huggingface", {"root": "conditional"}, without=("head",))
    given = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"layers": 2},
        "torch_dtype": "bfloat16",
    }
    there = convert_layout(source.manifest, family, "huggingface", "huggingface", config=given)
    said = {"torch_dtype": "float32", "tie_word_embeddings": True}
    assert written_config(there, given, whole=True).config == {
        **given,
        **said,
        "text_config": {**text, **said},
    }
    assert text["torch_dtype"] == "bfloat16"  # what was given is not changed


# What goes along with the tensors, end to end: files carried, gaps named, snippets that run, the way back
# whole.


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


# A user states the numbers of special tokens, which no checkpoint of T5X has, for a config of
# transformers.


os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def source():
    return place("t5x-orbax-ocdbt-head")


def convert(source, tmp_path, capfd, *settings):
    line = f"convert {source} HOME/hf --to huggingface --family t5 --only params"
    return typed(" ".join([line, *(f"--set '{one}'" for one in settings)]), tmp_path, capfd)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((), (0, 0, 1)),
        (("decoder_start_token_id=5", "pad_token_id=4", "eos_token_id=3"), (5, 4, 3)),
        (("eos_token_id=[3, 7]",), (0, 0, [3, 7])),
    ],
)
def test_stated_token_ids_are_in_the_config(source, tmp_path, capfd, settings, expected):
    code, text = convert(source, tmp_path, capfd, *settings)
    assert code == 0, text
    config = json.loads((tmp_path / "hf/config.json").read_text())
    names = ("decoder_start_token_id", "pad_token_id", "eos_token_id")
    assert tuple(config[name] for name in names) == expected
    unstated = [name for name in names if not any(one.startswith(name) for one in settings)]
    assert all(f"{name} = {config[name]!r}" in text for name in unstated), (
        "the defaults are named, and not masked"
    )
    assert "***" not in text


def test_transformers_reads_them(source, tmp_path, capfd):
    transformers = pytest.importorskip("transformers")
    convert(source, tmp_path, capfd, "eos_token_id=3", "bos_token_id=6")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    assert (config.eos_token_id, config.bos_token_id) == (3, 6)


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "[1,x]", "99999999"])
def test_what_is_no_token_is_refused(source, tmp_path, capfd, value):
    code, text = convert(source, tmp_path, capfd, f"eos_token_id={value}")
    assert code == 2, text
    assert "eos_token_id" in text
    assert not (tmp_path / "hf").exists()


def test_a_target_without_token_ids_does_not_take_them(source, tmp_path, capfd):
    code, text = typed(
        f"convert {source} HOME/x --to orbax --only params --set eos_token_id=1", tmp_path, capfd
    )
    assert code == 2, text
    assert "unknown option 'eos_token_id'" in text
