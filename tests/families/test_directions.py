"""Every direction between all systems of all families is there and back exact."""

from __future__ import annotations

import json

import numpy as np
import pytest

import wherry
from tests.support.families import OWN_SIZES, SIZES, carried, made, same
from tests.support.tiny_models import MODELS, REFUSED, TARGETS, save_tiny
from wherry.errors import WherryError
from wherry.families import convert_layout, families, family_of_config, load_family
from wherry.families.templates import form_choices

INDEXER = [
    f"{kind}_index_{name}"
    for kind in ("dense", "moe")
    for name in ("query", "key", "norm", "norm_bias", "weights")
]
BIASES = ["query_bias", "key_bias", "value_bias"]
HEAD_NORMS = ["query_norm", "key_norm"]
EXPERTS = ["router", "expert_gate", "expert_up", "expert_down"]

# Parameters that exclude each other: a model has those of one row less.
VARIANTS = {
    "deepseek": [["dense_query", "moe_query"], [*INDEXER, "dense_query", "moe_query"],
                 ["dense_query_down", "dense_query_norm", "dense_query_up", "moe_query_down", "moe_query_norm",
                  "moe_query_up", "moe_router_bias", "head", *INDEXER]],
    "t5": [["encoder_relpos", "decoder_relpos", "encoder_up", "decoder_up"],
           ["encoder_layer_relpos", "decoder_layer_relpos", "encoder_gate", "encoder_gated_up", "decoder_gate",
            "decoder_gated_up", "logits"]],
    "qwen": [["gate", "up", "down", *BIASES], [*EXPERTS, "query_norm", "key_norm", "head"], [*EXPERTS, *BIASES]],
    "stablelm": [[], HEAD_NORMS, [*HEAD_NORMS, "head", *BIASES]],
    "bert": [[], ["pooler", "pooler_bias"]],
    "lora": [[], ["key_in", "key_out", "down_in", "down_out"]],
    "lora-fused": [[]],
}  # fmt: skip
# Family and system → parameters that the system does not have: the indexer of DeepSeek V3.2, the biases of Qwen2, the
# output layer of a Gemma that is not tied.
LACKED = {
    ("deepseek", "megatron"): INDEXER, ("deepseek", "torchtitan"): INDEXER, ("qwen", "torchtitan"): BIASES,
    ("stablelm", "megatron"): HEAD_NORMS,
    ("gemma", "deepmind"): ["head"], ("gemma2", "deepmind"): ["head"], ("gemma3", "deepmind"): ["head"],
    ("gemma", "gguf"): ["head"], ("gemma2", "gguf"): ["head"], ("deepseek", "gguf"): INDEXER,
}  # fmt: skip
CHOSEN = {"rope": "interleaved"}


def conventions(family, name, **more):
    system = family.system(name)
    return {
        key: more.get(key) or one.always or CHOSEN.get(key, one.usual)
        for key, one in system.conventions.items()
    }


def _has_no_place(family, source, target, forms, without):  # noqa: PLR0911
    """Forms of T5 whose relative bias is of the other kind, which the checkpoint would lack; tied models in Penzai's
    GPT-NeoX, and from systems whose head is never tied; UMT5 in Flax, and models there that have a head but names
    without a prefix; parameters that a system lacks; models with experts where Megatron's norms are part of the
    projections, which tells that there are none."""
    tied = "head" in without
    one_way = family.name == "lora-fused" and source != target  # see test_lora.py
    apart = family.name == "gpt-neox" and {source, target} == {"penzai", "megatron"}  # side by side, or not
    if (
        apart
        or one_way
        or any(set(LACKED.get((family.name, one), ())) - set(without) for one in (source, target))
    ):
        return True
    if forms.get("norms") == "fused" and {"router"} & (family.parameters.keys() - set(without)):
        return True
    if tied and family.name == "gpt-neox" and {source, target} > {"penzai"}:
        return True
    if tied and family.system(source).untied.get("head"):
        return True
    if target == "huggingface-flax" and "encoder_relpos" in without:
        return True
    flax = "huggingface-flax" in (source, target) and forms.get("prefix") == "none"
    if flax and (family.name == "bert" or (family.name == "gpt2" and not tied)):
        return True
    return family.name == "t5" and forms.get("relpos") == (
        "shared" if "encoder_relpos" in without else "per_layer"
    )


def directions():
    for name in families():
        family = load_family(name)
        for source in family.systems.values():
            for forms in form_choices(source, {}):
                for target in family.systems.values():
                    for without in VARIANTS.get(name, [[], ["head"]]):
                        if _has_no_place(family, source.name, target.name, forms, without):
                            continue
                        label = "-".join([name, source.name, *forms.values(), target.name, *without[:1]])
                        yield pytest.param(name, source.name, forms, target.name, without, id=label)


@pytest.mark.parametrize(("name", "source", "forms", "target", "without"), list(directions()))
def test_there_and_back(name, source, forms, target, without):
    family = load_family(name)
    source_options = {**forms, **conventions(family, source)}
    target_options = conventions(family, target)
    sizes = {**SIZES, "expert_ffn": 5, **OWN_SIZES.get(name, {}), **family.constants}
    if {"huggingface-flax", "gguf"} & {
        source,
        target,
    } and "pair" in family.axes:  # heads that divide the width
        sizes["embed"] = sizes["group"] * sizes["qhead"] * 2 * sizes["pair"]
    if forms.get("use_qkv_einsum") == "true":  # of as many keys as queries
        sizes["qhead"] = 1
    begun = made(family, source, source_options, without=without, sizes=sizes)
    there = convert_layout(
        begun.manifest,
        family,
        source,
        target,
        source_options=source_options,
        options=target_options,
        sizes=sizes,
        dtype="float64",
    )
    moved = carried(there, begun.read, limit=600)
    back = convert_layout(
        moved.manifest,
        family,
        target,
        source,
        source_options=target_options,
        options=source_options,
        sizes=sizes,
        dtype="float32",
    )
    again, wanted = carried(back, moved.read).tensors, begun.tensors
    if "head" in without and family.system(target).untied:  # which makes it a parameter of its own
        assert len(again.keys() - wanted.keys()) == 1
        both = again.keys() & wanted.keys()
        assert len(both) >= len(wanted) - len(family.system(source).tied)
        again, wanted = ({path: tensors[path] for path in both} for tensors in (again, wanted))
    assert same(again, wanted)


# Tiny real models of every family, as transformers writes them with their real configs: every direction
# and back.


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
def test_there_and_back_transformers(saved, label, target):
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
