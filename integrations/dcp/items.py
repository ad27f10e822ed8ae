"""One item of a `.distcp` file: a complete torch.save archive, for one chunk of a tensor or one other object.

Its end is read once and its beginning once; directory, pickle and local header all lie in these two, so that a
checkpoint of a hundred thousand items opens in seconds. Pickles of equal bytes are interpreted once: those of equal
chunks are equal. The archive's data begins at a multiple of 64 of the item, not of the file.
Source: torch/distributed/checkpoint/filesystem.py of torch 2.13, and its files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wherry.errors import CorruptError, HostileError
from wherry.integrations.containers.inert_pickle import load
from wherry.integrations.containers.stored_zip import (
    Directory,
    Member,
    data_offset,
    read_directory,
    read_member,
)
from wherry.integrations.containers.torch_values import RULES, TorchTensor
from wherry.integrations.containers.torch_zip import PICKLE, PlacedTensor, place_tensor, roots
from wherry.store import Location

if TYPE_CHECKING:
    from wherry.integrations.dcp.metadata import Stored
    from wherry.store import Capabilities, Entry, Store

_HEAD, _END = 1 << 10, 1 << 11
_LARGEST_PICKLE = 1 << 29
_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Item:
    """An item that was found.

    Attributes:
        value: what its pickle makes; a `TorchTensor` for a chunk.
        pickle_bytes: length of its pickle.
        location: its file.
        directory: its members.
        root: the folder in its archive.
    """
