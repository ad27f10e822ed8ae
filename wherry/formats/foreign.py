"""foreign: files and folders of other software that are recognised by name, so that the error says what to do.

They hold weights in forms that wherry does not read. Each row has what shows the form, and a way to one that it reads.
Sources: DeepSpeed's engine.py (`_get_ckpt_name`, `_get_zero_ckpt_name`) and zero_to_fp32.py; NVIDIA NeMo's
save_restore_connector.py; Keras 3's saving_lib.py; HDF5 file format 4.0, II.A; TensorFlow's saved_model/constants.h;
onnx.proto3 (field 1 of a ModelProto is `ir_version`); EasyLM's checkpoint.py (StreamingCheckpointer).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from wherry.formats.format import Glimpse

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.storage.location import Location

_SHARD = re.compile(r"mp_rank_\d+_model_states\.pt|(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")
_STEP = re.compile(r"global_step\d+")
# What Trainer and accelerate put beside the weights.
_OPAQUE = re.compile(r"training_args\.bin|rng_state(_\d+)?\.pth|random_states_\d+\.pkl")
_TAR = slice(257, 262)  # of the first header of a tar archive: its magic
_HDF5 = b"\x89HDF\r\n\x1a\n"
_ZIP = b"PK\x03\x04"
_IR_VERSION = 0x08  # the key of field 1, a varint
# msgpack: an array of two elements, which begins with an array of 1 to 15 strings.
_PAIR, _KEY, _LONGEST_KEY = 0x92, 0x90, 0x9F
_FIXED_TEXT, _TEXT = range(0xA0, 0xC0), 0xD9


class ForeignForm(NamedTuple):
    """A form of checkpoints that is recognised, but not read: its name, how it is recognised, and what to do."""

    name: str
    seen: Callable[[Glimpse], bool]
    cure: str


def _deepspeed(glimpse: Glimpse) -> bool:
    names = glimpse.entries
    return any(map(_SHARD.fullmatch, names)) or ("latest" in names and any(map(_STEP.fullmatch, names)))


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
    return glimpse.is_file and holds_no_weights(glimpse.location.name)


def holds_no_weights(name: str) -> bool:
    """Whether a file of this name holds arguments or random states of a trainer; its pickle is nobody's business."""
    return _OPAQUE.fullmatch(name) is not None


FORMS = (
    ForeignForm(
        "a file of a trainer's arguments or random states without weights",
        _companion,
        "pass the folder that it belongs to; `wherry inspect --pickles` lists what the file would import",
    ),
    ForeignForm(
        "a DeepSpeed checkpoint",
        _deepspeed,
        "merge its shards with the script that DeepSpeed put beside them, `python zero_to_fp32.py . OUT`; convert OUT",
    ),
    ForeignForm(
        "a NeMo archive",
        _nemo,
        "unpack it with `tar -xf`, and convert the model_weights.ckpt or the folder model_weights in it",
    ),
    ForeignForm(
        "a Keras or HDF5 file",
        _keras,
        "save its weights with Keras: numpy.savez('weights.npz', **{one.path: one.numpy() for one in model.weights})",
    ),
    ForeignForm(
        "an ONNX model",
        _onnx,
        "it is a graph and not a checkpoint: convert the checkpoint from which it was exported",
    ),
    ForeignForm(
        "a TensorFlow SavedModel", _saved_model, "pass its folder `variables`, which is a tensor bundle"
    ),
    ForeignForm(
        "an EasyLM stream",
        _easylm,
        "load it with EasyLM's StreamingCheckpointer.load_checkpoint, and save it with flax.serialization.to_bytes",
    ),
)


def foreign_form(location: Location) -> ForeignForm | None:
    """The form of a file or folder that no format recognises; None if it is unknown here too."""
    glimpse = Glimpse(location)
    return next((form for form in FORMS if form.seen(glimpse)), None)
