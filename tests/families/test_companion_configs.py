"""Configs are written from what is known and read as it; what nobody knows is named, what contradicts is refused."""

from __future__ import annotations

import pytest

from tests.support.families import OWN_SIZES, PLAIN_LLAMA, SIZES, made
from wherry.errors import MismatchError, UnrepresentableError, UsageError
from wherry.families import convert_layout, families, load_family
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


CHOICES = {"feed_forward": "beside"}  # there are experts in a family that may have them


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
