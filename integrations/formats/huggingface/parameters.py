"""The expected number of parameters of a Hugging Face model, computed from its config.

A checkpoint with fewer parameters has lost some in a way that no header shows: a shard that is missing together with
its lines in the index. Buffers and second copies of tied weights, which some files also hold, are added by name. Each
`model_type` has a row: the attributes that an old config may lack, with their defaults, and functions that count the
embedding, one layer and the end of the model. The count is that of `save_pretrained`: tied weights once, no buffers.
Counts were compared with models built by transformers 5.23 and with the corpus. An unknown `model_type` or
architecture, and any quantised model, gives None, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import Any, Literal, TypeAlias

from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import TensorSpec

Config: TypeAlias = Mapping[str, Any]
Count: TypeAlias = Callable[[Config, int], int]


def _decoder_layer(
    c: Config,
    layer: int,
    *,
    biases: Literal["config", "none", "qkv"] = "config",
    norms: int = 2,
    head_norms: bool = False,
    expert_width: str | None = None,
) -> int:
    """The parameters of a decoder's layer: grouped attention and a gated MLP, or experts.

    Args:
        c: the config.
        layer: index of the layer.
        biases: which biases there are: as the config says, none, or those of queries, keys and values.
        norms: over the width of the model.
        head_norms: whether queries and keys have a norm each.
        expert_width: the attribute with the width of an expert; None without experts.
    """
    dim, heads = c["hidden_size"], c["num_attention_heads"]
    width = c.get("head_dim") or dim // heads
    query, keys = heads * width, (c.get("num_key_value_heads") or heads) * width
    stated = biases == "config"
    bias = stated and bool(c.get("attention_bias"))
    count = dim * (2 * query + 2 * keys) + (bias or biases == "qkv") * (query + 2 * keys) + bias * dim
    count += norms * dim + head_norms * 2 * width
    experts = c.get("num_experts", c.get("num_local_experts")) or 0 if expert_width else 0
    if (
        expert_width
        and experts > 0
        and layer not in c["mlp_only_layers"]
        and (layer + 1) % c["decoder_sparse_step"] == 0
    ):
        return count + dim * experts + experts * 3 * dim * c[expert_width]
    inner = c["intermediate_size"]
    return count + 3 * dim * inner + (stated and bool(c.get("mlp_bias"))) * (2 * inner + dim)


def _biased_layer(dim: int, inner: int) -> int:
    """The parameters of a layer whose attention, MLP of two matrices and two norms all have biases."""
    return 4 * (dim * dim + dim) + 2 * dim * inner + inner + dim + 4 * dim


def _gpt2_ends(c: Config) -> int:
    return (c["vocab_size"] + c["n_positions"]) * c["n_embd"] + 2 * c["n_embd"]


def _bert_embeddings(c: Config) -> int:
    rows = c["vocab_size"] + c["max_position_embeddings"] + c["type_vocab_size"]
    return (rows + 2) * c["hidden_size"]


def _bert_pooler(c: Config) -> int:
    return c["hidden_size"] * (c["hidden_size"] + 1)


def _bert_predictions(c: Config) -> int:
    """The transform, its norm and the bias; the decoder and its bias are tied to the word embeddings and the bias."""
    if not c["tie_word_embeddings"]:
        raise KeyError("whether the two biases are tied depends on the release of transformers")
    return _bert_pooler(c) + 2 * c["hidden_size"] + c["vocab_size"]


def _lm_head(c: Config) -> int:
    return 0 if c["tie_word_embeddings"] else c["vocab_size"] * c.get("hidden_size", c.get("n_embd", 0))


def _nothing(_c: Config) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class _Model:
    """How to count the parameters of one model_type.

    Attributes:
        layer: parameters of the layer with this index.
        ends: parameters outside the layers of the bare model.
        heads: architecture → parameters that it adds to the bare model.
        defaults: attributes that a config may omit.
        layers: the attribute with the number of layers.
    """

    layer: Count
    ends: Callable[[Config], int]
    heads: Mapping[str, Callable[[Config], int]]
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    layers: str = "num_hidden_layers"


def _decoder(name: str, layer: Count, **defaults: Any) -> _Model:
    heads = {f"{name}ForCausalLM": _lm_head, f"{name}Model": _nothing}
    given = {"tie_word_embeddings": False, **defaults}
    return _Model(layer, lambda c: c["vocab_size"] * c["hidden_size"] + c["hidden_size"], heads, given)


# Every layer has experts, unless a config says otherwise.
_EVERY_LAYER = {"mlp_only_layers": (), "decoder_sparse_step": 1}
_GEMMA = partial(_decoder_layer, norms=4)
_MODELS: dict[str, _Model] = {
    "llama": _decoder("Llama", _decoder_layer),
    "mistral": _decoder("Mistral", partial(_decoder_layer, biases="none")),
    "mixtral": _decoder(
        "Mixtral",
        partial(_decoder_layer, biases="none", expert_width="intermediate_size"),
        num_local_experts=8,
        **_EVERY_LAYER,
    ),
    "qwen2": _decoder("Qwen2", partial(_decoder_layer, biases="qkv")),
    "qwen3": _decoder("Qwen3", partial(_decoder_layer, head_norms=True), head_dim=128),
    "qwen3_moe": _decoder(
        "Qwen3Moe",
        partial(_decoder_layer, head_norms=True, expert_width="moe_intermediate_size"),
        **_EVERY_LAYER,
    ),
    "gemma": _decoder("Gemma", _decoder_layer, head_dim=256, tie_word_embeddings=True),
    "gemma2": _decoder("Gemma2", _GEMMA, head_dim=256, tie_word_embeddings=True),
    "gemma3_text": _decoder(
        "Gemma3", partial(_GEMMA, head_norms=True), head_dim=256, tie_word_embeddings=True
    ),
    "gpt2": _Model(
        lambda c, _layer: _biased_layer(c["n_embd"], c.get("n_inner") or 4 * c["n_embd"]),
        _gpt2_ends,
        {"GPT2LMHeadModel": _lm_head, "GPT2Model": _nothing},
        {"tie_word_embeddings": True},
        "n_layer",
    ),
    "bert": _Model(
        lambda c, _layer: _biased_layer(c["hidden_size"], c["intermediate_size"]),
        _bert_embeddings,
        {"BertModel": _bert_pooler, "BertForMaskedLM": _bert_predictions},
        {"tie_word_embeddings": True, "type_vocab_size": 2, "max_position_embeddings": 512},
    ),
}
_MOST_LAYERS = 10_000

# Name endings of buffers that files of old releases hold, by model_type; `` is every type.
_BUFFERS = {
    "": ("rotary_emb.inv_freq",),
    "bert": ("embeddings.position_ids", "embeddings.token_type_ids"),
    "gpt2": (".attn.bias", ".attn.masked_bias"),
}
# The names of the tensors that `heads` counts, and the element types of weights that are not quantised.
_HEAD = re.compile(r"(.*\.)?(lm_head|pooler|cls)\..*")
_PLAIN = frozenset({"float16", "bfloat16", "float32", "float64"})
# Names of tied tensors → those of the tensors of which they are copies; a file may have only the first of both.
_TIED = {
    "lm_head.weight": ("embed_tokens.weight", "wte.weight"),
    "cls.predictions.decoder.weight": ("word_embeddings.weight",),
    "cls.predictions.decoder.bias": ("cls.predictions.bias",),
}


def _numbers(config: Config) -> dict[str, Any]:
    """The attributes for counting, numbers only: in a hostile config, text times a number fills the memory."""
    kept = {name: value for name, value in config.items() if value is None or type(value) in (int, bool)}
    dense = config.get("mlp_only_layers")
    if dense is None:
        return {name: value for name, value in kept.items() if name != "mlp_only_layers"}
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise TypeError("mlp_only_layers is not a list of numbers")
    return {**kept, "mlp_only_layers": frozenset(dense)}


def _counts(config: Config) -> tuple[int, int] | None:
    """The number of parameters of the bare model, and of the head; None if one of them is unknown."""
    model = _MODELS.get(str(config.get("model_type")))
    names = config.get("architectures")
    if model is None or config.get("quantization_config") or not isinstance(names, list) or not names:
        return None
    head = model.heads.get(str(names[0]))
    if head is None or config.get("add_cross_attention") or config.get("pruned_heads"):
        return None
    try:
        full = {**model.defaults, **_numbers(config)}
        layers = full[model.layers]
        if not 0 <= layers <= _MOST_LAYERS:
            return None
        body = model.ends(full) + sum(model.layer(full, layer) for layer in range(layers))
        of_head = head(full)
    except (KeyError, TypeError, ZeroDivisionError):
        return None  # an attribute is missing or of the wrong type: the count is unknown
    return (body, of_head) if type(body) is int and type(of_head) is int and body > 0 else None


def expected_parameters(config: Config) -> int | None:
    """The number of parameters of a model with this config.

    Args:
        config: the contents of `config.json`.

    Returns:
        The count, or None if the model type or architecture is unknown, the model is quantised or pruned, or the config
        lacks a needed attribute.
    """
    counts = _counts(config)
    return sum(counts) if counts else None


def least_elements(config: Config, stored: Sequence[TensorSpec]) -> int | None:
    """The number of elements below which the files have lost some.

    A head of which no tensor is stored is not counted: `BertModel` is saved with a pooler or without, and models that
    make embeddings leave `lm_head` out, whatever their config says.

    Args:
        config: the contents of `config.json`.
        stored: the tensors of the files.

    Returns:
        The number; None if it is unknown, or the files hold codes of quantised weights.
    """
    expected, counts = expected_elements(config, stored), _counts(config)
    if expected is None or counts is None:
        return None
    names = [(spec.path[-1] if spec.path else "", spec.dtype) for spec in stored]
    buffers = tuple(name for names in _BUFFERS.values() for name in names)
    if any(dtype not in _PLAIN and not name.endswith(buffers) for name, dtype in names):
        return None
    return expected if any(_HEAD.fullmatch(name) for name, _dtype in names) else expected - counts[1]


def expected_elements(config: Config, stored: Iterable[TensorSpec]) -> int | None:
    """The number of elements that the files should hold, given the buffers and tied copies in them.

    Args:
        config: the contents of `config.json`.
        stored: the tensors of the files.

    Returns:
        `expected_parameters` plus the elements that it does not count; None if it is None.
    """
    count = expected_parameters(config)
    if count is None:
        return None
    model_type = str(config["model_type"])
    tied = config.get("tie_word_embeddings", _MODELS[model_type].defaults["tie_word_embeddings"])
    sizes = {spec.path[-1]: spec.size for spec in stored if spec.path}
    copies = [name for name, firsts in _TIED.items() if any(other.endswith(firsts) for other in sizes)]
    besides = (*_BUFFERS[""], *_BUFFERS.get(model_type, ()), *(copies if tied else ()))
    return count + sum(size for name, size in sizes.items() if name.endswith(besides))
