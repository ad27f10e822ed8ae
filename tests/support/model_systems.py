"""One model in the layout of every system that has its family, by index arithmetic of our own and no code of wherry's.

A Llama, a T5 1.1 and PaxML's GPT-3. `CONTENTS` gives for each family and system the arrays by key path;
`tests.support.model_files` writes them as that system saves them. The Llama's heads have 16 elements: MaxText's scale
of the query is then a quarter, which no float32 loses a bit by.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from tests.support import paxml

Arrays = dict[tuple[str, ...], np.ndarray]

LAYERS, EMBED, GROUPS, QUERIES, DIM, FFN, VOCAB = 2, 64, 2, 2, 16, 192, 20
HEADS = GROUPS * QUERIES
LLAMA_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
    "hidden_size": EMBED, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": DIM,
    "num_hidden_layers": LAYERS, "intermediate_size": FFN, "vocab_size": VOCAB, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 64,
}  # fmt: skip
PARAMS = {
    "dim": EMBED, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": GROUPS, "head_dim": DIM, "vocab_size": VOCAB,
    "multiple_of": 32, "ffn_dim_multiplier": None, "norm_eps": 1e-5, "rope_theta": 5e5, "max_seqlen": 64,
    "weight_tying": False, "sliding_window": None,
}  # fmt: skip


RUN = {
    "model": PARAMS,
    "distributed": {"model_dtype": "fp32"},
    "data": {"tokenizer": {"name": "bytes", "path": None}},
}
# Meta's own params.json, which nothing finds next to a file of torch.
META_PARAMS = {
    "dim": EMBED, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": GROUPS, "vocab_size": VOCAB, "multiple_of": 32,
    "norm_eps": 1e-5, "rope_theta": 5e5,
}  # fmt: skip


# ---- Llama


@cache
def _llama() -> dict[str, np.ndarray]:
    """The weights under Hugging Face's names."""
    rng = np.random.default_rng(7)
    layer = {
        "input_layernorm": (EMBED,), "self_attn.q_proj": (HEADS * DIM, EMBED),
        "self_attn.k_proj": (GROUPS * DIM, EMBED), "self_attn.v_proj": (GROUPS * DIM, EMBED),
        "self_attn.o_proj": (EMBED, HEADS * DIM),
        "post_attention_layernorm": (EMBED,), "mlp.gate_proj": (FFN, EMBED), "mlp.up_proj": (FFN, EMBED),
        "mlp.down_proj": (EMBED, FFN),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, EMBED), "model.norm": (EMBED,)}
    shapes |= {f"model.layers.{at}.{name}": shape for at in range(LAYERS) for name, shape in layer.items()}
    shapes["lm_head"] = (VOCAB, EMBED)
    return {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def llama_huggingface() -> Arrays:
    """Names in one part."""
    return {(name,): array for name, array in _llama().items()}


def _neighbours(rows: np.ndarray) -> np.ndarray:
    """Halves of each head, as Hugging Face turns them, put next to each other, as Meta does."""
    return rows.reshape(-1, 2, DIM // 2, EMBED).swapaxes(1, 2).reshape(rows.shape)


META = {
    "input_layernorm": "attention_norm", "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    "embed_tokens": "tok_embeddings", "norm": "norm", "lm_head": "output",
}  # fmt: skip


def llama_meta(*root: str, joint: str = "") -> Arrays:
    """Meta's names, below the parts of a root or behind a prefix."""
    found: Arrays = {}
    for name, array in _llama().items():
        stem = name.removeprefix("model.").removesuffix(".weight")
        layer, _, rest = (
            stem.removeprefix("layers.").partition(".") if stem.startswith("layers.") else ("", "", stem)
        )
        turned = _neighbours(array) if rest in ("self_attn.q_proj", "self_attn.k_proj") else array
        found[*root, f"{joint}{f'layers.{layer}.' if layer else ''}{META[rest]}.weight"] = turned
    return found


def _maxtext_layer(at: int) -> dict[tuple[str, ...], np.ndarray]:
    source = {name: array for name, array in _llama().items() if name.startswith(f"model.layers.{at}.")}
    of = {
        name.removeprefix(f"model.layers.{at}.").removesuffix(".weight"): array
        for name, array in source.items()
    }
    return {
        ("pre_self_attention_layer_norm", "scale"): of["input_layernorm"],
        ("post_self_attention_layer_norm", "scale"): of["post_attention_layernorm"],
        ("self_attention", "query", "kernel"): of["self_attn.q_proj"].T.reshape(EMBED, HEADS, DIM) / 4,
        ("self_attention", "key", "kernel"): of["self_attn.k_proj"].T.reshape(EMBED, GROUPS, DIM),
        ("self_attention", "value", "kernel"): of["self_attn.v_proj"].T.reshape(EMBED, GROUPS, DIM),
        ("self_attention", "out", "kernel"): of["self_attn.o_proj"].T.reshape(HEADS, DIM, EMBED),
        ("mlp", "wi_0", "kernel"): of["mlp.gate_proj"].T,
        ("mlp", "wi_1", "kernel"): of["mlp.up_proj"].T,
        ("mlp", "wo", "kernel"): of["mlp.down_proj"].T,
    }


def llama_maxtext(*, scan: bool) -> Arrays:
    """MaxText's decoder; scanned, the layers are the second axis."""
    found: Arrays = {
        ("token_embedder", "embedding"): _llama()["model.embed_tokens.weight"],
        ("decoder", "decoder_norm", "scale"): _llama()["model.norm.weight"],
        ("decoder", "logits_dense", "kernel"): _llama()["lm_head.weight"].T,
    }
    layers = [_maxtext_layer(at) for at in range(LAYERS)]
    if scan:
        found |= {
            ("decoder", "layers", *path): np.stack([one[path] for one in layers], 1) for path in layers[0]
        }
    else:
        found |= {
            ("decoder", f"layers_{at}", *path): array
            for at, one in enumerate(layers)
            for path, array in one.items()
        }
    return {("step",): np.zeros((), np.int32)} | {
        ("params", "params", *path): array for path, array in found.items()
    }


AXES = {
    "attention/query": ("embedding", "head_groups", "query_heads", "projection"),
    "attention/key": ("embedding", "head_groups", "projection"),
    "attention/value": ("embedding", "head_groups", "projection"),
    "attention/output": ("head_groups", "query_heads", "projection", "embedding"),
    "mlp/gating_linear": ("embedding", "neurons"),
    "mlp/value_linear": ("embedding", "neurons"),
    "mlp/out_linear": ("neurons", "embedding"),
    "pre_attention_norm/scale": ("embedding",),
    "pre_ffw_norm/scale": ("embedding",),
    "embedder": ("vocabulary", "embedding"),
    "final_norm/scale": ("embedding",),
    "lm_head": ("embedding", "vocabulary"),
}


def penzai_axes(label: str) -> tuple[str, ...]:
    stem = label.removeprefix("transformer/").rpartition(".")[0]
    return AXES[stem.partition("/")[2] if stem.startswith("block_") else stem]


def llama_penzai() -> Arrays:
    """Penzai's labels; the axes in the order of `AXES`."""
    one = _llama()
    found = {
        "embedder.embeddings": one["model.embed_tokens.weight"],
        "final_norm/scale.weights": one["model.norm.weight"],
        "lm_head.weights": one["lm_head.weight"].T,
    }
    shared = (GROUPS, DIM)
    for at in range(LAYERS):
        hf, penzai = f"model.layers.{at}", f"block_{at}"
        heads = one[f"{hf}.self_attn.o_proj.weight"].T.reshape(GROUPS, QUERIES, DIM, EMBED)
        query = one[f"{hf}.self_attn.q_proj.weight"].T.reshape(EMBED, GROUPS, QUERIES, DIM)
        found |= {
            f"{penzai}/attention/query.weights": query,
            f"{penzai}/attention/key.weights": one[f"{hf}.self_attn.k_proj.weight"].T.reshape(EMBED, *shared),
            f"{penzai}/attention/value.weights": one[f"{hf}.self_attn.v_proj.weight"].T.reshape(
                EMBED, *shared
            ),
            f"{penzai}/attention/output.weights": heads,
            f"{penzai}/mlp/gating_linear.weights": one[f"{hf}.mlp.gate_proj.weight"].T,
            f"{penzai}/mlp/value_linear.weights": one[f"{hf}.mlp.up_proj.weight"].T,
            f"{penzai}/mlp/out_linear.weights": one[f"{hf}.mlp.down_proj.weight"].T,
            f"{penzai}/pre_attention_norm/scale.weights": one[f"{hf}.input_layernorm.weight"],
            f"{penzai}/pre_ffw_norm/scale.weights": one[f"{hf}.post_attention_layernorm.weight"],
        }
    return {(f"transformer/{label}", "data_array"): array for label, array in found.items()}


# ---- T5 1.1

T5_SIZES = {"d_model": 12, "num_heads": 2, "d_kv": 4, "d_ff": 10, "vocab_size": 20, "num_layers": 2}
T5_CONFIG = {
    **T5_SIZES, "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "num_decoder_layers": 2,
    "feed_forward_proj": "gated-gelu", "is_gated_act": True, "dense_act_fn": "gelu_new", "tie_word_embeddings": False,
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-6, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_T5_KERNELS = {
    **{f"SelfAttention.{one}": f"{{attention}}/{long}" for one, long in zip("qkvo", ("query", "key", "value", "out"),
                                                                         strict=True)},
    **{f"EncDecAttention.{one}": f"encoder_decoder_attention/{long}"
       for one, long in zip("qkvo", ("query", "key", "value", "out"), strict=True)},
    **{f"DenseReluDense.{one}": f"mlp/{one}" for one in ("wi_0", "wi_1", "wo")},
}  # fmt: skip


@cache
def t5_pairs() -> dict[str, tuple[str, np.ndarray]]:
    """Hugging Face's name → T5X's path and the array of Hugging Face; every matrix but embeddings is turned."""
    rng, wide, inner, ffn = np.random.default_rng(5), T5_SIZES["d_model"], 8, T5_SIZES["d_ff"]
    shapes = {"q": (inner, wide), "k": (inner, wide), "v": (inner, wide), "o": (wide, inner),
              "wi_0": (ffn, wide), "wi_1": (ffn, wide), "wo": (wide, ffn)}  # fmt: skip
    rows: dict[str, tuple[str, tuple[int, ...]]] = {
        "shared": ("token_embedder/embedding", (T5_SIZES["vocab_size"], wide)),
        "lm_head": ("decoder/logits_dense/kernel", (T5_SIZES["vocab_size"], wide)),
    }
    for stack, own, norms in (
        ("encoder", "attention", ("pre_attention_layer_norm", "pre_mlp_layer_norm")),
        ("decoder", "self_attention",
         ("pre_self_attention_layer_norm", "pre_cross_attention_layer_norm", "pre_mlp_layer_norm")),
    ):  # fmt: skip
        rows[f"{stack}.final_layer_norm"] = (f"{stack}/{stack}_norm/scale", (wide,))
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        rows[bias] = (f"{stack}/relpos_bias/rel_embedding", (32, 2))
        kinds = ["SelfAttention", *(["EncDecAttention"] if stack == "decoder" else []), "DenseReluDense"]
        for at in range(T5_SIZES["num_layers"]):
            for number, (kind, norm) in enumerate(zip(kinds, norms, strict=True)):
                hf, t5x = f"{stack}.block.{at}.layer.{number}", f"{stack}/layers_{at}"
                rows[f"{hf}.layer_norm"] = (f"{t5x}/{norm}/scale", (wide,))
                for name, path in _T5_KERNELS.items():
                    if name.startswith(kind):
                        rows[f"{hf}.{name}"] = (
                            f"{t5x}/{path.format(attention=own)}/kernel", shapes[name.partition(".")[2]]
                        )  # fmt: skip
    return {
        f"{name}.weight": (path, rng.standard_normal(shape).astype(np.float32))
        for name, (path, shape) in rows.items()
    }


def t5_huggingface() -> Arrays:
    """Names in one part."""
    return {(name,): array for name, (_path, array) in t5_pairs().items()}


def t5_t5x() -> Arrays:
    """Below `target`; heads joined, layers one by one."""
    kept = ("token_embedder/embedding",)
    return {
        ("target", *path.split("/")): array
        if path in kept or array.ndim < 2
        else np.ascontiguousarray(array.T)
        for path, array in t5_pairs().values()
    }


# ---- GPT-3


def gpt3_maxtext(*, scan: bool) -> Arrays:
    """Parameters, moments, count and step."""
    if scan:
        return paxml.maxtext()
    found: Arrays = {}
    for path, array in paxml.maxtext().items():
        if "layers" not in path:
            found[path] = array
            continue
        at = path.index("layers")
        for layer in range(paxml.LAYERS):
            found[*path[:at], f"layers_{layer}", *path[at + 1 :]] = array.take(
                layer, 1 if array.ndim > 1 else 0
            )
    return found


def gpt3_flat() -> Arrays:
    """The names of PaxML 1.1."""
    return {tuple(paxml.flat_name(path).split(".")): array for path, array in paxml.leaves().items()}


# Family → target → the format, its options, and what must lie in it.
CONTENTS: dict[str, dict[str, tuple[str, dict[str, str], Callable[[], Arrays]]]] = {
    "llama": {
        "huggingface": ("huggingface", {}, llama_huggingface),
        "lingua": ("lingua", {}, lambda: llama_meta(joint="model.")),
        "lingua-consolidated": ("lingua-consolidated", {}, lambda: llama_meta("model")),
        "maxtext-scan": ("maxtext", {"scan_layers": "true"}, lambda: llama_maxtext(scan=True)),
        "maxtext-unscan": ("maxtext", {"scan_layers": "false"}, lambda: llama_maxtext(scan=False)),
        "penzai": ("penzai", {"order": "native", "leaf": "data_array", "layer_stack": "false"}, llama_penzai),
    },
    "t5": {
        "huggingface": ("huggingface", {}, t5_huggingface),
        "t5x-legacy": ("t5x-legacy", {"scan_layers": "false", "heads": "joined"}, t5_t5x),
        "t5x-orbax": ("t5x-orbax", {"scan_layers": "false", "heads": "joined"}, t5_t5x),
    },
    "gpt3": {
        "paxml-1.1": ("paxml", {"version": "1.1", "tree": "flat"}, gpt3_flat),
        "paxml-1.2": ("paxml", {"version": "1.2", "tree": "nested"}, paxml.leaves),
        "maxtext-scan": ("maxtext", {"scan_layers": "true"}, lambda: gpt3_maxtext(scan=True)),
        "maxtext-unscan": ("maxtext", {"scan_layers": "false"}, lambda: gpt3_maxtext(scan=False)),
    },
}
