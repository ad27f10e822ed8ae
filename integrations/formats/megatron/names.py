"""The names of Megatron's files, and of what its checkpoints hold apart from parameters.

Source: megatron/core/dist_checkpointing and megatron/training/checkpointing.py of Megatron-Core 0.16, and its files.

The parts of expert-parallel ranks: each has some of the experts, and a copy of everything else.

Rank R of N has experts R·n to R·n + n - 1, which it counts from 0: as modules (`local_experts.0.linear_fc1.weight`), or
grouped, with the index behind the name (`linear_fc1.weight0`). Experts that are one tensor (`experts.weight1`) are
refused, since no name tells which they are.
Source: megatron/core/transformer/moe/moe_layer.py and experts.py, megatron/training/checkpointing.py (0.16).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from wherry.core.account import TRAINING_STATE, IgnoredEntry
from wherry.errors import CorruptError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wherry.integrations.containers.flat.strides import PlacedTensor


COMMON, BACKEND, LATEST = "common.pt", "metadata.json", "latest_checkpointed_iteration.txt"
ARGUMENTS = "megatron_args.json"  # the arguments of `common.pt` as wherry shows them, and as it takes them
ARGS, ITERATION = "args", "iteration"
EMBEDDING = "embedding.word_embeddings.weight"
SHARDED, VERSION = "torch_dist", 1
STEP = re.compile(r"iter_(\d{7,18})|release")
LEFT: tuple[tuple[str, str, str], ...] = (
    (
        r".*\._extra_state(/.*)?",
        "state of fp8 recipes",
        "Transformer Engine makes it anew; it holds no weights",
    ),
    (r"(.*\.)?rng_state(/.*)?", "state of random numbers", "a run draws new ones"),
    (r"rerun_state_machine_state(/.*)?", "state of the checks of a run", "only a run that resumes reads it"),
)
# Classes whose objects `common.pt` holds: enumerations and records of a run.
OPAQUE = frozenset(
    {
        "megatron.core.enums.ModelType",
        "megatron.core.enums.Fp8Recipe",
        "megatron.core.enums.Fp4Recipe",
        "megatron.core.enums.CudaGraphScope",
        "megatron.core.transformer.enums.AttnBackend",
        "megatron.core.transformer.enums.AttnMaskType",
        "megatron.core.transformer.enums.AttnType",
        "megatron.core.transformer.enums.CudaGraphScope",
        "megatron.core.transformer.enums.LayerType",
        "megatron.core.rerun_state_machine.RerunDiagnostic",
        "megatron.core.rerun_state_machine.RerunMode",
        "megatron.core.rerun_state_machine.RerunState",
        "megatron.core.rerun_state_machine.RerunValidationStatus",
        "megatron.core.dist_checkpointing.mapping.ShardedObject",
        "megatron.training.arguments.ModelType",
        "signal.Signals",
    }
)


def left_entry(name: str) -> IgnoredEntry | None:
    """The entry of an object of a run that no model needs; None for any other."""
    for pattern, what, reason in LEFT:
        if re.fullmatch(pattern, name):
            return IgnoredEntry((name,), TRAINING_STATE, reason, what)
    return None


def step_name(step: int) -> str:
    """The folder name of a step."""
    return f"iter_{step:07d}"


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
