"""Makes the checkpoints that everything else is made from, in the shapes of a Llama-like model.

The numbers are bfloat16 from a normal distribution, as those of a trained model nearly are: their exponents compress
and their mantissas do not, so a codec has its real work. `python -m benchmarks.inputs` runs it in the bench
environment, since it needs numpy.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.inputs_deepseek import make_deepseek
from benchmarks.inputs_zarr import make_paxml, make_t5x

LAYERS = 22
SHARD = 0.55  # of the requested size: the larger of two files
_BLOCK = 8 << 20
_THREADS = 2
_SIDE = 1024


class Tensor(NamedTuple):
    """One bfloat16 tensor of the synthetic model."""

    name: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return 2 * math.prod(self.shape)


def model(size: int) -> list[Tensor]:
    """201 bfloat16 tensors in the proportions of TinyLlama that hold at least `size` bytes, in order of their names."""
    step = 64 if size >= 1 << 28 else 16  # a head has an eighth, and rotary embeddings need it even
    hidden = step
    while sum(tensor.nbytes for tensor in _tensors(hidden)) < size:
        hidden += step
    return sorted(_tensors(hidden), key=lambda tensor: _natural(tensor.name))


def wide(size: int) -> list[Tensor]:
    """The same with so wide a feed-forward layer that each of its three kernels has `size` bytes in all layers."""
    hidden = 1024 if size >= 1 << 28 else 128
    return _tensors(hidden, -(-size // (2 * LAYERS * hidden)))


def _tensors(hidden: int, wide: int = 0) -> list[Tensor]:
    vocabulary, key, inner = min(32000, 16 * hidden), hidden // 8, wide or 11 * hidden // 4
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


def _natural(name: str) -> list[str | int]:
    return [int(part) if at % 2 else part for at, part in enumerate(re.split(r"(\d+)", name))]


def make_huggingface(folder: Path, size: int) -> None:
    """Write a Hugging Face folder: shards of at most `SHARD` of the size, their index, config.json."""
    _write_model(folder, model(size), int(SHARD * size))


def make_wide(folder: Path, size: int) -> None:
    """Write a Hugging Face folder of a model whose scanned kernels have `size` bytes, in two shards."""
    tensors = wide(size)
    _write_model(folder, tensors, int(SHARD * sum(tensor.nbytes for tensor in tensors)))


def _write_model(folder: Path, tensors: list[Tensor], most: int) -> None:
    _write_folder(folder, _shards(tensors, most))
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    vocabulary, hidden = shapes["model.embed_tokens.weight"]
    inner = shapes["model.layers.0.mlp.gate_proj.weight"][0]
    (folder / "config.json").write_text(json.dumps(_config(vocabulary, hidden, inner), indent=1))


def make_one_tensor(folder: Path, size: int) -> None:
    """Write a Hugging Face folder whose only tensor has about so many bytes."""
    _write_folder(folder, [[Tensor("model.embed_tokens.weight", (max(size // (2 * _SIDE), 1), _SIDE))]])


def make_sparse(folder: Path, files: int, count: int) -> None:
    """Write a Hugging Face folder whose tensors of 128 KiB are holes: they take no disk, and reading one would show.

    A plan is refused where the disk is too small for its target: 100,000 of these are 13 GB.
    """
    each = count // files
    names = [f"model.layers.{index}.weight" for index in range(count)]
    shards = [
        [Tensor(name, (_SIDE // 16, _SIDE)) for name in names[at * each : (at + 1) * each]]
        for at in range(files)
    ]
    _write_folder(folder, shards, filled=False)


def _shards(tensors: list[Tensor], most: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(other.nbytes for other in shards[-1]) + tensor.nbytes > most:
            shards.append([])
        shards[-1].append(tensor)
    return shards


def _write_folder(folder: Path, shards: list[list[Tensor]], *, filled: bool = True) -> None:
    folder.mkdir(parents=True)
    if len(shards) == 1:
        _write_safetensors(folder / "model.safetensors", shards[0], filled=filled)
        return
    where: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_safetensors(folder / name, tensors, filled=filled)
        where |= {tensor.name: name for tensor in tensors}
    total = sum(tensor.nbytes for tensors in shards for tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _config(vocabulary: int, hidden: int, inner: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_hidden_layers": LAYERS,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _write_safetensors(path: Path, tensors: list[Tensor], *, filled: bool) -> None:
    offset, header = 0, {}
    for tensor in tensors:
        end = offset + tensor.nbytes
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + offset)
        file.flush()
        if filled:
            _fill(file.fileno(), 8 + len(text), offset)
        os.fsync(file.fileno())


def _fill(file: int, start: int, size: int) -> None:
    """Fill a range with bfloat16 numbers; each block has a seed of its own, so two threads give the same file."""

    def fill(at: int) -> None:
        os.pwrite(file, weights(min(_BLOCK, size - at) // 2, at + size), start + at)

    with ThreadPoolExecutor(_THREADS) as pool:
        for _done in pool.map(fill, range(0, size, _BLOCK)):
            pass


def weights(count: int, seed: int) -> bytes:
    import numpy as np

    generator = np.random.Generator(np.random.SFC64(seed))
    numbers = generator.standard_normal(count, np.float32) * np.float32(0.02)
    return (numbers.view(np.uint32) >> 16).astype("<u2").tobytes()


MAKERS = {
    "huggingface": make_huggingface,
    "wide": make_wide,
    "one-tensor": make_one_tensor,
    "sparse": make_sparse,
    "deepseek": make_deepseek,
    "t5x": make_t5x,
    "paxml": make_paxml,
}

if __name__ == "__main__":
    MAKERS[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:]))
