"""Alternative values of the entries of `rope_parameters`, for each rule by which transformers scales positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.support.walk.change import Change, to

# Entries of the rules that a class with longrope alone does not read.
OF_OTHERS = (
    "beta_fast",
    "beta_slow",
    "high_freq_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)


def entries(half: int, place: str, scaled: Mapping[str, Any] | None = None) -> dict[str, list[Any]]:
    """Entry → alternative values.

    Args:
        half: pairs of elements of a head that turn.
        place: the table of the entries; dotted, ends with a dot.
        scaled: attributes without which a factor of the attention would change nothing.
    """

    def rule(kind: str, **more: Any) -> dict[str, Any]:
        return {f"{place}rope_type": kind, **{f"{place}{name}": value for name, value in more.items()}}

    def without(attributes: Mapping[str, Any], name: str) -> dict[str, Any]:
        return {key: value for key, value in attributes.items() if key != f"{place}{name}"}

    linear = rule("linear", factor=4.0)
    dynamic = {**rule("dynamic", factor=4.0), "max_position_embeddings": 16}
    yarn = rule("yarn", factor=4.0, rope_theta=100.0, original_max_position_embeddings=1024)
    long = rule(
        "longrope", factor=4.0, original_max_position_embeddings=16,
        short_factor=[1.0 + at for at in range(half)], long_factor=[2.0 + at for at in range(half)],
    )  # fmt: skip
    short = {**long, f"{place}original_max_position_embeddings": 48}
    llama = rule(
        "llama3", factor=8.0, rope_theta=500000.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip
    part = rule("proportional", rope_theta=100.0, partial_rotary_factor=0.5)
    rules = (linear, dynamic, yarn, long, llama, part)
    found = {
        "rope_theta": [500.0, 777.5, 10000.5],
        "rope_type": [to(one[f"{place}rope_type"], without(one, "rope_type")) for one in rules],
        "factor": [to(2.0, one) for one in (linear, dynamic, yarn, llama)],
        "original_max_position_embeddings": [to(64, yarn), to(48, long), to(16, llama)],
        "attention_factor": [to(1.5, yarn), to(1.5, long)],
        "beta_fast": [to(4.0, yarn)],
        "beta_slow": [to(8.0, yarn)],
        "short_factor": [to([3.0 + at for at in range(half)], short)],
        "long_factor": [to([3.0 + at for at in range(half)], long)],
        "low_freq_factor": [to(2.0, llama)],
        "high_freq_factor": [to(8.0, llama)],
        "mscale": [to(2.0, {**yarn, f"{place}mscale_all_dim": 1.0, **(scaled or {})})],
        "mscale_all_dim": [to(2.0, {**yarn, f"{place}mscale": 1.0, **(scaled or {})})],
        "truncate": [to(False, yarn)],
        "partial_rotary_factor": [0.5, to(0.25, part)],
        "mrope_section": [to([half])],
    }
    return {f"{place}{name}": values for name, values in found.items()}


def entries_without_long(half: int, place: str) -> dict[str, list[Any]]:
    """The same of a class that does not know the rule longrope: the factors of that rule change nothing."""
    known = {
        name: [one for one in values if not (isinstance(one, Change) and "longrope" in one.label)]
        for name, values in entries(half, place).items()
    }
    return {**known, f"{place}short_factor": [to([2.0] * half)], f"{place}long_factor": [to([2.0] * half)]}


def long_entries(half: int, place: str) -> dict[str, list[Any]]:
    """The same of a class that knows no rule but longrope."""
    known = entries(half, place)
    kinds = [one for one in known[f"{place}rope_type"] if one.value == "longrope"]
    long = {f"{place}rope_type": "longrope", **kinds[0].also}
    kept = ("rope_theta", "short_factor", "long_factor", "mrope_section")
    return {
        **{f"{place}{name}": known[f"{place}{name}"] for name in kept},
        **{f"{place}{name}": [2.0] for name in OF_OTHERS if name != "truncate"},
        f"{place}partial_rotary_factor": [0.5],
        f"{place}truncate": [False],
        f"{place}rope_type": kinds,
        f"{place}factor": [to(2.0, long)],
        f"{place}attention_factor": [to(1.5, long)],
        f"{place}original_max_position_embeddings": [to(48, long)],
    }
