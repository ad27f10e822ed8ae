"""The allow-list for a DCP `.metadata` pickle: exactly the globals that torch 2.0 to 2.15 and OLMo-core write.

`TensorProperties` and its memory-format enum were in the sharded-tensor package until torch 2.2, and can be written
under either name. A path of the writer's machine (`checkpoint_id`) is pickled as a `pathlib` object, which Python 3.13
names `pathlib._local`. Layouts other than strided, and all other globals, are refused by name.
Source: torch/distributed/checkpoint/{metadata,filesystem}.py of these releases, and the globals of each one's output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wherry.errors import CorruptError, UnsupportedError
from wherry.integrations.containers.pickle.values import Global, Rules, dict_of
from wherry.integrations.containers.torch.values import DTYPES, RULES

if TYPE_CHECKING:
    from wherry.integrations.containers.pickle.values import Maker

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
OLMO_CORE = "olmo_core.distributed.checkpoint.filesystem"  # its writer's own class: path, offset and length, as torch's
PLANNER = "torch.distributed.checkpoint.planner"  # plans that Megatron-Core keeps for its next save
OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"
STRIDED = "torch.strided"
_INTEGER = frozenset({int})
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


def _size(args: tuple[Any, ...]) -> tuple[int, ...]:
    (extents,) = args
    if (
        type(extents) not in (tuple, list)
        or not _INTEGER.issuperset(map(type, extents))
        or min(extents, default=0) < 0
    ):
        raise CorruptError(
            "invalid torch.Size: expected a tuple of non-negative integers",
            cure="restore .metadata from a backup",
        )
    return tuple(extents)


def _layout(args: tuple[Any, ...]) -> str:
    if args != (STRIDED,):
        raise UnsupportedError(f"unsupported tensor layout {args[0]}", cure="save it as a dense tensor")
    return STRIDED


def _path(args: tuple[Any, ...]) -> str:
    return "/".join(str(part) for part in args)


_RECORDS = (
    *((METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((METADATA, name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    *((METADATA, name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    (OLD_PROPERTIES, "TensorProperties"),
    (OLD_PROPERTIES, "MEM_FORMAT_ENCODING"),
    (FILESYSTEM, "_StorageInfo"),
    (OLMO_CORE, "_StorageInfo"),
    *((PLANNER, name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
)
_MAKERS: dict[tuple[str, str], Maker | None] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): dict_of,
    **{(module, name): _path for module in ("pathlib", "pathlib._local") for name in _PATHS},
}
# Source: torch.distributed.checkpoint.metadata and planner (torch 2.13).
_FORMATS = {"TORCH_CONTIGUOUS_FORMAT": 0, "TORCH_CHANNELS_LAST": 1, "TORCH_PRESERVE_FORMAT": 2}
# The attributes of objects of which an index has one for each tensor.
ATTRIBUTES = {
    Global(METADATA, "TensorStorageMetadata"): ["chunks", "properties", "size"],
    Global(METADATA, "MetadataIndex"): ["fqn", "index", "offset"],
    Global(FILESYSTEM, "_StorageInfo"): ["length", "offset", "relative_path"],
}
METADATA_RULES = Rules(
    members={
        (METADATA, "_MEM_FORMAT_ENCODING"): _FORMATS,
        (OLD_PROPERTIES, "MEM_FORMAT_ENCODING"): _FORMATS,
        (PLANNER, "WriteItemType"): {"TENSOR": 1, "SHARD": 2, "BYTE_IO": 3},
    },
    allowed={
        **dict.fromkeys(_RECORDS),
        **{("torch", torch): None for torch, _, _ in DTYPES},
        **_MAKERS,
    },
    refusal=RULES.refusal,
)
