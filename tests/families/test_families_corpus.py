"""The corpus through the families: the bits of real converters and writers, and of index arithmetic on real data."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.families import CORPUS, Made, carried, hashes, opened, same, wanted_hashes
from wherry.errors import UnrepresentableError
from wherry.families import convert_layout, load_family

pytestmark = pytest.mark.skipif(
    not CORPUS.exists(), reason="the corpus is not here; set WHERRY_CORPUS to its folder"
)
RANDOM = ("nnx_aux",)  # keys and counters that MaxText makes anew


def lingua_params(case):
    (path,) = [one for one in (CORPUS / case).rglob("params.json") if "0000000002" not in str(one)][:1]
    return json.loads(path.read_text())


def convert(case, family, source, target, *formats, **common):
    with opened(case, *formats) as checkpoint:
        projected = convert_layout(checkpoint.manifest, load_family(family), source, target, **common)
        return projected, carried(projected, checkpoint.read), checkpoint.manifest


@pytest.mark.parametrize(
    ("case", "formats"), [("lingua-fsdp2-w2", ("dcp",)), ("lingua-fsdp2-w2-consolidated", ("torch-zip",))]
)
def test_lingua_to_hugging_face_is_what_gives_lingua_s_logits(case, formats):
    config = lingua_params("lingua-fsdp2-w2")
    projected, there, manifest = convert(case, "llama", "lingua", "huggingface", *formats, config=config)
    assert hashes(there.tensors) == wanted_hashes("hf-llama-from-lingua-fp32")
    assert not projected.lossy
    _accounted(projected, manifest)


def test_hugging_face_to_lingua():
    config = json.loads(
        next((CORPUS / "hf-llama-from-lingua-fp32/checkpoint").rglob("config.json")).read_text()
    )
    _projected, there, _manifest = convert(
        "hf-llama-from-lingua-fp32", "llama", "huggingface", "lingua", config=config
    )
    wanted = wanted_hashes("lingua-fsdp2-w2", leave=())
    assert hashes(there.tensors) == {
        path: one for path, one in wanted.items() if path[0].startswith("model.")
    }


@pytest.mark.parametrize(
    ("case", "formats"),
    [("paxml-gpt3-l3-v12-gda-ocdbt", ("orbax",)), ("paxml-gpt3-l3-v11-gda-zarr", ())],
)
def test_paxml_to_maxtext_equals_maxtext_s_own_converter(case, formats):
    projected, there, manifest = convert(case, "gpt3", "paxml", "maxtext", *formats)
    assert hashes(there.tensors) == wanted_hashes("maxtext-gpt3-l3-converted-by-maxtext")
    assert not projected.lossy
    _accounted(projected, manifest)


SCANNED = [
    ("maxtext-gpt3-l3-scan", "gpt3"),
    ("maxtext-gpt3-l3-unscan", "gpt3"),
    ("maxtext-llama31-l3-scan", "llama"),
    ("maxtext-llama31-l3-unscan", "llama"),
    ("maxtext-llama31-l3-scan-zarr2-noocdbt", "llama"),
    ("maxtext-mixtral-l2-scan", "mixtral"),
    ("maxtext-gemma2-l4-scan", "gemma2"),
    ("maxtext-deepseek3-l4-scan", "deepseek"),
]


@pytest.mark.parametrize(("case", "family"), SCANNED)
def test_maxtext_scanned_and_not(case, family):
    """Layer by layer the tensors of a stack, and together again the tensors of the file."""
    scanned = case.split("-")[3] == "scan"
    options = {"scan_layers": str(not scanned).lower()}
    projected, there, manifest = convert(case, family, "maxtext", "maxtext", "orbax", options=options)
    _accounted(projected, manifest)
    assert not projected.lossy
    with opened(case, "orbax") as checkpoint:
        whole = {path: checkpoint.read(path) for path in manifest.tensors if path[0] != "nnx_aux"}
    stacks, singles = (whole, there.tensors) if scanned else (there.tensors, whole)
    _require_slices(stacks, singles)
    back = convert_layout(
        Made(there.tensors).manifest,
        load_family(family),
        "maxtext",
        "maxtext",
        options={"scan_layers": str(scanned).lower()},
    )
    again = carried(back, lambda path, region: there.tensors[path][region if region is not None else ...])
    kept = {path: array for path, array in again.tensors.items() if path[0] != "nnx_aux"}
    assert same(kept, whole)


def _require_slices(stacks, singles):
    """Every tensor of one layer is the slice of its stack on axis 1."""
    for path, array in singles.items():
        place = next((at for at, part in enumerate(path) if part.rsplit("_", 1)[0].endswith("layers")), None)
        if path[0] == "nnx_aux" or place is None:
            continue
        name, layer = path[place].rsplit("_", 1)
        np.testing.assert_array_equal(
            array, stacks[(*path[:place], name, *path[place + 1 :])].take(int(layer), 1)
        )


def test_deepseek_router_bias_is_not_lost():
    projected, there, _manifest = convert(
        "maxtext-deepseek3-l4-scan", "deepseek", "maxtext", "huggingface", "orbax"
    )
    bias = there.tensors[("model.layers.3.mlp.gate.e_score_correction_bias",)]
    with opened("maxtext-deepseek3-l4-scan", "orbax") as checkpoint:
        path = next(path for path in checkpoint.manifest.tensors if path[-2:] == ("gate", "bias"))
        np.testing.assert_array_equal(bias, checkpoint.read(path)[2])
    assert ("model.layers.0.mlp.gate_proj.weight",) in there.tensors
    assert not projected.lossy


@pytest.mark.parametrize("name", ["plain", "label-dict"])
def test_penzai_to_hugging_face(name):
    case = f"penzai-llama-unroll-{name}"
    projected, there, manifest = convert(case, "llama", "penzai", "huggingface", "orbax")
    _accounted(projected, manifest)
    with opened(case, "orbax") as checkpoint:
        query, out = (
            checkpoint.read(next(path for path in checkpoint.manifest.tensors if text in path[0]))
            for text in ("block_1/attention/query", "block_1/attention/output")
        )
    made = there.tensors[("model.layers.1.self_attn.q_proj.weight",)]
    np.testing.assert_array_equal(made, query.reshape(16, 16).T)
    made = there.tensors[("model.layers.1.self_attn.o_proj.weight",)]
    np.testing.assert_array_equal(made, out.reshape(16, 16).T)
    back = convert_layout(
        there.manifest, load_family("llama"), "huggingface", "penzai", sizes=dict(projected.source.solved.sizes),
        options={"layer_stack": "false", "order": "native", "leaf": projected.source.chosen["leaf"]},
    )  # fmt: skip
    assert hashes(carried(back, there.read).tensors) == wanted_hashes(case)


T5 = [
    "t5x-orbax-ocdbt-head",
    "t5x-orbax-zarr-metadata-2024",
    "t5x-legacy-v3-f32-head",
    "t5x-legacy-v3-scanned-2024",
]


@pytest.mark.parametrize("case", T5)
def test_t5x_to_hugging_face_and_back(case):
    scanned = "scanned" in case
    projected, there, manifest = convert(case, "t5", "t5x", "huggingface", "orbax")
    _accounted(projected, manifest)
    with opened(case, "orbax") as checkpoint:
        root = ("target", "decoder", "decoder" if scanned else "layers_2", "encoder_decoder_attention")
        key, out = (checkpoint.read((*root, name, "kernel")) for name in ("key", "out"))
        bias = checkpoint.read(
            ("target", "encoder", *(["encoder"] if scanned else []), "relpos_bias", "rel_embedding")
        )
        rows = {path: checkpoint.read(path) for path in manifest.tensors}
    key, out = (key[:, 2], out[:, 2]) if scanned else (key, out)
    made = there.tensors
    np.testing.assert_array_equal(
        made["decoder.block.2.layer.1.EncDecAttention.k.weight",], key.reshape(16, 16).T
    )
    np.testing.assert_array_equal(
        made["decoder.block.2.layer.1.EncDecAttention.o.weight",], out.reshape(16, 16).T
    )
    relative = made["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",]
    np.testing.assert_array_equal(relative, (bias[:, 0] if scanned else bias).T)
    forms = {key: projected.source.chosen[key] for key in ("scan_layers", "heads")}
    back = convert_layout(
        there.manifest, load_family("t5"), "huggingface", "t5x", options=forms,
        sizes=dict(projected.source.solved.sizes),
    )  # fmt: skip
    again = carried(back, there.read).tensors
    assert same(again, {path: array for path, array in rows.items() if path[0] == "target"})


@pytest.mark.parametrize("case", T5)
def test_adafactor_between_forms_of_t5x(case):
    """Factored moments lose an axis each; they follow the layers as their parameters do."""
    scanned = "scanned" in case
    options = {"scan_layers": str(not scanned).lower(), "heads": "joined" if scanned else "apart"}
    projected, there, manifest = convert(case, "t5", "t5x", "t5x", "orbax", options=options)
    _accounted(projected, manifest)
    forms = {key: projected.source.chosen[key] for key in ("scan_layers", "heads")}
    back = convert_layout(
        there.manifest,
        load_family("t5"),
        "t5x",
        "t5x",
        options=forms,
        sizes=dict(projected.source.solved.sizes),
    )
    read = lambda path, region: there.tensors[path][region if region is not None else ...]  # noqa: E731
    assert hashes(carried(back, read).tensors) == wanted_hashes(case)


def test_qwen_experts_become_one_tensor():
    case = "hf-qwen3-moe-bf16"
    config = json.loads(next((CORPUS / case).rglob("config.json")).read_text())
    stated = {"norm_topk": True}  # MaxText knows no other, this model states another
    with pytest.raises(
        UnrepresentableError, match="norm_topk_prob is False in the config, but maxtext always uses True"
    ):
        convert(case, "qwen", "huggingface", "maxtext", config=config)
    projected, there, manifest = convert(case, "qwen", "huggingface", "maxtext", config=config, stated=stated)
    _accounted(projected, manifest)
    assert not projected.lossy
    with opened(case) as checkpoint:
        one = checkpoint.read(("model.layers.1.mlp.experts.3.gate_proj.weight",))
    stack = there.tensors["params", "params", "decoder", "layers", "moe_block", "wi_0"]
    np.testing.assert_array_equal(stack[3, 1], one.T)


def _accounted(projected, manifest):
    """Every source tensor is moved or ignored by a named rule; no target tensor is written twice."""
    moved = {spec.path for held in projected.pieces.held.values() for spec, _piece in held.values()}
    ignored = {row.path for row in projected.ignored}
    assert all(row.rule and row.reason for row in projected.ignored)
    scalars = set(projected.scalars.values())
    assert moved | ignored | scalars == set(manifest.tensors)
    assert not set(projected.targets) & set(projected.scalars)


@pytest.mark.parametrize(
    ("case", "tree"), [("paxml-gpt3-l3-v12-gda-ocdbt", "nested"), ("paxml-gpt3-l3-v11-gda-zarr", "flat")]
)
def test_maxtext_to_paxml_is_the_checkpoint_that_it_came_from(case, tree):
    projected, there, manifest = convert(
        "maxtext-gpt3-l3-converted-by-maxtext", "gpt3", "maxtext", "paxml", "orbax", options={"tree": tree}
    )
    assert hashes(there.tensors) == wanted_hashes(case)
    _accounted(projected, manifest)
