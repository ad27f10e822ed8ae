"""Conversions between systems through the front door: what `convert` writes is what the real software wrote, it goes
back to the bits that it came from, and `verify --level roundtrip` proves so from storage."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import wherry
from tests.support.families import wanted_hashes
from tests.support.formats import CORPUS, expected, place
from tests.support.stated import FACTS
from tests.support.systems import carry, hashes
from wherry.core.algorithms import BLAKE3
from wherry.core.digest import weights_digest as weights_of
from wherry.core.keypath import render
from wherry.core.request import LayoutRequest
from wherry.mover.hashing import hash_checkpoint

needs_corpus = pytest.mark.skipif(
    not CORPUS.is_dir(), reason="the corpus is not here; set WHERRY_CORPUS to its folder"
)
LLAMA = "hf-llama-from-lingua-fp32"
GPT3 = "maxtext-gpt3-l3-converted-by-maxtext"
RANDOM = "nnx_aux"  # keys and counters of MaxText's random streams, which no other system has


# ---- What real software wrote


@needs_corpus
@pytest.mark.parametrize("case", ["lingua-fsdp2-w2", "lingua-fsdp2-w2-consolidated"])
def test_lingua_to_hugging_face_and_back(case, tmp_path):
    receipt = carry(place(case), tmp_path / "hf", "huggingface")
    assert receipt.lossless
    assert "from_pretrained" in receipt.snippet
    assert hashes(tmp_path / "hf") == wanted_hashes(LLAMA)
    carry(tmp_path / "hf", tmp_path / "back", expected(case)["format"])
    again, wanted = hashes(tmp_path / "back"), wanted_hashes(case)
    assert again.items() <= wanted.items()
    assert all(path[0].startswith("optim") for path in wanted.keys() - again.keys())


@needs_corpus
@pytest.mark.parametrize(
    ("case", "form"),
    [
        ("paxml-gpt3-l3-v11-gda-zarr", {"version": "1.1", "tree": "flat"}),
        ("paxml-gpt3-l3-v12-gda-ocdbt", {"version": "1.2", "tree": "nested"}),
    ],
)
def test_paxml_to_maxtext_is_what_maxtext_s_converter_made(case, form, tmp_path):
    """Parameters, both moments, step and count."""
    carry(place(case), tmp_path / "maxtext", "maxtext")
    assert hashes(tmp_path / "maxtext") == wanted_hashes(GPT3)
    carry(tmp_path / "maxtext", tmp_path / "back", "paxml", options=form)
    assert hashes(tmp_path / "back") == wanted_hashes(case)
    carry(place(GPT3), tmp_path / "from-converter", "paxml", options=form)
    assert hashes(tmp_path / "from-converter") == wanted_hashes(case)


@needs_corpus
def test_paxml_to_maxtext_in_the_form_that_a_run_asks_for(tmp_path):
    """maxtext#879: the converter knew scanned layers only, the run wanted each by itself."""
    carry(
        place("paxml-gpt3-l3-v11-gda-zarr"), tmp_path / "apart", "maxtext", options={"scan_layers": "false"}
    )
    with wherry.open(tmp_path / "apart") as made, wherry.open(place(GPT3)) as converted:
        for moment in ((), ("opt_state", "mu"), ("opt_state", "nu")):
            root = (*moment, "params") if moment else ("params", "params")
            stack = converted.read((*root, "decoder", "layers", "mlp", "wi", "kernel"))
            for layer in range(3):
                one = made.read((*root, "decoder", f"layers_{layer}", "mlp", "wi", "kernel"))
                np.testing.assert_array_equal(one, stack[:, layer])


SCANNED = [
    "maxtext-gpt3-l3-scan",
    "maxtext-gpt3-l3-unscan",
    "maxtext-llama31-l3-scan",
    "maxtext-llama31-l3-unscan",
    "maxtext-mixtral-l2-scan",
    "maxtext-gemma2-l4-scan",
    "maxtext-deepseek3-l4-scan",
]


@needs_corpus
@pytest.mark.parametrize("case", SCANNED)
def test_maxtext_scanned_and_not(case, tmp_path):
    """Without a family being named: within one system it does not matter which of several alike it is."""
    scanned = "unscan" not in case
    carry(place(case), tmp_path / "other", "maxtext", options={"scan_layers": str(not scanned).lower()})
    assert f"layers are {'un' * scanned}scanned" in str(wherry.detect(tmp_path / "other").evidence)
    carry(tmp_path / "other", tmp_path / "back", "maxtext", options={"scan_layers": str(scanned).lower()})
    assert hashes(tmp_path / "back", leave=(RANDOM,)) == wanted_hashes(case, leave=(RANDOM,))


T5 = [
    "t5x-orbax-ocdbt-head",
    "t5x-orbax-zarr-metadata-2024",
    "t5x-legacy-v3-f32-head",
    "t5x-legacy-v3-bf16-2024",
    "t5x-legacy-v3-scanned-2024",
]


def forms(case, *, other=False):
    """The form of a T5X case, or the opposite one."""
    scanned = ("scanned" in case) != other
    return {"scan_layers": str(scanned).lower(), "heads": "apart" if scanned else "joined"}


@needs_corpus
@pytest.mark.parametrize("case", T5)
def test_t5x_to_hugging_face_and_back(case, tmp_path):
    receipt = carry(place(case), tmp_path / "hf", "huggingface")
    assert "T5ForConditionalGeneration" in receipt.snippet
    carry(tmp_path / "hf", tmp_path / "back", expected(case)["format"], options=forms(case))
    again = hashes(tmp_path / "back")
    assert again == {path: one for path, one in wanted_hashes(case).items() if path[0] == "target"}


@needs_corpus
@pytest.mark.parametrize("case", T5[2:3] + T5[4:])
def test_adafactor_goes_with_the_layers(case, tmp_path):
    """Factored moments lose an axis each; they are stacked, taken apart and fused as their parameters are."""
    carry(place(case), tmp_path / "other", "t5x-legacy", options=forms(case, other=True))
    carry(tmp_path / "other", tmp_path / "back", expected(case)["format"], options=forms(case))
    assert hashes(tmp_path / "back") == wanted_hashes(case)


@needs_corpus
@pytest.mark.parametrize("name", ["plain", "label-dict"])
def test_penzai_to_hugging_face_and_back(name, tmp_path):
    case, layout = f"penzai-llama-unroll-{name}", LayoutRequest(family="llama")
    carry(place(case), tmp_path / "hf", "huggingface", layout=layout, options=FACTS["llama", "penzai"])
    with wherry.open(place(case)) as there, wherry.open(tmp_path / "hf") as here:
        path = next(path for path in there.manifest.tensors if "block_1/attention/query" in path[0])
        made = here.read("model.layers.1.self_attn.q_proj.weight")
        np.testing.assert_array_equal(made, there.read(path).reshape(16, 16).T)
    carry(tmp_path / "hf", tmp_path / "back", "penzai", layout=layout)
    carry(tmp_path / "back", tmp_path / "again", "huggingface", layout=layout)
    assert hashes(tmp_path / "again") == hashes(tmp_path / "hf")


# ---- Hugging Face to every system and back

ROUTES = [
    *((LLAMA, to, {}) for to in ("lingua", "lingua-consolidated", "maxtext", "penzai")),
    (LLAMA, "maxtext", {"scan_layers": "false"}),
    (LLAMA, "maxtext", {"param_scan_axis": "0"}),
    (LLAMA, "maxtext", {"rope": "interleaved"}),
    ("hf-llama-tied-sharded-bf16", "maxtext", {}),
    ("hf-llama-tied-sharded-bf16", "lingua", {}),
    ("hf-qwen3-moe-bf16", "maxtext", {"norm_topk": True}),
    ("hf-qwen3-moe-bf16", "maxtext", {"scan_layers": "false", "norm_topk": True}),
]


@cache
def weights_digest(case):
    """Of everything in a case."""
    with wherry.open(place(case)) as source:
        return weights_of(hash_checkpoint(source, BLAKE3, memory=1 << 24).digests, BLAKE3)


@needs_corpus
@pytest.mark.parametrize(("case", "to", "options"), ROUTES)
def test_hugging_face_there_and_back(case, to, options, tmp_path):
    carry(place(case), tmp_path / "there", to, options=options)
    back = carry(tmp_path / "there", tmp_path / "back", "huggingface")
    assert back.target.weights_digest == weights_digest(case)


THROUGH = [
    ("maxtext-mixtral-l2-scan", FACTS["mixtral", "maxtext"]),
    ("maxtext-deepseek3-l4-scan", FACTS["deepseek", "maxtext"]),
    ("maxtext-gemma2-l4-scan", FACTS["gemma2", "maxtext"]),
]


@needs_corpus
@pytest.mark.parametrize(("case", "stated"), THROUGH)
def test_maxtext_to_hugging_face_and_back(case, stated, tmp_path):
    """MaxText's queries are scaled by the root of 8 here, which rounds; every other bit comes back."""
    lossless = carry(place(case), tmp_path / "hf", "huggingface", options=stated).lossless
    state = {"router_bias": "aux"} if "deepseek" in case else {}  # as in the train state of the source
    carry(tmp_path / "hf", tmp_path / "back", "maxtext", options=state)
    again, wanted = hashes(tmp_path / "back"), wanted_hashes(case)
    assert again.keys() <= wanted.keys()
    changed = {path[-2] for path, one in again.items() if wanted[path] != one}
    assert changed == (set() if lossless else {"query"})
    assert all(path[0] in (RANDOM, "opt_state") for path in wanted.keys() - again.keys())


# ---- Lossy on request, and damage


@needs_corpus
@pytest.mark.parametrize(("case", "to"), [(LLAMA, "maxtext"), (GPT3, "paxml")])
def test_another_dtype_is_measured_and_stays_within_its_bound(case, to, tmp_path):
    layout = LayoutRequest(dtype="bfloat16")
    plan = wherry.plan(place(case), tmp_path / "out", to=to, layout=layout).to_json()
    assert not plan["lossless"]
    receipt = carry(place(case), tmp_path / "out", to, layout=layout)
    assert not receipt.lossless
    measured = wherry.verify(tmp_path / "out", level="roundtrip", against=place(case)).measured
    assert 0 < measured.share <= 1
    assert 0 < measured.error < 1
    assert 0 < measured.tensors <= receipt.source.tensors
    with wherry.open(tmp_path / "out") as made:
        assert {spec.dtype for spec in made.manifest.tensors.values()} >= {"bfloat16"}


@needs_corpus
@pytest.mark.parametrize("layout", [LayoutRequest(), LayoutRequest(dtype="bfloat16")], ids=["exact", "lossy"])
def test_a_flipped_byte_of_the_target_is_found_through_the_inverse(layout, tmp_path):
    source, target = tmp_path / "lingua", tmp_path / "hf"
    wherry.convert(place(LLAMA), source, to="lingua", lineage=False)
    carry(source, target, "huggingface", layout=layout)
    with wherry.open(target) as made:
        spec = made.spec("model.layers.1.self_attn.k_proj.weight")
        (extent,) = made.reader.access(spec).extents
    flip(extent.file, extent.offset + extent.length - 1)
    proof = wherry.verify(target, level="roundtrip", against=source)
    assert not proof.ok
    assert "model.layers.1.attention.wk.weight" in {row.path for row in proof.failed}
    forget(target, spec.path)
    failed = {row.path for row in wherry.verify(target, level="roundtrip", against=source).failed}
    names = {
        "model.layers.1.attention.wk.weight",
        "model.layers.1.self_attn.k_proj.weight",
    }  # here and in the source
    assert failed == {"", *names}, "the sidecar contradicts itself, too"


@needs_corpus
def test_the_source_has_its_own_config_in_the_ledger_and_not_the_one_that_was_written(tmp_path):
    """Both are called config.json; with the other's digest, a source would be altered as soon as it is verified."""
    source = tmp_path / "maxtext"
    wherry.convert(place(LLAMA), tmp_path / "hf", to="huggingface", lineage=False)
    wherry.convert(tmp_path / "hf", source, to="maxtext", lineage=False)
    (source / "wherry.json").unlink()  # as the system itself would have left it
    wherry.convert(source, tmp_path / "back", to="huggingface")
    assert wherry.verify(source, level="digest").verdict == "ok"


def flip(file, offset):
    with Path(file).open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 0x41]))


def forget(target, path):
    """Let the recorded digest be that of the changed tensor, so that only the source can tell."""
    with wherry.open(target) as made:
        digest = hash_checkpoint(made, BLAKE3, memory=1 << 24).digests[path]
    data = json.loads((target / "wherry.json").read_text())
    (row,) = (row for row in data["manifest"]["tensors"] if row["path"] == render(path))
    row["digest"] = digest
    (target / "wherry.json").write_text(json.dumps(data))


# ---- Boxes: chunks that are no runs of a tensor's bytes
