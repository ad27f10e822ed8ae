"""How tensor-parallel ranks divide each parameter: by its name, as GPTModel's modules do.

A projection `out of` the residual stream is cut along its outputs (dimension 0), one `into` it along its inputs
(dimension 1). Gate and up are one tensor of each rank, so the whole one is all gates, then all ups. What is equal
on all ranks is taken from the first. Source: the classes of megatron/core/tensor_parallel/layers.py that each module
uses.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.errors import CorruptError, UnsupportedError
from wherry.integrations.formats.dcp.metadata import Chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wherry.integrations.containers.flat.strides import PlacedTensor

OUTPUTS, INPUTS, GATED, EQUAL = "outputs", "inputs", "gated", "equal"
_MODULES: tuple[tuple[str, str], ...] = (
    (r"embedding\.word_embeddings\.weight|output_layer\.weight", OUTPUTS),
    (r".*\.self_attention\.(linear_qkv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj)\.(weight|bias)", OUTPUTS),
    (r".*\.self_attention\.core_attention\.softmax_offset", OUTPUTS),
    (r".*\.self_attention\.linear_proj\.weight", INPUTS),
    (r".*\.linear_fc1\.(weight|bias)", GATED),
    (r".*\.linear_fc2\.weight", INPUTS),
    (r".*norm\.(weight|bias)|.*\.layer_norm_(weight|bias)|.*\.router\.(weight|bias|expert_bias)", EQUAL),
    (r"embedding\.position_embeddings\.weight|.*\.shared_experts\.gate_weight", EQUAL),
    (r".*\.self_attention\.(linear_q_down_proj|linear_kv_down_proj)\.weight", EQUAL),
    (r".*\.(linear_proj|linear_fc2)\.bias", EQUAL),
)  # fmt: skip


def division(name: str, uri: str) -> str:
    """How ranks divide a parameter.

    Raises:
        UnsupportedError: no rule knows its name.
    """
    found = next((how for pattern, how in _MODULES if re.fullmatch(pattern, name)), None)
    if found is None:
        raise UnsupportedError(
            f"unknown parameter {name}: how tensor-parallel ranks divide it is not known", uri=uri, path=name,
            cure="merge the ranks with Megatron's tools/checkpoint/convert.py",
        )  # fmt: skip
    return found


def chunks_of(
    name: str, parts: Sequence[PlacedTensor], *, gated: bool, uri: str
) -> tuple[tuple[int, ...], list[tuple[Chunk, PlacedTensor]]]:
    """The shape of a whole parameter, and its chunks.

    Args:
        name: of the parameter.
        parts: that of each tensor-parallel rank.
        gated: whether the first projection of the feed-forward layers is gate and up.
        uri: the checkpoint, for errors.

    Raises:
        CorruptError: the parts do not fit one another.
        UnsupportedError: see `division`.
    """
    first = parts[0]
    if any((one.shape, one.dtype) != (first.shape, first.dtype) for one in parts):
        raise CorruptError(
            f"the ranks have different shapes of {name}", uri=uri, path=name, cure="copy all ranks again"
        )
    how = division(name, uri) if len(parts) > 1 else EQUAL
    if how == EQUAL:
        return first.shape, [(Chunk((0,) * len(first.shape), first.shape), first)]
    axis = 1 if how == INPUTS else 0
    if len(first.shape) <= axis:
        raise CorruptError(
            f"{name} of shape {list(first.shape)} has no axis {axis}, which the ranks divide", uri=uri, path=name,
            cure="copy all ranks again",
        )  # fmt: skip
    if how == GATED and gated:
        return _whole(first.shape, 0, len(parts)), list(_gates_and_ups(parts))
    return _whole(first.shape, axis, len(parts)), list(_along(parts, axis, 0, first.shape[axis]))


def _whole(shape: tuple[int, ...], axis: int, count: int) -> tuple[int, ...]:
    return tuple(extent * count if place == axis else extent for place, extent in enumerate(shape))


def _along(
    parts: Sequence[PlacedTensor], axis: int, first: int, step: int
) -> Iterator[tuple[Chunk, PlacedTensor]]:
    for number, one in enumerate(parts):
        offsets = tuple(first + number * step if place == axis else 0 for place in range(len(one.shape)))
        yield Chunk(offsets, one.shape), one


def _gates_and_ups(parts: Sequence[PlacedTensor]) -> Iterator[tuple[Chunk, PlacedTensor]]:
    rows = parts[0].shape[0] // 2
    for half in (0, 1):
        halves = [_rows(one, half * rows, rows) for one in parts]
        yield from _along(halves, 0, half * rows * len(parts), rows)


def _rows(one: PlacedTensor, first: int, count: int) -> PlacedTensor:
    """Some rows of a tensor."""
    offset = one.offset + first * (one.strides[0] if one.strides else math.prod(one.shape[1:]))
    return replace(one, offset=offset, shape=(count, *one.shape[1:]))
