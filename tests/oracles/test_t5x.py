"""T5X computes from what wherry wrote what transformers computes from the source, and the other way around."""

from __future__ import annotations

import re
from ast import literal_eval

import numpy as np
import pytest

import wherry
from tests.support.corpus import CORPUS, expected, needs
from tests.support.oracles import files, huggingface, judge, t5x
from tests.support.oracles.cases import T5X_FORMS, T5X_PAIRS
from tests.support.oracles.huggingface import TOKENS
from tests.support.oracles.leaves import Invented, Leaves
from wherry.core.request import LayoutRequest

pytest.importorskip("transformers")
pytest.importorskip("orbax.checkpoint")

SIDES = ("encoder", "decoder")
BACKWARDS = TOKENS[:, ::-1]
# transformers scales the output of UMT5's decoder by d_model ** -0.5, T5X only if logits go through the embedding.
SCALED = {"umt5": 32**0.5}
GOLDEN = ["t5x-legacy-v3-f32-2024", "t5x-legacy-v3-scanned-2024", "t5x-orbax-ocdbt-head"]


def bindings(text):
    """The attributes of `T5Config` in a gin file."""
    rows = re.findall(r"^[\w./]*T5Config\.(\w+) *= *(.+)$", text, re.MULTILINE)
    return {name: literal_eval(value) for name, value in rows}


def network(label, form, config):
    return t5x.Network({**t5x.DEFAULTS, **config}, apart=form != "minimal", own_bias=label.startswith("umt5"))


@pytest.mark.parametrize("case", GOLDEN)
def test_the_oracle_computes_what_t5x_computed(case):
    needs(case)
    record = expected(case)
    step = CORPUS / case / "checkpoint" / record["uri"]
    found = {
        name: array
        for name, array in files.arrays(record["format"], step).items()
        if name.startswith("target/")
    }
    leaves = Leaves(files.below(found, "target/"))
    own = "encoder/relpos_bias/rel_embedding" not in leaves
    net = t5x.Network({**t5x.DEFAULTS, **sizes(leaves)}, apart=own, own_bias=own)
    tokens = [np.array([record["golden"][f"{side}_input_ids"]]) for side in SIDES]
    logits = t5x.logits(leaves, net, *tokens)
    leaves.require_all_taken()
    assert np.abs(logits - np.load(CORPUS / case / "logits.npy")).max() < 1e-4


def sizes(leaves):
    """What a case's config was, from its shapes."""
    names = list(leaves.arrays)
    vocab, embed = leaves.arrays["token_embedder/embedding"].shape
    scanned = "encoder/encoder/mlp/wo/kernel" in leaves
    bias = next(array for name, array in leaves.arrays.items() if "relpos_bias" in name)
    inner = leaves.arrays[f"encoder/{'encoder' if scanned else 'layers_0'}/attention/query/kernel"].shape[-1]
    wo = {side: leaves.arrays[f"{side}/{side if scanned else 'layers_0'}/mlp/wo/kernel"] for side in SIDES}
    unrolled = {
        side: {name.split("/")[1] for name in names if name.startswith(f"{side}/layers_")} for side in SIDES
    }
    count = {side: wo[side].shape[1] if scanned else len(unrolled[side]) for side in SIDES}
    return {
        "vocab_size": vocab, "emb_dim": embed, "num_heads": bias.shape[0], "mlp_dim": wo["encoder"].shape[0],
        "head_dim": inner if scanned else inner // bias.shape[0], "scan_layers": scanned,
        **{f"num_{side}_layers": count[side] for side in SIDES},
        "mlp_activations": ("gelu", "linear") if any("wi_0" in name for name in names) else ("relu",),
        "logits_via_embedding": "decoder/logits_dense/kernel" not in leaves,
    }  # fmt: skip


@pytest.mark.parametrize(("label", "form", "to"), T5X_PAIRS)
def test_t5x_computes_what_transformers_computed(label, form, to, tmp_path):
    wherry.convert(judge.source(label), tmp_path / "out", to=to, options=T5X_FORMS[form], lineage=False)
    config = bindings((tmp_path / "out" / "architecture.gin").read_text())
    leaves = Leaves(files.below(files.arrays(to, tmp_path / "out"), "target/"))
    net = network(label, form, config)
    found = (
        t5x.encode(leaves, net, TOKENS) if "encoder" in label else t5x.logits(leaves, net, TOKENS, BACKWARDS)
    )
    leaves.require_all_taken()
    judge.require_equal(found, judge.wanted(label) * SCALED.get(label, 1))


@pytest.mark.parametrize("form", list(T5X_FORMS))
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_computes_what_t5x_computed(form, tied, tmp_path):
    config = {
        "vocab_size": 60, "emb_dim": 32, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 3,
        "head_dim": 8, "mlp_dim": 48, "mlp_activations": ("relu",) if tied else ("gelu", "linear"),
        "logits_via_embedding": tied, "scan_layers": form.startswith("scanned"),
        "param_scan_axis": int(T5X_FORMS[form].get("param_scan_axis", "1")),
    }  # fmt: skip
    invented, scalable = Invented(), form != "minimal"
    net = t5x.Network({**t5x.DEFAULTS, **config}, apart=scalable, own_bias=scalable)
    wanted = t5x.logits(invented, net, TOKENS, BACKWARDS)
    step = files.save_t5x(tmp_path / "checkpoint_0", invented.arrays)
    wherry.convert(
        step,
        tmp_path / "out",
        to="huggingface",
        layout=LayoutRequest(family="t5"),
        options=T5X_FORMS[form],
        lineage=False,
    )
    scaled = 32**0.5 if scalable and not tied else 1  # UMT5, which transformers scales in any case
    judge.require_equal(huggingface.logits(tmp_path / "out") * scaled, wanted)
