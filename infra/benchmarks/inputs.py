"""Makes the checkpoints that the rows read: random bytes in the shapes of a Llama-like model.

Random bytes do not compress, so no row is flattered by a codec. `python -m benchmarks.inputs` runs it in the
bench environment, since it needs numpy.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import NamedTuple

LAYERS = 22
_SHARDS = 2
_BLOCK = 8 << 20


class Tensor(NamedTuple):
    """One tensor of the synthetic model."""

    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return 2 * math.prod(self.shape)


def model(size: int) -> list[Tensor]:
    """201 bfloat16 tensors in the proportions of TinyLlama that hold at least `size` bytes."""
    step = 64 if size >= 1 << 28 else 8
    hidden = step
    while sum(tensor.nbytes for tensor in _tensors(hidden)) < size:
        hidden += step
    return _tensors(hidden)


def _tensors(hidden: int) -> list[Tensor]:
    vocabulary, key, inner = min(32000, 16 * hidden), hidden // 8, 11 * hidden // 4
    layer = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return [
        Tensor("model.embed_tokens.weight", (vocabulary, hidden)),
        *(
            Tensor(f"model.layers.{index}.{name}.weight", shape)
            for index in range(LAYERS)
            for name, shape in layer.items()
        ),
        Tensor("model.norm.weight", (hidden,)),
        Tensor("lm_head.weight", (vocabulary, hidden)),
    ]


def make_huggingface(folder: Path, size: int) -> None:
    """Write a Hugging Face folder: two shards, their index, config.json."""
    tensors = model(size)
    folder.mkdir(parents=True)
    total = sum(tensor.nbytes for tensor in tensors)
    where: dict[str, str] = {}
    start = 0
    for number in range(_SHARDS):
        name = f"model-{number + 1:05}-of-{_SHARDS:05}.safetensors"
        stop, held = start, 0
        while stop < len(tensors) and (held < total / _SHARDS or number == _SHARDS - 1):
            held += tensors[stop].nbytes
            stop += 1
        _write_safetensors(folder / name, tensors[start:stop])
        where |= {tensor.name: name for tensor in tensors[start:stop]}
        start = stop
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(_config(tensors), indent=1))


def _config(tensors: list[Tensor]) -> dict[str, object]:
    vocabulary, hidden = tensors[0].shape
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 11 * hidden // 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_hidden_layers": LAYERS,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _write_safetensors(path: Path, tensors: list[Tensor]) -> None:
    import numpy as np

    offset, header = 0, {}
    for tensor in tensors:
        end = offset + tensor.nbytes
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = np.random.Generator(np.random.SFC64(len(text)))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, offset, _BLOCK):
            file.write(generator.bytes(min(_BLOCK, offset - start)))
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    make_huggingface(Path(sys.argv[1]), int(sys.argv[2]))
