"""The Flax classes of transformers 4.46 as judges: equal outputs in both directions, and no weight missing or left."""

from __future__ import annotations

import numpy as np
import pytest

import wherry
from tests.support.flax_classes import MODELS, OUT_OF, flax_outputs, saved, torch_outputs

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]


def same(found, wanted):
    assert wanted
    assert found.keys() >= wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, atol=1e-4, err_msg=name)


def test_the_flax_classes_compute_what_the_source_computed(tmp_path):
    wanted = {}
    for label in MODELS:
        wanted[label] = torch_outputs(saved(label, tmp_path / label))
        receipt = wherry.convert(
            tmp_path / label, tmp_path / f"{label}-flax", to="huggingface-flax", lineage=False
        )
        assert receipt.lossless
        proof = wherry.verify(tmp_path / f"{label}-flax", level="roundtrip", against=tmp_path / label)
        assert proof.ok, proof.failed
    found = flax_outputs(*[(tmp_path / f"{label}-flax", None) for label in MODELS])
    for label, (values, heard) in zip(MODELS, found, strict=True):
        assert heard == [], label
        same(values, wanted[label])


@pytest.mark.parametrize("shard", ["10GB", "20KB"])
def test_pytorch_computes_what_the_flax_classes_saved(shard, tmp_path):
    jobs = []
    for label in OUT_OF:
        saved(label, tmp_path / label)
        jobs.append((tmp_path / label, tmp_path / f"{label}-flax"))
    found = flax_outputs(*jobs, shard=shard)
    for label, (values, _heard) in zip(OUT_OF, found, strict=True):
        there = tmp_path / f"{label}-flax"
        assert len(list(there.glob("flax_model*.msgpack"))) > 1 or shard == "10GB"
        receipt = wherry.convert(there, tmp_path / f"{label}-back", to="huggingface", lineage=False)
        assert receipt.lossless
        same(torch_outputs(tmp_path / f"{label}-back"), values)
