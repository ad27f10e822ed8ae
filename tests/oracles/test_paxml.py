"""GPT-3 has no form of Hugging Face: PaxML and MaxText compute the same, each by its own definition."""

from __future__ import annotations

import pytest
import yaml

import wherry
from tests.support import paxml as contract
from tests.support.oracles import files, judge, maxtext, paxml
from tests.support.oracles.huggingface import TOKENS
from tests.support.oracles.leaves import Invented, Leaves
from wherry.core.request import LayoutRequest

pytest.importorskip("orbax.checkpoint")

SIZES = paxml.Sizes(3, 32, 4, 8, 48, 60, 16, repeat=True)
FORMS = {
    "fused": {"scan_layers": "true", "fused_qkv": "true"},
    "fused-axis-0": {"scan_layers": "true", "fused_qkv": "true", "param_scan_axis": "0"},
    "separate": {"scan_layers": "true", "fused_qkv": "false"},
    "unscanned": {"scan_layers": "false", "fused_qkv": "true"},
    "unscanned-separate": {"scan_layers": "false", "fused_qkv": "false"},
}


@pytest.mark.parametrize("form", FORMS)
def test_maxtext_computes_what_paxml_computed(form, tmp_path):
    invented = Invented()
    expected = paxml.logits(invented, SIZES, TOKENS)
    step = tmp_path / "checkpoint_00000100"
    leaves = {
        ("mdl_vars", "params", "lm", *name.split("/")): array for name, array in invented.arrays.items()
    }
    contract.gda(step / "state", leaves)
    contract.write_metadata(step, 1.1, leaves)
    wherry.convert(step, tmp_path / "out", to="maxtext", options=FORMS[form], lineage=False)
    config = yaml.safe_load((tmp_path / "out" / "items" / "assets" / "maxtext_config.yml").read_text())
    found = Leaves(files.below(files.arrays("maxtext", tmp_path / "out"), "params/params/"))
    logits = maxtext.logits(found, config, TOKENS)
    found.require_all_taken()
    judge.require_equal(logits, expected)


@pytest.mark.parametrize("repeat", ["true", "false"])
@pytest.mark.parametrize("form", FORMS)
def test_paxml_computes_what_maxtext_computed(form, repeat, tmp_path):
    config = {
        "decoder_block": "gpt3", "base_emb_dim": 32, "base_num_query_heads": 4, "base_num_kv_heads": 4, "head_dim": 8,
        "base_mlp_dim": 48, "base_num_decoder_layers": 3, "vocab_size": 60, "trainable_position_size": 16,
        "mlp_activations": ["gelu"], "logits_via_embedding": True, "normalize_embedding_logits": False,
        **{name: yaml.safe_load(text) for name, text in FORMS[form].items()},
    }  # fmt: skip
    invented = Invented()
    expected = maxtext.logits(invented, config, TOKENS)
    step = files.save_maxtext(tmp_path / "run", invented.arrays)
    files.write_yaml(tmp_path / "run.yml", config)
    wherry.convert(
        step, tmp_path / "out", to="paxml", options={"repeat": repeat}, lineage=False,
        layout=LayoutRequest(family="gpt3", config=str(tmp_path / "run.yml")),
    )  # fmt: skip
    found = Leaves(files.below(files.arrays("paxml", tmp_path / "out"), "mdl_vars/params/lm/"))
    logits = paxml.logits(found, SIZES._replace(repeat=repeat == "true"), TOKENS)
    found.require_all_taken()
    judge.require_equal(logits, expected)
