"""A config is part of the model: what changes outputs is carried, checked, stated by the user or refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import wherry
from tests.support.command import command
from tests.support.families import PLAIN_LLAMA, SIZES, carried, made
from tests.support.oracles import judge
from wherry.core.request import LayoutRequest
from wherry.errors import MismatchError, UnrepresentableError, UsageError
from wherry.families import convert_layout, families, load_family, load_family_file
from wherry.families.config_written import written_config
from wherry.families.fact_checks import applicable
from wherry.families.facts import tell
from wherry.layout.expr import evaluate

safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")

GEMMA2 = {
    "model_type": "gemma2", "vocab_size": 20, "num_hidden_layers": 4, "hidden_size": 12, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 10, "query_pre_attn_scalar": 8,
}  # fmt: skip
# Attributes of Gemma 2, another value of each, and what MaxText does with it.
CHANGES = [
    ("hidden_activation", "silu", "carried"),
    ("hidden_activation", "gelu", "would use 'gelu_pytorch_tanh'|would use 'silu'"),
    ("final_logit_softcapping", None, "carried"),
    ("attn_logit_softcapping", None, "carried"),
    ("attn_logit_softcapping", 7.0, "carried"),
    ("rms_norm_eps", 1e-5, "always uses 1e-06"),
    ("sliding_window", 3, "carried"),
    ("sliding_window", None, "need a window"),
    ("layer_types", ["full_attention"] * 4, "always uses"),
    ("use_bidirectional_attention", True, "always uses False"),
    ("query_pre_attn_scalar", 18, "carried"),
    ("rope_theta", 7.0, "carried"),
    ("rope_theta", 7.5, "would use 7"),
    ("rope_scaling", {"rope_type": "linear", "factor": 2.0}, "carried"),
    ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "would use"),
    ("attention_bias", True, "the attention has biases"),
]


def gemma2(**changes):
    family = load_family("gemma2")
    config = {**GEMMA2, **changes}
    begun = made(family, "huggingface", {}, without=("head",))
    there = convert_layout(begun.manifest, family, "huggingface", "maxtext", config=config)
    return family, config, begun, there


@pytest.mark.parametrize(("attribute", "value", "said"), CHANGES)
def test_every_attribute_of_gemma2_is_carried_or_refused(attribute, value, said):
    """Back from MaxText's own config, without any other file, the model is the same."""
    if said != "carried":
        with pytest.raises(UnrepresentableError, match=said) as caught:
            written_config(gemma2(**{attribute: value})[3])
        assert caught.value.cure
        return
    family, config, begun, there = gemma2(**{attribute: value})
    maxtext_config = written_config(there).config
    moved = carried(there, begun.read)
    back = convert_layout(moved.manifest, family, "maxtext", "huggingface", config=maxtext_config)
    written = written_config(back).config
    original, again = (tell(family.system("huggingface"), one) for one in (config, written))
    absorbed = family.system("maxtext").absorbs.keys()
    facts = {fact for fact, one in family.facts.items() if one.outputs} - absorbed
    assert {fact: original.facts.get(fact) for fact in facts} == {
        fact: again.facts.get(fact) for fact in facts
    }
    scalars = [one.facts["query_pre_attn_scalar"] for one in (original, again)]
    path = ("model.layers.1.self_attn.q_proj.weight",)
    first, last = begun.tensors[path], carried(back, moved.read).tensors[path]
    np.testing.assert_allclose(first / np.sqrt(scalars[0]), last / np.sqrt(scalars[1]), rtol=1e-6)


def test_a_message_names_attribute_value_and_cure():
    with pytest.raises(UnrepresentableError) as caught:
        gemma2(use_bidirectional_attention=True)
    assert "gemma2: use_bidirectional_attention is True in the config, but maxtext always uses False" in str(
        caught.value
    )
    assert "--set bidirectional=false" in str(caught.value.cure)


def test_null_is_not_a_missing_attribute():
    system = load_family("gemma2").system("huggingface")
    absent, null = (
        tell(system, {**GEMMA2, **more}).facts for more in ({}, {"final_logit_softcapping": None})
    )
    assert (absent["final_softcap"], null["final_softcap"]) == (30.0, 0.0)


def test_every_fact_is_answered_by_every_system():
    for family in map(load_family, families()):
        for system in family.systems.values():
            said = {*system.config.facts, *system.assumes, *system.absorbs}
            assert {name for name, fact in family.facts.items() if fact.outputs} <= said, (
                family.name,
                system.name,
            )
            assert all(len(reason) > 5 for reason in system.config.ignored.values())


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('[facts]\nwarmth = "a new fact"', "huggingface: no value for facts that change outputs: warmth"),
        ("[systems.lingua.assumes]\nwarmth = 3", "lingua: facts that .facts. does not declare: warmth"),
        ('[facts.warmth]\nabout = "a"\noutput = false', "unknown field output"),
    ],
)
def test_a_family_file_that_forgets_a_fact_is_an_error(tmp_path, text, match):
    path = tmp_path / "custom.toml"
    path.write_text(f'extends = "llama"\nname = "custom"\nabout = "ours"\n{text}\n')
    with pytest.raises(UsageError, match=match):
        load_family_file(str(path))


def test_a_fact_of_the_user_s_own_family(tmp_path):
    path = tmp_path / "custom.toml"
    path.write_text(
        'extends = "llama"\nname = "custom"\nabout = "ours"\n[facts]\nwarmth = { about = "a", outputs = false }\n'
        '[systems.huggingface.config]\nfacts.warmth = "warmth"\n'
    )
    family = load_family_file(str(path))
    assert "warmth" not in set(applicable(family, {}))
    assert tell(family.system("huggingface"), {"warmth": 3}).facts["warmth"] == 3


@pytest.mark.parametrize("attribute", ["pruned_heads", "per_layer_config", "is_decoder"])
def test_a_value_that_no_layout_knows_is_refused(attribute):
    system = load_family("llama").system("huggingface")
    assert tell(system, {attribute: None})
    with pytest.raises(UnrepresentableError, match=f"{attribute} is"):
        tell(system, {attribute: {"0": [1]} if attribute != "is_decoder" else True})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 1.0}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2}),
        ({"rope_type": "default", "rope_theta": 7.0}, {"rope_type": "default"}),
        (
            {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32,
             "beta_slow": 1, "truncate": True, "attention_factor": 1.0, "mscale_all_dim": 1.0},
        ),
    ],
)  # fmt: skip
def test_one_spelling_of_rope_scaling(given, found):
    assert evaluate("rope(given, 64)", {"given": given}) == found


@pytest.mark.parametrize(
    ("system", "config", "found"),
    [
        ("huggingface", {"num_hidden_layers": 4}, [1, 1, 1, 0]),
        ("huggingface", {"num_hidden_layers": 4, "no_rope_layers": [0, 1, 1, 1]}, [0, 1, 1, 1]),
        ("megatron", {"num_layers": 4, "no_rope_freq": 2}, [1, 0, 1, 0]),
        ("megatron", {"num_layers": 4, "no_rope_freq": [1, 0, 0, 0]}, [0, 1, 1, 1]),
        ("megatron", {"num_layers": 4, "no_rope_freq": None}, [1, 1, 1, 1]),
    ],
)
def test_layers_that_turn_no_positions(system, config, found):
    """transformers lists the layers that do, Megatron those that do not, or every how-manieth."""
    rules = load_family("smollm3").system(system).config
    attributes = {**{name: evaluate(str(text), {}) for name, text in rules.defaults.items()}, **config}
    assert evaluate(rules.facts["rotated_layers"], attributes) == found


def test_activations_by_their_names_elsewhere():
    assert (
        evaluate("flax_activation(['gelu', 'linear'])", {}) == "gelu_pytorch_tanh"
    )  # jax.nn's is the approximation
    assert (
        evaluate("flax_activations('gelu', True)", {}) is None
    )  # the exact one: flax.linen has no name for it
    assert evaluate("t5_activation('gated-gelu')", {}) == "gelu_pytorch_tanh"
    assert evaluate("t5_activation('gelu')", {}) == "gelu"
    for name in ("relu", "silu", "gelu", "gelu_pytorch_tanh"):
        for gated in (True, False):
            assert evaluate(f"t5_activation(t5_projection('{name}', {gated}))", {}) == name
    with pytest.raises(UnrepresentableError, match="mish"):
        evaluate("flax_activation(['mish', 'linear'])", {})


def test_tied_logits_are_not_divided():
    """base.yml divides the logits of tied embeddings by sqrt(width), which only Gemma's stored embedding makes good."""
    family = load_family("llama")
    begun = made(family, "huggingface", {}, without=("head",))
    config = {**PLAIN_LLAMA, "tie_word_embeddings": True}
    there = convert_layout(begun.manifest, family, "huggingface", "maxtext", config=config)
    written = written_config(there).config
    assert (written["logits_via_embedding"], written["normalize_embedding_logits"]) == (True, False)
    moved = carried(there, begun.read)
    divided = {**written, "normalize_embedding_logits": True}
    with pytest.raises(UnrepresentableError, match=r"tied_logits|normalize_embedding_logits"):
        written_config(convert_layout(moved.manifest, family, "maxtext", "huggingface", config=divided))


def test_the_router_s_bias_inside_params_is_stacked_as_other_parameters():
    """MaxText's own converter transposes it to [expert, layer]; outside `params` it is [layer, expert]."""
    family = load_family("deepseek")
    shapes = {}
    for form, axis in (("params", "1"), ("params", "0"), ("aux", "1")):
        forms = {"scan_layers": "true", "param_scan_axis": axis, "router_bias": form}
        begun = made(family, "maxtext", forms, sizes=SIZES, without=("dense_query", "moe_query", "head"))
        path = next(path for path in begun.tensors if path[-2:] == ("gate", "bias"))
        shapes[form, axis] = begun.tensors[path].shape
        there = convert_layout(
            begun.manifest, family, "maxtext", "huggingface", source_options=forms, sizes=SIZES
        )
        bias = carried(there, begun.read).tensors["model.layers.2.mlp.gate.e_score_correction_bias",]
        rows = begun.tensors[path].T if (form, axis) == ("params", "1") else begun.tensors[path]
        np.testing.assert_array_equal(bias, rows[1])
    layers, experts = SIZES["moe"], SIZES["expert"]
    assert shapes == {("params", "1"): (experts, layers), ("params", "0"): (layers, experts),
                      ("aux", "1"): (layers, experts)}  # fmt: skip


def test_the_router_s_bias_is_among_the_parameters_where_no_moments_are_carried():
    """MaxText 0.2.5 loads parameters alone only so; a train state has the bias where MaxText saves it."""
    family = load_family("deepseek")
    system = family.system("maxtext")
    adam = system.optimizers["adamw"].slots
    for moments, root in ((False, "params"), (True, "nnx_aux")):
        slots = {"params": system.slots["params"][:1], **(adam if moments else {})}
        forms = {"scan_layers": "true", "param_scan_axis": "1", "router_bias": "aux"}
        begun = made(family, "maxtext", forms, without=("dense_query", "moe_query", "head"), slots=slots)
        there = convert_layout(
            begun.manifest, family, "maxtext", "maxtext", source_options=forms, sizes=SIZES
        )
        assert {path[0] for path in there.targets if path[-2:] == ("gate", "bias")} == {root}


# ---- Through the front door


@pytest.fixture
def bare(tmp_path):
    """A Llama of MaxText without any config."""
    (tmp_path / "hf").mkdir()
    tensors = made(load_family("llama"), "huggingface", {}).tensors
    safetensors.save_file(
        {path[0]: array for path, array in tensors.items()}, tmp_path / "hf/model.safetensors"
    )
    (tmp_path / "hf/config.json").write_text(json.dumps(PLAIN_LLAMA))
    wherry.convert(tmp_path / "hf", tmp_path / "bare", to="maxtext", lineage=False)
    for path in [*(tmp_path / "bare").rglob("*.json"), *(tmp_path / "bare").rglob("maxtext_config.yml")]:
        if path.name in ("wherry.json", "config.json", "maxtext_config.yml"):
            path.unlink()
    return tmp_path / "bare"


def model_file(folder, **more):
    lines = {
        "base_emb_dim": 12, "base_num_query_heads": 4, "base_num_kv_heads": 2, "base_mlp_dim": 10, "head_dim": 8,
        "base_num_decoder_layers": 3, "vocab_size": 20, "decoder_block": "llama2", "rope_max_timescale": 500_000,
        "rope_type": "default",
        "mlp_activations": ["silu", "linear"], **more,
    }  # fmt: skip
    path = folder / "stated.yml"
    path.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in lines.items()))
    return str(path)


def test_the_user_must_state_the_facts_that_no_config_states(bare, tmp_path):
    layout = LayoutRequest(family="llama")
    options = {"rope": "half"}
    with pytest.raises(UsageError, match="no config states") as caught:
        wherry.plan(bare, tmp_path / "out", to="huggingface", layout=layout, options=options)
    facts = {"activation": "silu", "norm_eps": "1e-5", "rope_theta": "500000.0", "rope_scaling": "default"}
    assert all(f"--set {fact}=VALUE" in caught.value.for_shell() for fact in facts)
    receipt = wherry.convert(
        bare, tmp_path / "out", to="huggingface", layout=layout, options=facts, lineage=False
    )
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert (found["rms_norm_eps"], found["rope_theta"], found["hidden_act"]) == (1e-5, 500000.0, "silu")
    assert "500000.0" in json.dumps(receipt.to_json())


def test_maxtext_s_own_file_is_the_config(bare, tmp_path):
    """Its decoder block decides the family, which names and shapes leave open."""
    layout = LayoutRequest(config=model_file(tmp_path))
    wherry.convert(bare, tmp_path / "out", to="huggingface", layout=layout, lineage=False)
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert (found["model_type"], found["rms_norm_eps"], found["rope_theta"]) == ("llama", 1e-5, 500000)
    other = LayoutRequest(config=model_file(tmp_path, decoder_block="mistral"))
    wherry.convert(bare, tmp_path / "mistral", to="huggingface", layout=other, lineage=False)
    assert json.loads((tmp_path / "mistral/config.json").read_text())["model_type"] == "mistral"
    both = LayoutRequest(config=other.config, family="llama")
    with pytest.raises(
        UnrepresentableError, match=r"decoder block is not llama2 .decoder_block is 'mistral'."
    ):
        wherry.plan(bare, tmp_path / "no", to="huggingface", layout=both)


def test_a_stated_fact_wins_and_is_named(tmp_path):
    config = {**PLAIN_LLAMA, "model_type": "mistral", "sliding_window": 16}
    (tmp_path / "hf").mkdir()
    tensors = made(load_family("mistral"), "huggingface", {}).tensors
    safetensors.save_file(
        {path[0]: array for path, array in tensors.items()}, tmp_path / "hf/model.safetensors"
    )
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnrepresentableError, match=r"sliding_window is 16 in config.json, but maxtext always uses 0"
    ):
        wherry.plan(tmp_path / "hf", tmp_path / "there", to="maxtext")
    options = {"sliding_window": 0}
    plan = wherry.plan(tmp_path / "hf", tmp_path / "there", to="maxtext", options=options)
    assert "sliding_window = 0 as stated, instead of 16 in config.json" in plan.notes
    wherry.convert(tmp_path / "hf", tmp_path / "there", to="maxtext", options=options, lineage=False)
    assert not list((tmp_path / "there").rglob("config.json"))  # it no longer describes the model
    assert wherry.verify(tmp_path / "there", level="roundtrip", against=tmp_path / "hf").ok
    wherry.convert(tmp_path / "there", tmp_path / "back", to="huggingface", lineage=False)
    assert json.loads((tmp_path / "back/config.json").read_text())["sliding_window"] is None


BUILT = {
    "Mistral": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 3, "rms_norm_eps": 1e-3},
    # The last norm has Penzai's own epsilon.
    "GPTNeoX": {"rotary_pct": 0.5, "layer_norm_eps": 1e-6},
}


@pytest.mark.parametrize("kind", BUILT)
def test_penzai_builds_the_model_that_was_converted(kind, tmp_path):
    """By Penzai's own code, with the arguments that wherry wrote, computed as transformers does."""
    pytest.importorskip("penzai", reason="penzai is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import jax.numpy as jnp
    from penzai import pz

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        hidden_act="gelu_new", **BUILT[kind],
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path / "hf")
    plan = wherry.plan(tmp_path / "hf", tmp_path / "out", to="penzai")
    wherry.convert(tmp_path / "hf", tmp_path / "out", to="penzai", lineage=False)
    names: dict[str, object] = {}
    exec(plan.snippet.replace("DST", str(tmp_path / "out")), names)  # as a user pastes it
    ids = np.asarray([[3, 14, 15, 9, 26, 5, 7]])
    tokens = pz.nx.wrap(jnp.asarray(ids)).tag("batch", "seq")
    positions = pz.nx.wrap(jnp.arange(7)).tag("seq")
    found = names["model"](tokens, token_positions=positions).unwrap("batch", "seq", "vocabulary")
    with torch.no_grad():
        wanted = model(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(np.asarray(found), wanted, atol=2e-5)


def test_nothing_is_invented_between_two_trees_of_one_system(bare, tmp_path):
    layout, options = LayoutRequest(family="llama"), {"scan_layers": "false", "rope": "half"}
    plan = wherry.plan(bare, tmp_path / "apart", to="maxtext", layout=layout, options=options)
    assert any("does not state" in note and "rope_theta" in note for note in plan.notes)
    wherry.convert(bare, tmp_path / "apart", to="maxtext", layout=layout, options=options, lineage=False)
    (written,) = (tmp_path / "apart").rglob("maxtext_config.yml")
    assert "rope_max_timescale" not in written.read_text()


# Facts and forms that the tensors disprove are refused (9); values that both can have replace the
# config's, named.


pytest.importorskip("transformers")

# A model of each family with facts that tensors disprove, and a target that has the family.
LABELS = {
    "deepseek": ("deepseek-v3", "maxtext"), "gemma2": ("gemma2", "maxtext"), "gemma3": ("gemma3", "maxtext"),
    "gemma4": ("gemma4-experts", "maxtext"), "gemma4-small": ("gemma4-e2b", "maxtext"),
    "glm4-moe": ("glm4-moe", "megatron"), "gpt-oss": ("gpt-oss", "maxtext"), "llama4": ("llama4-maverick", "maxtext"),
    "mixtral": ("mixtral", "maxtext"), "olmo3": ("olmo3", "maxtext"), "qwen": ("qwen3-moe", "maxtext"),
    "qwen2-moe": ("qwen2-moe", "megatron"), "qwen3-next": ("qwen3-next", "maxtext"),
}  # fmt: skip


def disproved():
    return [
        pytest.param(name, fact, id=f"{name}-{fact}")
        for name in families()
        for fact, one in load_family(name).facts.items()
        if one.fits
    ]


@pytest.mark.parametrize(("family", "fact"), disproved())
def test_a_value_that_the_tensors_disprove_is_refused(family, fact, tmp_path):
    label, target = LABELS[family]
    text = json.dumps(["full_attention"] if fact == "layer_types" else 97)
    with pytest.raises(MismatchError, match=f"{fact}=.* is stated, but the tensors have") as caught:
        wherry.plan(judge.source(label), tmp_path / "out", to=target, options={fact: text})
    assert (
        f"leave --set {fact}=" in caught.value.for_shell()
        or f"leave --set '{fact}=" in caught.value.for_shell()
    )
    wherry.plan(judge.source(label), tmp_path / "out", to=target)  # as the cure says


@pytest.mark.parametrize(("label", "tied"), [("llama", True), ("llama-tied", False)])
def test_a_tie_that_the_tensors_disprove_is_refused(label, tied, tmp_path):
    with pytest.raises(MismatchError, match=f"tied={json.dumps(tied)} is stated, but") as caught:
        wherry.plan(judge.source(label), tmp_path / "out", to="maxtext", options={"tied": tied})
    assert caught.value.exit_code == 9


@pytest.mark.parametrize("stated", [{"scan_layers": "false"}, {"param_scan_axis": "0"}])
def test_a_form_that_the_tensors_disprove_is_refused(stated, tmp_path):
    wherry.convert(judge.source("llama"), tmp_path / "there", to="maxtext", lineage=False)
    ((name, value),) = stated.items()
    with pytest.raises(
        MismatchError, match=f"{name} = {value} is stated, but the tensors show {name} = "
    ) as caught:
        wherry.plan(tmp_path / "there", tmp_path / "out", to="huggingface", options=stated)
    assert f"leave --set {name}={value} out" in caught.value.for_shell()


@pytest.mark.parametrize(
    ("system", "options", "words"),
    [
        ("maxtext", {"rope_theta": 5}, "rope_theta = 5 as stated, instead of 10000 in maxtext_config.yml"),
        ("lingua", {"activation": "gelu"}, "activation = 'gelu' as stated, instead of 'silu', which lingua always"),
    ],
)  # fmt: skip
def test_a_value_that_replaces_another_is_named(system, options, words, tmp_path):
    wherry.convert(judge.source("llama"), tmp_path / "there", to=system, lineage=False)
    found = wherry.plan(tmp_path / "there", tmp_path / "out", to="huggingface", options=options)
    assert any(note.startswith(words) for note in found.notes)


# Conventions, which no tensor shows: what is stated agrees with software, record and config, or is
# refused (9).


pytest.importorskip("transformers")

# A model of each family whose MaxText has conventions, and of both layouts of rotary positions.
LABELS_OF_CONVENTIONS = {
    "llama": "llama", "llama-3.1": "llama", "llama-yarn": "llama", "phi3": "phi3", "granite": "granite",
    "mistral": "mistral", "mixtral": "mixtral", "qwen2": "qwen", "qwen3-yarn": "qwen", "gemma": "gemma",
    "gemma2": "gemma2", "gemma4": "gemma4", "gemma4-experts": "gemma4", "llama4-maverick": "llama4",
}  # fmt: skip


def conventions(family):
    return [
        (system.name, name, one)
        for system in load_family(family).systems.values()
        for name, one in system.conventions.items()
    ]


def cases():
    for label, family in LABELS_OF_CONVENTIONS.items():
        for system, name, _one in conventions(family):
            yield pytest.param(label, family, system, name, id=f"{label}-{system}-{name}")


def plan(source, target, *, options=None, **layout):
    return wherry.plan(
        source, target, to="huggingface", options=options or {}, layout=LayoutRequest(**layout)
    )


def stated_otherwise(error, name, value, recorded, where):
    """The refusal names both values and the file, and its cure leaves the statement out."""
    assert error.exit_code == 9
    assert f"{name} = {value} is stated" in error.what
    assert f"{name} = {recorded}" in error.what
    assert where in error.what
    assert error.cure == f"leave --set {name}={value} out"


def test_each_family_with_conventions_has_a_model_here():
    assert {name for name in families() if conventions(name)} == set(LABELS_OF_CONVENTIONS.values())


@pytest.mark.parametrize(("label", "family", "system", "name"), list(cases()))
def test_a_choice_is_that_of_the_record_and_of_the_config(label, family, system, name, tmp_path):
    """Each choice that the system can hold is written; each other one that is stated later is refused."""
    one = load_family(family).system(system).conventions[name]
    written = []
    for choice in one.choices:
        target = tmp_path / choice
        try:
            wherry.convert(judge.source(label), target, to=system, options={name: choice}, lineage=False)
        except MismatchError as error:
            stated_otherwise(error, name, choice, one.always, f"{system} always")
            continue
        except UnrepresentableError:  # of this model MaxText computes only the other
            continue
        written.append(choice)
        for stated in one.choices:
            if stated == choice:
                plan(target, tmp_path / "again", options={name: stated})
                continue
            with pytest.raises(MismatchError) as caught:
                plan(target, tmp_path / "again", options={name: stated})
            where = "always" if one.always else "wherry.json"
            stated_otherwise(caught.value, name, stated, choice, where)
        plan(target, tmp_path / "again")  # which the cure says
        (target / "wherry.json").unlink()
        if not one.config and not one.always:
            continue
        plan(target, tmp_path / "again", options={name: choice})
        for stated in set(one.choices) - {choice}:
            with pytest.raises(MismatchError) as caught:
                plan(target, tmp_path / "again", options={name: stated})
            where = "always" if one.always else "maxtext_config.yml"
            stated_otherwise(caught.value, name, stated, choice, where)
    assert written


def test_a_config_that_contradicts_the_record_is_refused(tmp_path):
    wherry.convert(judge.source("llama"), tmp_path / "there", to="maxtext", lineage=False)
    file = tmp_path / "there/items/assets/maxtext_config.yml"
    other = tmp_path / "run.yml"
    other.write_text(
        file.read_text().replace('rope_type: "default"', "rope_type: llama3.1\nrope_use_scale: false")
    )
    with pytest.raises(MismatchError, match=r"run\.yml: rope is 'interleaved', but 'half' in the record"):
        plan(tmp_path / "there", tmp_path / "out", config=str(other))


def test_no_choice_is_taken_that_nobody_states(tmp_path):
    """Without a record and a config the user must state the choices; the cure names the models that have each."""
    wherry.convert(judge.source("mistral"), tmp_path / "there", to="maxtext", lineage=False)
    (tmp_path / "there/wherry.json").unlink()
    shutil.rmtree(tmp_path / "there/items/assets")
    with pytest.raises(UsageError, match="rotary positions") as caught:
        plan(tmp_path / "there", tmp_path / "out", family="mistral")
    assert "--set rope=half (Llama 2, 3 and 3.3, Mistral" in str(caught.value.cure)
    assert "--set rope=interleaved (Llama 3.1" in str(caught.value.cure)


@pytest.mark.parametrize(
    ("name", "rope"),
    [("llama2-7b", "half"), ("llama3-8b", "half"), ("llama3.1-8b", "interleaved"), ("llama3.3-70b", "half")],
)
def test_the_name_of_a_model_decides(name, rope, tmp_path):
    """MaxText 0.2.5, attentions.py: llama3.1 and what begins so turns neighbours; of the others, halves."""
    scaled = "llama-3.1" if rope == "interleaved" else "llama"
    wherry.convert(judge.source(scaled), tmp_path / "there", to="maxtext", lineage=False)
    (tmp_path / "there/wherry.json").unlink()
    file = tmp_path / "there/items/assets/maxtext_config.yml"
    lines = [
        line for line in file.read_text().splitlines() if not line.startswith(("rope_type", "rope_use_scale"))
    ]
    config = tmp_path / "run.yml"
    config.write_text("\n".join([*lines, f"model_name: {name}", "override_model_config: true"]))
    shutil.rmtree(tmp_path / "there/items/assets")
    found = plan(tmp_path / "there", tmp_path / "out", config=str(config))
    assert found.to_json()["layout"]["from"]["rope"] == rope
    assert any(f"rope = {rope}" in note and f"model_name = {name}" in note for note in found.notes)
    renamed = tmp_path / "renamed.yml"  # a file of configs/models under another name states no model
    renamed.write_text("\n".join(line for line in lines if not line.startswith("base_config")))
    with pytest.raises(UsageError, match="does not state model_name"):
        plan(tmp_path / "there", tmp_path / "out", config=str(renamed))
    found = plan(tmp_path / "there", tmp_path / "out", config=str(renamed.rename(tmp_path / f"{name}.yml")))
    assert found.to_json()["layout"]["from"]["rope"] == rope


def test_a_choice_that_models_of_such_facts_do_not_have_is_named(tmp_path):
    """MaxText can turn neighbours without scaling, if rope_type is llama3.1 and rope_use_scale is false."""
    wherry.convert(judge.source("llama"), tmp_path / "there", to="maxtext", lineage=False)
    (tmp_path / "there/wherry.json").unlink()
    shutil.rmtree(tmp_path / "there/items/assets")
    facts = {"rope_scaling": "default", "rope_theta": 10000, "norm_eps": 1e-6, "activation": "silu"}
    for rope in ("half", "interleaved"):
        found = plan(tmp_path / "there", tmp_path / "out", options={**facts, "rope": rope}, family="llama")
        named = any(note.startswith("rope = interleaved as stated, instead of half") for note in found.notes)
        assert named is (rope == "interleaved")


def test_the_command_line_refuses_with_9(tmp_path):
    wherry.convert(judge.source("llama"), tmp_path / "there", to="maxtext", lineage=False)
    done = command(
        "convert", tmp_path / "there", tmp_path / "out", "--to", "huggingface", "--set", "rope=interleaved"
    )
    assert done.returncode == 9, done.stderr
    assert "wherry.json" in done.stderr
    assert "cure: leave --set rope=interleaved out" in done.stderr
    assert not (tmp_path / "out").exists()
