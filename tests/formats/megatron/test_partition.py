"""How tensor-parallel ranks divide parameters: known of every parameter of every family, and undone."""

from __future__ import annotations

import numpy as np
import pytest

import wherry
from tests.support.families import made
from tests.support.torch import torch
from wherry.errors import CorruptError
from wherry.families import families_of_system, load_family
from wherry.families.templates import form_choices
from wherry.integrations.formats.megatron.ranks import EQUAL, GATED, INPUTS, OUTPUTS, division

# How ranks have the parameters of a layer without a gate, with biases.
SERIAL = {
    "linear_qkv.weight": OUTPUTS, "linear_qkv.bias": OUTPUTS, "linear_fc1.weight": OUTPUTS, "linear_fc1.bias": OUTPUTS,
    "linear_proj.weight": INPUTS, "linear_fc2.weight": INPUTS, "word_embeddings.weight": OUTPUTS,
    "output_layer.weight": OUTPUTS,
}  # fmt: skip


@pytest.mark.parametrize("name", families_of_system("megatron"))
def test_the_division_of_every_parameter_is_known(name):
    family = load_family(name)
    system = family.system("megatron")
    for forms in form_choices(system, {}):
        for path in made(family, "megatron", forms).tensors:
            assert division(path[0], name) in (OUTPUTS, INPUTS, GATED, EQUAL)


@pytest.mark.parametrize("name", ["gpt-neox", "gpt2"])
def test_ranks_without_a_gate_are_put_together(name, tmp_path):
    from argparse import Namespace

    family = load_family(name)
    forms = {"norms": "fused", "stacked_layers": "false", "stacked_experts": "false"}
    whole = {path[0]: array for path, array in made(family, "megatron", forms).tensors.items()}
    args = Namespace(swiglu=False, tensor_model_parallel_size=2, pipeline_model_parallel_size=1,
                     untie_embeddings_and_output_weights=True)  # fmt: skip
    for rank in range(2):
        place = tmp_path / "iter_0000001" / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        model = {key: torch.from_numpy(part(key, array, rank).copy()) for key, array in whole.items()}
        torch.save({"args": args, "iteration": 1, "model": model}, place / "model_optim_rng.pt")
    with wherry.open(tmp_path / "iter_0000001") as found:
        assert {path[0] for path in found.manifest.tensors} == set(whole)
        for key, array in whole.items():
            np.testing.assert_array_equal(found.read((key,)), array, err_msg=key)


def part(key, array, rank):
    """What one of two ranks has."""
    how = next((one for end, one in SERIAL.items() if key.endswith(end)), EQUAL)
    return array if how == EQUAL else np.split(array, 2, axis=0 if how == OUTPUTS else 1)[rank]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("decoder.layers.0.mlp.linear_fc1.weight", ()),
        ("decoder.layers.0.mlp.linear_fc1.bias", ()),
        ("decoder.layers.0.self_attention.linear_proj.weight", (3,)),
        ("embedding.word_embeddings.weight", ()),
    ],
)
@pytest.mark.parametrize("gated", [True, False])
def test_a_parameter_without_the_axis_that_ranks_divide_is_corrupt(name, shape, gated, tmp_path):
    from argparse import Namespace

    args = Namespace(swiglu=gated, tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
    for rank in range(2):
        place = tmp_path / "iter_0000001" / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        model = {name: torch.ones(shape)}
        torch.save({"args": args, "iteration": 1, "model": model}, place / "model_optim_rng.pt")
    with pytest.raises(CorruptError, match=r"has no axis [01], which the ranks divide"):
        wherry.open(tmp_path / "iter_0000001")
