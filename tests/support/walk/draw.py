"""Draws a model and a way into a system from a seed: a class, sizes, several changes at once, a target and its options.

A draw depends on the seed, on the tables of this package and on tests/golden/attributes.json. What is kept as a test is
the draw itself, as JSON, and not its seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.walk.change import ABSENT, Change
from tests.support.walk.models import BASES, DTYPE, made, put
from tests.support.walk.record import golden
from tests.support.walk.values import SIZES, values_of
from tests.support.walk.walk import ROUTES, systems_of
from wherry.families import load_family

# Drawn from these; heads and widths that depend on each other are drawn together.
_HEADS, _DIMS = (1, 2, 3, 4, 6, 8), (4, 6, 8, 10, 12, 16, 24)
_WIDTHS = (16, 24, 30, 32, 40, 48, 64)
_SIZES: Mapping[str, Sequence[Any]] = {
    "vocab_size": (60, 61, 64, 72, 100),
    "intermediate_size": (8, 20, 33, 40, 48, 64),
    "num_hidden_layers": (1, 2, 3, 4, 5, 6, 8),
    "num_local_experts": (2, 3, 4, 6, 8), "num_experts": (2, 3, 4, 6, 8), "n_routed_experts": (4, 6, 8, 12),
    "num_experts_per_tok": (1, 2, 3), "top_k_experts": (1, 2, 3),
    "moe_intermediate_size": (8, 16, 21, 24), "shared_expert_intermediate_size": (8, 12, 24),
    "n_shared_experts": (1, 2, 3), "first_k_dense_replace": (0, 1, 2),
    "kv_lora_rank": (8, 12, 16), "q_lora_rank": (None, 8, 12), "qk_rope_head_dim": (4, 8),
    "qk_nope_head_dim": (4, 6, 8),
    "v_head_dim": (4, 7, 8, 12), "index_n_heads": (8, 16), "index_head_dim": (8, 12),
    "linear_num_key_heads": (1, 2), "linear_num_value_heads": (2, 4), "linear_key_head_dim": (6, 8),
    "linear_value_head_dim": (8, 10), "intermediate_size_mlp": (24, 40, 48), "interleave_moe_layer_step": (1, 2),
    "type_vocab_size": (1, 2, 3), "n_layer": (1, 2, 3), "n_positions": (32, 64), "max_position_embeddings": (64, 128),
    "d_ff": (20, 33, 48), "num_layers": (1, 2, 3), "num_decoder_layers": (1, 2, 3),
    "num_kv_shared_layers": (0, 2, 6), "global_head_dim": (16, 32), "num_global_key_value_heads": (1, 2),
}  # fmt: skip
# Options of the formats, besides the forms of the families.
_ORBAX = {
    "ocdbt": ("true", "false"),
    "compression": ("none", "zstd"),
    "chunks": ("auto", "whole", "store", "1"),
}
_DCP = {"shard_size": ("2GB", "40KB"), "for_torch": ("default", "2.3")}
OPTIONS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "huggingface": {"max_shard_size": ("5GB", "40KB"), "metadata_format": ("pt", "np")},
    "huggingface-flax": {"max_shard_size": ("10GB", "40KB")},
    "lingua": _DCP, "lingua-consolidated": {}, "megatron": _DCP, "torchtitan": _DCP, "torch-zip": {},
    "maxtext": {**_ORBAX, "zarr": ("2", "3")}, "penzai": {**_ORBAX, "zarr": ("2", "3")}, "t5x-orbax": _ORBAX,
    "t5x-legacy": {
        "compression": ("none", "gzip", "zstd"), "inline": ("auto", "none", "all"), "chunks": ("auto", "whole"),
    },
}  # fmt: skip
# Of the source's weights, and of the target's where that is another: float64 rounds no words of values.
_DTYPES = ((DTYPE, None), (DTYPE, None), ("float32", DTYPE), ("bfloat16", DTYPE))
_CHANGES = (0, 1, 1, 2, 2, 3, 4)
_KNOWN, _CARRIED, _NUDGED, _RESIZED, _USUAL = 0.8, 0.75, 0.5, 0.35, 0.75
_ONE_MORE = ("Gemma", "Gemma2", "Gemma3Text", "Qwen3Next")  # their norms multiply by one and the weight
_AFTER = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight", "_layernorm_1.weight",
          "_layernorm_2.weight", "post_per_layer_input_norm.weight")  # fmt: skip
_LARGE = 100  # a whole number this large is a base, which some configs state as an integer
_ATTEMPTS = 60


@dataclass(frozen=True, slots=True)
class Draw:
    """A model and a way into a system.

    Attributes:
        label: the class, a key of `BASES`.
        settings: its arguments.
        edits: what is written into `config.json` as it is, dotted where nested.
        absent: what is removed from it.
        saved: the dtype of the source's weights.
        system, to: where to, and in which format.
        options: of the format and of the family's form.
        dtype: of the target; None is the source's.
    """

    label: str
    settings: Mapping[str, Any]
    system: str
    to: str
    edits: Mapping[str, Any] = field(default_factory=dict)
    absent: Sequence[str] = field(default_factory=list)
    saved: str = DTYPE
    options: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None

    @property
    def text(self) -> str:
        """The draw as a line of JSON, from which `Draw(**json.loads(line))` makes it again."""
        return json.dumps(asdict(self))


class NoModelError(Exception):
    """No draw of a seed is a model of transformers."""


def save(folder: Path, draw: Draw) -> Path:
    """Save the model of a draw as transformers does, then edit its config."""
    import torch

    model = made(draw.label, json.dumps(dict(draw.settings)))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(_calmed(draw.label, name, tensor))
    model.to(getattr(torch, draw.saved)).save_pretrained(folder)
    file = folder / "config.json"
    stated = json.loads(file.read_text())
    for name in draw.absent:
        put(stated, name, ABSENT)
    for name, value in draw.edits.items():
        put(stated, name, value)
    file.write_text(json.dumps(stated, indent=2))
    return folder


def _calmed(label: str, name: str, tensor: Any) -> Any:
    """A weight of a model in which a rounding stays small: what a layer adds is less than what it is added to."""
    if name.endswith("layer_scalar"):
        return 1 + tensor / 5
    if "norm" in name and tensor.ndim == 1:
        tensor = tensor - 1 if BASES[label].config in _ONE_MORE else tensor
        return tensor / 4 if name.endswith(_AFTER) and "gemma" in label else tensor
    return tensor


def draws(seed: int) -> Iterable[Draw]:
    """The draws of a seed: the first that is a model counts, all have the same class and target."""
    rng = np.random.default_rng(seed)
    label = _choice(rng, list(BASES))
    system = _choice(rng, systems_of(label))
    to = _choice(rng, sorted({route.to for route in ROUTES[system]}))
    saved, dtype = _choice(rng, _DTYPES)
    for attempt in range(_ATTEMPTS):
        settings, edits, absent = _model(rng, label, system, calm=attempt > _ATTEMPTS // 2)
        yield Draw(label, settings, system, to, edits, absent, saved, _options(rng, label, system, to), dtype)


def _choice(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _options(rng: np.random.Generator, label: str, system: str, to: str) -> dict[str, str]:
    """Every option of the family's form, and half of the format's."""
    forms = load_family(BASES[label].family).system(system).forms if system != "meta" else {}
    usual = system in ("megatron", "torchtitan") and rng.random() < _USUAL
    found = {
        name: form.choices[0] if usual else str(_choice(rng, form.choices)) for name, form in forms.items()
    }
    return found | {
        name: _choice(rng, choices) for name, choices in OPTIONS[to].items() if rng.random() < 0.5
    }


def _model(
    rng: np.random.Generator, label: str, system: str, *, calm: bool
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Arguments of the class, what stands in the file alone, and what is removed from it."""
    settings = json.loads(json.dumps(BASES[label].settings))
    _resize(rng, label, settings, calm=calm)
    edits: dict[str, Any] = {}
    absent: set[str] = set()
    taken: set[str] = set()
    for name, change in _changes(rng, label, system, 1 if calm else _choice(rng, _CHANGES)):
        names = {name, *change.also}
        if any(_meet(new, before) for new in names for before in taken):
            continue
        taken |= names
        for attribute, value in change.also.items():
            if value is ABSENT:
                absent.add(attribute)
            else:
                put(settings, attribute, value)
        if change.value is ABSENT:
            absent.add(name)
        elif change.in_file or change.value is None:
            edits[name] = change.value
        else:
            put(settings, name, _nudged(rng, name, change.value))
    return settings, edits, sorted(absent)


def _meet(first: str, second: str) -> bool:
    """Whether two attributes are the same, or one is the table that the other stands in."""
    return first == second or first.startswith(f"{second}.") or second.startswith(f"{first}.")


def _changes(rng: np.random.Generator, label: str, system: str, count: int) -> Iterable[tuple[str, Change]]:
    """Some changes; most change what the model computes, and most of these reach the system when they are alone."""
    rows = golden(label)
    every = [
        (name, change)
        for name, values in values_of(label).items()
        for change in values
        if name not in SIZES and rows.get(name, {}).get(change.label) is not None
    ]

    def row(name: str, change: Change) -> Mapping[str, str]:
        return rows[name][change.label]

    known = [pair for pair in every if row(*pair)["changes"] != "no"]
    carried = [pair for pair in known if row(*pair).get(system) == "carried"]
    for _ in range(count):
        chosen = every if rng.random() > _KNOWN else carried if carried and rng.random() < _CARRIED else known
        yield _choice(rng, chosen or every)


def _nudged(rng: np.random.Generator, name: str, value: Any) -> Any:
    """A number is no longer the table's in half of the draws; shares stay below one."""
    if not isinstance(value, float) or rng.random() > _NUDGED or "drop" in name:
        return value
    near = value * np.exp(rng.uniform(-0.6, 0.0 if value <= 1.0 else 0.6))
    return float(round(near)) if value.is_integer() and value > _LARGE else float(f"{near:.4g}")


def _resize(rng: np.random.Generator, label: str, settings: dict[str, Any], *, calm: bool) -> None:
    known = {*settings, "vocab_size"}
    for name, choices in _SIZES.items():
        if name in known and rng.random() < (_RESIZED / 2 if calm else _RESIZED):
            settings[name] = _choice(rng, choices)
    if calm or rng.random() < 0.4:
        return
    heads = _choice(rng, _HEADS)
    groups = _choice(rng, [count for count in _HEADS if heads % count == 0])
    dim, width = _choice(rng, _DIMS), _choice(rng, _WIDTHS)
    if "d_kv" in settings:
        settings |= {"num_heads": heads, "d_kv": dim, "d_model": width}
    elif "n_embd" in settings:
        settings |= {"n_head": heads, "n_embd": heads * dim}
    elif "kv_lora_rank" in settings:
        settings |= {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": width}
    else:
        settings["num_attention_heads"] = heads
        if "num_key_value_heads" in settings:
            settings["num_key_value_heads"] = groups
        own = label in {name for labels in SIZES["head_dim"] for name in labels.split()}
        settings |= {"head_dim": dim, "hidden_size": width} if own else {"hidden_size": heads * dim}
        if "query_pre_attn_scalar" in settings:
            settings["query_pre_attn_scalar"] = dim
