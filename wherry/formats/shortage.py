"""shortage: whether the matrices of a checkpoint are whole, or the parts that one process of a training job held.

DeepSpeed's ZeRO-3 and FSDP keep a part of each matrix on every device. A program that saves `model.state_dict()`
without gathering them writes placeholders of shape [0] or [1], flat parts, or some of the rows; all names are there,
and no header shows the loss (transformers#20082, accelerate#2155). This is the one rule by which `detect`, `verify` and
`convert` find them, from the manifest of a stored checkpoint alone:

1. A weight of a layer has no elements, or one dimension, where the same weight of an equal layer has more. Layers are
   equal if they lie at one place of the tree, differ in a number and have the same key paths below it.
2. Every matrix of such a layer has fewer rows than that of an equal layer, and as many columns, and one of them is
   known to have as many rows as the model is wide. That width cannot change from layer to layer, so it is no pruned
   layer: of that, matrices that read what others write would have fewer columns.
3. Two matrices that are known by name (`q_proj`, `embed_tokens`, …) have no elements, or only one; or two weights of
   any name have none; or there are two such names in numbered layers of which every matrix has one dimension.
4. There are fewer parameters than follow from the config, where its format counts them (`least_parameters`).

Not found: a model without a config all of whose matrices lack the same rows, and one matrix of an unknown name.
Only tensors of floating-point types count: codes of quantised weights are packed. Layers that differ by design pass:
experts in some layers, heads of two sizes, stages of a vision model, adapters of several ranks, pruned layers.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, TypeAlias

from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.units import plural

if TYPE_CHECKING:
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import TensorSpec


Names: TypeAlias = tuple[str, ...]

# The modules of a transformer whose `weight` is a matrix: linear layers, embeddings, adapters.
_MATRICES = frozenset(
    {
        "embed_tokens", "tok_embeddings", "word_embeddings", "position_embeddings", "token_type_embeddings",
        "embed_positions", "wte", "wpe", "embed_in", "embed_out", "shared", "lm_head",
        "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "Wqkv", "query", "key", "value",
        "c_attn", "c_fc", "fc1", "fc2", "fc_in", "fc_out", "wq", "wk", "wv", "wo", "wi", "wi_0", "wi_1",
        "w1", "w2", "w3", "linear_qkv", "linear_proj", "linear_fc1", "linear_fc2",
        "lora_A", "lora_B",
    }
)  # fmt: skip
_PROJECTION = "_proj"  # ends the names of others: q_proj, down_proj, in_proj, …
# The modules whose first dimension is the width of the model, which all layers share.
_OF_WIDTH = frozenset(
    {
        "o_proj", "out_proj", "down_proj", "dense_4h_to_h", "wo", "fc2", "fc_out", "linear_proj", "linear_fc2",
        "c_attn", "c_fc", "output.dense", "attention.dense", "self_attention.dense",
    }
)  # fmt: skip
_WEIGHT = "weight"
_MARKS = (_WEIGHT, _PROJECTION)  # with which names of weights end
_NUMBERED = re.compile(r"(.*?)(\d+)")
_WITHOUT_NUMBERS = str.maketrans("", "", "0123456789")
_FLOATS = ("float16", "bfloat16", "float32", "float64", "float8")
_OF_LINEAR = 2  # dimensions of the weight of a linear layer
_FEWEST = 2  # matrices without elements, and names of matrices of one dimension, that are evidence
CURE = (
    "save the model again with its weights gathered: DeepSpeed's stage3_gather_16bit_weights_on_model_save, or "
    "model.save_pretrained(…, state_dict=accelerator.get_state_dict(model)); or gather the training checkpoint of the "
    "same step: convert DeepSpeed's or FSDP's own folder, or run its zero_to_fp32.py"
)
_CONFIG_CURE = f"restore the missing files, or correct config.json if it is of another model; or {CURE}"


@dataclass(frozen=True, slots=True)
class Shortage:
    """The evidence that a checkpoint holds parts of matrices in place of matrices.

    Attributes:
        reason: one sentence.
        cure: what to do.
        parts: the tensors that are not whole, each with what shows it; empty if only the number of parameters does.
    """

    reason: str
    cure: str
    parts: Mapping[KeyPath, str] = field(default_factory=dict[KeyPath, str])


def shortage(manifest: Manifest) -> Shortage | None:
    """What shows that the matrices of a stored checkpoint were saved without gathering them; None if nothing does.

    Args:
        manifest: of the checkpoint as it is stored, not of a view of it.
    """
    # The weights of modules, and what is named as a matrix, but not the codes of one.
    weights = {
        path: spec
        for path, spec in manifest.tensors.items()
        if path and path[-1].endswith(_MARKS) and spec.dtype.startswith(_FLOATS)
    }
    parts = {**_by_equal_layers(manifest.tensors, weights), **_by_name(weights)}
    if parts:
        first = min(parts)
        example = f"{render(first)} has shape {list(weights[first].shape)}"
        said = f"{_counts(parts)}: saved by ZeRO-3 or FSDP without gathering ({example})"
        return Shortage(said, CURE, {path: _WORDS[parts[path]][0] for path in sorted(parts)})
    least = manifest.origin.get("least_parameters")
    if least is not None and manifest.parameters < least:
        reason = f"{plural(manifest.parameters, 'parameter', 'is/are')} stored, but {least:,} follow from config.json"
        return Shortage(reason, _CONFIG_CURE)
    return None


def _names(path: KeyPath) -> Names:
    """The names of modules and parameter in a key path, whether its tree is nested or joined with dots."""
    return tuple(name for part in path for name in part.split("."))


def _module(names: Names) -> str | None:
    """The named module whose weight this is, or the parameter itself if it is a matrix without a module.

    A module that has only a number says nothing: the second one of a sequence can be a norm.
    """
    if not names or names[-1] != _WEIGHT:
        return names[-1] if names and names[-1].endswith(_PROJECTION) else None
    before = names[:-1]
    if len(before) > 1 and before[-2].startswith("lora_"):  # lora_A.default.weight
        return before[-2]
    return before[-1] if before and not before[-1].isdecimal() else None


def _by_equal_layers(
    tensors: Mapping[KeyPath, TensorSpec], weights: Mapping[KeyPath, TensorSpec]
) -> dict[KeyPath, str]:
    """Weights that are parts of those of an equal layer → what is left of them (rules 1 and 2)."""
    shapes: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for path, spec in weights.items():
        shapes["/".join(path).translate(_WITHOUT_NUMBERS)].add(spec.shape)
    if all(len(found) == 1 for found in shapes.values()):
        return {}  # of almost every checkpoint: no weight differs from layer to layer
    found: dict[KeyPath, str] = {}
    for layers in _equal_layers(tensors):
        found |= _parts_of_layers(layers, weights)
    return found


def _equal_layers(tensors: Iterable[KeyPath]) -> Iterator[list[dict[Names, KeyPath]]]:
    """The groups of equal layers; each layer as the key path of every tensor by what follows the layer's number."""
    places: defaultdict[Names, defaultdict[str, dict[Names, KeyPath]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for path in tensors:
        names = _names(path)
        for depth, name in enumerate(names[:-1]):
            numbered = _NUMBERED.fullmatch(name)
            if numbered is not None:
                places[(*names[:depth], numbered[1])][numbered[2]][names[depth + 1 :]] = path
    for layers in places.values():
        alike: defaultdict[frozenset[Names], list[dict[Names, KeyPath]]] = defaultdict(list)
        for layer in layers.values():
            alike[frozenset(layer)].append(layer)
        yield from (group for group in alike.values() if len(group) > 1)


def _parts_of_layers(
    layers: list[dict[Names, KeyPath]], weights: Mapping[KeyPath, TensorSpec]
) -> dict[KeyPath, str]:
    whole: dict[Names, TensorSpec] = {}
    for inner in layers[0]:
        found = [weights[layer[inner]] for layer in layers if layer[inner] in weights]
        if _module(inner) and len(found) == len(layers):
            whole[inner] = max(found, key=lambda spec: (len(spec.shape) > 1, spec.size))
    parts: dict[KeyPath, str] = {}
    for layer in layers:
        of_layer = {inner: weights[layer[inner]] for inner in whole}
        for inner, spec in of_layer.items():
            left = _left_of(spec, whole[inner])
            if left is not None:
                parts[spec.path] = left
        parts |= _lost_rows(of_layer, whole)
    return parts


def _left_of(spec: TensorSpec, whole: TensorSpec) -> str | None:
    """The remaining rows of a weight of which an equal layer has all rows."""
    if not spec.size:
        return "empty" if whole.size else None
    flat = len(spec.shape) == 1 < len(whole.shape) and spec.size <= whole.size and spec.dtype == whole.dtype
    return ("one" if spec.size == 1 else "flat") if flat else None


def _lost_rows(layer: Mapping[Names, TensorSpec], whole: Mapping[Names, TensorSpec]) -> dict[KeyPath, str]:
    """The matrices of a layer if all of them lost rows, and nothing else (rule 2)."""
    matrices = {inner: spec for inner, spec in layer.items() if len(whole[inner].shape) > 1}
    lost = all(_is_rows_of(spec, whole[inner]) for inner, spec in matrices.items())
    of_width = any(
        _module(inner) in _OF_WIDTH or ".".join(inner[-3:-1]) in _OF_WIDTH
        for inner, spec in matrices.items()
        if len(spec.shape) == _OF_LINEAR
    )
    return (
        {spec.path: "rows" for spec in matrices.values()} if lost and of_width and len(matrices) > 1 else {}
    )


def _is_rows_of(spec: TensorSpec, whole: TensorSpec) -> bool:
    return (
        spec.dtype == whole.dtype
        and len(spec.shape) == len(whole.shape)
        and spec.shape[1:] == whole.shape[1:]
        and spec.shape[0] < whole.shape[0]
    )


def _by_name(weights: Mapping[KeyPath, TensorSpec]) -> dict[KeyPath, str]:
    """Weights that are no matrices although their names say so → what is left of them (rule 3)."""
    thin = {path: spec for path, spec in weights.items() if len(spec.shape) <= 1}
    named = {
        path: module
        for path in thin
        if (module := _module(_names(path))) and (module in _MATRICES or module.endswith(_PROJECTION))
    }
    small = {path: "empty" if spec.shape == (0,) else "one" for path, spec in thin.items()
             if spec.shape == (0,) or (spec.shape == (1,) and path in named)}  # fmt: skip
    parts = small if len(small) >= _FEWEST else {}
    flat = [path for path in named if weights[path].size > 1]
    if flat:
        whole = {_module(_names(path)) for path in weights if path not in thin}
        flat = [path for path in flat if named[path] not in whole]
    of_layers = {named[path] for path in flat if any(name.isdecimal() for name in _names(path))}
    if len(of_layers) >= _FEWEST:
        parts = {**parts, **dict.fromkeys(flat, "flat")}
    return parts


_WORDS = {
    "empty": ("has no elements", "have no elements"),
    "one": ("has one element", "have one element"),
    "flat": ("has one dimension", "have one dimension"),
    "rows": ("lacks rows", "lack rows"),
}


def _counts(parts: Mapping[KeyPath, str]) -> str:
    """How many matrices are what."""
    counted = Counter(parts.values())
    return ", ".join(
        f"1 matrix {one}" if counted[what] == 1 else f"{counted[what]:,} matrices {many}"
        for what, (one, many) in _WORDS.items()
        if counted[what]
    )
