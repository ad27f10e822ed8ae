"""Weights that were saved without gathering them are incomplete, and models whose layers differ by design are not.

`detect`, `verify` and `plan` say the same of every container, with a config and without one.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.model_systems import LLAMA_CONFIG, llama_huggingface
from wherry.errors import IncompleteError

torch = pytest.importorskip("torch")

PARTS = {
    "no elements": lambda array: np.zeros(0, array.dtype),
    "one element": lambda array: np.ones(1, array.dtype),
    "one dimension": lambda array: array.reshape(-1)[: array.size // 2].copy(),
    "rows": lambda array: array[: len(array) // 2].copy(),
}
CONTAINERS = ("huggingface", "huggingface bin", "safetensors", "torch")


def llama():
    return {path[0]: array for path, array in llama_huggingface().items()}


def store(folder, tensors, container, config=None):
    folder.mkdir()
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    if container in ("huggingface", "safetensors"):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder if container == "huggingface" else folder / "model.safetensors"
    name = "pytorch_model.bin" if container == "huggingface bin" else "model.pt"
    torch.save({key: torch.from_numpy(array) for key, array in tensors.items()}, folder / name)
    return folder if container == "huggingface bin" else folder / name


def reasons(place, target):
    """What detect, verify and plan say; all of them that it is incomplete, or none."""
    found, checked = wherry.detect(place), wherry.verify(place, level="structure")
    if found.verdict == "ok":
        assert checked.verdict == "ok"
        assert wherry.plan(place, target, to="safetensors").tensors
        return None
    with pytest.raises(IncompleteError) as caught:
        wherry.plan(place, target, to="safetensors")
    assert caught.value.exit_code == checked.exit_code == 5
    assert (found.verdict, checked.verdict) == ("incomplete", "incomplete")
    assert (found.reason, found.cure) == (caught.value.what, caught.value.cure)
    assert found.cure
    assert str(found.reason) in checked.failed[0].reason
    return found.reason


# Without a config nothing says how many rows the matrices of a whole model have.
CASES = [
    (where, kind, container, configured)
    for where in ("layers.1.", "layers.", "")
    for kind in PARTS
    for container in CONTAINERS
    for configured in (True, False)
    if kind != "rows" or where == "layers.1." or (configured and container.startswith("huggingface"))
]


@pytest.mark.parametrize(("where", "kind", "container", "configured"), CASES)
def test_parts_are_named(where, kind, container, configured, tmp_path):
    tensors = llama()
    damaged = {
        name: PARTS[kind](array) if array.ndim > 1 and where in name else array
        for name, array in tensors.items()
    }
    place = store(tmp_path / "source", damaged, container, LLAMA_CONFIG if configured else None)
    said = reasons(place, tmp_path / "target")
    assert said is not None
    if "follow from config.json" not in said:
        count = sum(array.shape != tensors[name].shape for name, array in damaged.items())
        assert f"{count} matrices" in said
        assert kind in said


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.down_proj", "embed_tokens"])
def test_one_matrix_is_found_by_the_config(name, kind, tmp_path):
    damaged = {key: PARTS[kind](array) if f"{name}." in key else array for key, array in llama().items()}
    assert reasons(store(tmp_path / "source", damaged, "huggingface", LLAMA_CONFIG), tmp_path / "target")


def test_small_tensors_that_zero_3_keeps_whole(tmp_path):
    """DeepSpeed does not cut what has fewer elements than its persistence threshold."""
    damaged = {key: np.zeros(0, "f4") if array.size > 5000 else array for key, array in llama().items()}
    assert "have no elements" in reasons(
        store(tmp_path / "source", damaged, "safetensors"), tmp_path / "target"
    )


@pytest.mark.parametrize("adapter", ["", "default."])
def test_an_adapter_without_elements(adapter, tmp_path):
    start = "base_model.model.model.layers.0.self_attn"
    names = [f"{start}.{module}_proj.lora_{side}.{adapter}weight" for module in "qv" for side in "AB"]
    place = store(tmp_path / "source", dict.fromkeys(names, np.zeros(0, "f4")), "safetensors")
    assert "4 matrices have no elements" in reasons(place, tmp_path / "target")


def test_experts_without_elements_next_to_whole_ones(tmp_path):
    """A part of shape [0, 8], which has the columns of the whole matrix, and a name that says nothing."""
    tensors = {f"layers.{layer}.mix.own.weight": np.ones((0 if layer else 16, 8), "f4") for layer in range(3)}
    assert "2 matrices have no elements" in reasons(
        store(tmp_path / "source", tensors, "torch"), tmp_path / "target"
    )


def test_fused_experts_without_elements(tmp_path):
    shapes = {"up_proj": (4, 16, 8), "down_proj": (4, 8, 16)}
    tensors = {
        f"layers.{layer}.experts.{name}": np.zeros(shape if layer else 0, "f4")
        for layer in range(3)
        for name, shape in shapes.items()
    }
    assert "2 matrices have no elements" in reasons(
        store(tmp_path / "source", tensors, "torch"), tmp_path / "target"
    )


def decoder(count=3, width=8, **changes):
    """Shapes of a decoder; `changes` are those of some layers: number → name → shape."""
    layer = {
        "norm": (width,), "self_attn.q_proj": (width, width), "self_attn.k_proj": (4, width),
        "self_attn.v_proj": (4, width), "self_attn.o_proj": (width, width), "mlp.up_proj": (24, width),
        "mlp.gate_proj": (24, width), "mlp.down_proj": (width, 24),
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (20, width), "lm_head.weight": (20, width)}
    for at in range(count):
        own = {**layer, **changes.get(f"layer{at}", {})}
        shapes |= {f"model.layers.{at}.{name}.weight": shape for name, shape in own.items()}
    return shapes


def listed(start, *layers):
    """Numbered layers, each with its own shapes."""
    return {f"{start}.{at}.{name}": shape for at, layer in enumerate(layers) for name, shape in layer.items()}


HEADS = {"self_attn.q_proj": (16, 8), "self_attn.o_proj": (8, 16), "self_attn.k_proj": (8, 8)}
STAGES = [
    {f"blocks.{block}.{name}.weight": shape for block in range(2) for name, shape in {
        "norm": (width,), "attention.output.dense": (width, width), "mlp.fc1": (4 * width, width),
        "mlp.fc2": (width, 4 * width),
    }.items()} for width in (8, 16, 32)
]  # fmt: skip
SOUND = {
    "layers are alike": decoder(),
    "heads of two sizes": decoder(layer1={**HEADS, "self_attn.v_proj": (8, 8)}),
    "fewer groups of keys": decoder(layer1={"self_attn.k_proj": (2, 8), "self_attn.v_proj": (2, 8)}),
    "a pruned feed-forward layer": decoder(
        layer2={"mlp.up_proj": (10, 8), "mlp.gate_proj": (10, 8), "mlp.down_proj": (8, 10)}
    ),
    "pruned heads": decoder(
        layer0={"self_attn.q_proj": (4, 8), "self_attn.o_proj": (8, 4), "self_attn.k_proj": (2, 8)}
    ),
    "pruned heads and fewer channels": decoder(
        layer0={"self_attn.q_proj": (4, 8), "self_attn.o_proj": (8, 4), "mlp.up_proj": (6, 8),
                "mlp.gate_proj": (6, 8), "mlp.down_proj": (8, 6)}
    ),
    "experts in some layers": {
        **decoder(2),
        **{f"model.layers.2.mlp.experts.{at}.{name}.weight": (4, 8) for at in range(3) for name in ("w1", "w3")},
        **{f"model.layers.2.mlp.experts.{at}.w2.weight": (8, 4) for at in range(3)},
    },
    "stages of a vision model": {
        **listed("encoder.layers", *STAGES), "patch_embed.proj.weight": (8, 3, 4, 4), "patch_embed.norm.weight": (8,),
    },
    "a sequence of convolutions and norms": listed(
        "features", {"weight": (8, 3, 3, 3), "bias": (8,)}, {"weight": (8,), "bias": (8,)},
        {"weight": (16, 8, 3, 3), "bias": (16,)},
    ),
    "a nested sequence": listed(
        "features", {"0.weight": (8, 3, 3, 3), "1.weight": (8,)}, {"0.weight": (8, 8, 1, 1), "1.weight": (8,)}
    ),
    "convolutions with fewer and fewer channels": listed(
        "ups", {"conv1.weight": (64, 64, 3), "conv2.weight": (64, 64, 3)},
        {"conv1.weight": (32, 64, 3), "conv2.weight": (32, 32, 3)},
        {"conv1.weight": (16, 32, 3), "conv2.weight": (16, 16, 3)},
    ),
    "classifiers of several tasks": listed(
        "heads", *({"dense.weight": (8, 8), "out_proj.weight": (classes, 8)} for classes in (5, 3))
    ),
    "one matrix in each head": listed("heads", {"fc2.weight": (5, 8)}, {"fc2.weight": (3, 8)}),
    "an adapter of several ranks": listed(
        "model.layers", *({f"o_proj.lora_{side}.weight": (rank, 8)[:: -1 if side == "B" else 1] for side in "AB"}
                          for rank in (2, 4))
    ),
    "scales of several kinds": {
        **decoder(2), "model.layers.0.mlp.up_proj.weight_scale": (24, 1),
        "model.layers.1.mlp.up_proj.weight_scale": (1,), "model.layers.0.mlp.up_proj.input_scale": (1,),
    },
    "a head without elements": {**decoder(), "lm_head.weight": (0,)},
    "a buffer without elements": {**decoder(), "model.cache": (0,), "model.layers.0.self_attn.bias": (0,)},
    "activations with one parameter": listed("body", *({"conv.weight": (4, 4, 3), "act.weight": (1,)} for _ in "ab")),
    "a gate of one dimension": decoder(**{f"layer{at}": {"mlp.gate_proj": (8,)} for at in range(3)}),
    "parameters of a small model": {"w1": (8,), "w2": (8,), "wo": (1,), "dense.weight": (4,), "w1.weight": (8,)},
    "a matrix of one element": {**decoder(), "layers.0.attention.wo.weight": (1,)},
    "norms alone": listed("base_model.model.layers", *({"input_layernorm.weight": (8,)} for _ in "ab")),
    "recurrent layers": {"rnn.weight_ih_l0": (32, 4), "rnn.weight_hh_l0": (32, 8), "rnn.weight_ih_l1": (32, 8)},
}  # fmt: skip


@pytest.mark.parametrize("container", ["safetensors", "torch"])
@pytest.mark.parametrize("what", SOUND)
def test_what_differs_by_design_is_whole(what, container, tmp_path):
    tensors = {name: np.ones(shape, "f4") for name, shape in SOUND[what].items()}
    assert reasons(store(tmp_path / "source", tensors, container), tmp_path / "target") is None


def test_codes_of_quantised_weights_are_whole(tmp_path):
    tensors = {name: np.ones(shape, "f4") for name, shape in decoder().items()}
    codes = {
        name: np.ones((array.size // 2), "u1") for name, array in tensors.items() if "layers.1.mlp" in name
    }
    counters = {f"layers.{at}.num_batches_tracked": np.ones((), "i8") for at in range(2)}
    place = store(tmp_path / "source", {**tensors, **codes, **counters}, "safetensors")
    assert reasons(place, tmp_path / "target") is None


@pytest.mark.parametrize(
    ("change", "config"),
    [
        ({"lm_head.weight": None}, {}),  # a model that makes embeddings, under the class of a causal model
        (
            {"model.embed_tokens.weight": None},
            {"tie_word_embeddings": True},
        ),  # transformers ties the other way then
        ({}, {"pruned_heads": {"0": [1]}, "num_attention_heads": 8}),
        ({}, {"quantization_config": {"quant_method": "gptq"}, "intermediate_size": 400}),
        (
            {"model.layers.0.mlp.up_proj.weight": np.ones((24, 64), "i4")},
            {},
        ),  # packed, as quantize_config.json says
        ({"extra.weight": np.ones((40, 64), "f4")}, {}),
    ],
    ids=[
        "no head",
        "a head in place of the embedding",
        "pruned heads",
        "quantised",
        "packed",
        "more than the config counts",
    ],
)
def test_fewer_parameters_than_the_config_counts_for_a_reason(change, config, tmp_path):
    tensors = {key: array for key, array in {**llama(), **change}.items() if array is not None}
    place = store(tmp_path / "source", tensors, "huggingface", {**LLAMA_CONFIG, **config})
    assert wherry.detect(place).verdict == "ok"


def test_the_config_of_the_base_next_to_an_adapter(tmp_path):
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format("A"): np.ones((2, 64), "f4"), name.format("B"): np.ones((64, 2), "f4")}
    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    assert wherry.detect(folder).verdict == "ok"
