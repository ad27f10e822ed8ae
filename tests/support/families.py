"""Checkpoints of any family and system made from its declaration, with random values, and the corpus's real ones."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import wherry
from tests.support.corpus import CORPUS, expected, needs
from wherry.core.keypath import parse
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import WherryError
from wherry.families import convert_layout, load_family
from wherry.families.scalars import tied_keys
from wherry.families.schema import Family
from wherry.families.templates import templates

SIZES = {
    "vocab": 20, "layer": 3, "embed": 12, "group": 2, "qhead": 2, "half": 2, "pair": 4, "ffn": 10, "expert": 3,
    "expert_ffn": 5, "head": 3, "dim": 4, "position": 7, "qkv": 3, "bucket": 32, "elayer": 2, "dlayer": 3, "block": 2,
    "side": 2, "cycle": 6, "rest": 2, "dense": 1, "moe": 2, "query_rank": 7, "query_dim": 9, "kv_rank": 8,
    "kv_down": 11, "kv_dim": 13, "value_dim": 5, "shared_ffn": 14, "segment": 2, "sentence": 2, "label": 4,
    "index_head": 3, "index_dim": 6, "rank": 3, "queries": 8, "keys": 4, "turn": 3, "step": 2, "early": 1,
    "qkvz": 22, "ba": 8, "channel": 17, "kernel": 3, "value_head": 4,
    "global_group": 2, "global_qhead": 2, "global_pair": 6, "local": 5, "own_block": 1, "owner": 6, "sharer": 6,
    "sharer_ffn": 20, "ple": 3, "ple_vocab": 16,
}  # fmt: skip
# Sizes that depend on one another: MaxText's shared expert of Qwen3-Next is as wide as the others, and the layers of
# Gemma 4 are two cycles of six.
OWN_SIZES = {"qwen3-next": {"shared_ffn": 5}, "gemma4-small": {"layer": 12}}


class Made:
    """A checkpoint in memory."""

    def __init__(self, tensors, axes=None):
        self.tensors = tensors
        specs = {
            path: TensorSpec(path, array.shape, array.dtype.name, axes=(axes or {}).get(path))
            for path, array in tensors.items()
        }
        self.manifest = Manifest(specs)

    def read(self, path, region):
        return np.ascontiguousarray(self.tensors[path][region]) if region else self.tensors[path].copy()


def made(
    family: Family, name: str, chosen, *, without=(), slots=None, dtype="float32", sizes=SIZES, seed=0
) -> Made:
    """A system's checkpoint of a family, every value different."""
    system, sizes = family.system(name), {**sizes, **family.constants}
    rng = np.random.default_rng(seed)
    tensors = {}
    for template in templates(family, system, chosen, slots or {"params": system.slots["params"][:1]}):
        if set(template.parameters) & set(without):
            continue
        layout = template.layouts[0]
        for at in layout.places(sizes):
            bits = rng.normal(size=stored_shape(template, sizes)).astype(
                ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
            )
            tensors[layout.path(at, sizes)] = bits
    tensors.update({parse(text): np.zeros((), dtype) for text, dtype in system.zeros.items()})
    for parameter in set(system.tied) & set(without):
        embedding = next(array for path, array in tensors.items() if "tok_embeddings" in path[-1])
        for text in tied_keys(system, parameter, chosen):
            tensors[parse(text)] = embedding
    return Made(tensors)


def stored_shape(template, sizes):
    """The shape of a tensor that holds one parameter, or several of them along an axis."""
    shapes = [list(layout.shape(sizes)) for layout in template.layouts]
    if len(template.parameters) > 1:
        shapes[0][template.along] = sum(shape[template.along] for shape in shapes)
    return tuple(shapes[0])


def carried(projected, read, limit=None):
    """Everything of a projection, band by band."""
    from wherry.layout.cuts import bands

    tensors = {}
    for path, stored in projected.targets.items():
        if limit is None:
            tensors[path] = projected.gather(path, stored.spec.whole, read)
            continue
        whole = np.empty(
            stored.spec.shape, projected.gather(path, (slice(0, 0),) * len(stored.spec.shape), read).dtype
        )
        for region, _span in bands(stored, limit, projected.pieces):
            whole[region] = projected.gather(path, region, read)
        tensors[path] = whole
    for path, source in projected.scalars.items():
        tensors[path] = read(source, None)
    return Made(
        tensors, {path: stored.spec.axes for path, stored in projected.targets.items() if stored.spec.axes}
    )


def same(first, second):
    return first.keys() == second.keys() and all(
        first[path].shape == second[path].shape
        and first[path].dtype == second[path].dtype
        and first[path].tobytes() == second[path].tobytes()
        for path in first
    )


def opened(case, *formats):
    """A case of the corpus, opened as the first of these formats that this version reads."""
    needs(case)
    wanted = expected(case)
    for name in (wanted["format"], *formats):
        try:
            return wherry.open(CORPUS / case / "checkpoint" / wanted["uri"], format=name)
        except WherryError as error:
            reason = str(error)
    pytest.skip(f"not read by this version: {reason}")
    return None


def wanted_hashes(case, *, leave=()):
    return {
        tuple(row["path"]): (row["shape"], row["sha256"])
        for row in expected(case)["tensors"]
        if row["path"][0] not in leave
    }


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
    "hidden_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 3,
    "intermediate_size": 10, "vocab_size": 20, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "max_position_embeddings": 64,
}  # fmt: skip
# The same without what only a written config has.
PLAIN_LLAMA = {
    "model_type": "llama", "vocab_size": 20, "num_hidden_layers": 3, "hidden_size": 12, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 10, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


def llama(**changes):
    """A Hugging Face Llama with a config, and the family."""
    family = load_family("llama")
    return made(family, "huggingface", {}), family, {**LLAMA, **changes}


def to_maxtext(begun, family, config, **common):
    return convert_layout(begun.manifest, family, "huggingface", "maxtext", config=config, **common)
