"""PaxML's on-disk contract, followed without PaxML and without our code: tensorstore, Orbax and Flax write it here.

The train state is that of a small GPT-3 with repeated layers and Adam, as paxml 1.4.0 lays it out: `gda` is a zarr
folder for each array under its flat name, `ocdbt` what Orbax's tree handler leaves, `flax` one msgpack file with the
leaves by number and the structure as the text that jax prints. `maxtext` is the same state in MaxText's tree, by the
table of MaxText's own converter.
"""

from __future__ import annotations

import base64
import json
from collections import namedtuple
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

Leaves = dict[tuple[str, ...], np.ndarray]

STEP, LAYERS = 4000, 3
_EMBED, _VOCAB, _POSITIONS, _HEADS, _DIM, _FFN = 16, 64, 16, 2, 8, 64
_LM = ("params", "lm")
_LAYER = ("transformer", "repeat", "sub", "x_layers_0")
_SINGLE = {
    ("final_ln", "bias"): (_EMBED,),
    ("final_ln", "scale"): (_EMBED,),
    ("position_emb", "emb_var"): (_POSITIONS, _EMBED),
    ("softmax", "logits_ffn", "linear", "w"): (_EMBED, _VOCAB),
}
_STACKED = {
    (*_LAYER, *path): (LAYERS, *shape)
    for path, shape in {
        ("ff_layer", "ffn_layer1", "bias", "b"): (_FFN,),
        ("ff_layer", "ffn_layer1", "linear", "w"): (_EMBED, _FFN),
        ("ff_layer", "ffn_layer2", "bias", "b"): (_EMBED,),
        ("ff_layer", "ffn_layer2", "linear", "w"): (_FFN, _EMBED),
        ("ff_layer", "layer_norm", "bias"): (_EMBED,),
        ("ff_layer", "layer_norm", "scale"): (_EMBED,),
        ("layer_norm", "bias"): (_EMBED,),
        ("layer_norm", "scale"): (_EMBED,),
        ("self_attention", "combined_qkv", "b"): (3, _HEADS, _DIM),
        ("self_attention", "combined_qkv", "w"): (3, _EMBED, _HEADS, _DIM),
        ("self_attention", "post", "b"): (_EMBED,),
        ("self_attention", "post", "w"): (_EMBED, _HEADS, _DIM),
    }.items()
}
# The chain of the optimizer, once for single and once for stacked variables; its third has Adam's moments.
GROUPS = {"no_prefix": _SINGLE, f"p#{LAYERS}#i-1": _STACKED}
_CHAIN, _ADAM = 4, 2
LISTS = frozenset({("opt_states",), *(("opt_states", "0", group) for group in GROUPS)})
MASKED = tuple(
    ("opt_states", "0", group, str(_ADAM), moment, *_LM, *path)
    for group, own in GROUPS.items()
    for moment in ("m", "v")
    for path in {**_SINGLE, **_STACKED}
    if path not in own
)


@cache
def leaves(*, optimizer: bool = True) -> Leaves:
    """Key path, with list indices as parts of their own → array, in no order that means something."""
    rng = np.random.default_rng(879)
    found: Leaves = {("step",): np.asarray(STEP, np.uint32)}
    for path, shape in {**_SINGLE, **_STACKED}.items():
        found["mdl_vars", *_LM, *path] = rng.standard_normal(shape).astype(np.float32)
    if not optimizer:
        return found
    for group, variables in GROUPS.items():
        stack = () if group == "no_prefix" else (LAYERS,)
        for at in range(_CHAIN):
            found["opt_states", "0", group, str(at), "count"] = np.full(stack, STEP, np.int32)
        for moment in ("m", "v"):
            for path, shape in variables.items():
                value = rng.standard_normal(shape).astype(np.float32)
                found["opt_states", "0", group, str(_ADAM), moment, *_LM, *path] = value
    return found


def flat_name(path: tuple[str, ...]) -> str:
    """The name of an array's folder: `.` before a key, `_<i>` for the index of a list or tuple."""
    text = path[0]
    for depth, part in enumerate(path[1:], 1):
        text += f"_{part}" if path[:depth] in LISTS else f".{part}"
    return text


def partition(shape: tuple[int, ...]) -> list[str | None]:
    """Over which axes of a mesh of data 2 and mdl 2 the axes lie: of a matrix the two longest, where they are even."""
    cut = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))[-2:] if len(shape) > 1 else []
    names = iter(("mdl", "data"))
    found = {axis: next(names) for axis in sorted(cut, reverse=True) if shape[axis] % 2 == 0}
    return [found.get(axis) for axis in range(len(shape))]


def chunks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The share of one device."""
    return tuple(
        extent // 2 if name else extent for extent, name in zip(shape, partition(shape), strict=True)
    )


def write_array(folder: Path, name: str, data: Any, **metadata: Any) -> None:
    """An array as tensorstore writes it for PaxML."""
    import tensorstore as ts

    data = np.asarray(data)
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{folder}/{name}/"},
        "metadata": {"shape": data.shape, "chunks": data.shape, "dtype": data.dtype.str, **metadata},
    }
    ts.open(spec, create=True).result().write(data).result()


def gda(state: Path, found: Leaves) -> None:
    """The folders of versions 0.0 to 1.1."""
    zstd = {"id": "zstd", "level": 1}
    for path, array in found.items():
        name, grid = flat_name(path), chunks(array.shape)
        write_array(state, name, array, chunks=grid, compressor=zstd, fill_value=None)
    (state / "_sharding").write_text(_shardings({flat_name(path): array for path, array in found.items()}))


def ocdbt(state: Path, found: Leaves) -> None:
    """The state of version 1.2: Orbax's database and tree, and the msgpack with a placeholder for each array."""
    import jax.numpy as jnp
    import msgpack
    import orbax.checkpoint as ocp

    masked = dict.fromkeys((*MASKED, ("extra_state",)))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)) as checkpointer:
        checkpointer.save(state, nested({path: jnp.asarray(one) for path, one in found.items()} | masked))
    texts = {path: f"PLACEHOLDER://{'.'.join(path)}" for path in found}
    (state / "checkpoint").write_bytes(msgpack.packb(nested(texts | masked)))
    (state / "_sharding").write_text(_shardings({".".join(path): array for path, array in found.items()}))


def flax(file: Path, found: Leaves) -> list[tuple[str, ...]]:
    """The file of the Flax type; the true names of its leaves, in their order."""
    import jax
    from flax import serialization

    tree = _train_state(found)
    values, structure = jax.tree.flatten(tree)
    names, _ = jax.tree.flatten(_train_state({path: Name(path) for path in found}))
    file.parent.mkdir(parents=True, exist_ok=True)
    state = {str(number): value for number, value in enumerate(values)}
    file.write_bytes(
        serialization.msgpack_serialize({"flattened_state": state, "str_pytree_state": str(structure)})
    )
    return [name.path for name in names]


class Name:
    """A leaf that stands for an array and knows its path."""

    def __init__(self, path: tuple[str, ...]) -> None:
        self.path = path


def metadata_item(version: float, found: Leaves) -> dict[str, Any]:
    """What `metadata/metadata` states; version 1.0 has the version alone."""
    if version == 1.0:
        return {"version": version}
    variables = {path: array for path, array in found.items() if path[0] == "mdl_vars"}
    rows = {
        path: {
            "_array_metadata_tag": True,
            "is_optax_masked_node": False,
            "unpadded_shape": list(array.shape),
            "dtype": array.dtype.name,
        }
        for path, array in variables.items()
    }
    return {"version": version, "train_state_metadata": nested(rows)}


def write_metadata(step: Path, version: float, found: Leaves) -> None:
    """The item `metadata` of a step folder."""
    (step / "metadata").mkdir(parents=True)
    (step / "metadata" / "metadata").write_text(json.dumps(metadata_item(version, found)))


def nested(flat: Mapping[tuple[str, ...], Any]) -> Any:
    """A tree of dicts, with lists where the state has lists or tuples."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = leaf
    if "opt_states" in tree:
        groups = {
            group: [rows[str(at)] for at in range(len(rows))]
            for group, rows in tree["opt_states"]["0"].items()
        }
        tree["opt_states"] = [groups]
    return tree


def _shardings(arrays: Mapping[str, np.ndarray]) -> str:
    mesh = {"sharding_type": "NamedSharding", "shape": [1, 2, 2], "axis_names": ["replica", "data", "mdl"]}
    rows = {
        name: json.dumps({**mesh, "partition_spec": partition(one.shape)}) for name, one in arrays.items()
    }
    return json.dumps({base64.b64encode(name.encode()).decode(): row for name, row in rows.items()})


# ---- The classes of praxis, as far as jax prints them


class NestedMap(dict):
    """A dict that is a node of its own type and keeps its keys next to its children."""


class TrainState(list):
    """step, mdl_vars, opt_states, extra_state."""


MaskedNode = namedtuple("MaskedNode", [])  # noqa: PYI024  as optax has it


@cache
def _register() -> None:
    import jax

    jax.tree_util.register_pytree_node(
        NestedMap,
        lambda node: ([node[key] for key in sorted(node)], tuple(sorted(node))),
        lambda keys, children: NestedMap(zip(keys, children, strict=True)),
    )
    jax.tree_util.register_pytree_node(
        TrainState, lambda node: (list(node), ()), lambda _keys, children: TrainState(children)
    )


def _train_state(found: Mapping[tuple[str, ...], Any]) -> Any:
    """The state as PaxML holds it: variables in dicts, optimizer states in NestedMaps, masked nodes among them."""
    _register()
    tree = nested({**found, **{path: MaskedNode() for path in MASKED}})
    (groups,) = tree["opt_states"]
    states = NestedMap({group: tuple(NestedMap(state) for state in rows) for group, rows in groups.items()})
    return TrainState([tree["step"], tree["mdl_vars"], [states], ()])


# ---- The same state in MaxText's tree

_ATTENTION = ("self_attention",)
# MaxText's leaf → PaxML's, and the order of its axes; stacked ones have the layers second.
TABLE: dict[tuple[str, ...], tuple[tuple[str, ...], tuple[int, ...]]] = {
    ("token_embedder", "embedding"): (("softmax", "logits_ffn", "linear", "w"), (1, 0)),
    ("decoder", "position_embedder", "embedding"): (("position_emb", "emb_var"), (0, 1)),
    ("decoder", "decoder_norm", "scale"): (("final_ln", "scale"), (0,)),
    ("decoder", "decoder_norm", "bias"): (("final_ln", "bias"), (0,)),
    **{
        ("decoder", "layers", *maxtext_path): ((*_LAYER, *pax_path), order)
        for maxtext_path, pax_path, order in (
            (("pre_self_attention_norm", "scale"), ("layer_norm", "scale"), (1, 0)),
            (("pre_self_attention_norm", "bias"), ("layer_norm", "bias"), (1, 0)),
            (("self_attention", "qkv_proj", "kernel"), (*_ATTENTION, "combined_qkv", "w"), (2, 0, 1, 3, 4)),
            (("self_attention", "qkv_proj", "bias"), (*_ATTENTION, "combined_qkv", "b"), (1, 0, 2, 3)),
            (("self_attention", "out", "kernel"), (*_ATTENTION, "post", "w"), (2, 0, 3, 1)),
            (("self_attention", "out", "bias"), (*_ATTENTION, "post", "b"), (1, 0)),
            (("mlp", "mlp_layer_norm", "scale"), ("ff_layer", "layer_norm", "scale"), (1, 0)),
            (("mlp", "mlp_layer_norm", "bias"), ("ff_layer", "layer_norm", "bias"), (1, 0)),
            (("mlp", "wi", "kernel"), ("ff_layer", "ffn_layer1", "linear", "w"), (1, 0, 2)),
            (("mlp", "wi", "bias"), ("ff_layer", "ffn_layer1", "bias", "b"), (1, 0)),
            (("mlp", "wo", "kernel"), ("ff_layer", "ffn_layer2", "linear", "w"), (1, 0, 2)),
            (("mlp", "wo", "bias"), ("ff_layer", "ffn_layer2", "bias", "b"), (1, 0)),
        )
    },
}


def maxtext() -> Leaves:
    """Parameters, both moments, count and step in MaxText's tree, scanned on axis 1."""
    state = leaves()
    found: Leaves = {
        ("step",): state["step",],  # as MaxText's converter leaves it
        ("opt_state", "count"): state["opt_states", "0", "no_prefix", "0", "count"],
    }
    roots = {
        ("params", "params"): None,
        ("opt_state", "mu", "params"): "m",
        ("opt_state", "nu", "params"): "v",
    }
    for root, moment in roots.items():
        for maxtext_path, (pax_path, order) in TABLE.items():
            group = "no_prefix" if pax_path in _SINGLE else f"p#{LAYERS}#i-1"
            above = ("opt_states", "0", group, str(_ADAM), moment) if moment else ("mdl_vars",)
            found[*root, *maxtext_path] = np.ascontiguousarray(
                state[*above, *_LM, *pax_path].transpose(order)
            )
    return found
