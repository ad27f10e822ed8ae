"""compressed-tensors as the judge of what `quantize` writes: a script that runs in an environment of its own.

    python compressed_tensors_writes.py JOB

JOB is a JSON file with `cases`: name → {plain, coded, loads}, folders with the weights and with what wherry made of
them, and whether transformers loads them too. compressed-tensors computes scales and codes from the plain weights
itself, with the `quantization_config` of the coded folder. The answer, a JSON file next to the job, has for each name:

    modules   how many were quantised
    differ    stored tensors whose bits are others
    nearest   share of the codes that it has itself, where it rounds quotients to the type of the weights first
    loaded    whether the weights that transformers computes with are those that compressed-tensors decompresses

What it decompresses is written next to the coded folder, as `<folder>.safetensors`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

# Modules that vLLM and llm-compressor join: their scales are divided by one number.
JOINED = (r"\.[qkv]_proj$", r"\.(gate|up)_proj$", r"\.(q_a_proj|kv_a_proj_with_mqa)$")


def ranges(weight, args):
    """The smallest and largest value of each block, as the min-max observer takes them."""
    if args.strategy == "channel":
        return weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    groups = weight.unflatten(-1, (-1, args.group_size))
    return groups.amin(-1), groups.amax(-1)


def shared_scale(module, plain, modules):
    """The global scale of a module: the least of those of the modules with which it is joined."""
    pattern = next((one for one in JOINED if re.search(one, module)), None)
    start = re.sub(pattern, "", module) if pattern else None
    joined = [
        one for one in modules if pattern and re.search(pattern, one) and re.sub(pattern, "", one) == start
    ]
    weights = [plain[f"{one}.weight"] for one in joined or [module]]
    # float16 has no room for the number that it would be.
    weights = [one.float() if one.dtype == torch.float16 else one for one in weights]
    return torch.min(torch.stack([generate_gparam(one.min(), one.max()) for one in weights])).reshape(1)


def compress(weight, scheme, kind, whole):
    """The tensors of a module: as its kernels compute them, in float32, and as they are computed without one."""
    scale, _zero = calculate_qparams(*ranges(weight, scheme.weights), scheme.weights, global_scale=whole)
    more = {} if whole is None else {"weight_global_scale": whole}
    states = (
        {"weight": weight.float(), "weight_scale": scale.float(), **more},
        {"weight": weight.clone(), "weight_scale": scale, **more},
    )
    made, own = (dict(kind.compress(state, scheme)) for state in states)
    if made["weight_scale"].dtype == torch.float32:
        made["weight_scale"] = scale.to(weight.dtype)
    return made, own


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def judge(plain_folder, coded_folder):
    """The answer of a case."""
    plain, coded = (load_file(Path(one) / "model.safetensors") for one in (plain_folder, coded_folder))
    stated = json.loads((Path(coded_folder) / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(stated)
    (scheme,) = config.config_groups.values()
    kind = BaseCompressor.get_value_from_registry(config.format)
    modules = sorted(name.removesuffix(".weight_scale") for name in coded if name.endswith(".weight_scale"))
    differ, same, codes, wanted = [], 0, 0, {}
    for module in modules:
        weight = plain[f"{module}.weight"]
        whole = shared_scale(module, plain, modules) if scheme.weights.strategy == "tensor_group" else None
        made, own = compress(weight, scheme, kind, whole)
        stored = {name: coded[f"{module}.{name}"] for name in kind.compression_param_names(scheme)}
        assert stored.keys() == made.keys(), (stored.keys(), made.keys())
        for name, tensor in made.items():
            found = stored[name]
            if (
                found.dtype != tensor.dtype
                or found.shape != tensor.shape
                or not torch.equal(bits(found), bits(tensor))
            ):
                differ.append(f"{module}.{name}")
        name = "weight_packed" if "weight_packed" in own else "weight"
        same, codes = same + int((bits(own[name]) == bits(stored[name])).sum()), codes + len(bits(own[name]))
        wanted[f"{module}.weight"] = kind.decompress(stored, scheme)["weight"].contiguous()
    save_file(wanted, f"{coded_folder}.safetensors")
    return {"modules": len(modules), "differ": differ, "nearest": same / codes}, wanted


def loaded(coded_folder, wanted):
    """The differences of the weights with which transformers computes."""
    from transformers import AutoModelForCausalLM

    # 4-bit floats are decompressed to bfloat16 whatever the type of the model is, which then must be the same.
    kind = next(iter(wanted.values())).dtype
    model = AutoModelForCausalLM.from_pretrained(coded_folder, dtype=kind)
    with torch.no_grad():
        model(torch.arange(8)[None])  # compressed modules are decompressed when they first compute
    found = dict(model.named_parameters())
    return [name for name, one in wanted.items() if not torch.equal(found[name].to(one.dtype), one)]


job = json.loads(Path(sys.argv[1]).read_text())
torch.set_num_threads(1)
answer = {}
for name, case in job["cases"].items():
    answer[name], wanted = judge(case["plain"], case["coded"])
    if case.get("loads"):
        answer[name]["loaded"] = loaded(case["coded"], wanted) == []
Path(sys.argv[1]).with_suffix(".answer.json").write_text(json.dumps(answer))
