"""What a DTensor becomes when a rank of torch saves it with `torch.save`: its local part, and where that lies.

A DTensor is pickled as `_rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, …, state)`. Its state holds the
local tensor and a specification: placements of each dimension of the mesh, the mesh, and shape, strides and type
of the whole tensor. Of the mesh only the coordinate of the rank that saved it is read (`_coordinate_on_dim`).
Everything is data: no class is imported, nothing is called. The result is a plain node, {DTENSOR: {local, shape,
placements, coordinate}}, whose leaves `flatten` lists as any others.
Source: torch/_tensor.py, torch/distributed/tensor (_dtensor_spec.py, placement_types.py), device_mesh.py of 2.4 to
2.13.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.errors import CorruptError, UnsupportedError
from wherry.integrations.containers.pickle.values import CallRecord, Global, Opaque
from wherry.integrations.containers.torch.values import RULES, TorchTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

DTENSOR = "__dtensor__"
LOCAL, SHAPE, PLACEMENTS, COORDINATE = "local", "shape", "placements", "coordinate"
REPLICATE = "replicate"
_TENSOR, _SPEC = "torch.distributed.tensor", "torch.distributed.tensor._dtensor_spec"
_PLACED = "torch.distributed.tensor.placement_types"
# The modules up to torch 2.4 had an underscore.
_OLDER = {_TENSOR: "torch.distributed._tensor.api", _SPEC: "torch.distributed._tensor._dtensor_spec"}
_CLASSES = (
    *((module, "DTensor") for module in (_TENSOR, f"{_TENSOR}._api", "torch.distributed._tensor", _OLDER[_TENSOR])),
    *((module, name) for module in (_SPEC, _OLDER[_SPEC]) for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
    *((module, "TensorMeta") for module in (_PLACED, "torch.distributed._tensor.placement_types")),
    *((module, name) for module in (_PLACED, "torch.distributed._tensor.placement_types")
      for name in ("Shard", "Replicate", "Partial", "_StridedShard")),
    ("torch.distributed.device_mesh", "DeviceMesh"),
    ("torch.distributed._mesh_layout", "_MeshLayout"),
    ("torch.distributed._mesh_layout", "_FlatLayout"),
)  # fmt: skip
_CURE = "save whole tensors (full_tensor()), or merge the ranks with the framework that trained the model"


def _rebuilt(args: tuple[Any, ...]) -> Mapping[str, Any]:
    """The node of a DTensor."""
    kind, state = (args[1], args[3]) if len(args) > 3 else (None, None)  # noqa: PLR2004  as torch pickles it
    if not isinstance(kind, Global) or kind.name != "DTensor":
        raise UnsupportedError(f"unsupported kind of tensor: {kind}", cure="save it as a dense tensor")
    found: Any = state[1] if type(state) is tuple and len(state) == 2 else state  # noqa: PLR2004  (dict, slots)
    local, spec = (
        (found.get("_local_tensor"), _state(found.get("_spec"))) if type(found) is dict else (None, {})
    )
    whole = spec.get("tensor_meta")
    if not isinstance(local, TorchTensor) or not isinstance(whole, CallRecord) or not whole.args:
        raise CorruptError("invalid DTensor: expected a local tensor, and the shape of the whole one")
    return {
        DTENSOR: {
            LOCAL: local,
            SHAPE: _numbers(whole.args[0]),
            PLACEMENTS: [_placement(one) for one in _rows(spec.get("placements"))],
            COORDINATE: _numbers(_state(spec.get("mesh")).get("_coordinate_on_dim")),
        }
    }


def _state(record: Any) -> dict[str, Any]:
    """The state of an object; empty for everything else."""
    state = record.state if isinstance(record, CallRecord) else None
    return state if type(state) is dict else {}


def _rows(found: Any) -> list[Any]:
    value = found.value if isinstance(found, Opaque) else found
    if type(value) not in (tuple, list):
        raise CorruptError("invalid DTensor: its shape, placements or coordinate are not sequences")
    return list(value)


def _numbers(found: Any) -> list[int]:
    numbers = _rows(found)
    if any(type(one) is not int or one < 0 for one in numbers):
        raise CorruptError("invalid DTensor: its shape or coordinate contains a value that is not a size")
    return numbers


def _placement(record: Any) -> int | str:
    """The dimension that a placement cuts, or REPLICATE.

    Raises:
        UnsupportedError: it is another placement.
    """
    kind = record.kind.name if isinstance(record, CallRecord) else type(record).__name__
    if kind == "Replicate":
        return REPLICATE
    dim = _state(record).get("dim")
    if kind == "Shard" and type(dim) is int and dim >= 0:
        return dim
    raise UnsupportedError(f"unsupported placement of a DTensor: {kind}", cure=_CURE)


RANK_RULES = replace(
    RULES,
    allowed={
        **RULES.allowed,
        **dict.fromkeys(_CLASSES),
        ("torch._utils", "_rebuild_wrapper_subclass"): None,
        ("torch._tensor", "_rebuild_from_type_v2"): _rebuilt,
    },
)
