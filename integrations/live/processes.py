"""The processes of a training run: the rank of this one, and how rank 0 broadcasts one line of text.

The only collective operation of an export is `broadcast`; all processes call it while training is paused anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from wherry.core.lazy_dataclass import dataclass
from wherry.errors import IncompleteError, UnsupportedError

_LONGEST = 4096


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The processes that hold one state together.

    Attributes:
        rank: rank of this process.
        count: number of processes.
        broadcast: called by all processes with a text; returns the text of rank 0 to all of them.
    """

    rank: int
    count: int
    broadcast: Callable[[str], str]


def group(distributed: str) -> ProcessGroup:
    """The processes that share a state.

    Args:
        distributed: `torch`, `jax`, or empty if this process holds all of the state.

    Returns:
        The group. If each process holds the whole state, only the first one exports: `count` is 1, and `rank` is the
        rank of this process.
    """
    if distributed == "torch":
        return _torch()
    if distributed == "jax":
        return _jax()
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    rank = 0
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
    elif jax is not None and jax.distributed.is_initialized():
        rank = jax.process_index()
    return ProcessGroup(rank, 1, str)


def _torch() -> ProcessGroup:
    distributed = sys.modules["torch"].distributed

    def broadcast(text: str) -> str:
        texts = [text]
        try:
            distributed.broadcast_object_list(texts, src=0)
        except RuntimeError as error:
            raise _lost_error(error) from error
        return texts[0]

    return ProcessGroup(distributed.get_rank(), distributed.get_world_size(), broadcast)


def _lost_error(error: RuntimeError) -> IncompleteError:
    return IncompleteError(
        f"another process of the training has ended or cannot be reached: {str(error)[:200]}",
        cure="check the logs of the other processes",
    )


def _jax() -> ProcessGroup:
    def broadcast(text: str) -> str:
        import numpy as np
        from jax.experimental import multihost_utils

        data = text.encode()
        if len(data) > _LONGEST:
            raise UnsupportedError(f"broadcast of {len(data)} bytes exceeds the limit of {_LONGEST} bytes")
        try:
            received = multihost_utils.broadcast_one_to_all(np.frombuffer(data.ljust(_LONGEST), "u1"))
        except RuntimeError as error:
            raise _lost_error(error) from error
        return np.asarray(received).tobytes().decode().rstrip()

    jax = sys.modules["jax"]
    return ProcessGroup(jax.process_index(), jax.process_count(), broadcast)
