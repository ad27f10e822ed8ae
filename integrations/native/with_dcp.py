"""Loader of `torch.distributed.checkpoint` (DCP), which gets its metadata from wherry and unpickles nothing.

torch's own reader unpickles `.metadata`, and its planner unpickles items that are not tensors, both without any
restriction. Here wherry reads `.metadata` once, inertly, with the checks of its own reader; from that index the
`Metadata` object is built that torch's reader plans with. It has tensors alone, which torch reads with
`weights_only=True`, from the byte ranges and with the resharding of torch. What is replaced meanwhile is therefore
never more than data.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wherry.integrations.formats.dcp.folder import read_contents
from wherry.integrations.native.with_torch import device, require_safe_torch
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from wherry.core.tensorspec import TensorSpec
    from wherry.integrations.formats.dcp.metadata import DcpIndex


def distributed(folder: Path, specs: Mapping[str, TensorSpec]) -> Any:
    """A folder, by `torch.distributed.checkpoint` in one process."""
    del specs
    import torch

    require_safe_torch()
    checkpoint: Any = import_module("torch.distributed.checkpoint")
    index = read_contents(locate(str(folder))).index
    metadata = _metadata(index)

    class InertReader(checkpoint.FileSystemReader):
        """torch's reader, with metadata that it does not unpickle."""

        def read_metadata(self, *_args: Any, **_how: Any) -> Any:
            return metadata

    state = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=device())
        for name, tensor in index.tensors.items()
    }
    checkpoint.load(state, storage_reader=InertReader(folder), no_dist=True)
    return state


def _metadata(index: DcpIndex) -> Any:
    """The object that torch would have unpickled, of the tensors of an index."""
    import torch

    classes: Any = import_module("torch.distributed.checkpoint.metadata")
    filesystem: Any = import_module("torch.distributed.checkpoint.filesystem")
    tensors = {
        name: classes.TensorStorageMetadata(
            classes.TensorProperties(dtype=getattr(torch, tensor.dtype)),
            torch.Size(tensor.shape),
            [
                classes.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                for chunk in tensor.chunks
            ],
        )
        for name, tensor in index.tensors.items()
    }
    stored = {
        classes.MetadataIndex(name, offsets): filesystem._StorageInfo(  # noqa: SLF001  the class that the reader takes
            item.file, item.offset, item.length, *([item.transforms] if item.transforms else [])
        )
        for (name, offsets), item in index.stored.items()
        if name in tensors
    }
    return classes.Metadata(tensors, storage_data=stored, storage_meta=classes.StorageMeta())
