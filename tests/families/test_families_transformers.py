"""Tiny real models of every family, as transformers writes them with their real configs: every direction and back."""

from __future__ import annotations

import json

import numpy as np
import pytest

import wherry
from tests.support.families import carried, same
from tests.support.tiny_models import MODELS, REFUSED, TARGETS, save_tiny
from wherry.errors import WherryError
from wherry.families import convert_layout, family_of_config, load_family

pytest.importorskip("transformers")
pytest.importorskip("torch")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a model, made once."""
    made = {}

    def folder(label):
        if label not in made:
            made[label] = save_tiny(tmp_path_factory.mktemp(label), label)
        return made[label]

    return folder


def routes():
    for label in MODELS:
        for target in TARGETS.get(label.split("-")[0], ("maxtext",)):
            yield pytest.param(label, target, id=f"{label}-{target}")


@pytest.mark.parametrize(("label", "target"), list(routes()))
def test_there_and_back(saved, label, target):
    folder = saved(label)
    config = json.loads((folder / "config.json").read_text())
    family = load_family(family_of_config(config))
    with wherry.open(folder) as checkpoint:
        source = {path: checkpoint.read(path) for path in checkpoint.manifest.tensors}
        if (label, target) in REFUSED:
            with pytest.raises(WherryError, match=REFUSED[label, target]):
                convert_layout(checkpoint.manifest, family, "huggingface", target, config=config)
            return
        there = convert_layout(
            checkpoint.manifest, family, "huggingface", target, config=config, dtype="float64"
        )
        moved = carried(there, checkpoint.read)
    sizes = dict(there.source.solved.sizes)
    own = {key: there.chosen[key] for key in family.system(target).conventions}
    assert {path for path in source if path not in {row.path for row in there.ignored}} == {
        spec.path for held in there.pieces.held.values() for spec, _piece in held.values()
    }
    back = convert_layout(
        moved.manifest,
        family,
        target,
        "huggingface",
        source_options=own,
        sizes=sizes,
        dtype="float32",
        facts=there.source.config_facts.facts,
    )
    again = carried(back, moved.read).tensors
    if label.endswith("tied") and target in (
        "penzai",
        "meta",
    ):  # their models always have an output layer of their own
        assert np.array_equal(again.pop(("lm_head.weight",)), source["model.embed_tokens.weight",])
    assert same(again, source)
