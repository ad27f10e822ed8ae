"""Tiny real models of every family, as transformers writes them with their real configs: every direction and back."""

from __future__ import annotations

import json

import pytest

import wherry
from tests.support.families import carried, same
from tests.support.tiny_models import CLASSES, MODELS, STATED, TARGETS
from wherry.errors import WherryError
from wherry.families import convert_layout, family_of_config, load_family

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a model, made once."""
    made = {}

    def folder(label):
        if label not in made:
            name, settings = MODELS[label]
            config = getattr(transformers, f"{name}Config")(**settings)
            kind = "T5EncoderModel" if label == "t5-encoder" else CLASSES.get(name, f"{name}ForCausalLM")
            made[label] = tmp_path_factory.mktemp(label)
            getattr(transformers, kind)(config).save_pretrained(made[label])
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
    stated = STATED.get(label, {})
    with wherry.open(folder) as checkpoint:
        source = {path: checkpoint.read(path) for path in checkpoint.manifest.tensors}
        if label == "gemma2-27b":
            with pytest.raises(WherryError, match="which scale of the attention"):
                convert_layout(checkpoint.manifest, family, "huggingface", target, config=config)
        if label == "llama-3.1" and target == "lingua":
            with pytest.raises(WherryError, match="does not support scaled rotary positions"):
                convert_layout(checkpoint.manifest, family, "huggingface", target, config=config)
            return
        there = convert_layout(
            checkpoint.manifest, family, "huggingface", target, config=config, options=stated, dtype="float64"
        )
        moved = carried(there, checkpoint.read)
    sizes = dict(there.source.solved.sizes)
    own = {key: there.chosen[key] for key in family.system(target).conventions}
    assert {path for path in source if path not in {row.path for row in there.ignored}} == {
        spec.path for held in there.pieces.held.values() for spec, _piece in held.values()
    }
    if label == "gemma2-27b":
        own |= {"query_scale": "query_pre_attn_scalar"}
        with pytest.raises(WherryError, match="query_pre_attn_scalar"):
            convert_layout(moved.manifest, family, target, "huggingface", source_options=own, sizes=sizes)
        return
    back = convert_layout(
        moved.manifest, family, target, "huggingface", source_options=own, sizes=sizes, dtype="float32"
    )
    again = carried(back, moved.read).tensors
    if label in ("t5-1.1", "mt5"):  # tied and not scaled, which T5X has only with logits of their own
        head = again.pop(("lm_head.weight",))
        assert head.tobytes() == source[("shared.weight",)].tobytes()
    assert same(again, source)
