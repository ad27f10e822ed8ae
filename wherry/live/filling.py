"""Filling: the arrays of a live state made from a checkpoint's tensors, in parallel and within a budget.

What holds memory on its way to a device is counted; a shard that is larger than the budget goes alone. The frameworks
are behind the service `live`; here is only what is read for them.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes
from wherry.core.keypath import KeyPath, render
from wherry.errors import MismatchError
from wherry.runtime import threads

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import numpy as np

    from wherry.core.progress import Meter
    from wherry.core.tensorspec import Region
    from wherry.formats.checkpoint import Checkpoint
    from wherry.live.match import Pair


@dataclass(slots=True)
class Filling:
    """One pass: what is read, and how much of it may be in memory at once.

    Attributes:
        checkpoint: the source, or a view of it.
        memory: the budget in bytes.
        meter: counts what was read.
        held: bytes that are in memory now.
        free: told when there are less.
    """

    checkpoint: Checkpoint
    memory: int
    meter: Meter
    held: int = 0
    free: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def room(self, nbytes: int) -> Generator[None]:
        """Wait until so many bytes fit into the budget; what is larger than it goes alone."""
        with self.free:
            self.free.wait_for(lambda: self.held == 0 or self.held + nbytes <= self.memory)
            self.held += nbytes
        try:
            yield
        finally:
            with self.free:
                self.held -= nbytes
                self.free.notify_all()


def filled(pairs: Sequence[Pair], filling: Filling, live: Any) -> dict[KeyPath, Any]:
    """Fill every leaf, several at a time.

    Args:
        pairs: leaves and what fills them; all of it was found to fit.
        filling: the pass.
        live: the service of that name.

    Returns:
        Stored key path of each leaf → what it becomes.

    Raises:
        MismatchError: something was made otherwise than asked for.
        DamagedError, StorageError: it could not be read.
    """
    tied = {pair.leaf.path: pair for pair in pairs}
    first = [pair for pair in pairs if pair.leaf.alias not in tied]

    def one(pair: Pair) -> Any:
        return _fill(pair, filling, live)

    with threads.executor(threads.worker_count(), "wherry-restore") as executor:
        try:
            values = list(executor.map(one, first))
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    made = {pair.leaf.stored: value for pair, value in zip(first, values, strict=True)}
    for pair in pairs:
        if pair.leaf.alias in tied:
            kept = made[tied[pair.leaf.alias].leaf.stored]
            _require_equal(pair, kept, filling, live)
            made[pair.leaf.stored] = kept
    return made


def _fill(pair: Pair, filling: Filling, live: Any) -> Any:
    spec = pair.source
    if spec is None:
        return live.of_value(pair.leaf, pair.value)

    def read(region: Region) -> np.ndarray:
        return _read(pair, region, filling)

    def room(nbytes: int) -> Any:
        return filling.room(nbytes)

    return live.fill(pair.leaf, read, room, filling.memory)


def _read(pair: Pair, region: Region, filling: Filling) -> np.ndarray:
    """A region of the leaf out of the checkpoint, in its element type; a new C-order array."""
    import numpy as np

    spec, order = pair.source, pair.order
    if spec is None:
        raise AssertionError("a value has no regions")
    wanted = region
    if order is not None:
        turned: list[slice] = [slice(0)] * len(order)
        for axis, place in enumerate(order):
            turned[place] = region[axis]
        wanted = tuple(turned)
    found = filling.checkpoint.read(spec.path, wanted)
    filling.meter.add(found.nbytes, spec.name)
    made = np.asarray(found.transpose(order) if order is not None else found, order="C")
    made = made.astype(dtypes.numpy_dtype(pair.leaf.dtype or spec.dtype), copy=False)
    alone = made.flags.owndata or not np.shares_memory(made, found)
    return made if alone else made.copy()  # the reader of a view uses its memory again


def _require_equal(pair: Pair, kept: Any, filling: Filling, live: Any) -> None:
    """Refuse two tensors of a checkpoint for what is one tensor in the template, unless they are equal."""
    if pair.source is None:
        return
    whole = tuple(slice(0, extent) for extent in pair.leaf.shape)
    with filling.room(pair.source.nbytes):
        if not live.equals(kept, _read(pair, whole, filling)):
            raise MismatchError(
                f"in the template it is {render(pair.leaf.alias or ())} too, in the checkpoint they differ",
                uri=filling.checkpoint.uri, path=pair.leaf.name, cure="untie them, or leave one out with only=…",
            )  # fmt: skip
