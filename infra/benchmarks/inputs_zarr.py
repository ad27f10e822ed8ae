"""Makes the inputs that T5X and PaxML write: zarr arrays by tensorstore, T5X's tree by flax, PaxML's names as JSON.

Neither system can be installed with today's libraries, so their contract on disk is followed: T5X's legacy checkpointer
stores each parameter as one gzip chunk where one partition holds it, PaxML 1.1 each array of the train state as zstd
chunks of its shards, all under the names of the tree. The numbers are float32 from a normal distribution.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from benchmarks.files import make_durable

if TYPE_CHECKING:
    import numpy as np

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
    while _bytes(_t5(embed)) < size:
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
    while 3 * _bytes(_gpt3(embed)) < size:
        embed += 16
    return _gpt3(embed)


def _gpt3(embed: int) -> Shapes:
    head, dim, inner = 8, embed // 8, 4 * embed
    layer = {
        "layer_norm.scale": (embed,),
        "layer_norm.bias": (embed,),
        "self_attention.combined_qkv.w": (3, embed, head, dim),
        "self_attention.combined_qkv.b": (3, head, dim),
        "self_attention.post.w": (embed, head, dim),
        "self_attention.post.b": (embed,),
        "ff_layer.layer_norm.scale": (embed,),
        "ff_layer.layer_norm.bias": (embed,),
        "ff_layer.ffn_layer1.linear.w": (embed, inner),
        "ff_layer.ffn_layer1.bias.b": (inner,),
        "ff_layer.ffn_layer2.linear.w": (inner, embed),
        "ff_layer.ffn_layer2.bias.b": (embed,),
    }
    return {
        "softmax.logits_ffn.linear.w": (embed, min(50304, 48 * embed)),
        "position_emb.emb_var": (min(_POSITIONS, 2 * embed), embed),
        "final_ln.scale": (embed,),
        "final_ln.bias": (embed,),
        **{f"{_STACK}{name}": (GPT_LAYERS, *shape) for name, shape in layer.items()},
    }


def _bytes(shapes: Shapes) -> int:
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
    (step / "metadata" / "metadata").write_text(json.dumps(_metadata(shapes)))
    make_durable(folder)


def _shard(shape: tuple[int, ...]) -> tuple[int, ...]:
    longest = shape.index(max(shape))
    return tuple(-(-extent // _SHARDS) if at == longest else extent for at, extent in enumerate(shape))


def _metadata(shapes: Shapes) -> dict[str, object]:
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
        _write_array(folder / name, weights(shapes[name], seed), chunks[name], compressor)

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


def weights(shape: tuple[int, ...], seed: int) -> np.ndarray:
    import numpy as np

    generator = np.random.Generator(np.random.SFC64(seed))
    return generator.standard_normal(shape, np.float32) * np.float32(0.02)
