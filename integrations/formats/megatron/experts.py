"""The parts of expert-parallel ranks: each has some of the experts, and a copy of everything else.

Rank R of N has experts R·n to R·n + n - 1, which it counts from 0: as modules (`local_experts.0.linear_fc1.weight`), or
grouped, with the index behind the name (`linear_fc1.weight0`). Experts that are one tensor (`experts.weight1`) are
refused, since no name tells which they are.
Source: megatron/core/transformer/moe/moe_layer.py and experts.py, megatron/training/checkpointing.py (0.16).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from wherry.errors import CorruptError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wherry.integrations.containers.flat.strides import PlacedTensor

_GROUPED = re.compile(r"(.+\.mlp\.experts)\.(linear_fc[12])\.(weight|bias)(\d{1,18})")
_LOCAL = re.compile(r"(.+\.mlp\.experts\.local_experts)\.(\d{1,18})\.(.+)")
_EXPERTS = ".mlp.experts."
_CURE = "copy the whole folder of the step again, with the files of all ranks"


def sequential(name: str) -> str:
    """The name of an expert's parameter as that of a sequential one; other names stay."""
    return _GROUPED.sub(r"\1.local_experts.\4.\2.\3", name)


def join_ranks(ranks: Sequence[Mapping[str, PlacedTensor]], uri: str) -> dict[str, PlacedTensor]:
    """The parameters of all expert-parallel ranks, experts under the numbers that they have in the whole model.

    Args:
        ranks: the parameters of each by name, all of one tensor-parallel rank and pipeline stage.
        uri: the checkpoint, for errors.

    Raises:
        UnsupportedError: experts that are one tensor.
        CorruptError: the ranks have different parameters.
    """
    if len(ranks) == 1:
        return {sequential(name): part for name, part in ranks[0].items()}
    named = [{sequential(name): part for name, part in rank.items()} for rank in ranks]
    counts = {_count(rank) for rank in named}
    first = named[0]
    for rank in named:
        other = next((name for name in first.keys() ^ rank.keys()), None)
        other = other or next(
            (
                name
                for name, part in first.items()
                if (part.shape, part.dtype) != (rank[name].shape, rank[name].dtype)
            ),
            None,
        )
        if other is not None or len(counts) > 1:
            raise CorruptError(
                "the expert-parallel ranks have different parameters", uri=uri, path=other, cure=_CURE
            )
    (count,) = counts
    whole: dict[str, PlacedTensor] = {}
    for number, rank in enumerate(named):
        for name, part in rank.items():
            expert = _LOCAL.fullmatch(name)
            if expert:
                whole[f"{expert[1]}.{number * count + int(expert[2])}.{expert[3]}"] = part
            elif _EXPERTS in name:
                raise UnsupportedError(
                    f"unsupported form of experts in the files of expert-parallel ranks: {name}", uri=uri, path=name,
                    cure="merge the ranks with Megatron's tools/checkpoint/convert.py, or save as torch_dist",
                )  # fmt: skip
            else:
                whole.setdefault(name, part)
    return whole


def _count(rank: Mapping[str, PlacedTensor]) -> int:
    """How many experts a rank has in each layer."""
    return 1 + max((int(found[2]) for name in rank if (found := _LOCAL.fullmatch(name))), default=-1)
