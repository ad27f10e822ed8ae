"""MaxText computes from what wherry wrote what transformers computes from the source, and the other way around."""

from __future__ import annotations

import pytest
import yaml

import wherry
from tests.support.oracles import files, huggingface, judge, maxtext
from tests.support.oracles.cases import (
    CONFIGS,
    FORMS,
    LABELS,
    MODEL_NAMES,
    NEVER_SCANNED,
    RARE,
    SAMPLED,
    leaves_of,
)
from tests.support.oracles.huggingface import MODELS, TOKENS
from tests.support.oracles.leaves import Invented
from tests.support.oracles.maxtext_itself import round_factor
from wherry.core.request import LayoutRequest

pytest.importorskip("transformers")
pytest.importorskip("orbax.checkpoint")

_SLOW = pytest.mark.slow


def cases(labels):
    """Every label in every form; what is not sampled is slow."""
    for label in labels:
        for name, form in FORMS.items():
            if label in NEVER_SCANNED and name != "unscanned":
                continue
            marks = () if (label, name) in SAMPLED or (name == "scanned" and label not in RARE) else (_SLOW,)
            yield pytest.param(label, form, id=f"{label}-{name}", marks=marks)


@pytest.mark.parametrize(("label", "form"), list(cases(LABELS)))
def test_maxtext_computes_what_transformers_computed(label, form, tmp_path):
    target = tmp_path / "out"
    wherry.convert(judge.source(label), target, to="maxtext", options=form, lineage=False)
    config = yaml.safe_load((target / "items" / "assets" / "maxtext_config.yml").read_text())
    leaves = leaves_of(files.arrays("maxtext", target), config)
    found = maxtext.logits(leaves, {**MODEL_NAMES.get(label, {}), **config}, TOKENS)
    leaves.require_all_taken()
    judge.require_equal(found, judge.wanted(label), judge.allowed(label))


def test_gemma_3_s_embedding_is_multiplied_by_a_rounded_factor(tmp_path, monkeypatch):
    """The square root of 64 is exact; that of 48 is not, nor that of any width that was released."""
    wide = MODELS["gemma3"]
    narrow = wide._replace(settings={**wide.settings, "hidden_size": 48})
    monkeypatch.setitem(huggingface.MODELS, "gemma3-48", narrow)
    source = huggingface.save("gemma3-48", tmp_path / "source")
    wherry.convert(source, tmp_path / "out", to="maxtext", lineage=False)
    config = yaml.safe_load((tmp_path / "out" / "items" / "assets" / "maxtext_config.yml").read_text())
    leaves = leaves_of(files.arrays("maxtext", tmp_path / "out"), config)
    found = maxtext.logits(leaves, {**MODEL_NAMES["gemma3"], **config}, TOKENS)
    judge.require_equal(found, huggingface.logits(source, TOKENS, round_factor))
    assert judge.ALLOWED < huggingface.apart(found, huggingface.logits(source)) < 8e-3


@pytest.mark.parametrize(("label", "form"), list(cases(CONFIGS)))
def test_transformers_computes_what_maxtext_computed(label, form, tmp_path):
    config = {**CONFIGS[label], **{name: yaml.safe_load(text) for name, text in form.items()}}
    invented = Invented()
    expected = maxtext.logits(invented, config, TOKENS)
    files.write_yaml(tmp_path / "run.yml", config)
    step = files.save_maxtext(tmp_path / "run", invented.arrays)
    layout = LayoutRequest(family=MODELS[label].family, config=str(tmp_path / "run.yml"))
    wherry.convert(
        step, tmp_path / "out", to="huggingface", layout=layout, options=STATED.get(label, {}), lineage=False
    )
    judge.require_equal(huggingface.logits(tmp_path / "out"), expected, judge.allowed(label))


@pytest.mark.parametrize("place", ["params", "params_first", "aux"])
def test_the_router_s_bias_is_read_where_each_release_keeps_it(place, tmp_path):
    """Stacked as every parameter (until August 2026), or on the first axis: as 0.2.5 loads it, and as it saves it."""
    config, invented = CONFIGS["deepseek-v3"], Invented()
    expected = maxtext.logits(invented, config, TOKENS)
    aux, name = {}, "decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/bias"
    if place != "params":
        (aux if place == "aux" else invented.arrays)[name] = invented.arrays.pop(name).T
    files.write_yaml(tmp_path / "run.yml", config)
    step = files.save_maxtext(tmp_path / "run", invented.arrays, aux)
    layout = LayoutRequest(family="deepseek", config=str(tmp_path / "run.yml"))
    wherry.convert(step, tmp_path / "out", to="huggingface", layout=layout, lineage=False)
    judge.require_equal(huggingface.logits(tmp_path / "out"), expected)


# What MaxText's config does not state, so that the user must.
_FACTORS = {"embedding_multiplier": 12.0, "attention_multiplier": 0.3, "residual_multiplier": 0.7}
STATED = {
    "gemma2": {"query_scale": "head_dim"},
    "granite": {**_FACTORS, "logits_scaling": 3.0},
    "granite-tied": {**_FACTORS, "logits_scaling": 3.0},
}
