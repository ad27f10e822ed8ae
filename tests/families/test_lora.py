"""LoRA adapters go from PEFT to Megatron-Bridge's CanonicalLoRA and back; a forward pass from the definition judges."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from wherry.errors import UnrepresentableError, WherryError

LAYERS, RANK, EMBED, GROUPS, HEADS, DIM, FFN = 3, 4, 24, 2, 3, 5, 16
QUERIES, KEYS = GROUPS * HEADS * DIM, GROUPS * DIM
ALL = {
    "self_attn.q_proj": (EMBED, QUERIES), "self_attn.k_proj": (EMBED, KEYS), "self_attn.v_proj": (EMBED, KEYS),
    "self_attn.o_proj": (QUERIES, EMBED), "mlp.gate_proj": (EMBED, FFN), "mlp.up_proj": (EMBED, FFN),
    "mlp.down_proj": (FFN, EMBED),
}  # fmt: skip
START = "base_model.model.model.layers"


def adapter(folder, modules=ALL, layers=range(LAYERS), dtype="f4", **config):
    """A PEFT adapter, as `save_pretrained` leaves it."""
    rng = np.random.default_rng(3)
    folder.mkdir()
    tensors = {}
    for layer in layers:
        for module, (ins, outs) in modules.items():
            for letter, shape in (("A", (RANK, ins)), ("B", (outs, RANK))):
                key = f"{START}.{layer}.{module}.lora_{letter}.weight"
                tensors[key] = rng.standard_normal(shape).astype(dtype)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    names = sorted(module.rsplit(".", 1)[-1] for module in modules)
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps({**said, **config}))
    return folder, tensors


@pytest.mark.parametrize("stacked", ["true", "false"])
@pytest.mark.parametrize(
    "modules", [list(ALL), ["self_attn.q_proj", "self_attn.v_proj"], ["mlp.down_proj"]], ids=len
)
def test_there_and_back_is_bit_equal(modules, stacked, tmp_path):
    source, tensors = adapter(tmp_path / "peft", {name: ALL[name] for name in modules}, dtype="f2")
    options = {"stacked_layers": stacked}
    wherry.convert(source, tmp_path / "iter_0000001", to="megatron", options=options, lineage=False)
    (tmp_path / "iter_0000001" / "wherry.json").unlink()
    wherry.convert(tmp_path / "iter_0000001", tmp_path / "back", to="huggingface", lineage=False)
    back = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert set(back) == set(tensors)
    assert all(back[name].tobytes() == tensors[name].tobytes() for name in tensors)
    configs = [json.loads((one / "adapter_config.json").read_text()) for one in (source, tmp_path / "back")]
    assert configs[0] == configs[1]


def test_the_forward_pass_of_canonical_lora_is_that_of_peft(tmp_path):
    """W·x + alpha / r · B·A·x of each projection, which Megatron-Bridge interleaves by groups of heads."""
    source, tensors = adapter(tmp_path / "peft")
    wherry.convert(source, tmp_path / "out", to="megatron", lineage=False)
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, EMBED)).astype("f4")
    base = {
        name: rng.standard_normal(ALL[f"self_attn.{name}"][::-1]).astype("f4")
        for name in ("q_proj", "k_proj", "v_proj")
    }
    with wherry.open(tmp_path / "out") as checkpoint:
        stored = {path[0]: checkpoint.read(path) for path in checkpoint.manifest.tensors}
    for layer in range(LAYERS):
        peft = []
        for name, weight in base.items():
            down, up = (tensors[f"{START}.{layer}.self_attn.{name}.lora_{letter}.weight"] for letter in "AB")
            peft.append(x @ weight.T + 8 / RANK * (x @ down.T @ up.T))
        bridge = interleaved(*(x @ weight.T for weight in base.values()))
        start = "decoder.layers.self_attention.linear_qkv.adapter.adapter_"
        rows = [
            (
                stored[f"{start}{letter}.linear_in.weight"][layer],
                stored[f"{start}{letter}.linear_out.weight"][layer],
            )
            for letter in "qkv"
        ]
        bridge = bridge + 8 / RANK * interleaved(*(x @ down.T @ up.T for down, up in rows))
        np.testing.assert_allclose(bridge, interleaved(*peft), rtol=1e-5, atol=1e-5)


def interleaved(query, key, value):
    """The order of a fused projection: of each group its queries, its key and its value."""
    parts = [query.reshape(len(query), GROUPS, HEADS, DIM)]
    parts += [one.reshape(len(one), GROUPS, 1, DIM) for one in (key, value)]
    return np.concatenate(parts, axis=2).reshape(len(query), -1)


def test_a_layer_without_an_adapter_is_refused(tmp_path):
    """Stacked or not, all layers of a projection belong to a checkpoint."""
    source, _tensors = adapter(tmp_path / "peft", layers=(0, 2))
    with pytest.raises(WherryError, match="layer"):
        wherry.convert(source, tmp_path / "out", to="megatron", lineage=False)
    assert not (tmp_path / "out").exists()


def test_what_the_layouts_do_not_have_is_refused(tmp_path):
    source, _tensors = adapter(tmp_path / "peft", {**ALL, "mlp.router": (EMBED, FFN)})
    with pytest.raises(UnrepresentableError, match="no layout for the LORA adapter"):
        wherry.convert(source, tmp_path / "out", to="megatron", lineage=False)
    source, _tensors = adapter(tmp_path / "plain")
    with pytest.raises(UnrepresentableError, match="no layout for the LORA adapter"):
        wherry.convert(source, tmp_path / "out", to="penzai", lineage=False)


def test_an_adapter_of_megatron_needs_a_config_for_peft(tmp_path):
    source, _tensors = adapter(tmp_path / "peft")
    wherry.convert(source, tmp_path / "step", to="megatron", lineage=False)
    (tmp_path / "step" / "adapter_config.json").unlink()
    with pytest.raises(UnrepresentableError, match=r"missing adapter_config\.json"):
        wherry.convert(tmp_path / "step", tmp_path / "back", to="huggingface", lineage=False)
    assert not (tmp_path / "back").exists()
