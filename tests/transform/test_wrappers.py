"""What trainers put around a model's names is removed by name.

A Llama in every wrapper and container becomes the folder that transformers loads, after one command.
"""

from __future__ import annotations

import json
import re
import shlex
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wherry
from tests.support.wrapped import CONTAINERS, FLAT, NESTED, before, inside
from wherry.cli import main
from wherry.core.request import LayoutRequest
from wherry.errors import UnrepresentableError, WherryError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

CASES = [
    (container, label, one)
    for container, (_save, nests) in CONTAINERS.items()
    for label, one in (*FLAT.items(), *(NESTED.items() if nests else ()))
]
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    made.config.architectures = ["LlamaForCausalLM"]
    return made


@pytest.fixture(scope="module")
def state(model):
    return dict(model.state_dict())


@pytest.fixture(scope="module")
def config(model, tmp_path_factory):
    """The file that is named with --config."""
    model.config.save_pretrained(folder := tmp_path_factory.mktemp("config"))
    return str(folder / "config.json")


def save(container, folder, saved, config):
    """What a trainer leaves, and the options of the one command."""
    folder.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = CONTAINERS[container][0](folder, saved)
    if container != "accelerate":
        return source, {"config": config}
    (source / "config.json").write_bytes(open(config, "rb").read())  # noqa: PTH123, SIM115
    return source, {}


def weights(folder):
    from safetensors.torch import load_file

    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


def assert_is(folder, state):
    """The model's own names and bytes, with a config."""
    found = weights(folder)
    assert found.keys() == state.keys()
    assert [name for name in state if not torch.equal(found[name], state[name])] == []
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def removals(lines):
    return [
        found[1] for found in (re.match(r"removed (\S+) from the names of", line) for line in lines) if found
    ]


def expected(container, one):
    """What is removed; DCP joins the parts of a nested name by dots, and accelerate has a root of its own."""
    words = [word.replace("/", ".") if container == "dcp" else word for word in one.removed]
    return {*words, *(["model."] if container == "accelerate" else [])}


@pytest.mark.parametrize(
    ("container", "label", "one"), CASES, ids=[f"{container}-{label}" for container, label, _one in CASES]
)
def test_one_command_gives_the_model_of_its_config(container, label, one, state, config, tmp_path):
    source, stated = save(container, tmp_path / "in", one.saved(dict(state)), config)
    receipt = wherry.convert(
        source, tmp_path / "out", to="huggingface", ignore=one.ignore, lineage=False, **stated
    )
    assert_is(tmp_path / "out", state)
    if container != "bin" or label != "plain":
        assert set(removals(receipt.warnings)) == expected(container, one)


@pytest.mark.parametrize("container", CONTAINERS)
def test_transformers_loads_it_and_computes_the_same(container, model, state, config, tmp_path):
    label = "composer" if container in ("pt", "dcp") else "fsdp-all"
    one = (NESTED if label == "composer" else FLAT)[label]
    source, stated = save(container, tmp_path / "in", one.saved(dict(state)), config)
    plan = wherry.plan(source, tmp_path / "out", to="huggingface", layout=LayoutRequest(**stated))
    assert set(removals(plan.notes)) == expected(container, one)
    wherry.convert(source, tmp_path / "out", to="huggingface", lineage=False, **stated)
    loaded, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
    proof = wherry.verify(tmp_path / "out", level="roundtrip", against=source)
    assert proof.ok, proof.failed


# ---- Any stack of them

OUTER = (
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_forward_module",
    "model",
    "net",
    "state_dict",
    "_module",
)
INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    outer=st.lists(st.sampled_from(OUTER), max_size=4),
    inner=st.lists(st.sampled_from(INNER), max_size=3),
    nodes=st.lists(st.sampled_from(("app", "state", "model", "state_dict", "module")), max_size=3),
)
def test_any_stack_of_them_is_removed(outer, inner, nodes, state, config, tmp_path_factory):
    saved = before(*outer)(inside(*inner)(dict(state))) if inner else before(*outer)(dict(state))
    for node in reversed(nodes):
        saved = {node: saved}
    folder = tmp_path_factory.mktemp("stack")
    source, stated = save("pt", folder / "in", saved, config)
    wherry.convert(source, folder / "out", to="huggingface", lineage=False, **stated)
    assert_is(folder / "out", state)


# ---- Prefixes that no table knows

UNKNOWN = {
    "my.net.": ({"pt", "dcp", "safetensors", "ranks", "bin"}, before("my", "net"), "my.net."),
    "my/net/": ({"pt"}, lambda s: {"my": {"net": s}}, "my/net/"),
    "weights/backbone.": (
        {"pt", "legacy"},
        lambda s: {"weights": before("backbone")(s)},
        "weights/backbone.",
    ),
    "module.encoder.": ({"pt", "dcp"}, before("module", "encoder"), "module.encoder."),
}


@pytest.mark.parametrize(
    ("container", "label"),
    [
        (container, label)
        for label, (containers, *_rest) in UNKNOWN.items()
        for container in sorted(containers)
    ],
)
def test_a_prefix_that_no_table_knows_is_named_with_the_rule_that_removes_it(
    container, label, state, config, tmp_path, capfd
):
    _containers, make, prefix = UNKNOWN[label]
    source, stated = save(container, tmp_path / "in", make(dict(state)), config)
    rule = f"{prefix}{{rest*}} -> {{rest*}}"
    with pytest.raises(UnrepresentableError, match=f"`{re.escape(prefix)}`") as caught:
        wherry.convert(source, tmp_path / "out", to="huggingface", lineage=False, **stated)
    assert f"--rename '{rule}'" in caught.value.cure
    words = shlex.split(caught.value.cure[caught.value.cure.index("--rename") :])
    command = [
        "convert",
        str(source),
        str(tmp_path / "out"),
        "--to",
        "huggingface",
        "--config",
        config,
        *words,
    ]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--no-lineage"])
    assert ended.value.code == 0, capfd.readouterr().err
    assert_is(tmp_path / "out", state)
    for rename in (rule, [rule]):
        target = tmp_path / f"python-{type(rename).__name__}"
        wherry.convert(source, target, to="huggingface", rename=rename, lineage=False, **stated)
        assert_is(target, state)


@pytest.mark.parametrize("container", CONTAINERS)
def test_other_names_are_compared_with_those_of_hugging_face(container, state, config, tmp_path):
    """The error states how Hugging Face stores the tensors, not how another system does."""
    saved = {name.replace("self_attn", "attn2"): one for name, one in state.items()}
    source, stated = save(container, tmp_path / "in", saved, config)
    if container == "bin":
        return  # a folder of Hugging Face keeps its names, whatever they are
    with pytest.raises(UnrepresentableError, match=r"as huggingface stores it: .*attn2"):
        wherry.convert(source, tmp_path / "out", to="huggingface", lineage=False, **stated)


# ---- A folder of Hugging Face


def folder_of(saved, folder, config=None):
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({name: one.contiguous().clone() for name, one in saved.items()}, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_bytes(open(config, "rb").read())  # noqa: PTH123, SIM115
    return folder


@pytest.mark.parametrize("label", ["compile", "fsdp-each-layer", "ddp", "megatron-fsdp"])
def test_a_folder_with_wrapped_names_and_its_config(label, state, config, tmp_path):
    source = folder_of(FLAT[label].saved(dict(state)), tmp_path / "in", config)
    receipt = wherry.convert(source, tmp_path / "out", to="huggingface", lineage=False)
    assert_is(tmp_path / "out", state)
    assert set(removals(receipt.warnings)) == set(FLAT[label].removed)
    wherry.convert(source, tmp_path / "kept", to="huggingface", family="none", lineage=False)
    assert weights(tmp_path / "kept").keys() == FLAT[label].saved(dict(state)).keys()


def test_a_folder_with_words_of_frameworks_and_no_known_model(state, config, tmp_path):
    source = folder_of(before("_orig_mod")(state), tmp_path / "in")
    with pytest.raises(UnrepresentableError, match=r"`_orig_mod`, which torch.compile puts there") as caught:
        wherry.convert(source, tmp_path / "out", to="huggingface", lineage=False)
    assert "--config" in caught.value.cure
    wherry.convert(source, tmp_path / "out", to="huggingface", config=config, lineage=False)
    assert_is(tmp_path / "out", state)


def test_a_folder_takes_the_config_and_the_files_that_are_stated(state, config, tmp_path):
    source = folder_of(state, tmp_path / "in")
    (assets := tmp_path / "assets").mkdir()
    (assets / "tokenizer_config.json").write_text("{}")
    wherry.convert(
        source, tmp_path / "out", to="huggingface", config=config, assets=str(assets), lineage=False
    )
    assert_is(tmp_path / "out", state)
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == "{}"
    other = json.loads(open(config).read()) | {"num_hidden_layers": 3}  # noqa: PTH123, SIM115
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(WherryError):
        wherry.convert(
            source, tmp_path / "x", to="huggingface", config=str(tmp_path / "other.json"), lineage=False
        )
    assert not (tmp_path / "x").exists()


def test_the_folder_that_verl_saves_next_to_its_ranks_is_used(model, state, config, tmp_path):
    (actor := tmp_path / "global_step_7" / "actor").mkdir(parents=True)
    source, _stated = save("ranks", actor / "made", dict(state), config)
    for file in source.iterdir():
        file.rename(actor / file.name)
    source.rmdir()
    model.config.save_pretrained(actor / "huggingface")
    (actor / "huggingface" / "tokenizer_config.json").write_text("{}")
    wherry.convert(actor, tmp_path / "out", to="huggingface", lineage=False)
    assert_is(tmp_path / "out", state)
    assert (tmp_path / "out" / "tokenizer_config.json").exists()


# ---- Merges


@pytest.mark.parametrize(
    ("container", "label"), [("pt", "compile-ddp"), ("dcp", "fsdp-all"), ("pt", "composer")]
)
def test_a_base_with_wrapped_names_takes_an_adapter(container, label, state, config, tmp_path):
    from safetensors.torch import save_file

    one = (NESTED if label == "composer" else FLAT)[label]
    name = "model.layers.1.self_attn.q_proj"
    down, up = torch.randn(2, 16), torch.randn(16, 2)
    (adapter := tmp_path / "adapter").mkdir()
    start = f"base_model.model.{name}.lora_"
    save_file({f"{start}A.weight": down, f"{start}B.weight": up}, adapter / "adapter_model.safetensors")
    lora = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "bias": "none", "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(lora))
    source, _stated = save(container, tmp_path / "in", one.saved(dict(state)), config)
    words = [str(source), str(adapter)]
    layout = LayoutRequest(config=config)
    wherry.merge(words, tmp_path / "out", to="huggingface", layout=layout, only="params", lineage=False)
    found = weights(tmp_path / "out")
    assert found.keys() == state.keys()
    changed = {path for path in state if not torch.equal(found[path], state[path])}
    assert changed == {f"{name}.weight"}
    torch.testing.assert_close(found[f"{name}.weight"], state[f"{name}.weight"] + up @ down)


def test_checkpoints_with_different_wrappers_are_added(state, config, tmp_path):
    first, _stated = save("pt", tmp_path / "a", FLAT["compile"].saved(dict(state)), config)
    other = {name: one * 3 for name, one in state.items()}
    second, _stated = save("dcp", tmp_path / "b", FLAT["megatron-fsdp"].saved(other), config)
    words = [f"{first}*0.5", f"{second}*0.5"]
    wherry.merge(
        words, tmp_path / "out", to="huggingface", layout=LayoutRequest(config=config), lineage=False
    )
    found = weights(tmp_path / "out")
    assert found.keys() == state.keys()
    assert [name for name in state if not torch.equal(found[name], state[name] * 2)] == []
