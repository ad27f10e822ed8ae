"""A file of one parameter in a universal checkpoint: a table whose `param` is the tensor, the tensor, or a number.

Tensor-parallel parts were joined along a dimension (`cat_dim`); a vocabulary was cut to its size (`vocab_tensor`), and
experts of all ranks follow one another (`is_expert_param`). After ZeRO 3 a file has a vector without a shape.
Source: DeepSpeed 0.19, checkpoint/ds_to_universal.py (`merge_tp_slices`, `merge_zero3_slices`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wherry.errors import CorruptError, UnsupportedError
from wherry.integrations.containers.flat.strides import StridedReader
from wherry.integrations.formats.deepspeed.zero import CURE, read_pickle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.contents import Extent
    from wherry.storage.location import Location

WEIGHT, COUNT = "fp32.pt", "step.pt"
STATES = (WEIGHT, "exp_avg.pt", "exp_avg_sq.pt", COUNT)
AGAIN = "run ds_to_universal.py again"
_PARAM, _VOCABULARY, _EXPERTS, _MANY = "param", "vocab_tensor", "is_expert_param", "ep_num_experts"
_JOINED = "cat_dim"


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file of one parameter, opened.

    Attributes:
        location: the file.
        spec: its tensor; None if it holds a number.
        extents: the bytes of the tensor.
        values: what else it says.
    """

    location: Location
    spec: TensorSpec | None
    extents: tuple[Extent, ...]
    values: Mapping[KeyPath, Any]

    @property
    def joined(self) -> bool:
        """Whether it was joined of parts of an optimizer's state."""
        return (_JOINED,) in self.values


def open_state(location: Location) -> StateFile:
    """A file of one parameter: a table with a tensor, a tensor, or a number."""
    archive = read_pickle(location)
    path = next((path for path in ((_PARAM,), ()) if path in archive.specs), None)
    if path is None and () not in archive.tree.values:
        raise CorruptError(f"expected a tensor, or a table with {_PARAM}", uri=location.uri, cure=AGAIN)
    spec = None if path is None else archive.specs[path]
    extents = StridedReader(location, archive.placed, ()).access(spec).extents if spec else ()
    if extents is None:
        raise UnsupportedError(
            "unsupported strides: the tensor is not stored in order", uri=location.uri, cure=AGAIN
        )
    return StateFile(location, spec, extents, archive.tree.values)


def whole_shape(name: str, file: StateFile, ranks: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of a whole parameter, which fits those of the ranks' parts."""
    assert file.spec is not None
    stored, part, values = file.spec.shape, ranks[0], file.values
    if len(ranks) == 1 and math.prod(stored) == math.prod(part) and not values.get((_EXPERTS,)):
        return part  # also of a vector
    if len(stored) != len(part) and len(ranks) > 1:
        raise UnsupportedError(
            f"{name} was joined of {len(ranks)} ranks as sub-parameters of the shape {list(stored)}",
            uri=file.location.uri, path=name, cure="load the checkpoint with DeepSpeed, and save the whole model",
        )  # fmt: skip
    alike = stored[1:] == part[1:] and bool(stored)
    if values.get((_VOCABULARY,)) and alike and stored[0] <= sum(shape[0] for shape in ranks):
        return stored
    if values.get((_EXPERTS,)) and alike and stored[0] == values.get((_MANY,)):
        return stored
    if len(ranks) > 1 and _joins(stored, ranks):
        return stored
    raise CorruptError(
        f"the file has the shape {list(stored)}, the model states {list(part)}",
        uri=file.location.uri, path=name, cure=CURE,
    )  # fmt: skip


def _joins(stored: tuple[int, ...], ranks: Sequence[tuple[int, ...]]) -> bool:
    """Whether a shape is that of all ranks, or of their parts side by side; some may have copies of others' parts."""
    if all(shape == stored for shape in ranks):
        return True
    if any(len(shape) != len(stored) for shape in ranks):
        return False
    cuts = [at for at in range(len(stored)) if any(shape[at] != stored[at] for shape in ranks)]
    if len(cuts) != 1:
        return False
    total, size = sum(shape[cuts[0]] for shape in ranks), stored[cuts[0]]
    return size > 0 and total % size == 0 and len(ranks) % (total // size) == 0
