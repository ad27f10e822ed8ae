"""What the name of a file or folder next to a checkpoint says: weights in some form, or the state of a trainer.

Nothing is opened for it. Whoever reads a folder uses it to tell companions from files that are not converted.
Sources: transformers 5 (trainer.py, trainer_callback.py, training_args.py); accelerate 1.12 (utils/constants.py,
checkpointing.py, utils/fsdp_utils.py); DeepSpeed 0.18 (runtime/engine.py: `_get_ckpt_name`, `_get_zero_ckpt_name`,
`_get_expert_ckpt_name`; pipe/module.py).
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

COMMIT_SUCCESS = (
    "commit_success.txt"  # Orbax's mark of a finished save, without contents; not on every file system
)
_WEIGHTS = re.compile(
    r".+\.(safetensors|bin|msgpack|h5|onnx|onnx_data|ot|gguf|pt|pth|pkl|ckpt|distcp|tflite|mlmodel)"
    r"|.+\.(safetensors|bin|msgpack|h5)\.index(\..+)?\.json"
)
_INDEX = re.compile(r".+\.index(\..+)?\.json")
_ADAPTER = re.compile(r"adapter_model[.-].+")
_ONNX = re.compile(r".+\.onnx(_data)?")
_DEEPSPEED = re.compile(
    r"(mp_rank_\d+|layer_\d+|expp_rank_\d+|((bf|fp)16_)?zero_pp_rank_\d+)([_-]\w+)*[_-](model|optim)_states\.pt"
)
# nanotron's file of each rank (serialize/utils.py); vLLM's of each worker (model_loader/sharded_state_loader.py).
_NANOTRON = re.compile(r".+_pp-rank-\d+-of-\d+_tp-rank-\d+-of-\d+(_exp-rank-\d+-of-\d+)?\.safetensors")
_VLLM = re.compile(r"model-rank-\d+-part-\d+\.safetensors")
_FSDP_ITEM = re.compile(r"(?P<model>pytorch_model_fsdp)_\d+|optimizer_\d+")


class TrainerFile(NamedTuple):
    """A file that a trainer writes next to the weights.

    Attributes:
        pattern: of its name.
        what: what it holds, in words.
        opaque: whether its pickle has classes of the trainer itself, so that it is never read.
    """

    pattern: re.Pattern[str]
    what: str
    opaque: bool = False


_TRAINER_FILES = (
    TrainerFile(re.compile(r"optimizer(_\d+)?\.(pt|bin)"), "optimizer state"),
    TrainerFile(re.compile(r"scheduler(_\d+)?\.(pt|bin)"), "state of the learning rate schedule"),
    TrainerFile(re.compile(r"scaler(_\d+)?\.pt"), "state of the gradient scaler"),
    TrainerFile(re.compile(r"(sampler|dl_state_dict)(_\d+)?\.bin"), "state of the data loader"),
    TrainerFile(re.compile(r"custom_checkpoint_\d+\.pkl"), "state of an object of the user"),
    TrainerFile(re.compile(r"meta\.pt"), "what Lightning Fabric saves next to sharded tensors"),
    TrainerFile(re.compile(r"training_args\.bin"), "arguments of the trainer", opaque=True),
    TrainerFile(re.compile(r"rng_state(_\d+)?\.pth"), "random states", opaque=True),
    TrainerFile(re.compile(r"random_states_\d+\.pkl"), "random states", opaque=True),
)


def trainer_file(name: str) -> TrainerFile | None:
    """What a trainer writes under a file name; None for every other name."""
    return next((row for row in _TRAINER_FILES if row.pattern.fullmatch(name)), None)


def fsdp_item(name: str) -> Literal["model", "optimizer"] | None:
    """What accelerate saves of an FSDP run in a folder of this name; None for every other name."""
    found = _FSDP_ITEM.fullmatch(name)
    return None if found is None else "model" if found["model"] else "optimizer"


def is_weights(name: str) -> bool:
    """Whether a file name is that of weights in any form, or of their index."""
    return _WEIGHTS.fullmatch(name.rsplit("/", 1)[-1]) is not None


def is_deepspeed_shard(name: str) -> bool:
    """Whether a file name is that of one rank's part of a DeepSpeed checkpoint."""
    return _DEEPSPEED.fullmatch(name) is not None


def is_nanotron_shard(name: str) -> bool:
    """Whether a file name is that of one rank's part of one tensor in a nanotron checkpoint."""
    return _NANOTRON.fullmatch(name) is not None


def is_vllm_shard(name: str) -> bool:
    """Whether a file name is that of one worker's part of a model that vLLM saved as `sharded_state`."""
    return _VLLM.fullmatch(name) is not None


def weights_words(name: str) -> str:
    """What a file of weights is, in words."""
    if is_deepspeed_shard(name):
        return "a DeepSpeed shard of weights or optimizer state"
    if _INDEX.fullmatch(name):
        return "an index of weights"
    if _ADAPTER.fullmatch(name):
        return "weights of an adapter"
    return "weights in an ONNX model" if _ONNX.fullmatch(name) else "weights in another form"
