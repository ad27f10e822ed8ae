"""What DeepSpeed's pickles hold apart from plain tensors: objects of its own classes, and tensors with attributes.

Objects of DeepSpeed's classes (loss scalers, enumerations) are opaque: nothing is imported or called. ZeRO 3 marks
tensors with an attribute (`ds_id`), and torch pickles such a tensor as `_rebuild_from_type_v2(function, torch.Tensor,
arguments, attributes)`: it is the plain tensor.
Source: DeepSpeed 0.19, runtime/zero/stage3.py and partition_parameters.py; torch/_tensor.py of 2.13.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.errors import UnsupportedError
from wherry.integrations.containers.flat.strides import require_honest_size
from wherry.integrations.containers.pickle.values import Global
from wherry.integrations.containers.torch.archive import read_object
from wherry.integrations.containers.torch.values import RULES
from wherry.integrations.containers.zip.read import read_directory

if TYPE_CHECKING:
    from wherry.integrations.containers.torch.archive import Archive
    from wherry.storage.location import Location

_OPAQUE = frozenset(
    {
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.utils.tensor_fragment.tensor_fragment",
    }
)
_PLAIN = ("torch", "Tensor")
_FUNCTIONS = {
    (module, name): RULES.allowed[module, name]
    for module, name in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3"))
}


def _without_attributes(args: tuple[Any, ...]) -> Any:
    """The plain tensor of one that has attributes."""
    function, kind, rest = args[:3] if len(args) > 3 else (None, None, None)  # noqa: PLR2004  as torch pickles it
    rebuild = _FUNCTIONS.get(function) if isinstance(function, Global) else None
    if rebuild is None or kind != _PLAIN or type(rest) is not tuple:
        raise UnsupportedError(f"unsupported kind of tensor: {kind}", cure="save it as a dense tensor")
    return rebuild(rest)


_RULES = replace(
    RULES,
    allowed={**RULES.allowed, _PLAIN: None, ("torch._tensor", "_rebuild_from_type_v2"): _without_attributes},
)


def read_pickle(location: Location) -> Archive:
    """Interpret the pickle of a file, which may hold no tensor, and locate its tensors.

    Raises:
        HostileError: it has a forbidden global, or claims more than its size.
        WherryError: as of files of torch.
    """
    place = replace(location, opaque=location.opaque | _OPAQUE)
    archive = read_object(place, read_directory(place), {}, _RULES)
    if archive.placed:  # the model states of stage 3 have no tensors
        require_honest_size(archive.placed, place)
    return archive
