"""Facts and forms that the tensors disprove are refused (9); values that both can have replace the config's, named."""

from __future__ import annotations

import json

import pytest

import wherry
from tests.support.oracles import judge
from wherry.errors import MismatchError
from wherry.families import families, load_family

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
