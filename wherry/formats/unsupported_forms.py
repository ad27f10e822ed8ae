"""Forms of checkpoints that wherry recognises and does not read, so that the error names them and says what to do.

They hold weights in forms that wherry does not read. Each row has what shows the form, and a way to one that it reads.
Sources: DeepSpeed's engine.py (`_get_ckpt_name`, `_get_zero_ckpt_name`) and zero_to_fp32.py; NVIDIA NeMo's
save_restore_connector.py; Keras 3's saving_lib.py; HDF5 file format 4.0, II.A; TensorFlow's saved_model/constants.h;
onnx.proto3 (field 1 of a ModelProto is `ir_version`); EasyLM's checkpoint.py (StreamingCheckpointer).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from wherry.formats.file_names import is_deepspeed_shard, is_nanotron_shard, is_vllm_shard, trainer_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.formats.format import Glimpse

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
    return (is_nanotron_shard(name) or is_vllm_shard(name)) and glimpse.is_file


def _nanotron(glimpse: Glimpse) -> bool:
    names = glimpse.entries
    return "checkpoint_metadata.json" in names and "model_config.json" in names and "model" in names


def _vllm(glimpse: Glimpse) -> bool:
    return any(map(is_vllm_shard, glimpse.entries))


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
_MERGE_ABOVE = (
    "pass the folder of the step: its ZeRO partitions are read as whole tensors. Only without ZeRO a rank has whole "
    "tensors: --format torch-zip reads them"
)
_NANOTRON_CURE = (
    "convert it with nanotron's examples/llama/convert_nanotron_to_hf.py, and pass what this writes"
)
FORMS = (
    UnsupportedForm(
        "a file of a trainer's arguments or random states without weights",
        _companion,
        "pass the folder that it belongs to; `wherry inspect --pickles` lists what the file would import",
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
        "merge the ranks where they were trained or served; --format safetensors reads this part alone",
    ),
    UnsupportedForm("a nanotron checkpoint of files of ranks", _nanotron, _NANOTRON_CURE, ranks=True),
    UnsupportedForm("a run of nanotron", _nanotron_run, _NANOTRON_CURE),
    UnsupportedForm(
        "a model that vLLM saved as sharded_state",
        _vllm,
        "convert the model from which vLLM loaded it; vLLM's names and shapes depend on its own number of workers",
        ranks=True,
    ),
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
