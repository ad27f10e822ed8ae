"""What a torch pickle may contain, and the inert values that it becomes: storages, tensors, plain containers.

The allow-list holds exactly the globals that state dicts and trainer dicts of torch 1.6 to 2.15 need. A persistent id
is ("storage", type, key, location, elements); the type gives the dtype, except for `UntypedStorage`, whose elements are
bytes and whose tensors name their dtype (`_rebuild_tensor_v3`). Known globals that are harmless but not read (sparse
and quantised tensors, numpy objects, whole modules) are unsupported; all others are hostile. `flatten` turns the inert
value into key paths.

Source: torch/_utils.py, torch/serialization.py, torch/_weights_only_unpickler.py.

What a DTensor becomes when a rank of torch saves it with `torch.save`: its local part, and where that is.

A DTensor is pickled as `_rebuild_from_type_v2(_rebuild_wrapper_subclass, DTensor, …, state)`. Its state holds the
local tensor and a specification: placements of each dimension of the mesh, the mesh, and shape, strides and type
of the whole tensor. Of the mesh only the coordinate of the rank that saved it is read (`_coordinate_on_dim`).
Everything is data: no class is imported, nothing is called. The result is a plain node, {DTENSOR: {local, shape,
placements, coordinate}}, whose leaves `flatten` lists as any others.
Source: torch/_tensor.py, torch/distributed/tensor (_dtensor_spec.py, placement_types.py), device_mesh.py of 2.4 to
2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Argument, Cure
from wherry.errors import CorruptError, UnsupportedError, WherryError
from wherry.integrations.containers.pickle.tree import HARMLESS, NUMPY_SCALARS, PickleTree, plant
from wherry.integrations.containers.pickle.values import CallRecord, Global, Opaque, Rules

__all__ = ["PickleTree", "flatten"]


def flatten(root: Any, pickle_bytes: int, uri: str | None = None) -> PickleTree:
    """List the leaves of an inert value; see `pickle.tree.plant`."""
    return plant(root, pickle_bytes, TorchTensor, uri)


# torch's dtype → the name in wherry, and the name of its typed storage if it has one.
DTYPES: tuple[tuple[str, str, str], ...] = (
    ("float64", "float64", "DoubleStorage"),
    ("float32", "float32", "FloatStorage"),
    ("float16", "float16", "HalfStorage"),
    ("bfloat16", "bfloat16", "BFloat16Storage"),
    ("int64", "int64", "LongStorage"),
    ("int32", "int32", "IntStorage"),
    ("int16", "int16", "ShortStorage"),
    ("int8", "int8", "CharStorage"),
    ("uint8", "uint8", "ByteStorage"),
    ("bool", "bool", "BoolStorage"),
    ("complex64", "complex64", "ComplexFloatStorage"),
    ("complex128", "complex128", "ComplexDoubleStorage"),
    ("uint16", "uint16", ""),
    ("uint32", "uint32", ""),
    ("uint64", "uint64", ""),
    ("complex32", "complex32", ""),
    ("float8_e4m3fn", "float8_e4m3fn", ""),
    ("float8_e4m3fnuz", "float8_e4m3fnuz", ""),
    ("float8_e5m2", "float8_e5m2", ""),
    ("float8_e5m2fnuz", "float8_e5m2fnuz", ""),
    ("float8_e8m0fnu", "float8_e8m0fnu", ""),
)
_OURS = {torch: ours for torch, ours, _ in DTYPES}
_OF_STORAGE = {storage: ours for _, ours, storage in DTYPES if storage}
_UNTYPED = "UntypedStorage"
_NUMPY = (
    "numpy.core.multiarray",
    "numpy._core.multiarray",
    "numpy.core.numeric",
    "numpy._core.numeric",
    "numpy",
)
_UNREAD_REBUILDS = (
    "_rebuild_sparse_tensor",
    "_rebuild_sparse_csr_tensor",
    "_rebuild_qtensor",
    "_rebuild_nested_tensor",
    "_rebuild_device_tensor_from_numpy",
    "_rebuild_device_tensor_from_cpu_tensor",
    "_rebuild_meta_tensor_no_storage",
)
_UNREAD_TYPES = (
    *("QInt8Storage", "QInt32Storage", "QUInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage"),
    *("qint8", "qint32", "quint8", "quint4x2", "quint2x4", "float4_e2m1fn_x2"),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
)


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage of a torch file.

    Attributes:
        key: its name in the file.
        dtype: its element type as named in wherry; None if its elements are bytes.
        elements: number of elements.
        first: offset in the stored bytes, in elements: legacy streams have storages that are views of another one,
            whose key they then have.
    """

    key: str
    dtype: str | None
    elements: int
    first: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TorchTensor:
    """A view of a storage: offset and strides in elements of `dtype`."""

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def storage_of(persistent: Any) -> Storage:
    """The storage that a persistent id stands for.

    Raises:
        CorruptError: it does not describe a storage.
        UnsupportedError: its element type is not supported.
    """
    if type(persistent) is not tuple or len(persistent) < 5 or persistent[0] != "storage":  # noqa: PLR2004
        raise CorruptError("invalid persistent id in the torch pickle: expected a storage")
    _, kind, key, _, elements, *rest = persistent
    if not isinstance(kind, Global) or type(key) is not str or type(elements) is not int or elements < 0:
        raise CorruptError("invalid storage in the torch pickle: missing type, key or size")
    if kind.name != _UNTYPED and kind.name not in _OF_STORAGE:
        raise UnsupportedError(f"unsupported torch storage type {kind}")
    dtype = None if kind.name == _UNTYPED else _OF_STORAGE[kind.name]
    return Storage(key, dtype, elements, _view_start(rest, elements))


def _view_start(rest: list[Any], elements: int) -> int:
    """Offset of a storage that is a view of another one; `elements` counts those of the other one."""
    if all(part is None for part in rest):
        return 0
    view = rest[0]
    if type(view) is not tuple or len(view) != 3 or any(type(n) is not int or n < 0 for n in view[1:]):  # noqa: PLR2004
        raise CorruptError("invalid storage view: expected a key, an offset and a size")
    if view[1] + view[2] > elements:
        raise CorruptError(
            f"storage view of elements {view[1]} to {view[1] + view[2]} out of range for {elements} elements"
        )
    return view[1]


def _rebuild_v2(args: tuple[Any, ...]) -> TorchTensor:
    storage, offset, shape, strides, *rest = args
    if not isinstance(storage, Storage) or storage.dtype is None:
        raise CorruptError("invalid tensor: expected a typed storage")
    _require_plain(rest[2:])
    return _tensor(storage, storage.dtype, offset, shape, strides)


def _rebuild_v3(args: tuple[Any, ...]) -> TorchTensor:
    storage, offset, shape, strides, _, _, dtype, *rest = args
    if not isinstance(storage, Storage) or not isinstance(dtype, Global):
        raise CorruptError("invalid tensor: expected a storage and a dtype")
    if dtype.name not in _OURS:
        raise UnsupportedError(f"unsupported torch dtype {dtype}")
    _require_plain(rest)
    return _tensor(storage, _OURS[dtype.name], offset, shape, strides)


def _require_plain(metadata: list[Any]) -> None:
    """Refuse lazily conjugated or negated tensors, which torch marks here: their stored bytes are not their values."""
    if any(metadata):
        raise UnsupportedError(
            "unsupported tensor with a conjugate or negative bit",
            cure="call .resolve_conj() or .resolve_neg() before saving",
        )


def _tensor(storage: Storage, dtype: str, offset: Any, shape: Any, strides: Any) -> TorchTensor:
    shape, strides = (part.value if isinstance(part, Opaque) else part for part in (shape, strides))
    if type(shape) not in (tuple, list) or type(strides) not in (tuple, list):
        raise CorruptError("invalid tensor: missing shape or strides")
    numbers = [offset, *shape, *strides]
    if any(type(number) is not int or number < 0 for number in numbers) or len(shape) != len(strides):
        raise CorruptError(
            "invalid tensor: shape, strides and offset must be non-negative integers, one stride per axis"
        )
    return TorchTensor(storage, dtype, storage.first + offset, tuple(shape), tuple(strides))


def _parameter(args: tuple[Any, ...]) -> TorchTensor:
    if not isinstance(args[0], TorchTensor):
        raise CorruptError(f"invalid parameter: expected a tensor, got {type(args[0]).__name__}")
    return args[0]


def _size(args: tuple[Any, ...]) -> Opaque:
    return Opaque("torch.Size", tuple(args[0]))


def _layout(args: tuple[Any, ...]) -> Opaque:
    return Opaque("torch.layout", str(args[0]))


def _device(args: tuple[Any, ...]) -> Opaque:
    return Opaque("torch.device", ":".join(str(arg) for arg in args if isinstance(arg, (str, int))))


def _refusal(wanted: Global) -> WherryError | None:
    if wanted.module.startswith("torch.nn."):
        return UnsupportedError(
            f"unsupported pickled module: loading it runs code of {wanted}; expected a state dict",
            cure="load it where its code is installed and save model.state_dict()",
        )
    if wanted.module in _NUMPY:
        return UnsupportedError(
            f"unsupported numpy object {wanted} in a torch file",
            cure=Cure(
                "pass {} to read only the tensors, or save tensors instead",
                Argument("allow-opaque", str(wanted)),
            ),
        )
    if wanted.module.startswith(_SHARDED):
        return UnsupportedError(
            f"unsupported kind of tensor: {wanted}, of which every rank has only a part",
            cure="load the ranks where they were trained and save whole tensors there (FSDP: "
            "StateDictType.FULL_STATE_DICT), or save with torch.distributed.checkpoint, which is read",
        )
    if wanted in _HARMLESS:
        return UnsupportedError(f"unsupported kind of tensor: {wanted}", cure="save it as a dense tensor")
    return None


def _class_refusal(wanted: Global, function: Any) -> WherryError | None:
    """The error of an unknown class of tensors: only its name is wrong with such a pickle.

    Args:
        wanted: the class.
        function: what would rebuild the tensor.
    """
    if (
        wanted.module.partition(".")[0] in sys.stdlib_module_names - {"__main__"}
        or not wanted.name.isidentifier()
    ):
        return None
    if function not in DENSE:
        return UnsupportedError(f"unsupported kind of tensor: {wanted}", cure="save it as a dense tensor")
    return UnsupportedError(
        f"unsupported class of a tensor: {wanted}",
        cure=Cure(
            "pass {} to read the dense tensor without what the class adds, or save "
            "tensor.as_subclass(torch.Tensor)",
            Argument("allow-opaque", str(wanted)),
        ),
    )


def _from_type(args: tuple[Any, ...]) -> Any:
    """The dense tensor of an object of a subclass, or of one with attributes.

    Raises:
        UnsupportedError: it is not stored as a dense tensor, or an attribute holds a tensor.
    """
    function, kind, rest, state = args if len(args) == 4 else (None, None, None, None)  # noqa: PLR2004  as torch pickles it
    rebuild = DENSE.get(function) if isinstance(function, Global) else None
    if rebuild is None or type(rest) is not tuple:
        name = kind if isinstance(kind, Global) else "unknown"
        raise UnsupportedError(f"unsupported kind of tensor: {name}", cure="save it as a dense tensor")
    parts = state if type(state) is tuple else (state,)  # torch pickles a dict, or a pair of dicts
    held = [
        str(name)
        for part in parts
        if type(part) is dict
        for name, value in cast("dict[Any, Any]", part).items()
        if isinstance(value, (TorchTensor, dict, list, tuple, CallRecord)) and _holds_tensor(value)
    ]
    if held:
        raise UnsupportedError(
            f"unsupported tensor of class {kind}: its attribute {held[0]} is a tensor of its own",
            cure="save a state dict in which that tensor has a name",
        )
    return rebuild(rest)


def _holds_tensor(value: Any) -> bool:
    pending, seen = [value], 0
    while pending and seen < _MOST_LOOKED_AT:
        one, seen = pending.pop(), seen + 1
        if isinstance(one, (TorchTensor, CallRecord)):
            return True
        pending += one.values() if type(one) is dict else one if type(one) in (list, tuple) else ()
    return bool(pending)


# What rebuilds a dense tensor.
DENSE = {
    ("torch._utils", "_rebuild_tensor"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
}
_MOST_LOOKED_AT = 10_000  # values of an attribute
_SHARDED = "torch.distributed."
_FROM_TYPE = ("torch._tensor", "_rebuild_from_type_v2")
_WRAPPED = ("torch._utils", "_rebuild_wrapper_subclass")
_HARMLESS = {
    *(("torch._utils", name) for name in _UNREAD_REBUILDS),
    *(("torch", name) for name in _UNREAD_TYPES),
}
RULES = Rules(
    allowed={
        **HARMLESS,
        **NUMPY_SCALARS,
        **DENSE,
        _FROM_TYPE: _from_type,
        _WRAPPED: None,
        ("torch", "Tensor"): None,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
        ("torch", "Size"): _size,
        ("torch", "device"): _device,
        ("torch.serialization", "_get_layout"): _layout,
        ("torch.storage", _UNTYPED): None,
        ("torch.nn.parameter", "Parameter"): _parameter,
        **{("torch", storage): None for storage in _OF_STORAGE},
        **{("torch", torch): None for torch, _, _ in DTYPES},
    },
    persistent=storage_of,
    refusal=_refusal,
    within={_FROM_TYPE: _class_refusal},
)


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
