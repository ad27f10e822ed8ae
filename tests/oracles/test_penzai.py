"""Penzai's own models compute from what wherry wrote what transformers computes from the source, and the other way."""

from __future__ import annotations

import json

import pytest

import wherry
from tests.oracles import huggingface, judge, penzai
from tests.oracles.huggingface import MODELS, TOKENS
from wherry.core.request import LayoutRequest

pytest.importorskip("transformers")
pytest.importorskip("penzai")

SINGLE = 2e-4  # Penzai computes in float32
FORMS = {
    "stacked": {"layer_stack": "true", "order": "imported", "leaf": "plain"},
    "blocks": {"layer_stack": "false", "order": "native", "leaf": "data_array"},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("label", ["llama", "llama-head-dim", "mistral"])
def test_penzai_computes_what_transformers_computed(label, form, tmp_path):
    import orbax.checkpoint as ocp

    from wherry.integrations.penzai.rebuild import named_arrays

    source = judge.source(label)
    wherry.convert(source, tmp_path / "out", to="penzai", options=FORMS[form], lineage=False)
    arrays = named_arrays(ocp.StandardCheckpointer().restore(tmp_path / "out"), tmp_path / "out")
    config = json.loads((source / "config.json").read_text())
    model = penzai.bound(penzai.build(config, stack=form == "stacked"), arrays)
    judge.require_equal(penzai.logits(model, TOKENS), judge.wanted(label), SINGLE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("label", ["llama", "mistral"])
def test_transformers_computes_what_penzai_computed(label, form, tmp_path):
    import jax
    import orbax.checkpoint as ocp
    from penzai import pz

    file = judge.source(label) / "config.json"
    model = penzai.build(json.loads(file.read_text()), stack=form == "stacked", key=jax.random.key(0))
    expected = penzai.logits(model, TOKENS)
    _model, variables = pz.unbind_variables(model)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "penzai", {one.label: one.value for one in variables})
    wish = LayoutRequest(family=MODELS[label].family, config=str(file))
    wherry.convert(tmp_path / "penzai", tmp_path / "out", to="huggingface", wish=wish, lineage=False)
    judge.require_equal(huggingface.logits(tmp_path / "out"), expected, SINGLE)
