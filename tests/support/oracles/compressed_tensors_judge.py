"""compressed-tensors as the judge of quantised weights: a script that runs in an environment of its own.

    python compressed_tensors_judge.py JOB

JOB is a JSON file with `folder` and `cases`: name → {format, scheme, dtype, shapes}, where `scheme` has the fields of
QuantizationScheme and `dtype` is that of the scales. For each case the folder gets `<name>/`, a Hugging Face folder
with weights that compressed-tensors itself compressed and the `quantization_config` that it writes, and
`<name>.safetensors` with what it makes of them again. The answer, a JSON file next to the job, has for each name the
error where it refuses. A case may have `change`: what happens to the compressed tensors of each module before they are
read, as name → null (removed), shape or element type.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file


def parameters(weight, args, dtype):
    """Scales and zero points of a weight as an observer of the smallest and largest values computes them."""
    wide = weight.float()
    if args.strategy == "tensor":
        low, high = wide.min().reshape(1), wide.max().reshape(1)
    elif args.strategy == "channel":
        low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    elif args.strategy == "group":
        groups = wide.unflatten(-1, (-1, args.group_size))
        low, high = groups.amin(-1), groups.amax(-1)
    else:
        rows, columns = args.block_structure
        padded = torch.nn.functional.pad(wide, (0, -wide.shape[1] % columns, 0, -wide.shape[0] % rows))
        blocks = padded.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    scale, zero = calculate_qparams(low, high, args)
    return scale.to(dtype), zero.to(args.zp_dtype)


def compressed(shape, scheme, kind, dtype, draw):
    """The stored tensors of one module."""
    weight = torch.randn(shape, generator=draw) + 0.3 * torch.randn(shape[:-1], generator=draw)[..., None]
    scale, zero = parameters(weight, scheme.weights, dtype)
    state = {"weight": weight.to(dtype), "weight_scale": scale, "weight_zero_point": zero}
    return kind.compress(state, scheme)


def changed(state, change):
    """The stored tensors after a change."""
    for name, what in change.items():
        if what is None:
            state.pop(name, None)
        elif isinstance(what, str):
            state[name] = state[name].to(getattr(torch, what))
        else:
            state[name] = torch.zeros(what, dtype=getattr(state.get(name), "dtype", torch.int32))
    return state


def make(name, case, folder):
    """Write a case; the error of compressed-tensors where it refuses to read it."""
    scheme = QuantizationScheme(**case["scheme"])
    kind, draw = BaseCompressor.get_value_from_registry(case["format"]), torch.manual_seed(0)
    stored, wanted, refusal = {}, {}, None
    for number, shape in enumerate(case["shapes"]):
        state = compressed(shape, scheme, kind, getattr(torch, case["dtype"]), draw)
        state = changed(dict(state), case.get("change", {}))
        stored |= {f"m.{number}.{key}": value.contiguous() for key, value in state.items()}
        try:
            wanted[f"m.{number}.weight"] = kind.decompress(state, scheme)["weight"].contiguous()
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, quant_method="compressed-tensors", ignore=["lm_head"],
        format=case.get("stated", case["format"]), quantization_status=QuantizationStatus.COMPRESSED,
    )  # fmt: skip
    stated = {**json.loads(config.model_dump_json()), **case.get("more", {})}
    (folder / name).mkdir(parents=True)
    save_file(stored, folder / name / "model.safetensors", {"format": "pt"})
    (folder / name / "config.json").write_text(json.dumps({"quantization_config": stated}))
    if refusal is None:
        save_file(wanted, folder / f"{name}.safetensors")
    return refusal


job = json.loads(Path(sys.argv[1]).read_text())
torch.set_num_threads(1)
answer = {name: make(name, case, Path(job["folder"])) for name, case in job["cases"].items()}
Path(sys.argv[1]).with_suffix(".answer.json").write_text(json.dumps(answer))
