"""Penzai's own models compute from what wherry wrote what transformers computes from the source, and the other way."""

from __future__ import annotations

import json

import pytest

import wherry
from tests.support.oracles import huggingface, judge, penzai
from tests.support.oracles.cases import PENZAI_INTO, PENZAI_OUT_OF
from tests.support.oracles.huggingface import MODELS, TOKENS
from wherry.core.request import LayoutRequest
from wherry.families import load_family

pytest.importorskip("transformers")
pytest.importorskip("penzai")

SINGLE = 2e-4  # Penzai computes in float32
FORMS = {
    "stacked": {"layer_stack": "true", "order": "imported", "leaf": "plain"},
    "blocks": {"layer_stack": "false", "order": "native", "leaf": "data_array"},
}


def cases(labels, sampled):
    """Every label in both forms; what is not sampled is slow, as Penzai builds its model anew each time."""
    for label in labels:
        for form in FORMS:
            marks = () if (label, form) in sampled else (pytest.mark.slow,)
            yield pytest.param(label, form, id=f"{label}-{form}", marks=marks)


@pytest.mark.parametrize(("label", "form"), list(cases(PENZAI_INTO, [("llama", "blocks")])))
def test_penzai_computes_what_transformers_computed(label, form, tmp_path):
    assert huggingface.apart(computed(label, form, tmp_path), judge.wanted(label)) <= SINGLE


def computed(label, form, folder, **arguments):
    """Penzai's logits of what a model becomes."""
    import orbax.checkpoint as ocp

    from wherry.integrations.penzai.rebuild import named_arrays

    source = judge.source(label)
    wherry.convert(source, folder / "out", to="penzai", options=FORMS[form], lineage=False, **arguments)
    arrays = named_arrays(ocp.StandardCheckpointer().restore(folder / "out"), folder / "out")
    config = json.loads((source / "config.json").read_text())
    return penzai.logits(penzai.bound(penzai.build(config, stack=form == "stacked"), arrays), TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), [("gate", "up"), ("key", "value"), ("attention_norm", "ffn_norm")])
def test_exchanged_layouts_are_noticed(one, other, tmp_path):
    rows = {row.parameters[0]: row for row in load_family("llama").systems["penzai"].layouts}
    changed = {one: rows[other], other: rows[one]}
    lines = [f"{name} = {json.dumps([row.key, row.axes[0]])}" for name, row in changed.items()]
    head = ['extends = "llama"', 'name = "llama"', "[systems.penzai.layouts]"]
    (tmp_path / "wrong.toml").write_text("\n".join([*head, *lines]))
    layout = LayoutRequest(family_file=str(tmp_path / "wrong.toml"))
    assert (
        huggingface.apart(computed("llama", "blocks", tmp_path, layout=layout), judge.wanted("llama"))
        > judge.WRONG
    )


@pytest.mark.parametrize(("label", "form"), list(cases(PENZAI_OUT_OF, [("llama", "stacked")])))
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
    layout = LayoutRequest(family=MODELS[label].family, config=str(file))
    wherry.convert(tmp_path / "penzai", tmp_path / "out", to="huggingface", layout=layout, lineage=False)
    judge.require_equal(huggingface.logits(tmp_path / "out"), expected, SINGLE)
