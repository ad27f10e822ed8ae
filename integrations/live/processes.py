"""The processes of a training run: which one this is, and how rank 0 tells the others one line of text.

The only collective operation of an export is `broadcast`, called by all processes while training waits anyway.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

_LONGEST = 4096


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The processes that hold one state together.

    Attributes:
        rank: of this one.
        count: how many there are.
        broadcast: called by all with a text; gives all of them that of rank 0.
    """

    rank: int
    count: int
    broadcast: Callable[[str], str]


def group(distributed: str) -> ProcessGroup:
    """The processes among which a state is shared.

    Args:
        distributed: `torch`, `jax`, or empty where this process holds all of it.

    Returns:
        The group. Of processes that hold all of a state each, the first one alone has something to do: its count is
        1, and the rank says which one this is.
    """
    if distributed == "torch":
        return _torch()
    if distributed == "jax":
        return _jax()
    return ProcessGroup(_own_rank(), 1, str)


def _own_rank() -> int:
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    if jax is not None and jax.distributed.is_initialized():
        return jax.process_index()
    return 0


def _torch() -> ProcessGroup:
    distributed = sys.modules["torch"].distributed

    def broadcast(text: str) -> str:
        told = [text]
        distributed.broadcast_object_list(told, src=0)
        return told[0]

    return ProcessGroup(distributed.get_rank(), distributed.get_world_size(), broadcast)


def _jax() -> ProcessGroup:
    def broadcast(text: str) -> str:
        import numpy as np
        from jax.experimental import multihost_utils

        data = text.encode()
        if len(data) > _LONGEST:
            raise UnsupportedError(f"{len(data)} bytes are too long for one broadcast")
        told = multihost_utils.broadcast_one_to_all(np.frombuffer(data.ljust(_LONGEST), "u1"))
        return np.asarray(told).tobytes().decode().rstrip()

    jax = sys.modules["jax"]
    return ProcessGroup(jax.process_index(), jax.process_count(), broadcast)
