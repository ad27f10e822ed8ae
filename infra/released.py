"""released: what an installed wherry must do on a bare machine; `infra/release` runs it in a new environment.

    ENVIRONMENT/bin/python -I infra/released.py FOLDER -- wherry

Makes a tiny Llama in the folder, converts it to MaxText and back with the command after `--`, compares every byte of
its tensors, and prints as JSON the version, the state of the kernels, and the weights digests of both conversions. Only
the standard library is imported, since the environment has nothing but wherry and what it depends on.
"""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 64,
    "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_OUTSIDE = {"model.embed_tokens": (96, 64), "lm_head": (96, 64), "model.norm": (64,)}
_LAYER = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (160, 64), "mlp.up_proj": (160, 64), "mlp.down_proj": (64, 160),
    "input_layernorm": (64,), "post_attention_layernorm": (64,),
}  # fmt: skip


def make_llama(folder: Path) -> None:
    """Write a Hugging Face folder of a Llama with two layers, whose weights are the same each time."""
    shapes = _OUTSIDE | {
        f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in _LAYER.items()
    }
    draw, header, data = random.Random(0), dict[str, Any](), bytearray()
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        start = len(data)
        data += struct.pack(f"<{count}f", *(draw.gauss(0, 0.02) for _ in range(count)))
        header[f"{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": (start, len(data))}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps(_CONFIG, indent=2) + "\n")


def tensors(file: Path) -> dict[str, bytes]:
    """The bytes of each tensor of a safetensors file."""
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    return {name: data[slice(*row["data_offsets"])] for name, row in header.items() if name != "__metadata__"}


def wherry(command: list[str], *words: str, cwd: Path) -> str:
    """What the installed command prints."""
    done = subprocess.run([*command, *words], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"wherry {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    folder, command = Path(sys.argv[1]).absolute(), sys.argv[3:]
    make_llama(folder / "llama")
    there = wherry(command, "convert", "llama", "maxtext", "--to", "maxtext", "--json", cwd=folder)
    back = wherry(command, "convert", "maxtext", "again", "--to", "huggingface", "--json", cwd=folder)
    if tensors(folder / "again" / "model.safetensors") != tensors(folder / "llama" / "model.safetensors"):
        raise SystemExit("the tensors of the round trip differ")
    doctor = json.loads(wherry(command, "doctor", "--json", cwd=folder))
    receipts = [json.loads(there), json.loads(back)]
    print(json.dumps({
        "version": wherry(command, "--version", cwd=folder).split()[-1],
        "kernels": {row["name"]: row for row in doctor}["kernels"],
        "receipts": [one["software"].get("kernels") for one in receipts],
        "weights": [one["target"]["weights_digest"] for one in receipts],
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
