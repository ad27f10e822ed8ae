"""Makes the checkpoints that everything else is made from, in the shapes of a Llama-like model.

The numbers are bfloat16 from a normal distribution, as those of a trained model nearly are: their exponents compress
and their mantissas do not, so a codec has its real work. `python -m benchmarks.inputs` runs it in the bench
environment, since it needs numpy.

T5X and PaxML cannot be installed with today's libraries, so their contract on disk is followed: T5X's legacy
checkpointer stores each parameter as one gzip chunk where one partition holds it, PaxML 1.1 each array of the train
state as zstd chunks of its shards, all under the names of the tree; these numbers are float32. The layers of
DeepSeek-V3, a dense one and one of experts, have the layout of the released checkpoint in fp8 with blocks of 128x128:
codes (float8_e4m3fn) and `weight_scale_inv` (float32) for each projection, and plain bfloat16 for the rest. 32 of the
256 experts keep the size within a test; an expert more changes no other tensor.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from benchmarks.files import make_durable

if TYPE_CHECKING:
    import numpy as np

BLOCK = 128
_CODES = 1 << 22  # codes that are repeated, shifted by another number each time
_BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
_PLAIN_PROJECTION = "kv_a_proj_with_mqa"


class Dimensions(NamedTuple):
    """The dimensions of the layers; the defaults are those of DeepSeek-V3, with fewer experts."""

    experts: int = 32
    embed: int = 7168
    heads: int = 128
    dense: int = 18432
    expert: int = 2048
    q_rank: int = 1536
    kv_rank: int = 512

    def config(self, *, plain: bool = False) -> dict[str, object]:
        """Contents of `config.json`; see `make_layers`."""
        quantized = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
        left = {"modules_to_not_convert": ["lm_head", _PLAIN_PROJECTION]} if plain else {}
        return {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": self.embed,
            "vocab_size": 1024, "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads, "intermediate_size": self.dense, "moe_intermediate_size": self.expert,
            "n_routed_experts": self.experts, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
            "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.kv_rank, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 4096,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "quantization_config": {**quantized, **left},
        }  # fmt: skip

    def shapes(self, *, plain: bool = False) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → element type of safetensors, and shape."""
        codes = self._codes()
        plain_shapes = self._plain()
        if plain:
            for name in [name for name in codes if name.endswith(_PLAIN_PROJECTION)]:
                plain_shapes[name] = codes.pop(name)
        found = {f"{name}.weight": ("BF16", shape) for name, shape in plain_shapes.items()}
        for name, shape in codes.items():
            found[f"{name}.weight"] = ("F8_E4M3", shape)
            found[f"{name}.weight_scale_inv"] = ("F32", (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)))
        return {**found, "model.layers.1.mlp.gate.e_score_correction_bias": ("F32", (self.experts,))}

    def _codes(self) -> dict[str, tuple[int, ...]]:
        attention = {
            "q_a_proj": (self.q_rank, self.embed), "q_b_proj": (self.heads * 192, self.q_rank),
            _PLAIN_PROJECTION: (self.kv_rank + 64, self.embed), "kv_b_proj": (self.heads * 256, self.kv_rank),
            "o_proj": (self.embed, self.heads * 128),
        }  # fmt: skip
        moe = "model.layers.1.mlp"
        parts = [f"{moe}.shared_experts", *(f"{moe}.experts.{number}" for number in range(self.experts))]
        return {
            **{
                f"model.layers.{layer}.self_attn.{name}": shape
                for layer in (0, 1)
                for name, shape in attention.items()
            },
            **{f"model.layers.0.mlp.{name}": shape for name, shape in self._mlp(self.dense)},
            **{f"{part}.{name}": shape for part in parts for name, shape in self._mlp(self.expert)},
        }

    def _mlp(self, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "gate_proj", (width, self.embed)
        yield "up_proj", (width, self.embed)
        yield "down_proj", (self.embed, width)

    def _plain(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens": (1024, self.embed), "lm_head": (1024, self.embed), "model.norm": (self.embed,),
            "model.layers.1.mlp.gate": (self.experts, self.embed),
        }  # fmt: skip
        for layer in ("model.layers.0", "model.layers.1"):
            found |= {
                f"{layer}.{name}": (self.embed,) for name in ("input_layernorm", "post_attention_layernorm")
            }
            found[f"{layer}.self_attn.q_a_layernorm"] = (self.q_rank,)
            found[f"{layer}.self_attn.kv_a_layernorm"] = (self.kv_rank,)
        return found


def make_deepseek(folder: Path, experts: int) -> None:
    """The input of the bench: as many experts, or the 4 of which its groups need 2 each, and one projection plain.

    transformers 5.23 cannot dequantise `kv_a_proj_with_mqa`, whose 576 rows are not whole blocks (`Fp8Dequantize`
    raises an error), and the row needs a peer.
    """
    make_layers(folder, Dimensions(max(experts, 4)), plain=True)


def make_layers(folder: Path, dimensions: Dimensions, *, plain: bool = False) -> None:
    """A folder of finite numbers, written tensor by tensor; blocks differ.

    Args:
        folder: created.
        dimensions: of the layers.
        plain: whether `kv_a_proj_with_mqa` is bfloat16.
    """
    import numpy as np

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dimensions.config(plain=plain)))
    header, end, draw = {}, 0, np.random.default_rng(0)
    shapes = dimensions.shapes(plain=plain)
    for name, (kind, shape) in shapes.items():
        size = math.prod(shape) * _BYTES[kind]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    codes = draw.integers(0, 256, _CODES).astype("u1") & 0xBF
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for kind, shape in shapes.values():
            count = math.prod(shape)
            if kind == "F8_E4M3":
                for start in range(0, count, _CODES):
                    file.write(np.roll(codes, start // 999)[: count - start].data)
            elif kind == "F32":
                file.write(draw.random(count, np.float32).data)
            else:
                file.write((draw.random(count, np.float32).view("u4") >> 16).astype("u2").data)


Shapes: TypeAlias = "dict[str, tuple[int, ...]]"

T5_LAYERS = GPT_LAYERS = 12
_HEADS, _BUCKETS, _POSITIONS = 12, 32, 2048
_STEP = 4000
_STACK = "transformer.repeat.sub.x_layers_0."
_SHARDS = 8  # devices that the longest axis of an array of PaxML is spread over
_GZIP, _ZSTD = {"id": "gzip", "level": 1}, {"id": "zstd", "level": 1}
_FILES_AT_ONCE = 8


def t5(size: int) -> Shapes:
    """Parameters of a T5 1.1 with at least `size` bytes, in the proportions of the base model, as T5X names them."""
    embed = 48
    while _float32_bytes(_t5(embed)) < size:
        embed += 48
    return _t5(embed)


def _t5(embed: int) -> Shapes:
    vocabulary, inner = min(32128, 42 * embed), 8 * embed // 3
    attention = {f"{name}.kernel": (embed, embed) for name in ("query", "key", "value", "out")}
    feed_forward = {
        "pre_mlp_layer_norm.scale": (embed,),
        "mlp.wi_0.kernel": (embed, inner),
        "mlp.wi_1.kernel": (embed, inner),
        "mlp.wo.kernel": (inner, embed),
    }
    encoder = {"pre_attention_layer_norm.scale": (embed,)}
    encoder |= {f"attention.{name}": shape for name, shape in attention.items()} | feed_forward
    decoder = {f"pre_{kind}_attention_layer_norm.scale": (embed,) for kind in ("self", "cross")}
    for kind in ("self_attention", "encoder_decoder_attention"):
        decoder |= {f"{kind}.{name}": shape for name, shape in attention.items()}
    shapes: Shapes = {"token_embedder.embedding": (vocabulary, embed)}
    for side, layer in (("encoder", encoder), ("decoder", decoder | feed_forward)):
        shapes[f"{side}.relpos_bias.rel_embedding"] = (_HEADS, _BUCKETS)
        shapes[f"{side}.{side}_norm.scale"] = (embed,)
        for index in range(T5_LAYERS):
            shapes |= {f"{side}.layers_{index}.{name}": shape for name, shape in layer.items()}
    return shapes | {"decoder.logits_dense.kernel": (embed, vocabulary)}


def gpt3(size: int) -> Shapes:
    """Parameters of a GPT-3 whose train state, with both moments, has at least `size` bytes, as PaxML names them."""
    embed = 16
    while 3 * _float32_bytes(_gpt3(embed)) < size:
        embed += 16
    return _gpt3(embed)


def _gpt3(embed: int) -> Shapes:
    head, dim, inner = 8, embed // 8, 4 * embed
    layer = {
        "layer_norm.scale": (embed,), "layer_norm.bias": (embed,),
        "self_attention.combined_qkv.w": (3, embed, head, dim),
        "self_attention.combined_qkv.b": (3, head, dim), "self_attention.post.w": (embed, head, dim),
        "self_attention.post.b": (embed,), "ff_layer.layer_norm.scale": (embed,),
        "ff_layer.layer_norm.bias": (embed,), "ff_layer.ffn_layer1.linear.w": (embed, inner),
        "ff_layer.ffn_layer1.bias.b": (inner,), "ff_layer.ffn_layer2.linear.w": (inner, embed),
        "ff_layer.ffn_layer2.bias.b": (embed,),
    }  # fmt: skip
    return {
        "softmax.logits_ffn.linear.w": (embed, min(50304, 48 * embed)),
        "position_emb.emb_var": (min(_POSITIONS, 2 * embed), embed),
        "final_ln.scale": (embed,),
        "final_ln.bias": (embed,),
        **{f"{_STACK}{name}": (GPT_LAYERS, *shape) for name, shape in layer.items()},
    }


def _float32_bytes(shapes: Shapes) -> int:
    return sum(4 * math.prod(shape) for shape in shapes.values())


def make_t5x(folder: Path, size: int) -> None:
    """Write a legacy checkpoint of T5X, parameters and step."""
    import numpy as np
    from flax import serialization, traverse_util

    shapes = {f"target.{name}": shape for name, shape in t5(size).items()}
    folder.mkdir(parents=True)
    _write_arrays(folder, shapes, shapes, _GZIP)
    tree: dict[str, object] = {name: _spec(name, shape) for name, shape in shapes.items()}
    tree["state.step"] = np.asarray(_STEP, np.int32)
    content = {"version": 3, "optimizer": traverse_util.unflatten_dict(tree, sep=".")}
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(content, in_place=True))
    make_durable(folder)


def _spec(name: str, shape: tuple[int, ...]) -> dict[str, object]:
    metadata = {"shape": [*shape], "chunks": [*shape], "compressor": _GZIP}
    kvstore = {"driver": "file", "path": f"{name}/"}
    return {"driver": "zarr", "dtype": "float32", "kvstore": kvstore, "metadata": metadata}


def make_paxml(folder: Path, size: int) -> None:
    """Write a train state of PaxML 1.1: parameters, both moments of Adam, the counts of its chain, the step."""
    import numpy as np

    shapes = gpt3(size)
    others, stacked = "opt_states_0.no_prefix_", f"opt_states_0.p#{GPT_LAYERS}#i-1_"
    state = {f"mdl_vars.params.lm.{name}": shape for name, shape in shapes.items()}
    for moment in ("m", "v"):
        for name, shape in shapes.items():
            group = stacked if name.startswith(_STACK) else others
            state[f"{group}2.{moment}.params.lm.{name}"] = shape
    step = folder / f"checkpoint_{_STEP:08}"
    _write_arrays(step / "state", state, {name: _shard(shape) for name, shape in state.items()}, _ZSTD)
    counts = {f"{others}{at}.count": np.asarray(_STEP, np.int32) for at in range(4)}
    counts |= {f"{stacked}{at}.count": np.full(GPT_LAYERS, _STEP, np.int32) for at in range(4)}
    for name, array in (counts | {"step": np.asarray(_STEP, np.uint32)}).items():
        _write_array(step / "state" / name, array, array.shape, _ZSTD)
    (step / "metadata").mkdir()
    (step / "metadata" / "metadata").write_text(json.dumps(_pax_metadata(shapes)))
    make_durable(folder)


def _shard(shape: tuple[int, ...]) -> tuple[int, ...]:
    longest = shape.index(max(shape))
    return tuple(-(-extent // _SHARDS) if at == longest else extent for at, extent in enumerate(shape))


def _pax_metadata(shapes: Shapes) -> dict[str, object]:
    """What PaxML writes next to the arrays: of each variable the shape before padding."""
    from flax import traverse_util

    leaves = {
        f"mdl_vars.params.lm.{name}": {
            "_array_metadata_tag": True,
            "dtype": "float32",
            "is_optax_masked_node": False,
            "unpadded_shape": [*shape],
        }
        for name, shape in shapes.items()
    }
    return {"version": 1.1, "train_state_metadata": traverse_util.unflatten_dict(leaves, sep=".")}


def _write_arrays(folder: Path, shapes: Shapes, chunks: Shapes, compressor: Mapping[str, object]) -> None:
    """Write every array with numbers of a seed of its own, some at a time."""
    from concurrent.futures import ThreadPoolExecutor

    def write(numbered: tuple[int, str]) -> None:
        seed, name = numbered
        _write_array(folder / name, weights_float32(shapes[name], seed), chunks[name], compressor)

    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        for _done in pool.map(write, enumerate(shapes)):
            pass


def _write_array(
    path: Path, array: np.ndarray, chunks: tuple[int, ...], compressor: Mapping[str, object]
) -> None:
    import tensorstore as ts

    spec = {
        "driver": "zarr",
        "dtype": array.dtype.name,
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": {"shape": [*array.shape], "chunks": [*chunks], "compressor": dict(compressor)},
    }
    ts.open(spec, create=True).result().write(array).result()


def weights_float32(shape: tuple[int, ...], seed: int) -> np.ndarray:
    import numpy as np

    generator = np.random.Generator(np.random.SFC64(seed))
    return generator.standard_normal(shape, np.float32) * np.float32(0.02)


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
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
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
    """Write a Hugging Face folder whose tensors of 16 KiB are holes: they take no disk, and reading them would show.

    A plan is refused where the disk is too small for its target: 100,000 of these are 1.6 GB.
    """
    each = count // files
    names = [f"model.layers.{index}.weight" for index in range(count)]
    shards = [
        [Tensor(name, (_SIDE // 128, _SIDE)) for name in names[at * each : (at + 1) * each]]
        for at in range(files)
    ]
    _write_folder(folder, shards, filled=False)


def make_many(folder: Path, count: int) -> None:
    """Write a Hugging Face folder of so many tensors of 2 KB."""
    tensors = [Tensor(f"layers.{index}.weight", (32, 32)) for index in range(count)]
    most = 500_000  # safetensors refuses a header above 100 MB
    _write_folder(folder, [tensors[start : start + most] for start in range(0, count, most)])


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
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": 8, "num_key_value_heads": 1,
        "num_hidden_layers": LAYERS, "vocab_size": vocabulary, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }  # fmt: skip


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
    "huggingface": make_huggingface, "wide": make_wide, "one-tensor": make_one_tensor, "sparse": make_sparse,
    "many": make_many, "deepseek": make_deepseek, "t5x": make_t5x, "paxml": make_paxml,
}  # fmt: skip

if __name__ == "__main__":
    MAKERS[sys.argv[1]](Path(sys.argv[2]), *map(int, sys.argv[3:]))
