"""Loader with `torch.distributed.checkpoint` (DCP); wherry supplies the metadata, so that torch unpickles nothing.

torch's own reader unpickles `.metadata`, and its planner unpickles items that are not tensors, both without any
restriction. Here wherry reads `.metadata` once without executing it, with the checks of its own reader, and builds from
that index the `Metadata` object that torch's reader plans with. It has only tensors, which torch reads with
`weights_only=True`, with its own byte ranges and resharding. A file that is replaced meanwhile is therefore still read
as data only.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from wherry.core.tensorspec import TensorSpec
from wherry.formats.format import Glimpse
from wherry.integrations.formats.dcp.folder import read_contents
from wherry.integrations.formats.dcp.metadata import DcpIndex
from wherry.integrations.formats.megatron import newest_step
from wherry.integrations.native import with_torch
from wherry.integrations.native.with_torch import device, require_safe_torch
from wherry.store.local_store import locate


def prepare() -> None:
    """Make the devices ready, before the process gives up the network and the execution of programs."""
    with_torch.prepare()


def load_distributed(folder: Path | str, specs: Mapping[str, TensorSpec]) -> Any:
    """Load a folder, or a URI through fsspec, with `torch.distributed.checkpoint` in one process."""
    del specs
    import torch

    require_safe_torch()
    checkpoint: Any = import_module("torch.distributed.checkpoint")
    index = read_contents(locate(str(folder))).index
    metadata = _metadata(index)

    reader: Any = checkpoint.FileSystemReader
    if isinstance(folder, str):
        reader = import_module("torch.distributed.checkpoint._fsspec_filesystem").FsspecReader

    class InertReader(reader):
        """torch's reader, with metadata that is not unpickled."""

        def read_metadata(self, *_args: Any, **_how: Any) -> Any:
            return metadata

    state = {
        name: torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=device())
        for name, tensor in index.tensors.items()
    }
    try:
        checkpoint.load(state, storage_reader=InertReader(folder), no_dist=True)
    except checkpoint.api.CheckpointException as error:  # no Exception, so that nobody would catch it
        raise RuntimeError(str(error)) from error
    return state


def load_megatron(folder: Path | str, specs: Mapping[str, TensorSpec]) -> Any:
    """Load a step of Megatron-Core in the format `torch_dist`, or the newest step of a run, as a folder of DCP."""
    _, prefix = newest_step(Glimpse(locate(str(folder)))) or (None, "")
    if not prefix:
        return load_distributed(folder, specs)
    return load_distributed(f"{folder}/{prefix}" if isinstance(folder, str) else folder / prefix, specs)


def _metadata(index: DcpIndex) -> Any:
    """The `Metadata` object of an index's tensors, as torch would have unpickled it."""
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
        classes.MetadataIndex(name, offsets): filesystem._StorageInfo(  # noqa: SLF001  the class that the reader expects
            item.file, item.offset, item.length, *([item.transforms] if item.transforms else [])
        )
        for name, offsets, item in index.stored.items()
        if name in tensors
    }
    return classes.Metadata(tensors, storage_data=stored, storage_meta=classes.StorageMeta())
