"""What the name of a file or folder next to a checkpoint says: weights in some form, or the state of a trainer.

Nothing is opened for it. Whoever reads a folder uses it to tell companions from files that are not converted.
Sources: transformers 5 (trainer.py, trainer_callback.py, training_args.py); accelerate 1.12 (utils/constants.py,
checkpointing.py, utils/fsdp_utils.py); DeepSpeed 0.18 (runtime/engine.py: `_get_ckpt_name`, `_get_zero_ckpt_name`,
`_get_expert_ckpt_name`; pipe/module.py).

Some forms of checkpoints are recognised, by names and first bytes, and not read, so that the error names them and says
what to do. Each row of `FORMS` has what shows the form, and a way to one that wherry reads. Sources: zero_to_fp32.py of
DeepSpeed; NVIDIA NeMo's save_restore_connector.py; Keras 3's saving_lib.py; HDF5 file format 4.0, II.A; TensorFlow's
saved_model/constants.h; onnx.proto3 (field 1 of a ModelProto is `ir_version`); EasyLM's checkpoint.py
(StreamingCheckpointer).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from wherry.cures import Argument, Command, Cure

if TYPE_CHECKING:
    from wherry.formats.format import Glimpse

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
VLLM_SHARD = re.compile(r"model-rank-(?P<rank>0|[1-9]\d{0,8})-part-(?P<part>0|[1-9]\d{0,8})\.safetensors")
_FSDP_ITEM = re.compile(r"(?P<model>pytorch_model_fsdp)_\d+|optimizer_\d+")
_STEP = re.compile(r"global_step\d+")
_LAYER = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
_FEW = 8  # folders that are looked at
_TAR = slice(257, 262)  # of the first header of a tar archive: its magic
_HDF5 = b"\x89HDF\r\n\x1a\n"
_ZIP = b"PK\x03\x04"
_PICKLE = b"\x80"  # of protocol 2 and later, as in the legacy stream of torch.save
_IR_VERSION = 0x08  # the key of field 1, a varint
# msgpack: an array of two elements, which begins with an array of 1 to 15 strings.
_PAIR, _KEY, _LONGEST_KEY = 0x92, 0x90, 0x9F
_FIXED_TEXT, _TEXT = range(0xA0, 0xC0), 0xD9


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


def weights_words(name: str) -> str:
    """A description of a file of weights."""
    if is_deepspeed_shard(name):
        return "a DeepSpeed shard of weights or optimizer state"
    if _INDEX.fullmatch(name):
        return "an index of weights"
    if _ADAPTER.fullmatch(name):
        return "weights of an adapter"
    return "weights in an ONNX model" if _ONNX.fullmatch(name) else "weights in another form"


class UnsupportedForm(NamedTuple):
    """A form of checkpoints that is recognised, but not read: its name, how it is recognised, and what to do."""

    name: str
    seen: Callable[[Glimpse], bool]
    cure: str
    ranks: bool = False  # a folder that is one checkpoint in files of ranks, so that nothing in it is one


def _deepspeed(glimpse: Glimpse) -> bool:
    names = glimpse.entries
    return any(map(is_deepspeed_shard, names)) or ("latest" in names and any(map(_STEP.fullmatch, names)))


def _deepspeed_shard(glimpse: Glimpse) -> bool:
    named = is_deepspeed_shard(glimpse.location.name)
    return named and glimpse.is_file and glimpse.head.startswith((_ZIP, _PICKLE))


def _rank_file(glimpse: Glimpse) -> bool:
    name = glimpse.location.name
    return (is_nanotron_shard(name) or VLLM_SHARD.fullmatch(name) is not None) and glimpse.is_file


def _nanotron(glimpse: Glimpse) -> bool:
    names = glimpse.entries
    return "checkpoint_metadata.json" in names and "model_config.json" in names and "model" in names


def _nanotron_run(glimpse: Glimpse) -> bool:
    steps = [name for name, entry in glimpse.entries.items() if entry.is_dir and name.isdecimal()]
    return "latest.txt" in glimpse.entries and any(
        glimpse.location.join(f"{name}/checkpoint_metadata.json").exists() for name in steps[:_FEW]
    )


def _pipeline_layers(glimpse: Glimpse) -> bool:
    """A step whose files are layers, or a run with such a step."""
    if any(map(_LAYER.fullmatch, glimpse.entries)):
        return True
    steps = [name for name in glimpse.entries if _STEP.fullmatch(name)] if "latest" in glimpse.entries else []
    return any(
        _LAYER.fullmatch(entry.name)
        for name in steps[:_FEW]
        for entry in glimpse.location.join(name).entries()
    )


def _nemo(glimpse: Glimpse) -> bool:
    return glimpse.head[_TAR] == b"ustar" and glimpse.location.name.endswith(".nemo")


def _keras(glimpse: Glimpse) -> bool:
    zipped = glimpse.head.startswith(_ZIP) and glimpse.location.name.endswith(".keras")
    return zipped or glimpse.head.startswith(_HDF5)


def _onnx(glimpse: Glimpse) -> bool:
    if glimpse.is_dir:
        return any(name.endswith(".onnx") for name in glimpse.entries)
    return glimpse.location.name.endswith(".onnx") and glimpse.head[:1] == bytes([_IR_VERSION])


def _saved_model(glimpse: Glimpse) -> bool:
    return "saved_model.pb" in glimpse.entries


def _easylm(glimpse: Glimpse) -> bool:
    pair, key, text = (*glimpse.head[:3], 0, 0, 0)[:3]
    return pair == _PAIR and _KEY < key <= _LONGEST_KEY and (text in _FIXED_TEXT or text == _TEXT)


def _companion(glimpse: Glimpse) -> bool:
    found = trainer_file(glimpse.location.name)
    return glimpse.is_file and found is not None and found.opaque


def is_part(glimpse: Glimpse) -> bool:
    """Whether a file is part of something else although its first bytes are those of a checkpoint.

    Files of a trainer's arguments or random states are pickles without weights, which are never read; the file of one
    rank of DeepSpeed, nanotron or vLLM holds a part of the weights, or of the optimizer state, that only the other
    files complete.
    """
    return _companion(glimpse) or _deepspeed_shard(glimpse) or _rank_file(glimpse)


_MERGE = (
    "ZeRO's partitions and universal checkpoints are read, tensor-parallel ranks, experts and pipeline stages are not: "
    "merge its shards with the script that DeepSpeed put next to them, `python zero_to_fp32.py . OUT`; convert OUT"
)
_MERGE_ABOVE = Cure(
    "pass the folder of the step: its ZeRO partitions are read as whole tensors. Only "
    "without ZeRO a rank has whole tensors: {} reads them",
    Argument("format", "torch-zip"),
)
_NANOTRON_CURE = (
    "convert it with nanotron's examples/llama/convert_nanotron_to_hf.py, and pass what this writes"
)
FORMS = (
    UnsupportedForm(
        "a file of a trainer's arguments or random states without weights",
        _companion,
        Cure(
            "pass the folder that it belongs to; {} lists what the file would import",
            Command("inspect", Argument("pickles")),
        ),
    ),
    UnsupportedForm("the file of one rank of a DeepSpeed checkpoint", _deepspeed_shard, _MERGE_ABOVE),
    UnsupportedForm(
        "a DeepSpeed checkpoint of pipeline layers, such as GPT-NeoX saves",
        _pipeline_layers,
        "convert it with GPT-NeoX's tools/ckpts/convert_neox_to_hf.py, and pass the folder that this writes; DeepSpeed "
        "puts no script next to such a checkpoint",
    ),
    UnsupportedForm(
        "a DeepSpeed checkpoint",
        _deepspeed,
        _MERGE,
    ),
    UnsupportedForm(
        "the file of one rank of nanotron, or of one worker of vLLM",
        _rank_file,
        Cure(
            "pass the folder with the files of all ranks of vLLM, or merge those of nanotron where they were trained; "
            "{} reads this part alone",
            Argument("format", "safetensors"),
        ),
    ),
    UnsupportedForm("a nanotron checkpoint of files of ranks", _nanotron, _NANOTRON_CURE, ranks=True),
    UnsupportedForm("a run of nanotron", _nanotron_run, _NANOTRON_CURE),
    UnsupportedForm(
        "a NeMo archive",
        _nemo,
        "unpack it with `tar -xf`, and convert the model_weights.ckpt or the folder model_weights in it",
    ),
    UnsupportedForm(
        "a Keras or HDF5 file",
        _keras,
        "save its weights with Keras: numpy.savez('weights.npz', **{one.path: one.numpy() for one in model.weights})",
    ),
    UnsupportedForm(
        "an ONNX model",
        _onnx,
        "it is a graph and not a checkpoint: convert the checkpoint from which it was exported",
    ),
    UnsupportedForm(
        "a TensorFlow SavedModel", _saved_model, "pass its folder `variables`, which is a tensor bundle"
    ),
    UnsupportedForm(
        "an EasyLM stream",
        _easylm,
        "load it with EasyLM's StreamingCheckpointer.load_checkpoint, and save it with flax.serialization.to_bytes",
    ),
)


def unsupported_form(glimpse: Glimpse) -> UnsupportedForm | None:
    """The form of a file or folder that no format recognises; None if it is unknown here too."""
    return next((form for form in FORMS if form.seen(glimpse)), None)
