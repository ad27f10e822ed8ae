"""The Hugging Face config of the model in a GGUF file, from its metadata; `architectures.toml` has the rules.

What is stated and not understood becomes an attribute of its own name, so that a layout, which knows no such attribute,
refuses it by name. The config of an architecture without rules states the architecture only: no family is of it.
"""

from __future__ import annotations

import json
import math
import re
import struct
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.errors import CorruptError, UsageError
from wherry.layout.expr import evaluate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec

FILE = "config.json"
FACTORS = "rope_freqs.weight"  # divisors of the frequencies of rotary positions, by Llama 3.1's rule
_ARCHITECTURE = "general.architecture"
EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_RULES = Path(__file__).with_name("architectures.toml")
_NAMES = re.compile(r"'[^']*'|[a-z_][\w.]*")
_OTHER_WORDS = {"if", "else", "or", "tokens", "head", "rotary"}
_SCALING, _TOKENS = "rope.scaling.", "tokenizer.ggml."
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192  # of Llama 3.1, 3.2 and 3.3
_CLOSE = 1e-5


def model_config(
    metadata: Mapping[str, Any],
    left: Sequence[str],
    specs: Mapping[KeyPath, TensorSpec],
    factors: Sequence[float] | None,
) -> bytes:
    """The bytes of a config.json.

    Args:
        metadata: key → number, text or truth value.
        left: keys of other values.
        specs: the tensors.
        factors: the values of the tensor FACTORS; None if there is none.

    Raises:
        CorruptError: a size of the model is not a number, or is 0.
    """
    try:
        return (json.dumps(_config(metadata, left, specs, factors), indent=2) + "\n").encode()
    except UsageError as error:
        raise CorruptError(
            f"invalid GGUF: {error.what}", cure="download the file again, or restore it from a backup"
        ) from error


def _config(
    metadata: Mapping[str, Any],
    left: Sequence[str],
    specs: Mapping[KeyPath, TensorSpec],
    factors: Sequence[float] | None,
) -> dict[str, Any]:
    architecture = str(metadata.get(_ARCHITECTURE, "unnamed"))
    rules = _rules().get(architecture)
    if rules is None:
        return {"model_type": architecture}
    start = f"{architecture}."
    own = {
        key.removeprefix(start): _shortest(value) for key, value in metadata.items() if key.startswith(start)
    }
    lists = [key.removeprefix(start) for key in left if key.startswith(start)]
    tokens = {key: value for key, value in metadata.items() if key.startswith(_TOKENS)}
    rotary = _rotary(own, factors)
    embedding = specs.get((EMBEDDING,))
    rows = embedding.shape[0] if embedding is not None and embedding.shape else None
    names = {**_tables({**own, **tokens}), "tokens": rows, "head": _head(own), "rotary": rotary}
    stated = {name: evaluate(text, names) for name, text in rules["attributes"].items()}
    read = {one for text in rules["attributes"].values() for one in _NAMES.findall(text)} - _OTHER_WORDS
    read |= {key for key in own if key.startswith(_SCALING)} if rotary is not None else set()
    read |= {key for key, text in rules["neutral"].items() if evaluate(text, names) is True} | rules[
        "ignored"
    ]
    unknown = {
        f"{start}{key}": own.get(key, "a list") for key in [*own, *lists] if key not in read or key in lists
    }
    if factors is not None and rotary is None:
        unknown[FACTORS] = "factors of rotary positions that are not those of Llama 3.1"
    return {
        "architectures": [evaluate(rules["class"], names)],
        "model_type": evaluate(rules["model_type"], names),
        **{
            name: value
            for name, value in stated.items()
            if value is not None or name in rules.get("nulls", ())
        },
        "tie_word_embeddings": (_OUTPUT,) not in specs,
        **unknown,
    }


@cache
def _rules() -> Mapping[str, Mapping[str, Any]]:
    """Architecture → its rules, with those of all."""
    tables = tomllib.loads(_RULES.read_text(encoding="utf-8"))
    common = tables.pop("common")
    return {
        name: {
            **row,
            "attributes": {
                one: text
                for one, text in {**common["attributes"], **row.get("attributes", {})}.items()
                if text is not False
            },
            "neutral": {**common["neutral"], **row.get("neutral", {})},
            "ignored": {key for keys in common["ignored"].values() for key in keys},
        }
        for name, row in tables.items()
    }


def written_rules() -> Mapping[str, Mapping[str, Any]]:
    """Architecture → the family whose models are written, and what is written, of those that are."""
    return {name: rules["written"] for name, rules in _rules().items() if "written" in rules}


def _tables(own: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as tables within tables, for expressions."""
    tables: dict[str, Any] = {}
    for key, value in own.items():
        *path, last = key.split(".")
        table = tables
        for part in path:
            inner = table.setdefault(part, {})
            table = inner if isinstance(inner, dict) else {}
        table[last] = value
    return tables


def _head(own: Mapping[str, Any]) -> int | None:
    """Elements of a head: stated, or a part of the width."""
    if "attention.key_length" in own:
        return own["attention.key_length"]
    width, heads = own.get("embedding_length"), own.get("attention.head_count")
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def _rotary(own: Mapping[str, Any], factors: Sequence[float] | None) -> dict[str, Any] | None:
    """The scaling of rotary positions as a config states it; None if there is none, or not one that is known."""
    scaling = {key.removeprefix(_SCALING): value for key, value in own.items() if key.startswith(_SCALING)}
    scaling.pop("finetuned", None)
    kind, factor = scaling.pop("type", "none"), scaling.pop("factor", None)
    if factors is not None:
        base = own.get("rope.freq_base", 10000.0)
        return _of_llama3(factors, base) if kind == "none" and not scaling else None
    if kind == "linear" and factor and not scaling:
        return {"rope_type": "linear", "factor": factor}
    original = scaling.pop("original_context_length", None)
    if kind == "yarn" and factor and original and not scaling:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return None


def _of_llama3(factors: Sequence[float], base: Any) -> dict[str, Any] | None:
    """Llama 3.1's scaling if its rule gives these factors; they show the largest of them only."""
    if not isinstance(base, int | float) or not base > 0:
        return None
    factor = round(max(factors, default=0.0), 4)
    if factor <= 0:
        return None
    want = list(llama3_factors(len(factors), base, factor))
    if not all(math.isclose(one, other, rel_tol=_CLOSE) for one, other in zip(factors, want, strict=True)):
        return None
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }  # fmt: skip


def llama3_factors(count: int, base: float, factor: float) -> Iterator[float]:
    """The divisors of the frequencies: 1 for short waves, `factor` for long ones, and between them a mean."""
    for index in range(count):
        turns = _ORIGINAL / (2 * math.pi * base ** (index / count))
        share = min(max((turns - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        yield 1 / ((1 - share) / factor + share)


def _shortest(value: Any) -> Any:
    """A number of float32 in the fewest digits that are that number: 1e-05, not 9.99999974e-06."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value
