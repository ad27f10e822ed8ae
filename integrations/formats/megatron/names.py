"""The names of Megatron's files, and of what its checkpoints hold apart from parameters.

Source: megatron/core/dist_checkpointing and megatron/training/checkpointing.py of Megatron-Core 0.16, and its files.
"""

from __future__ import annotations

import re

from wherry.core.account import TRAINING_STATE, IgnoredEntry

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
