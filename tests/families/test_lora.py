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


BASE = {
    "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": EMBED, "num_attention_heads": GROUPS * HEADS,
    "num_key_value_heads": GROUPS, "head_dim": DIM, "intermediate_size": FFN, "rope_scaling": {"rope_type": "default"},
}  # fmt: skip


def save_fused(folder):
    """An adapter of fused projections, as Megatron-Bridge's LoRA saves it: imitated with torch's own DCP."""
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint as dcp

    rng = np.random.default_rng(7)
    fused = {
        "self_attention.linear_qkv": (EMBED, QUERIES + 2 * KEYS), "self_attention.linear_proj": (QUERIES, EMBED),
        "mlp.linear_fc1": (EMBED, 2 * FFN), "mlp.linear_fc2": (FFN, EMBED),
    }  # fmt: skip
    tensors = {}
    for name, (ins, outs) in fused.items():
        for half, shape in (("in", (LAYERS, RANK, ins)), ("out", (LAYERS, outs, RANK))):
            key = f"decoder.layers.{name}.adapter.linear_{half}.weight"
            tensors[key] = rng.standard_normal(shape).astype("f4")
    state = {name: torch.from_numpy(one) for name, one in tensors.items()}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    torch.save({"iteration": 10, "checkpoint_version": 3.0}, folder / "common.pt")
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(backend))
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    (folder.parent / "config.json").write_text(json.dumps(BASE))
    return tensors, str(folder.parent / "config.json")


def test_an_adapter_of_fused_projections_goes_to_peft(tmp_path):
    """Query, key and value get their rows of B, and a copy of A each; so do gate and up."""
    stored, config = save_fused(tmp_path / "iter_0000010")
    wherry.convert(
        tmp_path / "iter_0000010", tmp_path / "peft", to="huggingface", config=config, lineage=False
    )
    found = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert len(found) == LAYERS * 14
    x = np.random.default_rng(4).standard_normal((2, EMBED)).astype("f4")
    for layer in range(LAYERS):

        def applied(module, layer=layer):
            down, up = (found[f"{START}.{layer}.{module}.lora_{letter}.weight"] for letter in "AB")
            return x @ down.T @ up.T

        def fused(name, layer=layer):
            down, up = (
                stored[f"decoder.layers.{name}.adapter.linear_{half}.weight"][layer] for half in ("in", "out")
            )
            return x @ down.T @ up.T

        heads = interleaved(*(applied(f"self_attn.{one}_proj") for one in "qkv"))
        np.testing.assert_allclose(heads, fused("self_attention.linear_qkv"), rtol=1e-4, atol=1e-5)
        gated = np.concatenate([applied("mlp.gate_proj"), applied("mlp.up_proj")], axis=1)
        np.testing.assert_allclose(gated, fused("mlp.linear_fc1"), rtol=1e-4, atol=1e-5)
        for module, name in (
            ("self_attn.o_proj", "self_attention.linear_proj"),
            ("mlp.down_proj", "mlp.linear_fc2"),
        ):
            for letter, half in (("A", "in"), ("B", "out")):
                want = stored[f"decoder.layers.{name}.adapter.linear_{half}.weight"][layer]
                np.testing.assert_array_equal(found[f"{START}.{layer}.{module}.lora_{letter}.weight"], want)
    assert wherry.verify(tmp_path / "peft", level="digest", against=str(tmp_path / "iter_0000010")).ok


def test_a_fused_adapter_requires_the_config_of_its_base(tmp_path):
    save_fused(tmp_path / "iter_0000010")
    with pytest.raises(WherryError) as caught:
        wherry.convert(tmp_path / "iter_0000010", tmp_path / "peft", to="huggingface", lineage=False)
    assert "config" in caught.value.cure
    assert not (tmp_path / "peft").exists()


def test_an_adapter_of_peft_has_no_fused_form(tmp_path):
    """Its matrices A differ; the layouts of CanonicalLoRA have them all."""
    source, _tensors = adapter(tmp_path / "peft")
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    with pytest.raises(UnrepresentableError, match="no layout for parameter key_in"):
        wherry.convert(
            source, tmp_path / "out", to="megatron", family="lora-fused", config=str(tmp_path / "config.json"),
            lineage=False,
        )  # fmt: skip


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
